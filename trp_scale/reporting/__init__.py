"""Results of runs side by side, and HTML pages of runs.

results.py: results.json. paired_tests.py: intervals, tests and their correction. comparison.py: tables of results.
document.py: parts and plots of a page, rendered by page.html. record.py: contents of a run directory. run.py: page of
one run. comparison_page.py: `trp-scale compare`. watch.py: server for the page of a running run.
"""
