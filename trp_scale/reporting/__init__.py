"""Results of runs side by side, and pages of runs: one HTML file that needs no network, made of a run directory.

results.py: results.json. paired_tests.py: intervals, tests and their correction. comparison.py: `trp-scale compare`.
document.py: a page's parts and plots, written by page.html. record.py: contents of a run directory, its metrics as
curves. run.py: the page of one run. comparison_page.py: the page of several. watch.py: serves the page of a run that
goes on. Tables are those of trp_scale/console.py.
"""
