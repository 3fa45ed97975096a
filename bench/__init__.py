"""The library against the other ways to do what it does, and against what the machine can do.

`python -m bench --help`, from the root of the repository. Data flows forward: comparisons/ says
what is measured, session.py measures it into results.json, rows.py makes figures of that, and
report.py, charts.py and readme.py show them.
"""
