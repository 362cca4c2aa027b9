"""A run's directory: what is written while it goes on, and how it is picked up again.

records.py           rollouts, metrics.jsonl, times.jsonl; an earlier run is moved aside
lines.py             reading metrics.jsonl and the other JSON lines, without torch
saved_population.py  population.json
checkpoint.py        whole checkpoints or none
nodes.py             several nodes and their directories
progress.py          the line per step
alarms.py            runs in which nobody can learn
interrupts.py        Ctrl-C and SIGTERM
"""
