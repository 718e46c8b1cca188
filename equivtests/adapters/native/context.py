"""torch's context-parallel attention, as far as it goes: on CPUs it refuses causal attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional as F

from equivtests.adapters.adapter import Claims, KnownDivergence
from equivtests.adapters.textbook.context import ContextParallel
from equivtests.adapters.textbook.mesh import split_strategy
from equivtests.adapters.textbook.shards import ShardedSequence

NOT_ON_CPUS = KnownDivergence(
    case="gpt*",
    quantity="error",
    reason="attention on CPUs has no rule for sequences that are cut over ranks; torch has one for CUDA's kernels only",
    link="https://github.com/pytorch/pytorch/blob/v2.13.0/torch/distributed/tensor/experimental/_context_parallel/_attention.py",
    message="scaled_dot_product",
)


class TorchAttention(ShardedSequence):
    """scaled_dot_product_attention in torch's context, which passes keys and values around."""

    mesh: Any

    def attention(self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        positions = torch.arange(
            self.shards.length(q.shape[2])
        )  # torch cuts some buffer, and learns the length from it
        with context_parallel(self.mesh, buffers=[positions], buffer_seq_dims=[0]):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class TorchContextParallel(ContextParallel):
    """Sequences are cut by hand in zigzag, as torch's attention expects by default."""

    schemes = {"torch-context-parallel": (TorchAttention, True)}

    def claims(self) -> Claims:
        known = () if torch.cuda.is_available() else (NOT_ON_CPUS,)
        strategy = split_strategy(
            "torch-context-parallel",
            {"dp", "cp"},
            features=frozenset({"bias"}),
            restores=False,
            uneven=False,
            known=known,
        )
        return Claims((strategy,), framework=f"torch {torch.__version__}")

    def split(self, module: nn.Module) -> None:
        super().split(module)
        sequence: Any = module.sequence
        if self.shards.line.size > 1:
            sequence.mesh = self.ranks.split_mesh(self.layout, "dp", "cp")["cp"]
