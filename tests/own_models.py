"""Models of a user's own: good ones, one for every reason to refuse one, and adapters that err on them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from equivtests.adapters.adapter import Adapter, Claims, Strategy
from equivtests.adapters.textbook.dp import TEXTBOOK_OBSERVES, DataParallel
from equivtests.own import OwnModel

LENGTH = 8


class Curve(nn.Module):
    """Two layers on three numbers, scaled by a buffer that stays as it is."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 5), nn.Linear(5, 2, bias=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


class Good(OwnModel):
    """Squared error; float inputs."""

    def module(self) -> nn.Module:
        return Curve()

    def build(self) -> nn.Module:
        torch.manual_seed(3)
        return self.module()

    def sample(self, number: int) -> tuple[Any, Any]:
        draws = np.random.default_rng(number)
        return draws.normal(size=(LENGTH, 3)), draws.normal(size=(LENGTH, 2))

    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return ((module(inputs) - targets).square().sum(dim=2) * valid).sum(dim=1)


class Scaled(nn.Linear):
    """A layer with a buffer."""

    scale: Tensor

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        self.register_buffer("scale", torch.full((outputs,), 0.75))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * self.scale


class Units(Good):
    """Layers that are wrapped one by one, one without gradient and one with a buffer, and one loss per sample."""

    length = 1

    def module(self) -> nn.Module:
        frozen = nn.Linear(3, 5).requires_grad_(False)
        return nn.Sequential(frozen, nn.Tanh(), Scaled(5, 4), nn.Linear(4, 2))

    def units(self, module: nn.Module) -> list[nn.Module]:
        return [layer for layer in module.children() if isinstance(layer, nn.Linear)]

    def sample(self, number: int) -> tuple[Any, Any]:
        inputs, targets = super().sample(number)
        return torch.from_numpy(inputs[0]), int(targets[0, 0] > 0)

    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return F.cross_entropy(module(inputs), targets, reduction="none") * valid[:, 0]


class RoundsInside(Good):
    """Correct, but part of it is computed in float32 whatever the weights are."""

    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        outputs = module(inputs).float().to(inputs.dtype)
        return ((outputs - targets).square().sum(dim=2) * valid).sum(dim=1)


# ---------------------------------------------------------------------------------------------- refused


class NotBuilt(OwnModel):
    pass


class NoModule(Good):
    def build(self) -> Any:
        return "a module"


class NothingTrained(Good):
    def module(self) -> nn.Module:
        return Curve().requires_grad_(False)


class Unseeded(Good):
    def build(self) -> nn.Module:
        return Curve()


class Infinite(Good):
    def build(self) -> nn.Module:
        module = super().build()
        with torch.no_grad():
            module.first.bias.fill_(float("inf"))  # type: ignore[union-attr, operator, unused-ignore]
        return module


class SameInputs(Good):
    def sample(self, number: int) -> tuple[Any, Any]:
        return super().sample(number % 100)


class OddShape(Good):
    def sample(self, number: int) -> tuple[Any, Any]:
        inputs, targets = super().sample(number)
        return inputs[: 8 - number % 2], targets


class DrawnSamples(Good):
    def sample(self, number: int) -> tuple[Any, Any]:
        return torch.randn(LENGTH, 3), torch.randn(LENGTH, 2)


class MeanLoss(Good):
    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return super().losses(module, inputs, targets, valid).mean()


class Dropping(Good):
    def module(self) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))


class BatchNorm(Good):
    def module(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(3), nn.Linear(3, 2), nn.Unflatten(0, (-1, LENGTH)))


class SharedDivisor(Good):
    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return super().losses(module, inputs, targets, valid) / valid.sum().clamp(min=1)


class EveryToken(Good):
    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return (module(inputs) - targets).square().sum(dim=(1, 2))


class OnlyFloat32(Good):
    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return super().losses(module, inputs.float(), targets, valid)


class KeepsCopies(Good):
    class Keeper(Curve):
        def __init__(self) -> None:
            super().__init__()
            self.kept = [self.second.weight]

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(torch.tanh(self.first(x)), self.kept[0])

    def module(self) -> nn.Module:
        return self.Keeper()


REFUSED = {
    NotBuilt: "build() raised TypeError: NotBuilt.build() is not written: return your torch module",
    NoModule: "build() returned a str, not a torch module",
    NothingTrained: "no parameter takes a gradient",
    Unseeded: "build() gave other values of first.weight when called again",
    Infinite: "parameter first.bias is not finite",
    SameInputs: "samples 0 and 100 have the same inputs",
    OddShape: "inputs of sample 1 are float64 (7, 3), those of sample 0 float64 (8, 3)",
    DrawnSamples: "sample(1) gave other arrays when called again",
    MeanLoss: "losses() gave shape () for 4 samples: return (4,)",
    Dropping: "the module draws random numbers (dropout?); build it with p = 0",
    BatchNorm: "a forward pass changes buffer 1.running_mean (batch norm?)",
    SharedDivisor: "its loss depends on the other samples",
    EveryToken: "a sample without a valid token has loss",
    OnlyFloat32: "losses(), called in float32 and in float64 (the reference computes in float64), raised RuntimeError",
    KeepsCopies: "the module computes from copies of its parameters",
}
"""What is said of each model that cannot serve as a reference."""


class ByRank(Good):
    """Weights that depend on the rank: the main process cannot find it out."""

    def build(self) -> nn.Module:
        rank = dist.get_rank() if dist.is_initialized() else 0
        torch.manual_seed(3 + rank)
        return Curve()


# ---------------------------------------------------------------------------------------------- adapters that err


class Erring(DataParallel):
    def claims(self) -> Claims:
        return Claims((Strategy("dp", observes=TEXTBOOK_OBSERVES),))


class FromScratch(Adapter):
    """An adapter that says nothing about families, and builds no torch module."""

    def claims(self) -> Claims:
        return Claims((Strategy("scratch"),))


class FeedsRounded(Erring):
    """Inputs pass through half precision on their way."""

    def to_device(self, array: np.ndarray) -> Tensor:
        return super().to_device(array.astype(np.float16) if array.dtype == np.float64 else array)


class ForgetsBuffers(Erring):
    """Buffers of rank 1 are not those that the model was built with."""

    def wrap(self, module: nn.Module) -> nn.Module:
        if self.ranks.rank == 1:
            add_one(module)
        return module


class DriftingBuffers(Erring):
    """The step moves buffers, too."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        add_one(self.module)


def add_one(module: nn.Module) -> None:
    with torch.no_grad():
        for buffer in module.buffers():
            buffer += 1
