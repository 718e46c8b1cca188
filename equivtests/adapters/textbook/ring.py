"""Ring attention: keys and values go round, and each rank adds up what its own queries see of them.

Liu et al. 2023, Ring Attention with blockwise transformers, section 3; the backward pass as in Dao et al. 2022,
FlashAttention, appendix B.4, block by block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from equivtests.adapters.textbook.shards import ShardedSequence


class Softmax(NamedTuple):
    """A softmax that has seen some of the keys (Milakov and Gimelshein 2018, Online normalizer calculation, section 3).

    highest: of the scores so far; total: Σ exp(score - highest), both (N, heads, queries, 1); mixed: the values so weighted,
    (N, heads, queries, d).
    """

    highest: Tensor
    total: Tensor
    mixed: Tensor


class Ring(torch.autograd.Function):
    """Attention whose two passes are those of a `RingAttention`."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, whole: Tensor, ring: RingAttention) -> Tensor:
        mixed, log_total = ring.forward_pass(q, k, v, whole)
        ctx.save_for_backward(q, k, v, whole, mixed, log_total)
        ctx.ring = ring
        return mixed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.ring.backward_pass(*ctx.saved_tensors, gradients[0]), None, None


class RingAttention(ShardedSequence):
    """At every step a rank has the keys and values of one rank: first its own, then those of the one before, and so on."""

    def attention(self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        return Ring.apply(q, k, v, self.whole(inputs), self)

    def origins(self) -> list[int]:
        """Whose keys are here, step by step."""
        line = self.shards.line
        return [(line.index - step) % line.size for step in range(line.size)]

    # ------------------------------------------------------------------ forward

    def forward_pass(self, q: Tensor, k: Tensor, v: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
        """The mixed values (N, heads, queries, d), and log Σ exp(score) (N, heads, queries, 1)."""
        none = q.new_zeros(*q.shape[:-1], 1)
        seen, block = Softmax(none - torch.inf, none, torch.zeros_like(q)), torch.stack((k, v))
        for step, origin in enumerate(self.origins()):
            if step > 0:
                block = self.pass_on(block, origin, whole.shape[1])
            keys, values = block
            if keys.shape[2] > 0:
                seen = self.add(seen, self.scores(q, keys, whole, origin), values)
        return seen.mixed / seen.total, seen.highest + seen.total.log()

    def scores(self, q: Tensor, keys: Tensor, whole: Tensor, origin: int) -> Tensor:
        """q kᵀ / √d, minus infinity for keys that a query does not see."""
        here, there = self.shards.positions(whole.shape[1]), self.shards.positions(whole.shape[1], origin)
        hidden = ~self.visible(whole, here, there)
        return (q @ keys.mT * self.scale(q)).masked_fill(hidden, -torch.inf)

    def scale(self, q: Tensor) -> float:
        return float(q.shape[-1] ** -0.5)

    def add(self, seen: Softmax, scores: Tensor, values: Tensor) -> Softmax:
        """Go on with another block of keys. The first one is the rank's own, in which every query sees itself."""
        highest = torch.maximum(seen.highest, scores.amax(dim=-1, keepdim=True))
        weights, before = (scores - highest).exp(), self.rescale(seen.highest, highest)
        total = before * seen.total + weights.sum(dim=-1, keepdim=True)
        return Softmax(highest, total, before * seen.mixed + weights @ values)

    def rescale(self, before: Tensor, highest: Tensor) -> Tensor:
        """What sums made under another highest score are multiplied with."""
        return (before - highest).exp()

    # ------------------------------------------------------------------ backward

    def backward_pass(
        self, q: Tensor, k: Tensor, v: Tensor, whole: Tensor, mixed: Tensor, log_total: Tensor, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v: those of keys and values go round with them, and come home in the last step."""
        own = (gradient * mixed).sum(dim=-1, keepdim=True)
        dq, block = torch.zeros_like(q), torch.stack((k, v, torch.zeros_like(k), torch.zeros_like(v)))
        for origin in self.origins():
            weights = self.weights(self.scores(q, block[0], whole, origin), log_total)
            dscores = weights * (gradient @ block[1].mT - own) * self.scale(q)
            dq += dscores @ block[0]
            block = self.collect(block, dscores.mT @ q, weights.mT @ gradient, origin)
            block = self.pass_on(block, (origin - 1) % self.shards.line.size, whole.shape[1])
        return dq, block[2], block[3]

    def weights(self, scores: Tensor, log_total: Tensor) -> Tensor:
        """The softmax over all keys, of some of them."""
        return (scores - log_total).exp()

    def collect(self, block: Tensor, dk: Tensor, dv: Tensor, origin: int) -> Tensor:
        """Keys, values and their gradients, with what this rank's queries say of those of `origin`."""
        return torch.stack((block[0], block[1], block[2] + dk, block[3] + dv))

    # ------------------------------------------------------------------ round the ring

    def pass_on(self, block: Tensor, origin: int, length: int) -> Tensor:
        """Give what is here to the next rank, and take what the one before had: that of the rank `origin`."""
        line = self.shards.line
        taken = block.new_empty(*block.shape[:-2], len(self.shards.positions(length, origin)), block.shape[-1])
        after, before = (line.ranks[(line.index + step) % line.size] for step in (1, -1))
        give = dist.P2POp(dist.isend, block.contiguous(), after, line.group)
        take = dist.P2POp(dist.irecv, taken, before, line.group)
        for work in dist.batch_isend_irecv([give, take]):
            work.wait()
        return taken
