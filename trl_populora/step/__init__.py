"""One population step: match, propose, verify, solve, grade, price and rate, and then the update of all members.

slot.py        a task of a step, and all that becomes of it
play.py        `play_step`: a list of slots goes through all phases
player.py      who answers prompts
referee.py     what is a task and what is right
pay.py         what proposals and attempts are worth, and what guessing would give
rows.py        the rows that TRL trains on, and the metrics of a step
prompts.py     a step of a dataset run: its rows, advantages as TRL has them, figures by member
advantages.py  baselines, and the factors that make joint training equal solo training
microbatch.py  which rows are computed together, and how they enter the model
by_row.py      one beta, epsilon and temperature per row, where TRL's loss has one for all
"""
