"""How good members are: cross-play of saved populations, published benchmarks."""
