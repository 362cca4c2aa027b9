"""Many LoRA members on one base model: who computes which row, and how a member is read, written and reset.

layers.py   the route says which member each row of a forward belongs to; the layer computes all at once
members.py  a member moves in and out of a live model on any backend, and has an optimizer life of its own
convert.py  adapters for readers of another rank and alpha
checks.py   what this room cannot keep exact is refused
"""
