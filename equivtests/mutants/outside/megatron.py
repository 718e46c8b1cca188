"""Mutants of the Megatron Core adapter: what its layers leave to those who use them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor, nn

from equivtests.adapters.megatron import Megatron
from equivtests.adapters.megatron_models import CutVocabulary
from equivtests.cases.case import Model
from equivtests.models.gpt import GPT
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import CLIP
from equivtests.mutants.split_situations import ONE_DATA_RANK, TWO_DATA_RANKS, split_situation

AUXILIARY = Model("gpt", depth=1, vocabulary=16, features=("bias", "extra_head", "z_loss"))
NORMED = Model("gpt", depth=1, vocabulary=16, features=("bias", "qk_norm"))
CUT_AUXILIARY = split_situation("cut-auxiliary", "tp2", AUXILIARY, ONE_DATA_RANK)
CUT_HEAD_NORMS = split_situation("cut-head-norms", "tp2", NORMED, ONE_DATA_RANK)
CUT_CLIPPED = split_situation("cut-clipped", "dp2-tp2", NORMED, TWO_DATA_RANKS, CLIP)


class Overwritten(CutVocabulary):
    """Token losses first, the log-partition of what they left afterwards."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return tensor_parallel.vocab_parallel_cross_entropy(logits, targets)


@mutant(
    "megatron-overwritten-logits",
    strategy="megatron-tp",
    case=CUT_AUXILIARY,
    quantity="loss",
    source="NVIDIA/Megatron-LM#1594",
    mistake="vocab_parallel_cross_entropy writes over logits in float32, from which the z-loss is then taken",
)
class OverwrittenLogits(Megatron):
    """No error: the function does not say that it changes its input."""

    def cut_vocabulary(self, module: GPT) -> None:
        super().cut_vocabulary(module)
        module.vocabulary = Overwritten()


@mutant(
    "megatron-head-norms",
    strategy="megatron-tp",
    case=CUT_HEAD_NORMS,
    quantity="gradient",
    source="NVIDIA/Megatron-LM#816",
    mistake="norms of heads have other names than q_layernorm and k_layernorm: their gradients are not added up",
)
class HeadNorms(Megatron):
    """finalize_model_grads knows them by their names."""

    def synchronize(self) -> None:
        for _, gradient, _ in self.gradients():
            dist.all_reduce(gradient, group=self.data_group())
            gradient /= self.averaged()


@mutant(
    "megatron-copies-counted",
    strategy="megatron-tp",
    case=CUT_CLIPPED,
    quantity="norm",
    source="NVIDIA/Megatron-LM#1446",
    mistake="the norm counts what every tensor rank holds once per rank",
)
class CopiesCounted(Megatron):
    """The squares of all gradients are added up over the model-parallel group."""

    def gradient_norm(self, order: float) -> Tensor:
        square = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters() if p.grad is not None]) ** 2
        dist.all_reduce(square, group=parallel_state.get_model_parallel_group())
        return square.sqrt()


@mutant(
    "megatron-row-bias",
    strategy="megatron-tp",
    case=CUT_AUXILIARY,
    quantity="loss",
    source="NVIDIA/Megatron-LM#1446",
    mistake="the bias of a row-parallel layer is added on every rank before the sum, so it counts once per rank",
)
class RowBias(Megatron):
    """What a layer written by hand does, where RowParallelLinear adds the bias behind the all-reduce."""

    def row(self, name: str, layer: nn.Linear) -> nn.Module:
        made = super().row(name, layer)
        bias: Any = made.bias
        made.register_forward_hook(lambda _, inputs, output: output + (self.tp - 1) * bias)
        return made
