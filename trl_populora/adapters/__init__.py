"""Many LoRA members on one base model: who computes which row, and how a member is read, written and reset.

`routing` says which member each row of a forward belongs to, `layers` computes all of them at once, `weights` moves a
member in and out of a live model on any backend, `optim` gives each member an optimizer life of its own, `checks`
refuses configurations that this room cannot keep exact.
"""
