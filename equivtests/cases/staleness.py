"""Which weights a gradient is computed at, and when it is applied: the contract of training that is stale by design."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["newest", "stashing", "vertical-sync", "two-buffered", "unstashed", "predicted", "table", "arrivals"]

SCHEME_MEANING: dict[str, str] = {
    "newest": "every pass uses the newest weights",
    "stashing": "each stage uses the newest weights that it has, for both passes of a mini-batch (PipeDream)",
    "vertical-sync": "all stages use the version that was the newest on the first one (PipeDream, vertical sync)",
    "two-buffered": "all stages use the version one update behind (PipeDream-2BW)",
    "unstashed": "each stage uses the newest weights that it has in each pass, other ones forward than backward",
    "predicted": "as stashing, from the version moved on along its momentum by the updates that it lacks (SpecTrain)",
    "table": "each pass uses the version that a table gives",
    "arrivals": "each gradient is computed at the version that its worker had, and applied in the order of arrival",
}
"""Plain words for the schemes."""


@dataclass(frozen=True)
class Staleness:
    """Versions are numbered by the updates made before: version 0 are the initial weights.

    versions: the scheme (`SCHEME_MEANING`). table: of versions = "table": by window and pipeline stage (forward, backward)
    or (forward, backward, ahead), where `ahead` updates are predicted along the momentum.
    drains: windows before which all work in flight is finished, as by a checkpoint that drains.
    delay: how many updates later than it could be the gradient of a window is applied.
    arrivals: of versions = "arrivals": by update (window whose gradient arrives, version that it was computed at); (): as
    the record says. bound: most updates made between that version and the arrival (None: any number). late: what becomes
    of a gradient beyond it. refused: there is none, workers wait; dropped: it is not applied, and no update is made;
    reweighted: its learning rate is divided by 1 + the updates beyond the bound (Zhang et al. 2016, Staleness-aware
    async-SGD, section 3).
    period: of local SGD: every worker steps alone, and after every `period` windows weights are averaged (0: no local SGD).
    """

    versions: Scheme = "newest"
    table: tuple[tuple[tuple[int, ...], ...], ...] = ()
    drains: tuple[int, ...] = ()
    delay: int = 0
    arrivals: tuple[tuple[int, int], ...] = ()
    bound: int | None = None
    late: Literal["refused", "dropped", "reweighted"] = "refused"
    period: int = 0

    def problems(self, updates: int, stages: int) -> Iterator[tuple[bool, str]]:
        """(holds, what must hold) for every rule, of a case with so many windows and pipeline stages."""
        rows = [stage for window in self.table for stage in window]
        yield (
            (self.versions == "table") == bool(self.table),
            "staleness.table belongs to versions = table, and to no other",
        )
        whole = not self.table or len(self.table) == updates and all(len(row) == stages for row in self.table)
        yield whole, f"staleness.table needs {updates} windows of {stages} stage(s)"
        yield all(len(row) in (2, 3) and min(row) >= 0 for row in rows), "staleness.table: (forward, backward[, ahead])"
        known = all(max(row[:2], default=0) <= window for window, line in enumerate(self.table) for row in line)
        yield known, "staleness.table: a window cannot use a version that is made after it"
        served = self.versions == "arrivals"
        yield served or not self.arrivals, "staleness.arrivals belong to versions = arrivals"
        yield served or self.bound is None, "staleness.bound is of arrivals: it belongs to versions = arrivals"
        beyond = max(self.drains, default=0)
        yield beyond <= updates, f"staleness.drains: there is no window {beyond}, the case has {updates}"
        windows = sorted(window for window, _ in self.arrivals)
        yield not windows or windows == list(range(updates)), "staleness.arrivals must name every window once"
        yield (
            all(0 <= v <= u for u, (_, v) in enumerate(self.arrivals)),
            "staleness.arrivals: versions lie in 0..update",
        )
        yield (
            min(self.delay, self.period, self.bound or 0, *self.drains, 0) >= 0,
            "staleness: numbers must not be negative",
        )
        alone = self.versions == "newest" and not self.delay and not self.drains
        yield (
            self.period == 0 or alone,
            "staleness.period combines with no other rule: its workers use their newest weights",
        )
        yield self.late == "refused" or self.bound is not None, f"staleness.late = {self.late} needs a bound"

    def in_words(self) -> Iterator[str]:
        """What differs from one device, each as `field = value: plain words`."""
        if self.versions != "newest":
            yield f"versions = {self.versions}: {SCHEME_MEANING[self.versions]}"
        if self.drains:
            yield f"drains = {list(self.drains)}: all work in flight is finished before these windows"
        if self.delay:
            yield f"delay = {self.delay}: the gradient of a window is applied {self.delay} update(s) later"
        if self.bound is not None:
            yield f"bound = {self.bound}: later gradients are {LATE_MEANING[self.late]}"
        if self.period:
            yield f"period = {self.period}: workers step alone; weights are averaged after every {self.period} windows"


LATE_MEANING = {
    "refused": "never sent: workers wait",
    "dropped": "dropped",
    "reweighted": "applied at a learning rate divided by 1 + the updates beyond it",
}
