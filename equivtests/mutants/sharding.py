"""Correct ways of sharding, bucketing and overlapping that the textbook adapters lack, as parents for mutants."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from equivtests.adapters.textbook.collectives import all_gather, all_reduce
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.zero import Zero1, Zero2, Zero3
from equivtests.adapters.torch_adapter import Shown
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Place


class WholeVectors(Zero1):
    """Matrices are sharded; vectors stay whole on every rank, with gradients that all ranks share."""

    def sharded_parameters(self, module: nn.Module) -> list[tuple[str, nn.Parameter]]:
        everything = super().sharded_parameters(module)
        self.vectors = [(n, p) for n, p in everything if p.ndim < 2]
        return [(n, p) for n, p in everything if p.ndim >= 2]

    def shown_pieces(self) -> Iterator[Shown]:
        yield from super().shown_pieces()
        for name, parameter in self.vectors:
            yield name, parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)

    def trainable(self) -> list[tuple[str, Tensor]]:
        return [*super().trainable(), *self.vectors]

    def synchronize(self) -> None:
        super().synchronize()
        for _, parameter in self.vectors:
            if parameter.grad is not None:
                all_reduce(parameter.grad).div_(self.ranks.world)

    def gradient_norm(self, order: float) -> Tensor:
        """Squares of the shards added up over ranks, squares of the shared vectors once."""
        pieces = squares([p.grad for _, p in self.pieces])
        vectors = squares([p.grad for _, p in self.vectors])
        return self.total(pieces, vectors).sqrt()

    def total(self, pieces: Tensor, vectors: Tensor) -> Tensor:
        return self.add_squares(pieces) + vectors


class DividedLate(Zero2):
    """Micro-batches are accumulated as if each were the whole window, and divided by their number at the end."""

    def backward(self, objective: Tensor) -> None:
        super().backward(objective * self.counts.microbatches)

    def synchronize(self) -> None:
        self.gradient_shard /= self.counts.microbatches
        super().synchronize()


class MainGradients(DataParallel):
    """Every micro-batch's gradient moves to a main buffer at once; the main buffers are reduced."""

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.main = {name: torch.zeros_like(p) for name, p in self.trainable()}
        return super().accumulate(batches)

    def after_backward(self, k: int) -> None:
        for name, parameter in self.trainable():
            if parameter.grad is not None:
                self.main[name] += parameter.grad
            parameter.grad = None

    def synchronize(self) -> None:
        for name, parameter in self.trainable():
            parameter.grad = self.main[name]
        super().synchronize()


class TwoBuffers(DataParallel):
    """Gradients pass through two buffers in turn: one is filled while the other is reduced."""

    def reduce_gradients(self, gradients: list[Tensor]) -> None:
        buffers = gradients[0].new_zeros(2, max(g.numel() for g in gradients))
        for i, gradient in enumerate(gradients):
            buffers[self.filled(i), : gradient.numel()] = gradient.flatten()
            if i > 0:
                self.reduce_bucket(buffers[self.reduced(i - 1)], gradients[i - 1])
        self.reduce_bucket(buffers[self.reduced(len(gradients) - 1)], gradients[-1])

    def filled(self, bucket: int) -> int:
        """Number of the buffer that a bucket is copied into."""
        return bucket % 2

    def reduced(self, bucket: int) -> int:
        """Number of the buffer that is reduced for a bucket."""
        return bucket % 2

    def reduce_bucket(self, buffer: Tensor, gradient: Tensor) -> None:
        gradient.copy_(self.average(buffer[: gradient.numel()].clone()).view_as(gradient))


class LateWeights(Zero1):
    """Updated weights arrive while the next forward pass already runs: each module waits for its own."""

    def wrap(self, module: nn.Module) -> nn.Module:
        self.arriving: dict[nn.Module, list[tuple[nn.Parameter, Tensor]]] = {}
        for owner in module.modules():
            if any(p.requires_grad for p in owner.parameters(recurse=False)):
                owner.register_forward_pre_hook(lambda m, _: self.wait_for(m))
        return super().wrap(module)

    def publish(self) -> None:
        self.gathered = all_gather(self.shard, self.shard_group)
        fresh = {p: value for (_, p), value in zip(self.whole, self.flat.unflatten(self.gathered), strict=True)}
        for owner in self.module.modules():
            own = [(p, fresh[p]) for p in owner.parameters(recurse=False) if p in fresh]
            if own:
                self.arriving[owner] = own

    def wait_for(self, module: nn.Module) -> None:
        for parameter, value in self.arriving.pop(module, []):
            parameter.data.copy_(value)  # .data: autograd does not see what arrives from outside

    def updated_weights(self) -> list[Tensor]:
        return [self.gathered]

    def shown(self) -> Iterator[Shown]:
        """The own pieces: whole weights may still be on their way."""
        yield from self.shown_pieces()


class SecondCopy(Zero3):
    """Weights are gathered over all ranks once per window; later gathers read a copy kept nearby."""

    def accumulate(self, batches: list[MicroBatch]) -> Tensor:
        self.nearby: Tensor | None = None
        return super().accumulate(batches)

    def gather(self) -> None:
        if self.nearby is None:
            super().gather()
            self.keep()
        else:
            self.full.untyped_storage().resize_(self.flat.padded * self.full.element_size())
            self.full.data.copy_(self.nearby)

    def keep(self) -> None:
        """Fill the copy nearby."""
        self.nearby = self.full.clone()


def squares(tensors: list[Tensor | None]) -> Tensor:
    """Sum of the squares of all elements, a scalar."""
    return torch.stack([torch.zeros(()), *(t.float().square().sum() for t in tensors if t is not None)]).sum()
