"""Tensor and sequence parallelism by torch.distributed.tensor.parallel."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import loss_parallel, parallelize_module
from torch.nn import functional as F

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.native.mesh import SplitModel, whole
from equivtests.adapters.native.plan import GptPlan, Plan, plain_plan, use_own_heads
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.cases.windows import MicroBatch
from equivtests.models.gpt import GPT, Attention
from equivtests.models.parts import widen
from equivtests.models.vocabulary import WholeVocabulary

TENSOR_FEATURES = frozenset(
    {"bias", "dropout", "extra_head", "gated", "packed", "qk_norm", "shared_kv", "smoothing", "tied", "z_loss"}
)
TENSOR_FAMILIES = frozenset({"linear", "mlp", "gated_mlp", "gpt"})


def tensor_strategy(name: str, **changes: Any) -> Strategy:
    """A strategy on DTensors, with what all of them share."""
    shared: dict[str, Any] = {
        "worlds": frozenset(range(1, 17)),
        "axes": frozenset({"dp", "tp"}),
        "families": TENSOR_FAMILIES,
        "features": TENSOR_FEATURES,
        "observes": SHOWN | {"output"},
    }
    return Strategy(name, **(shared | changes))


class ShardedVocabulary(WholeVocabulary):
    """Losses from logits that are DTensors, cut along the vocabulary; inside `loss_parallel`."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss = whole(F.cross_entropy(widen(logits).transpose(1, 2), targets, reduction="none"))
        if not self.smoothing:
            return loss
        # loss_parallel takes no label_smoothing, and gives log_softmax a backward pass that is right for the loss alone.
        uniform = self.log_partition(logits) - whole(widen(logits).sum(dim=-1)) / logits.shape[-1]
        return (1 - self.smoothing) * loss + self.smoothing * uniform

    def log_partition(self, logits: Tensor) -> Tensor:
        return whole(super().log_partition(logits))


class TensorParallel(SplitModel):
    """parallelize_module with a plan per layer. Data ranks, if there are several, are averaged by hand.

    dtensor-tp: every rank gathers the logits. dtensor-tp-sequence: logits stay cut and the loss is parallel; norms and
    dropout see a part of each sequence.
    """

    def claims(self) -> Claims:
        return Claims(
            (
                tensor_strategy("dtensor-tp"),
                tensor_strategy("dtensor-tp-sequence", families=frozenset({"gpt"})),
            ),
            framework=f"torch {torch.__version__}",
        )

    @property
    def sequence(self) -> bool:
        return self.strategy.endswith("sequence")

    @property
    def parallel_loss(self) -> bool:
        return self.strategy != "dtensor-tp"

    def wrap(self, module: nn.Module) -> nn.Module:
        self.parallelize(module, self.ranks.split_mesh(self.layout, "dp", "tp")["tp"])
        self.watch_last(module)
        return module

    def watch_last(self, module: nn.Module) -> None:
        last = {"linear": "linear", "gated_mlp": "down", "gpt": "head"}.get(self.case.model.family)
        self.watch_output(module.get_submodule(last or f"layers.{self.case.model.depth - 1}"))

    def parallelize(self, module: nn.Module, mesh: DeviceMesh) -> None:
        if isinstance(module, GPT):
            self.parallelize_gpt(module, mesh)
        else:
            parallelize_module(module, mesh, plain_plan(module))

    def parallelize_gpt(self, module: GPT, mesh: DeviceMesh) -> None:
        rank, ranks = mesh.get_local_rank(), mesh.size()
        plan = self.plan(module, ranks)
        for part in module.modules():
            if isinstance(part, Attention):
                use_own_heads(part, rank, ranks)
        parallelize_module(module, mesh, plan)
        if self.case.model.has("tied"):
            self.tie(module)
        if self.parallel_loss:
            module.vocabulary = self.vocabulary(module.vocabulary.smoothing)
        if self.sequence and module.dropout is not None:
            module.dropout.rows = lambda n: (n * ranks, slice(rank * n, (rank + 1) * n))

    def plan(self, module: GPT, ranks: int) -> Plan:
        """A style for every layer that has parameters."""
        return GptPlan(module, ranks, self.sequence, self.parallel_loss).plan()

    def tie(self, module: GPT) -> None:
        """parallelize_module cuts each module by itself, and leaves two parameters where there was one."""
        module.head.weight = module.embedding.weight

    def vocabulary(self, smoothing: float) -> WholeVocabulary:
        return ShardedVocabulary(smoothing)

    def balanced(self, window: Any) -> list[MicroBatch]:
        """Each data rank works by itself: none has to wait for another's micro-batch."""
        return list(window.microbatches)

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with self.loss_context():
            return super().forward_backward(k, batch, last)

    def loss_context(self) -> AbstractContextManager[None]:
        """The parallel loss is switched on for forward and backward."""
        return loss_parallel() if self.parallel_loss else nullcontext()

    def synchronize(self) -> None:
        self.complete_gradients()
        self.average(self.own_gradients())
