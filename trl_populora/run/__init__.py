"""A run's directory: what is written while it goes on, and how it is picked up again.

directory.py         whose an output_dir is; moving an earlier run's records aside
records.py           rollouts, metrics.jsonl, times.jsonl
read.py              reading them without torch, and population.json
saved_population.py  population.json is written, and fits a trainer or not
checkpoint.py        whole checkpoints or none
nodes.py             several nodes and their directories
callbacks.py         the line per step, alarms, Ctrl-C and SIGTERM
"""
