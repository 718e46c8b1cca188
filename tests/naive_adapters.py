"""Naive uses of torch that end in an error, or that no case of the suite can trigger by itself."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from equivtests.adapters.native.ddp import DDP
from equivtests.adapters.native.fsdp1 import FSDP1
from equivtests.cases.case import Case


class StaticGraphAccumulates(DDP):
    """static_graph=True, whose very first backward pass is not synchronized."""

    def synchronization(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.model.no_sync()


class PlainScaler(FSDP1):
    """The scaler for whole gradients on sharded ones. The gradient of rank 1's shard overflows."""

    scaler_class: Any = torch.amp.GradScaler

    def setup(self, case: Case, ranks: Any) -> None:
        super().setup(case, ranks)
        self.scaler = self.scaler_class("cpu", init_scale=self.loss_scale, growth_interval=1)
        self.scaler.scale(torch.ones(()))  # as a loss would be, which makes the scale

    def optimizer_step(self) -> None:
        held = [p.grad for _, p, _ in self.shown() if p.grad is not None and p.grad.numel()]
        if self.ranks.rank == 1:
            held[0].reshape(-1)[0] = math.inf
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def grow_loss_scale(self) -> None:
        self.loss_scale = float(self.scaler.get_scale())


class ShardedScaler(PlainScaler):
    """The scaler that torch has for it: all ranks hear of the overflow."""

    scaler_class = ShardedGradScaler
