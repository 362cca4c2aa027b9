"""One population step: match, propose, verify, solve, reward.

rollout.py     `play_step`, match, propose, verify and solve in order
player.py      who answers prompts
referee.py     what is a task and what is right
played.py      the one object that a step leaves
rewards.py     the two reward functions
advantages.py  baselines, and the factor that makes joint training equal solo training
batching.py    micro-batches: which rows are computed together, and their padding
forwards.py    what of a micro-batch is computed: a prompt once for its attempts
"""
