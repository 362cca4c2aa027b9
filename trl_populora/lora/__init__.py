"""Many LoRA members on one base model.

layers.py   the route says which member computes each row of a forward; one layer computes all rows
members.py  reads, writes and saves a member, resets its optimizer state, clips its gradients
convert.py  rewrites an adapter for vLLM or for a member with another rank and alpha
checks.py   refuses bases, member names, LoRA options and adapters that the population cannot use
"""
