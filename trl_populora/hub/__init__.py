"""Publishing a population, and starting from a published one.

push.py          uploads of a run, its archive and a Space
card.py          model card and dataset card
eval_results.py  measured figures as the Hub reads them
download.py      a saved population from a directory or the Hub
warm_start.py    starting from what was trained before
export.py        one member as an ordinary adapter
"""
