"""Publishes a population, and starts from a published one.

push.py          uploads a run, its archive, and a Space with its report
card.py          writes the model card and the dataset card
eval_results.py  writes measured scores in the Hub's two formats
download.py      finds a saved population in a directory or on the Hub
warm_start.py    starts members from adapters that were trained before
export.py        writes one member as an ordinary adapter or a whole model
"""
