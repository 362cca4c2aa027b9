"""How good members are: on held-out tasks, in cross-play, and a base before it trains."""
