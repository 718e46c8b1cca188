"""Megatron's layers in the places of torch's, and its cross-entropy."""

from __future__ import annotations

from collections.abc import Callable

import torch
from megatron.core import parallel_state, tensor_parallel
from torch import Tensor

from equivtests.models.vocabulary import WholeVocabulary


class Column(tensor_parallel.ColumnParallelLinear):
    """Of (output, bias) the output. borrowed: gives the weight, where the layer has none of its own."""

    borrowed: Callable[[], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, weight=self.borrowed() if self.borrowed else None)[0]


class Row(tensor_parallel.RowParallelLinear):
    """Of (output, bias) the output."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


class CutVocabulary(WholeVocabulary):
    """Losses from the logits of this rank's part of the vocabulary; Megatron's function writes over its input."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        ranks = parallel_state.get_tensor_model_parallel_world_size()
        others = 1 - 1 / (ranks * logits.shape[-1])  # Megatron spreads the smoothing over all tokens but the target
        return tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), targets, self.smoothing * others)

    def log_partition(self, logits: Tensor) -> Tensor:
        """The loss of token 0 plus its logit, which the first rank has: gathering logits needs CUDA."""
        first = logits[..., 0] * (parallel_state.get_tensor_model_parallel_rank() == 0)
        loss = tensor_parallel.vocab_parallel_cross_entropy(logits.clone(), torch.zeros_like(first, dtype=torch.int64))
        return loss + tensor_parallel.reduce_from_tensor_model_parallel_region(first)


def copied(weight: Tensor) -> Callable[[Tensor], Tensor]:
    """An init_method: the weight of one device, of which Megatron takes the part that is here."""
    return lambda whole: whole.copy_(weight.detach())
