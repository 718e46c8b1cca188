"""DeepSpeed: the stages of ZeRO, with the engine's own accumulation and clipping, and optimizers on the CPU.

Written like its documentation: https://deepspeed.readthedocs.io/en/stable/training.html
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_grad, safe_get_local_grad
from torch import Tensor

from equivtests.adapters.adapter import Claims
from equivtests.adapters.deepspeed_claims import STRATEGIES, strategies
from equivtests.adapters.torch_adapter import CLIP_EPS, Shown, TorchAdapter
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Observe, Place

# Else it builds an all-reduce in shared memory when it is initialized on a CPU: minutes, for what only inference uses.
deepspeed.ops.__compatible_ops__ = {}

SIZES = {
    "reduce_bucket_size": 100,
    "sub_group_size": 100,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
"""In elements. The defaults are for billions: nothing would be sharded or released, and everything be reduced at once."""


class DeepSpeed(TorchAdapter):
    """The engine's forward, backward and step."""

    def claims(self) -> Claims:
        return Claims(
            strategies(),
            framework=f"deepspeed {deepspeed.__version__}",
            preload=("deepspeed.runtime.zero.muon.muon_optimizer",),
            mutants=("equivtests.mutants.outside.deepspeed",),
        )

    @property
    def means(self) -> bool:
        """Whether the loss of a micro-batch is a mean over its own tokens, as the engine's scaling takes it to be."""
        return self.strategy == "deepspeed-mean-of-means"

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.case.accumulation,
            "gradient_clipping": self.case.optimizer.clip or 0.0,  # left out, it clips by 1
            "zero_optimization": self.zero_options(),
            "zero_allow_untested_optimizer": True,  # SGD
            "zero_force_ds_cpu_optimizer": "cpu-adam" in self.strategy,
        }

    def zero_options(self) -> dict[str, Any]:
        return SIZES | STRATEGIES[self.strategy][0]

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.engine, optimizer, *_ = deepspeed.initialize(
            model=self.module,
            optimizer=super().make_optimizer(),
            lr_scheduler=super().make_scheduler,
            config=self.config(),
        )
        return optimizer

    def optimizer_class(self) -> Any:
        return DeepSpeedCPUAdam if "cpu-adam" in self.strategy else super().optimizer_class()

    def optimizer_options(self) -> dict[str, Any]:
        mode = {"adamw_mode": self.case.optimizer.name == "adamw"} if "cpu-adam" in self.strategy else {}
        return super().optimizer_options() | mode

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        return self.engine.lr_scheduler

    # ------------------------------------------------------------------ one update

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.engine.set_train_batch_size(self.counts.microbatches * self.averaged())  # may be fewer than configured
        self.engine.set_gradient_accumulation_boundary(last)
        objective = self.objective(self.forward(self.engine, batch), k, batch)
        return self.engine.backward(objective, scale_wrt_gas=self.means)

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return 1 / max(1, batch.tokens) if self.means else super().token_factor(span, k, batch)

    def clip(self, observe: Observe) -> None:
        """The engine's step clips, and tells the norm afterwards."""

    def advance(self, observe: Observe) -> None:
        super().advance(observe)
        limit, norm = self.case.optimizer.clip, self.engine.get_global_grad_norm()
        if limit is not None and norm is not None:
            self.show_clipping(observe, limit, norm)

    def clip_factor(self, limit: float, norm: Tensor) -> Tensor:
        return 1 / ((norm + CLIP_EPS) / limit).clamp(min=1.0)

    def optimizer_step(self) -> None:
        self.engine.step()

    def step_scheduler(self) -> None:
        """The engine's step does it."""

    # ------------------------------------------------------------------ showing

    def shown(self) -> Iterator[Shown]:
        """The model's weights; at stage 3 this rank's part of each."""
        for name, parameter in self.module.named_parameters():
            yield name, *self.placed(parameter, getattr(parameter, "ds_tensor", parameter))

    def gradients(self) -> Iterator[Shown]:
        """They can be read between the last backward pass and the step."""
        for name, parameter in self.module.named_parameters():
            if parameter.requires_grad:
                read = safe_get_local_grad if hasattr(parameter, "ds_tensor") else safe_get_full_grad
                yield name, *self.placed(parameter, read(parameter))

    def placed(self, parameter: Any, tensor: Tensor) -> tuple[Tensor, Place]:
        """A tensor and where it belongs: whole, or at stage 3 a flat part, without its padding."""
        if not hasattr(parameter, "ds_tensor"):
            return tensor, Place(tuple(parameter.shape), replica=self.ranks.rank)
        start, stop = (min((self.ranks.rank + i) * tensor.numel(), parameter.ds_numel) for i in (0, 1))
        return tensor[: stop - start], Place(tuple(parameter.ds_shape), interval=(start, stop))

    def show_bytes(self, observe: Observe, name: str, tensors: list[Tensor]) -> None:
        if self.strategy == "deepspeed-zero0":  # the others do not tell what they keep
            super().show_bytes(observe, name, tensors)
