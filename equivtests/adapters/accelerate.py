"""Hugging Face Accelerate with DistributedDataParallel, written like its guide on gradient accumulation."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import accelerate
from accelerate.utils import DataLoaderConfiguration, DDPCommunicationHookType, DistributedDataParallelKwargs
from torch import Tensor

from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.torch_adapter import SHOWN, TorchAdapter
from equivtests.cases.case import Case
from equivtests.cases.windows import MicroBatch

FEATURES = PLAIN_FEATURES | {"dropout", "extra_head", "z_loss"}
PRECISIONS = frozenset({"float32", "float64", "float32/bfloat16/float32"})
SHARED: dict[str, Any] = {"features": FEATURES, "precisions": PRECISIONS, "observes": SHOWN, "algorithm": "all-reduce"}
UNUSED = DistributedDataParallelKwargs(find_unused_parameters=True)
FP16_HOOK = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)
DDP_OPTIONS = {"accelerate-ddp-find-unused": UNUSED, "accelerate-ddp-fp16-hook": FP16_HOOK}


class Accelerate(TorchAdapter):
    """Model, optimizer and schedule are prepared; backward, accumulation, precision and clipping are Accelerate's."""

    def claims(self) -> Claims:
        strategies = (
            Strategy("accelerate-ddp", **SHARED),
            Strategy("accelerate-ddp-find-unused", **SHARED | {"features": FEATURES | {"conditional", "unused"}}),
            Strategy("accelerate-ddp-fp16-hook", **SHARED | {"precisions": frozenset({"float32/float32/float16"})}),
        )
        name, mutants = f"accelerate {accelerate.__version__}", ("equivtests.mutants.outside.accelerate",)
        return Claims(strategies, isolation="case", framework=name, preload=("accelerate",), mutants=mutants)

    def setup(self, case: Case, ranks: Ranks) -> None:
        super().setup(case, ranks)
        accelerator = self.accelerator = accelerate.Accelerator(**self.options())
        self.model, self.optimizer, self.scheduler = accelerator.prepare(self.module, self.optimizer, self.scheduler)

    def options(self) -> dict[str, Any]:
        return {
            "cpu": self.ranks.device == "cpu",
            "mixed_precision": "bf16" if self.case.precision.compute == "bfloat16" else "no",
            "gradient_accumulation_steps": self.case.accumulation,
            "dataloader_config": DataLoaderConfiguration(split_batches=True),  # one step of the schedule per update
            "kwargs_handlers": [DDP_OPTIONS[self.strategy]] if self.strategy in DDP_OPTIONS else [],
        }

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        with nullcontext() if last else self.accelerator.no_sync(self.model):
            return super().forward_backward(k, batch, last)

    def backward(self, objective: Tensor) -> None:
        self.accelerator.backward(objective * self.accelerator.gradient_accumulation_steps)  # it divides by them

    def clip_gradients(self, limit: float, order: float) -> Tensor:
        return self.accelerator.clip_grad_norm_(self.model.parameters(), limit, norm_type=order)
