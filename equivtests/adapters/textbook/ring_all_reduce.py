"""Data parallelism whose all-reduce is a ring of messages: a reduce-scatter, then an all-gather.

Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms for clusters of workstations, section 3. Every
element is added up on one way round the ring, and its sum is copied from there, so that all ranks have the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.messages import deliver

Chunks = tuple[Tensor, ...]


class RingAllReduce(DataParallel):
    """The bucket is W chunks. In each of 2 (W - 1) rounds every rank gives one chunk to the rank after it."""

    def claims(self) -> Claims:
        claims = super().claims()
        ring = (replace(s, name="ring", algorithm="ring", variant=True) for s in claims.strategies)
        return replace(claims, strategies=tuple(ring))

    def average(self, bucket: Tensor) -> Tensor:
        return self.all_reduce(bucket).div_(self.ranks.world)

    def all_reduce(self, bucket: Tensor) -> Tensor:
        """The sum over the ranks of a vector, in place."""
        chunks = self.chunks(bucket)
        self.reduce_scatter(chunks)
        self.all_gather(chunks)
        return bucket

    def chunks(self, bucket: Tensor) -> Chunks:
        """Views of W parts of a vector; where W does not divide it, the first ones are larger by one element."""
        return bucket.tensor_split(self.ranks.world)

    def reduce_scatter(self, chunks: Chunks) -> None:
        """Give away what has been added up of a chunk, starting with that of the rank's number, and add to what comes."""
        for step in range(self.ranks.world - 1):
            given, taken = (self.at(chunks, -step - shift) for shift in (0, 1))
            arrived = torch.empty_like(taken)
            self.pass_on(given, arrived)
            taken += arrived

    def all_gather(self, chunks: Chunks) -> None:
        """Give away a finished chunk, starting with the one that was finished here, and keep what comes."""
        for step in range(self.ranks.world - 1):
            self.pass_on(self.finished(chunks, step), self.finished(chunks, step + 1))

    def finished(self, chunks: Chunks, step: int) -> Tensor:
        """The chunk that this rank has the sum of since `step` rounds of the all-gather."""
        return self.at(chunks, 1 - step)

    def at(self, chunks: Chunks, ahead: int) -> Tensor:
        """The chunk whose number is so far ahead of this rank's, round the ring."""
        return chunks[(self.ranks.rank + ahead) % self.ranks.world]

    def pass_on(self, given: Tensor, taken: Tensor) -> None:
        """One round: give to the rank after this one, take from the one before."""
        after, before = ((self.ranks.rank + step) % self.ranks.world for step in (1, -1))
        deliver({after: given}, {before: taken})
