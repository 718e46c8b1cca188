"""Naive uses of torch's own collectives and random numbers inside a model that tensor ranks share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.nn.functional as differentiable
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional as F

from equivtests.adapters.textbook.tensor import TensorParallel
from equivtests.models.gpt import GPT
from equivtests.models.parts import KEEP
from equivtests.mutants.mutant import mutant
from equivtests.mutants.unsplit import grid_case


@mutant(
    "stock-nn-all-reduce",
    strategy="tp",
    case=grid_case("gpt-auxiliary-tp4"),
    quantity="gradient",
    source="pytorch/pytorch#58005",
    mistake="torch.distributed.nn.all_reduce under a loss that every rank has: its backward pass adds up all their copies",
)
class SumWhoseGradientIsSummed(TensorParallel):
    """Each sum on the way back multiplies the gradient by the number of tensor ranks."""

    def total(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return differentiable.all_reduce(x, group=self.tp.group)


@mutant(
    "stock-nn-all-gather",
    strategy="tp-column",
    case=grid_case("linear-tp4"),
    quantity="gradient",
    source="pytorch/pytorch#58005",
    mistake="torch.distributed.nn.all_gather under a loss that every rank has: its backward pass adds up all their copies",
)
class GatherWhoseGradientIsSummed(TensorParallel):
    """The gradient of each shard is that of all ranks' copies of the loss together."""

    def gather(self, x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            return torch.cat(differentiable.all_gather(x.contiguous(), group=self.tp.group), dim=-1)


class DTensorDropout(nn.Module):
    """F.dropout on a DTensor that is cut along the sequence. Every rank has the same seed, as for any DTensor."""

    def __init__(self, site: str, mesh: object, watch: Callable[[str, Tensor], None] | None) -> None:
        super().__init__()
        self.site, self.mesh, self.watch = site, mesh, watch

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        torch.manual_seed(int(ids.sum()))
        ones = DTensor.from_local(torch.ones_like(x), self.mesh, [Shard(1)])  # type: ignore[arg-type]
        dropped: Any = F.dropout(ones, 1 - KEEP)
        mask = dropped.to_local()
        if self.watch is not None:
            self.watch(self.site, mask > 0)
        return x * mask


@mutant(
    "stock-same-dropout",
    strategy="tp-sequence",
    case=grid_case("gpt-dropout-tp4"),
    quantity="dropout mask",
    source="pytorch/pytorch#168058",
    mistake="dropout on a DTensor: on CPUs, all shards of a sequence draw the same mask",
)
class DropoutOfDTensor(TensorParallel):
    def split_sequence(self, module: GPT) -> None:
        super().split_sequence(module)
        mesh = self.ranks.split_mesh(self.layout, "tp")
        module.dropout = DTensorDropout(module.dropout.site, mesh, None)  # type: ignore[assignment,union-attr]
