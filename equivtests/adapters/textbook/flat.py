"""One flat vector of all trained parameters, cut into equal shards."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from equivtests.record.observation import Place


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that lies in one shard: [start, stop) of the parameter, at `offset` in the shard."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int

    def place(self, replica: int) -> Place:
        return Place(self.shape, interval=(self.start, self.stop), replica=replica)


class FlatLayout:
    """Parameters laid end to end, padded so that `shards` equal pieces cover them."""

    def __init__(self, named: list[tuple[str, Tensor]], shards: int) -> None:
        self.named = [(name, tuple(t.shape), t.numel()) for name, t in named]
        total = sum(n for _, _, n in self.named)
        self.chunk = -(-total // shards)
        self.total, self.padded = total, self.chunk * shards

    def flatten(self, tensors: list[Tensor | None], like: Tensor) -> Tensor:
        """One vector of `padded` elements; absent tensors and padding are zero."""
        flat = like.new_zeros(self.padded)
        offset = 0
        for tensor, (_, _, size) in zip(tensors, self.named, strict=True):
            if tensor is not None:
                flat[offset : offset + size] = tensor.reshape(-1)
            offset += size
        return flat

    def unflatten(self, flat: Tensor) -> list[Tensor]:
        """Views of the parameters in a vector of `padded` elements."""
        parts = torch.split(flat[: self.total], [size for _, _, size in self.named])
        return [part.view(shape) for part, (_, shape, _) in zip(parts, self.named, strict=True)]

    def pieces(self, shard: int) -> list[Piece]:
        """The parts of parameters in one shard, in order; a parameter without elements there has none."""
        low, high = shard * self.chunk, (shard + 1) * self.chunk
        found, offset = [], 0
        for name, shape, size in self.named:
            start, stop = max(low, offset), min(high, offset + size)
            if start < stop:
                found.append(Piece(name, shape, start - offset, stop - offset, start - low))
            offset += size
        return found
