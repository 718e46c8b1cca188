"""What the checks read: a record with its tensors assembled, beside its case, strategy and expectation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case
from equivtests.judge.assemble import Whole, assemble
from equivtests.judge.check import Check, Verdict
from equivtests.judge.tolerance import THRESHOLD, Distance
from equivtests.record.observation import Observation, Record
from equivtests.reference.expectation import Expectation, gradient_unit
from equivtests.reference.update import States


@dataclass
class View:
    """A record as the checks see it. Tensors are assembled once.

    entering: optimizer states that enter the first update of a restored run, where the strategy does not show them.
    earlier: of a restored run, the one that was saved: what it showed before the save still matters where updates are stale.
    cache: what checks have computed of the record.
    """

    case: Case
    strategy: Strategy
    record: Record
    expectation: Expectation
    threshold: float = THRESHOLD
    entering: States = field(default_factory=dict)
    earlier: View | None = None
    cache: dict[str, Any] = field(default_factory=dict)
    parts: dict[tuple[str, int], dict[str, list[Observation]]] = field(default_factory=dict)
    wholes: dict[tuple[str, int, str], Whole] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for o in self.record.observations:
            self.parts.setdefault((o.kind, o.update), {}).setdefault(o.name, []).append(o)

    def names(self, kind: str, update: int) -> list[str]:
        return list(self.parts.get((kind, update), {}))

    def observations(self, kind: str, update: int) -> list[Observation]:
        return [o for parts in self.parts.get((kind, update), {}).values() for o in parts]

    def whole(self, kind: str, name: str, update: int) -> Whole | None:
        """The assembled tensor, or None if no rank showed it."""
        parts = self.parts.get((kind, update), {}).get(name)
        if parts is None:
            return None
        key = (kind, update, name)
        if key not in self.wholes:
            self.wholes[key] = assemble(parts, self.record.world)
        return self.wholes[key]

    def tensors(self, kind: str, update: int) -> dict[str, torch.Tensor]:
        """All whole tensors of a kind that entered or belong to an update, in their own dtype."""
        found = {name: self.whole(kind, name, update) for name in self.names(kind, update)}
        return {name: torch.from_numpy(np.array(w.values, order="C")) for name, w in found.items() if w is not None}

    def at(self, update: int) -> View:
        """Where to look up what an update, or a window of its number, showed."""
        return self if self.earlier is None or update >= self.record.start else self.earlier

    @property
    def updates(self) -> range:
        """Updates that the record has to hold."""
        return range(self.record.start, self.case.updates)

    @property
    def eps(self) -> float:
        """Unit roundoff scale of the stored weights, or of the copy that the optimizer steps."""
        master = self.expectation.semantics.master
        kept = self.case.precision.weights if master == "none" else master
        return float(torch.finfo(getattr(torch, kept)).eps)

    @property
    def gradient_unit(self) -> float:
        """Epsilon of the coarsest dtype that a gradient passes through."""
        return gradient_unit(self.case, self.expectation.semantics)

    @property
    def bitwise(self) -> bool:
        """Whether the optimizer's arithmetic is known bit for bit: torch's own on the CPU."""
        return self.strategy.arithmetic == "torch" and self.record.device == "cpu"

    # ------------------------------------------------------------------ making checks

    def compared(
        self, quantity: str, update: int, name: str, observed: np.ndarray, expected: np.ndarray, distance: Distance
    ) -> Check:
        """A check from a distance; the values with the largest error are quoted if it does not pass."""
        if distance.verdict is Verdict.PASS:
            return Check(quantity, update, name, Verdict.PASS, distance.ratio, resolution=distance.resolution)
        if observed.shape != expected.shape:
            words = f"has shape {observed.shape}, must be {expected.shape}"
            return self.failed(quantity, update, name, words)
        at = worst_element(observed, expected)
        wanted, seen = (f"{float(a.reshape(-1)[at]):.9g}" if a.size > at else "-" for a in (expected, observed))
        index = [int(i) for i in np.unravel_index(at, expected.shape)] if expected.size > at else []
        where = f"element {index}" if index else ""
        return Check(
            quantity, update, name, distance.verdict, distance.ratio, None, wanted, seen, where, distance.resolution
        )

    def failed(self, quantity: str, update: int, name: str, detail: str, rank: int | None = None) -> Check:
        return Check(quantity, update, name, Verdict.FAIL, np.inf, rank, detail=detail)

    def absent(self, quantity: str, update: int, name: str, kind: str) -> list[Check]:
        """A FAIL if the strategy promises to show this kind, else nothing."""
        if kind not in self.strategy.observes:
            return []
        return [self.failed(quantity, update, name, f"no rank showed it (observe({kind!r}, …) was not called)")]


def worst_element(observed: np.ndarray, expected: np.ndarray) -> int:
    """Flat index of the largest error; the first non-finite one if there is any."""
    with np.errstate(invalid="ignore"):
        error = np.abs(observed.astype(np.float64) - expected.astype(np.float64)).reshape(-1)
    return int(np.argmax(np.where(np.isfinite(error), error, np.inf))) if error.size else 0
