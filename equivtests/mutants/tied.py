"""Mutants of a tied output head where no pipeline is: the tie is broken, or breaks an optimizer's shards."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from equivtests.adapters.native.fsdp2 import FSDP2
from equivtests.adapters.textbook.tensor import TensorParallel
from equivtests.adapters.torch_adapter import Shown
from equivtests.models.gpt import GPT
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import TIED
from equivtests.mutants.split_situations import TENSOR_TIED


def untie(module: nn.Module) -> None:
    """Give the head a parameter of its own, with the same values."""
    assert isinstance(module, GPT)
    module.head.weight = nn.Parameter(module.head.weight.detach().clone())


def without_head(shown: Iterator[Shown]) -> Iterator[Shown]:
    """What is shown of a model that has no head's weight by name."""
    return (one for one in shown if one[0] != "head.weight")


@mutant(
    "accelerate-retie",
    strategy="fsdp2",
    case=TIED,
    quantity="gradient",
    source="huggingface/accelerate#3154; verl-project/verl#7835",
    mistake="materializing the weights gives the head a storage of its own: the tie is broken before wrapping",
)
class TieBroken(FSDP2):
    """The embedding gets the gradient of its use at the input only."""

    def wrap(self, module: nn.Module) -> nn.Module:
        untie(module)
        return super().wrap(module)

    def shown(self) -> Iterator[Shown]:
        return without_head(super().shown())


@mutant(
    "nemorl-tied-ignored",
    strategy="tp",
    case=TENSOR_TIED,
    quantity="gradient",
    source="NVIDIA-NeMo/RL#227",
    mistake="after the vocabulary has been cut, head and embedding are not tied again",
)
class NotTiedAgain(TensorParallel):
    """Two parameters of the same values, each with the gradient of its own use."""

    def split_vocabulary(self, module: GPT) -> None:
        super().split_vocabulary(module)
        untie(module)
        self.laid["head.weight"] = self.laid["embedding.weight"]

    def shown(self) -> Iterator[Shown]:
        return without_head(super().shown())


@mutant(
    "torch-fsdp2-tied-uneven",
    strategy="fsdp2",
    case=TIED,
    quantity="weight update",
    source="pytorch/pytorch#176076, #176225",
    mistake="a tied weight belongs to two groups of different padding: where its shard is shorter, it never moves",
)
class ShorterShardKept(FSDP2):
    """A rank whose shard of the tied weight has fewer rows than the others' does not update it."""

    def optimizer_step(self) -> None:
        tied = self.module.get_parameter("embedding.weight")
        assert isinstance(tied, DTensor)
        local = tied.to_local()
        before = local.detach().clone()
        super().optimizer_step()
        if len(local) * self.ranks.world < tied.shape[0]:
            with torch.no_grad():
                local.copy_(before)
