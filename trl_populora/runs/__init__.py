"""A run's directory: what is written while it goes on, and how it is picked up again.

directory.py         one run's directory: its lock, and what becomes of records that lie there
records.py           rollouts, metrics.jsonl, times.jsonl
lines.py             reading metrics.jsonl and the other JSON lines, without torch
saved_population.py  population.json
checkpoint.py        whole checkpoints or none
nodes.py             several nodes and their directories
progress.py          the line per step
alarms.py            runs in which nobody can learn
interrupts.py        Ctrl-C and SIGTERM
"""
