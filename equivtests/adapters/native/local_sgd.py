"""torch's PostLocalSGDOptimizer with a PeriodicModelAverager."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer

from equivtests.adapters.adapter import Claims
from equivtests.adapters.native.ddp import NATIVE_FEATURES
from equivtests.adapters.textbook.local_sgd import Alone, local
from equivtests.adapters.torch_adapter import SHOWN

PERIOD = 2


class PostLocalSGD(Alone):
    """The optimizer's step is the worker's own step and, where it is due, the averaging.

    The averager counts its calls from 0, and averages in call `warmup_steps` and every `period` calls from there: with
    `period` - 1 it does so after every `period` windows. There is no DDP, whose hook would reduce gradients during a
    warm-up.
    """

    optimizer: PostLocalSGDOptimizer

    def claims(self) -> Claims:
        strategy = local("post-local-sgd", PERIOD, features=NATIVE_FEATURES, observes=SHOWN)
        return Claims((strategy,), framework=f"torch {torch.__version__}")

    def make_optimizer(self) -> torch.optim.Optimizer:
        return PostLocalSGDOptimizer(super().make_optimizer(), PeriodicModelAverager(PERIOD, self.warmup_steps()))

    def warmup_steps(self) -> int:
        """Calls of the averager before the first one that averages."""
        return PERIOD - 1

    def after_window(self, update: int) -> None:
        """A worker that made no step calls the averager itself; that passes over parameters without a gradient."""
        if self.counts.tokens.sum() > 0:
            return
        for _, parameter in self.trainable():
            parameter.grad = torch.zeros_like(parameter)
        self.optimizer.averager.average_parameters(self.optimizer.param_groups)

    def save_tensors(self, directory: Path) -> None:
        torch.save(self.module.state_dict(), directory / "model.pt")
        torch.save(self.optimizer.state_dict(), directory / "optimizer.pt")

    def load_tensors(self, directory: Path) -> None:
        self.module.load_state_dict(torch.load(directory / "model.pt", weights_only=True))
        self.load_optimizer(torch.load(directory / "optimizer.pt", weights_only=True))

    def load_optimizer(self, saved: dict[str, Any]) -> None:
        """Loading gives the inner optimizer new groups; the outer one keeps the old, and with them the schedule's rates."""
        self.optimizer.load_state_dict(saved)
        self.optimizer.param_groups = self.optimizer.optim.param_groups
