"""How good members are: held-out tasks while training, cross-play of saved populations, published benchmarks."""
