"""Who plays, who meets whom, and who is replaced by whom.

members.py    `Member` and `Population`: names, roles, ratings, ages, lineage
ratings.py    PFSP pairing and the TrueSkill update
evolution.py  fitness, selection, breeding; the callback
operators.py  mutations and crossovers, on factors alone
factors.py    what operators need of linear algebra
"""
