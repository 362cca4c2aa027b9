"""Pictures, tables and a page of a run, from the files that it leaves.

load.py       what a run has left so far
charts.py     how pictures are drawn, and each of them
plots.py      their order, and the files that they become
table.py      what changed, and the members
page.py       report.html
callbacks.py  page and pictures of a run in progress; W&B and trackio
"""
