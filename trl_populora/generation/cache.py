"""Caches with room for the tokens to come: a token is written into them.

`DynamicCache` joins the keys and values of a new token to those before it, so that for every token the whole cache is
read and written once more. Between two rounds `decoding` copies it anyway, when rows leave; that copy leaves the room.
"""

from __future__ import annotations

import torch
from transformers import Cache
from transformers.cache_utils import DynamicLayer


class RoomyLayer(DynamicLayer):
    """
    A layer of a cache whose `batch_select_indices` leaves room.

    Args:
        layer: The layer whose keys and values it takes over.
        room: Tokens that can be written after each selection. Further ones are joined, as transformers does.
    """

    def __init__(self, layer: DynamicLayer, room: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values, self.room = layer.keys, layer.values, room
        self._held = self.keys, self.values  # as far as they have room, `[R, heads, L + room, D]`

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self._held = self._copy(self.keys, indices), self._copy(self.values, indices)
        self._show(self.keys.shape[2])

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        if end > self._held[0].shape[2]:
            return super().update(key_states, value_states, *args, **kwargs)
        for held, new in zip(self._held, (key_states, value_states), strict=True):
            held[:, :, start:end] = new
        self._show(end)
        return self.keys, self.values

    def _copy(self, given: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        _, heads, length, width = given.shape
        copy = given.new_empty(len(rows), heads, length + self.room, width)
        torch.index_select(given, 0, rows, out=copy[:, :, :length])
        return copy

    def _show(self, length: int) -> None:
        self.keys, self.values = (held[:, :, :length] for held in self._held)


class FixedLayer(DynamicLayer):
    """
    A layer of a cache that never moves, where a token's place is a tensor: what writes it can be recorded.

    Args:
        layer: Keys and values of the prompts, `[N, heads, L, D]`.
        prompts: Which prompt each row has, `[R]`.
        place: Where the next token is written, `[1]`, changed by whoever owns it.
        length: Tokens that there is room for.
    """

    def __init__(self, layer: DynamicLayer, prompts: torch.Tensor, place: torch.Tensor, length: int):
        super().__init__()
        self.lazy_initialization(layer.keys, layer.values)
        self.keys, self.values = (self._copy(given, prompts, length) for given in (layer.keys, layer.values))
        self.place = place

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys.index_copy_(2, self.place, key_states)
        self.values.index_copy_(2, self.place, value_states)
        return self.keys, self.values

    @staticmethod
    def _copy(given: torch.Tensor, prompts: torch.Tensor, length: int) -> torch.Tensor:
        _, heads, read, width = given.shape
        copy = given.new_zeros(len(prompts), heads, length, width)  # what is masked must be finite, too
        torch.index_select(given, 0, prompts, out=copy[:, :, :read])
        return copy


def fix(cache: Cache, prompts: torch.Tensor, place: torch.Tensor, length: int) -> Cache:
    """A cache of [`FixedLayer`]s; takes the given one apart, so that no more than one layer is held twice."""
    layers = []
    while cache.layers:
        layers.append(FixedLayer(cache.layers.pop(0), prompts, place, length))
    return Cache(layers=layers)


def join(parts: list[Cache], room: int) -> Cache:
    """
    One cache of all rows, with room for so many tokens in layers that hold every token. Takes the parts apart, layer
    by layer, so that no more than one layer is held twice.
    """
    first, *others = parts
    for number, layers in enumerate(zip(*(part.layers for part in parts), strict=True)):
        for name in ("keys", "values") if others else ():
            setattr(layers[0], name, torch.cat([getattr(layer, name) for layer in layers]))
            for layer in layers[1:]:
                setattr(layer, name, None)
        if type(layers[0]) is DynamicLayer:  # one with a sliding window drops tokens
            first.layers[number] = RoomyLayer(layers[0], room)
    return first
