"""Looking at a model that trains, so that its training never notices: samples of their own seed, and no dropout."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def pause_training(model: nn.Module) -> Iterator[None]:
    """Inside the block there is no dropout; afterwards the model trains again if it did before."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


@contextmanager
def seed_samples(seeds: Sequence[int] | None) -> Iterator[None]:
    """
    Inside the block torch's generators, which all rows share, start from the first of the rows' seeds; afterwards they
    are where they were. `None` does nothing.
    """
    if not seeds:
        yield
        return
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = [] if accelerator is None else [torch.accelerator.current_device_index()]
    with torch.random.fork_rng(devices=devices, device_type="cuda" if accelerator is None else accelerator.type):
        torch.manual_seed(seeds[0])
        yield
