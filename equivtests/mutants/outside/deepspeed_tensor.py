"""Mutants of DeepSpeed's tensor parallelism: what the configuration or the model must say, and does not."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed.module_inject.layers import DS_TENSOR_MODEL_PARALLEL
from torch import Tensor, nn

from equivtests.adapters.deepspeed_tensor import DeepSpeedTensor, Spec
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import SPREAD, SPREAD_BESIDE_DATA, SPREAD_CLIPPED, SPREAD_HEAD_NORMS


@mutant(
    "deepspeed-tp-head-norms",
    strategy="deepspeed-tp",
    case=SPREAD_HEAD_NORMS,
    quantity="gradient",
    source="NVIDIA-NeMo/RL#3716",
    mistake="norms of heads are left out of the partition configuration: each rank has the gradient of its own heads",
)
class HeadNorms(DeepSpeedTensor):
    """What no pattern names stays whole, and is not added up."""

    def layer_specs(self) -> list[Spec]:
        return [spec for spec in super().layer_specs() if not spec.get("grad_allreduce")]


@mutant(
    "deepspeed-tp-world-size",
    strategy="deepspeed-tp",
    case=SPREAD_BESIDE_DATA,
    quantity="loss",
    source="meta-pytorch/torchtune#2420",
    mistake="the loss is multiplied by engine.world_size, which counts tensor ranks, too",
)
class WorldSize(DeepSpeedTensor):
    """The engine averages over its data ranks alone."""

    def averaged(self) -> int:
        return int(self.engine.world_size)


@mutant(
    "deepspeed-tp-unmarked",
    strategy="deepspeed-tp-zero1",
    case=SPREAD_CLIPPED,
    quantity="norm",
    source="deepspeedai/DeepSpeed#5411",
    mistake="parts of layers are not marked tensor_model_parallel: the norm counts those of the first rank alone",
)
class Unmarked(DeepSpeedTensor):
    """A layer of the user's own that is cut like AutoTP's, without its marks."""

    def make_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super().make_optimizer()
        for parameter in self.module.parameters():
            setattr(parameter, DS_TENSOR_MODEL_PARALLEL, False)
        return optimizer


@mutant(
    "deepspeed-tp-strided",
    strategy="deepspeed-tp",
    case=SPREAD,
    quantity="gradient",
    source="NovaSky-AI/SkyRL#1886",
    mistake="inputs of a column layer lie feature by feature in memory: their gradient is added up in a copy, and lost",
)
class Strided(DeepSpeedTensor):
    """The values are the same; told in docs/findings/deepspeed-tp-strided-input.md."""

    def wrap(self, module: nn.Module) -> nn.Module:
        module.get_submodule("layers.0.norm2").register_forward_hook(by_features)
        return super().wrap(module)


def by_features(norm: nn.Module, arguments: Any, x_BLD: Tensor) -> Tensor:
    """The same tensor, its first dimension in memory the last one of its shape."""
    return x_BLD.permute(2, 0, 1).contiguous().permute(1, 2, 0)
