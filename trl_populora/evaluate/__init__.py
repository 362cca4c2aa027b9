"""Measures without training: members on held-out tasks, members against each other, a base, a kind of task.

held_out.py    solve rates on the tasks of `eval_dataset`, during a run
cross_play.py  students of saved populations on the tasks of every teacher
tryout.py      `populora try`: a base in each prompt style, before a run
intervals.py   95 % intervals of what is measured
check_kind.py  a user's own kind of task, before a run
"""
