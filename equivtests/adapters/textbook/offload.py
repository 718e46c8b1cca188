"""Offloaded optimizers: master weights and optimizer state live on the host, and the step is made there.

Ren et al. 2021, ZeRO-Offload: democratizing billion-scale model training, section 4: gradients go out to the host, the
optimizer steps the master weights, parameters come back. On several devices each host has the shard of ZeRO-2 (section 4.2).
The masters are copies even where the device is the CPU.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equivtests.adapters.adapter import Claims
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.textbook.zero import Zero2
from equivtests.adapters.torch_adapter import Shown, TorchAdapter
from equivtests.record.observation import Place


class HostOptimizer(TorchAdapter, ABC):
    """Every parameter that is trained on the device has a master on the host, which the optimizer steps in its place."""

    @abstractmethod
    def device_parameters(self) -> Iterator[Shown]:
        """(canonical name, parameter, place) of what this rank's optimizer updates."""

    def wrap(self, module: nn.Module) -> nn.Module:
        wrapped = super().wrap(module)
        self.masters = {p: on_host(p) for _, p, _ in self.device_parameters()}
        return wrapped

    def parameter_groups(self) -> list[dict[str, Any]]:
        groups = super().parameter_groups()
        return [{**group, "params": [self.masters[p] for p in group["params"]]} for group in groups]

    # ------------------------------------------------------------------ step

    def optimizer_step(self) -> None:
        self.gradients_out()
        self.step_on_host()
        self.parameters_back()

    def gradients_out(self) -> None:
        """Move the gradients, reduced and clipped, to the masters; what has none stays without."""
        for parameter, master in self.masters.items():
            master.grad = None if parameter.grad is None else on_host(parameter.grad)
            parameter.grad = None

    def step_on_host(self) -> None:
        self.optimizer.step()

    def parameters_back(self) -> None:
        """Copy the masters into the parameters of the device."""
        with torch.no_grad():
            for parameter, master in self.masters.items():
                parameter.copy_(master)

    # ------------------------------------------------------------------ showing, checkpoints

    def optimizer_state(self) -> Iterator[Shown]:
        for name, parameter, place in self.device_parameters():
            for key, value in self.optimizer.state.get(self.masters[parameter], {}).items():
                yield f"{name}/{key}", value, Place((), replica=self.ranks.rank) if value.ndim == 0 else place

    def load_tensors(self, directory: Path) -> None:
        super().load_tensors(directory)
        self.refresh_masters()

    def refresh_masters(self) -> None:
        """Make the masters those of the weights that were loaded."""
        for parameter, master in self.masters.items():
            master.data.copy_(parameter)

    def load_optimizer(self, saved: dict[str, Tensor]) -> None:
        for name, parameter, _ in self.device_parameters():
            keys = {n.removeprefix(f"{name}/"): t for n, t in saved.items() if n.rpartition("/")[0] == name}
            if keys:
                self.optimizer.state[self.masters[parameter]] = keys


def on_host(tensor: Tensor) -> Tensor:
    """A copy in the host's memory, apart from the tensor wherever that is; of a parameter one, too."""
    copied = tensor.detach().to("cpu", copy=True)
    return nn.Parameter(copied) if isinstance(tensor, nn.Parameter) else copied


class Offload(HostOptimizer, DataParallel):
    """Every rank's host keeps all masters and all state."""

    def claims(self) -> Claims:
        return renamed(super().claims(), "offload", variant=True)

    def device_parameters(self) -> Iterator[Shown]:
        return ((name, p, place) for name, p, place in self.shown() if p.requires_grad)


class ShardedOffload(HostOptimizer, Zero2):
    """Every rank's host keeps the masters and the state of its shard; stepped shards are gathered on the devices."""

    def claims(self) -> Claims:
        return renamed(super().claims(), "offload-sharded", variant=True)

    def device_parameters(self) -> Iterator[Shown]:
        return self.shown_pieces()

    def parameters_back(self) -> None:
        super().parameters_back()
        self.publish()


def renamed(claims: Claims, name: str, variant: bool = False) -> Claims:
    """The claims of an adapter with one strategy, for another that keeps them."""
    return replace(claims, strategies=tuple(replace(s, name=name, variant=variant) for s in claims.strategies))
