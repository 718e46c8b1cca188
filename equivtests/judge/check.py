"""The result of one comparison, and of all comparisons of one run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import StrEnum


class Verdict(StrEnum):
    """INCONCLUSIVE: the case cannot tell. ERROR: the run broke. KNOWN: a declared divergence that showed as declared."""

    PASS = "PASS"
    FAIL = "FAIL"
    INCONCLUSIVE = "INCONCLUSIVE"
    ERROR = "ERROR"
    KNOWN = "KNOWN DIVERGENCE"


QUANTITIES = (
    "restored cursor",
    "restored layout",
    "restored step",
    "restored weights",
    "restored optimizer state",
    "restored buffers",
    "restored random state",
    "restored loss scale",
    "restored schedule",
    "replayed state",
    "replayed arrivals",
    "replayed gradients",
    "initial weights",
    "cursor",
    "step",
    "random state",
    "loss scale",
    "samples",
    "tokens",
    "schedule",
    "arrivals",
    "versions",
    "dropout mask",
    "routing",
    "output",
    "loss",
    "gradient",
    "norm",
    "clip coefficient",
    "learning rate",
    "weight update",
    "optimizer state",
    "weight norm",
    "buffer",
    "collectives",
    "bytes",
    "live versions",
    "trajectory",
    "vacuity",
)
"""Compared quantities in causal order: within an update, the first that differs is the one that is reported."""

LATE = ("collectives", "bytes", "live versions", "trajectory", "vacuity")  # of the whole run, not of one update


@dataclass(frozen=True)
class Check:
    """One compared quantity of one update.

    ratio: distance over tolerance unit (rounding radius), judged against the threshold; 0 where equality is demanded and
    holds, inf where it is demanded and does not. resolution: the smallest relative error that this check would have caught.
    """

    quantity: str
    update: int
    name: str
    verdict: Verdict
    ratio: float = 0.0
    rank: int | None = None
    expected: str = ""
    observed: str = ""
    detail: str = ""
    resolution: float = 0.0

    @property
    def order(self) -> tuple[int, int, float]:
        """Causal order; within one quantity of one update the worst first."""
        late = self.quantity in LATE
        return (10**9 if late else self.update, QUANTITIES.index(self.quantity), -self.ratio)


@dataclass
class Judgement:
    """All checks of one run."""

    checks: list[Check] = field(default_factory=list)

    @property
    def verdict(self) -> Verdict:
        found = {check.verdict for check in self.checks}
        return next((v for v in (Verdict.FAIL, Verdict.INCONCLUSIVE) if v in found), Verdict.PASS)

    @property
    def first(self) -> Check | None:
        """The first check in causal order that did not pass, FAIL before INCONCLUSIVE."""
        wanted = self.verdict
        failed = [c for c in self.checks if c.verdict is wanted and wanted is not Verdict.PASS]
        return min(failed, key=lambda c: c.order, default=None)

    def worst(self) -> dict[str, float]:
        """Largest finite ratio per quantity."""
        ratios: dict[str, float] = {}
        for check in self.checks:
            if math.isfinite(check.ratio):
                ratios[check.quantity] = max(ratios.get(check.quantity, 0.0), check.ratio)
        return ratios

    def resolution(self) -> float:
        """Smallest relative gradient error that would have been caught in every tensor."""
        return max((c.resolution for c in self.checks if c.quantity == "gradient"), default=0.0)
