"""Pages of runs: one HTML file that needs no network, made of what a run directory holds.

curves.py: values over steps, of long runs means with their least and largest. figures.py: plots, as plotly takes them.
document.py: sections, tables and plots as HTML. record.py: what a run directory says. run.py: the page of one run,
whose sections are in tasks.py, hooks.py, how_it_went.py, picture_files.py and next_commands.py. comparison.py: runs
side by side. watch.py: the page of a run that goes on.
"""
