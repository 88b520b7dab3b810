"""Results of runs side by side, and pages of runs: one HTML file that needs no network, made of a run directory.

results.py: results.json. paired_tests.py: intervals, tests and their correction. comparison.py: `trp-scale compare`.
curves.py: values over steps, of long runs means with their least and largest. figures.py: plots, as plotly takes them.
document.py: a page's parts, written by page.html. record.py: contents of a run directory. run.py: the page of one run,
with the sections of metric_sections.py. comparison_page.py: the page of several. watch.py: serves the page of a run
that goes on. Tables are those of trp_scale/table.py.
"""
