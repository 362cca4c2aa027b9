"""Many LoRA members on one base model.

layers.py   the route says which member computes each row of a forward; one layer computes all rows
members.py  reads, writes and saves a member, resets its optimizer state, clips its gradients
convert.py  rewrites adapters with another rank and alpha: for vLLM, for a member, or as the mean of several
checks.py   refuses bases, member names, LoRA options and adapters that the population cannot use
"""
