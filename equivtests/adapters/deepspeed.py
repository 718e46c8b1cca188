"""DeepSpeed: the stages of ZeRO, gradient accumulation and clipping of its engine, optimizers on the CPU.

Written like its documentation: https://deepspeed.readthedocs.io/en/stable/training.html and
https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_grad, safe_get_local_grad
from torch import Tensor, nn

from equivtests.adapters.adapter import PLAIN_FEATURES, Claims, Strategy
from equivtests.adapters.torch_adapter import CLIP_EPS, SHOWN, Shown, TorchAdapter
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Observe, Place

# Its all-reduce in shared memory, for inference on CPUs alone, takes minutes to build when it is first initialized. Ranks
# on which it is not compatible do without it.
deepspeed.ops.__compatible_ops__ = {}

OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
STAGES: dict[str, dict[str, Any]] = {
    "deepspeed-zero0": {"stage": 0},
    "deepspeed-zero1": {"stage": 1},
    "deepspeed-zero2": {"stage": 2},
    "deepspeed-zero3": {"stage": 3},
    "deepspeed-zero2-offload": {"stage": 2, **OFFLOAD},
    "deepspeed-zero3-offload": {"stage": 3, **OFFLOAD},
    "deepspeed-mean-of-means": {"stage": 2},
    "deepspeed-zero1-master": {"stage": 1},
}
"""`zero_optimization` by strategy."""
SMALL = {"reduce_bucket_size": 100, "stage3_param_persistence_threshold": 0, "sub_group_size": 100}
"""Sizes that are meant for billions of parameters: so that gradients fill several buckets, and weights are sharded at all."""


class DeepSpeed(TorchAdapter):
    """The engine's forward, backward and step."""

    def claims(self) -> Claims:
        shared: dict[str, Any] = {
            "features": PLAIN_FEATURES | {"conditional", "dropout", "extra_head", "unused", "z_loss"},
            "precisions": frozenset({"float32"}),
            "clips": frozenset({"2"}),
            "observes": SHOWN - {"bytes"},
        }
        return Claims(
            tuple(Strategy(name, **shared) for name in STAGES),
            framework=f"deepspeed {deepspeed.__version__}",
            preload=("deepspeed.runtime.zero.muon.muon_optimizer",),
        )

    @property
    def stage(self) -> int:
        return int(STAGES[self.strategy]["stage"])

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.case.accumulation,
            "gradient_clipping": self.case.optimizer.clip or 0.0,
            "zero_optimization": SMALL | STAGES[self.strategy],
            "zero_allow_untested_optimizer": True,  # SGD
            "zero_force_ds_cpu_optimizer": False,
        }

    def wrap(self, module: nn.Module) -> nn.Module:
        self.engine, self.optimizer, _, self.scheduler = deepspeed.initialize(
            model=module,
            optimizer=super().make_optimizer(),
            lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, self.rate_factor),
            config=self.config(),
        )
        return self.engine

    def make_optimizer(self) -> torch.optim.Optimizer:
        return self.optimizer

    def make_scheduler(self) -> torch.optim.lr_scheduler.LRScheduler:
        return self.scheduler

    def trainable(self) -> list[tuple[str, Tensor]]:
        return [(name, p) for name, p in self.module.named_parameters() if p.requires_grad]

    # ------------------------------------------------------------------ one update

    def forward_backward(self, k: int, batch: MicroBatch, last: bool) -> Tensor:
        self.engine.set_gradient_accumulation_boundary(last)
        objective = self.objective(self.forward(self.engine, batch), k, batch)
        return self.engine.backward(objective, scale_wrt_gas=False)

    def clip(self, observe: Observe) -> None:
        """The engine clips when it steps, and knows the norm afterwards."""

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
        """The engine does it when it steps."""

    # ------------------------------------------------------------------ showing

    def shown(self) -> Iterator[Shown]:
        """The model's weights; under ZeRO-3 this rank's part of each, without padding."""
        for name, parameter in self.module.named_parameters():
            if self.stage == 3:
                yield name, *self.part(parameter, parameter.ds_tensor)
            else:
                yield name, parameter, Place(tuple(parameter.shape), replica=self.ranks.rank)

    def gradients(self) -> Iterator[Shown]:
        """What can be read between the last backward pass and the step."""
        for name, parameter in self.trainable():
            if self.stage == 3:
                yield name, *self.part(parameter, safe_get_local_grad(parameter))
            else:
                yield name, safe_get_full_grad(parameter), Place(tuple(parameter.shape), replica=self.ranks.rank)

    def part(self, parameter: Any, padded: Tensor) -> tuple[Tensor, Place]:
        """A rank's partition under ZeRO-3 and where it belongs."""
        start, stop = (min(rank * padded.numel(), parameter.ds_numel) for rank in (self.ranks.rank, self.ranks.rank + 1))
        return padded[: stop - start], Place(tuple(parameter.ds_shape), interval=(start, stop))

    def optimizer_state(self) -> Iterator[Shown]:
        """State of the flat partitions that this rank steps, parameter by parameter."""
        if self.stage == 0:
            yield from super().optimizer_state()
            return
        for name, parameter in self.trainable():
            flat, offset, place = self.partition(parameter)
            for key, value in self.optimizer.state.get(flat, {}).items():
                if value is not None:
                    whole = value.ndim == 0
                    yield f"{name}/{key}", value if whole else value[offset : offset + place.size], Place((), replica=self.ranks.rank) if whole else place

    def partition(self, parameter: Any) -> tuple[Tensor | None, int, Place]:
        """The flat tensor that is stepped for a parameter on this rank, the parameter's start in it, and its place."""
        if self.stage == 3:
            group, offset, size = self.optimizer.grad_position[self.optimizer.get_param_id(parameter)]
            flat = self.optimizer.fp32_partitioned_groups_flat[group]
            return flat, offset, self.part(parameter, flat[offset : offset + size])[1]
        mapping = parameter._hp_mapping
        if mapping is None:
            return None, 0, Place((0,))
        flat = self.optimizer.param_groups[mapping.param_group_index]["params"][0]
        start, size = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
        return flat, mapping.hp_fragment_address.start, Place(tuple(parameter.shape), interval=(start, start + size))

    def show_bytes(self, observe: Observe, name: str, tensors: list[Tensor]) -> None:
        pass
