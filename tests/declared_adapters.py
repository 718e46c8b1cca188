"""Frameworks that follow a rule of their own, and one that follows none."""

from __future__ import annotations

import torch

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.textbook.dp import DataParallel
from equivtests.adapters.torch_adapter import SHOWN
from equivtests.cases.case import Semantics
from equivtests.cases.windows import MicroBatch
from equivtests.record.observation import Place

MEANS = Semantics(denominator="rank-microbatch")
MASTER = Semantics(master="float32")


class Plain(DataParallel):
    """One device's rule."""

    def claims(self) -> Claims:
        return Claims((Strategy("plain", observes=SHOWN),))


class MeanOfMeans(DataParallel):
    """Every micro-batch of every rank is divided by its own tokens; then means are averaged."""

    def claims(self) -> Claims:
        observed = frozenset({"inputs", "loss", "gradient", "norm", "clip", "lr", "weight", "state"})
        return Claims((Strategy("means", semantics=MEANS, ragged=False, observes=observed),))

    def token_factor(self, span: str, k: int, batch: MicroBatch) -> float:
        return super().token_factor("rank-microbatch", k, batch)


class MasterCopy(DataParallel):
    """The optimizer steps float32 copies of the parameters; the parameters are set to them."""

    def claims(self) -> Claims:
        return Claims((Strategy("master", semantics=MASTER, precisions=frozenset({"float64"}), observes=SHOWN),))

    def make_optimizer(self) -> torch.optim.Optimizer:
        self.copies = {p: torch.nn.Parameter(p.detach().float()) for _, p, _ in self.shown() if p.requires_grad}
        optimizer = super().make_optimizer()
        for group in optimizer.param_groups:
            group["params"] = [self.copies[p] for p in group["params"]]
        return optimizer

    def optimizer_step(self) -> None:
        for parameter, copy in self.copies.items():
            copy.grad = None if parameter.grad is None else parameter.grad.float()
        super().optimizer_step()
        with torch.no_grad():
            for parameter, copy in self.copies.items():
                parameter.copy_(copy)
                parameter.grad = None

    def optimizer_state(self):  # type: ignore[no-untyped-def]
        """State is kept with the copies."""
        states = self.optimizer.state
        for name, parameter, place in self.shown():
            for key, value in states.get(self.copies.get(parameter), {}).items():
                yield f"{name}/{key}", value, place if value.ndim else Place((), replica=self.ranks.rank)
