"""Makes pictures, tables and a page from the files that a run leaves.

load.py       reads what a run has left so far
charts.py     draws each picture
plots.py      lists the pictures in their order, and writes them to files
table.py      compares the first fifth of a run with the last, and lists the members
page.py       writes report.html
callbacks.py  sends tables and alerts to W&B and trackio
"""
