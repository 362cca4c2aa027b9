"""Population: who plays, who meets whom, and who is replaced by whose child.

members.py    `Member`, `Population`: names, roles, ratings, ages, parents
ratings.py    `Matchmaker`: draws the matches of a step, and updates ratings from their scores
evolution.py  chooses who goes and who breeds; the callback that puts children in place
pooling.py    the members of a role become the mean of their factors; the callback for it
halving.py    in a dataset run, the half of the members with the lower rewards leaves; the callback for it
operators.py  mutations and crossovers: functions of LoRA factors
factors.py    the linear algebra under the operators
"""
