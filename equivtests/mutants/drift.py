"""Mistakes too small for one update: only the trajectory shows them."""

from __future__ import annotations

from typing import Any

import torch

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.textbook.dp import TEXTBOOK_OBSERVES, DataParallel
from equivtests.cases.grid import REAL_LINEAR, SGD, UNEQUAL
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import situation

DRIFTING = situation("drifting", REAL_LINEAR, UNEQUAL * 2, SGD)


class FusedOptimizer(DataParallel):
    """Data parallelism with torch's fused optimizers, whose arithmetic is their own: judged within 8 epsilon."""

    def claims(self) -> Claims:
        return Claims((Strategy("dp-fused", arithmetic="own", observes=TEXTBOOK_OBSERVES),))

    def optimizer_options(self) -> dict[str, Any]:
        return super().optimizer_options() | {"fused": True}


@mutant(
    "biased-rounding",
    strategy="dp-fused",
    case=DRIFTING,
    quantity="trajectory",
    source="constructed: a master copy that is truncated where it should be rounded, in float32 units",
    mistake="weights are rounded towards zero by a few units in the last place after every step",
)
class BiasedRounding(FusedOptimizer):
    """Each update is within its bound; all of them together are not."""

    def optimizer_step(self) -> None:
        super().optimizer_step()
        with torch.no_grad():
            for _, parameter, _ in self.shown():
                parameter.mul_(1 - 4 * torch.finfo(parameter.dtype).eps)
