"""Local SGD: workers step alone, and their weights are averaged after every few windows.

McMahan et al. 2017, Communication-efficient learning of deep networks from decentralized data, algorithm 1 (with equal
weights); Stich 2019, Local SGD converges fast and communicates little, algorithm 1. Optimizer state stays each worker's own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.textbook.dp import TEXTBOOK_FEATURES, TEXTBOOK_OBSERVES, DataParallel
from equivtests.adapters.torch_adapter import Counts, TorchAdapter
from equivtests.cases.case import Semantics
from equivtests.cases.staleness import Staleness
from equivtests.cases.windows import Window
from equivtests.record.observation import Place

PERIODS = {"local-sgd": 2, "local-sgd-every-3": 3}
"""By strategy, after how many windows weights are averaged."""

SEVERAL = frozenset({2, 3, 4})


def local(name: str, period: int, **changes: Any) -> Strategy:
    """A strategy of workers that average their weights after every `period` windows."""
    shared: dict[str, Any] = {
        "worlds": SEVERAL,
        "features": TEXTBOOK_FEATURES,
        "semantics": Semantics(staleness=Staleness(period=period)),
        "updates": period,
        "restores": True,
        "observes": TEXTBOOK_OBSERVES - {"buffer"},
    }
    return Strategy(name, **(shared | changes))


class Alone(TorchAdapter):
    """A worker that trains on its own rows by its own tokens, and has weights, optimizer and counters of its own."""

    def count(self, window: Window) -> Counts:
        return Counts(self.own_counts(window).numpy())

    def averaged(self) -> int:
        return 1

    def synchronize(self) -> None:
        """Gradients stay the worker's own."""

    def loss_place(self) -> Place:
        return Place((), replica=self.ranks.rank)

    # ------------------------------------------------------------------ checkpoints, one of every worker

    def save(self, directory: Path) -> None:
        self.save_tensors(self.own(directory))
        (self.own(directory) / "trainer.json").write_text(json.dumps(self.trainer_state()))
        dist.barrier()

    def load(self, directory: Path) -> None:
        super().load(self.own(directory))

    def own(self, directory: Path) -> Path:
        """Where this worker's part of a checkpoint lies."""
        found = directory / f"worker-{self.ranks.rank}"
        found.mkdir(exist_ok=True)
        return found


class LocalSGD(Alone, DataParallel):
    """One all-reduce of all weights after every few windows."""

    def claims(self) -> Claims:
        strategies = tuple(local(name, period, variant=period > 2) for name, period in PERIODS.items())
        return Claims(strategies, framework="equivtests textbook")

    def after_window(self, update: int) -> None:
        """A worker that made no step takes part in the averaging, too."""
        if self.due(update):
            self.average_weights()

    def due(self, update: int) -> bool:
        """Whether weights are averaged after a window; windows without a step count."""
        return (update + 1) % PERIODS[self.strategy] == 0

    def average_weights(self) -> None:
        self.take_over(self.averages([p.detach() for _, p in self.trainable()]))

    def averages(self, tensors: list[Tensor]) -> list[Tensor]:
        """The mean over all workers of each tensor."""
        flat = self.average(_flatten_dense_tensors(tensors))
        return list(_unflatten_dense_tensors(flat, tensors))

    def take_over(self, averages: list[Tensor]) -> None:
        """Continue from the averaged weights."""
        with torch.no_grad():
            for (_, parameter), average in zip(self.trainable(), averages, strict=True):
                parameter.copy_(average)

    def save_tensors(self, directory: Path) -> None:
        save_file(self.tensors(), directory / "model.safetensors")
        save_file(self.state_tensors(), directory / "optimizer.safetensors")
