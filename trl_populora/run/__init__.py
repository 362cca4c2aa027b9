"""A run's directory: what a run writes while it trains, and how it resumes.

directory.py         locks an output_dir for one run, refuses a second run, moves or copies records
records.py           writes rollouts, metrics.jsonl, times.jsonl, and population.json at every log
read.py              reads these files and population.json, without torch
saved_population.py  describes a population in population.json, checks whether a saved one fits a trainer
checkpoint.py        writes whole checkpoints or none, and reads them back
nodes.py             checks that several nodes are there and can make a whole checkpoint
callbacks.py         prints a line per step, warns of runs that learn nothing, ends a run at Ctrl-C or SIGTERM
"""
