"""Asynchronous pipelines with version rules of their own, and one that runs any rule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.textbook.stale_pipeline import (
    ALONE,
    ASYNCHRONOUS,
    Version,
    WeightStashing,
    overwrite,
    stale_strategy,
)
from equivtests.cases.case import Case, Semantics
from equivtests.cases.staleness import Scheme, Staleness
from equivtests.reference.versions import RULES

Rule = Callable[[int, int, int], tuple[int, int]]
"""(mini-batch, stage, stages) to the versions of forward and backward pass."""


def own_strategy(name: str, rule: Rule) -> Strategy:
    """A strategy whose contract is a table, filled for every case by a rule of the framework's own."""

    def semantics(case: Case) -> Semantics:
        stages = case.layout.pp
        table = tuple(tuple(rule(t, s, stages) for s in range(stages)) for t in range(case.updates))
        return Semantics(staleness=Staleness(versions="table", table=table))

    return stale_strategy(name, "table", **ALONE | {"semantics": semantics, "restores": False})


def late_forward(t: int, s: int, stages: int) -> tuple[int, int]:
    """The forward pass uses what there is, the backward pass what there is then: every update before it has been made."""
    return max(0, t - (stages - 1 - s)), t


def first_stashes(t: int, s: int, stages: int) -> tuple[int, int]:
    forward, backward = late_forward(t, s, stages)
    return (forward, forward) if s == 0 else (forward, backward)


class OneCopy(WeightStashing):
    """One copy of the weights, updated under the passes in flight (Yang et al. 2021, PipeMare, section 2.2, uncorrected)."""

    def claims(self) -> Claims:
        return Claims((own_strategy("one-copy", late_forward),))

    def stashes(self) -> bool:
        return False

    def version_for_backward(self, k: int) -> int:
        return super().version_for_backward(k) if self.stashes() else self.steps

    def needed(self) -> set[int]:
        return super().needed() if self.stashes() else set(self.stash)

    def versions_kept(self) -> set[int]:
        return super().versions_kept() if self.stashes() else {self.steps}

    def keep_newest(self) -> None:
        if self.stashes() or not self.stash:
            super().keep_newest()
        else:
            (copy,) = self.stash.values()
            overwrite(copy, self.newest)
            self.stash, self.live = {self.steps: Version(self.steps, copy.leaves)}, 1


class FirstStashes(OneCopy):
    """The first stage, where weights are oldest, stashes; the others have one copy."""

    def claims(self) -> Claims:
        return Claims((own_strategy("first-stashes", first_stashes),))

    def stashes(self) -> bool:
        return self.stage == 0


class ByRule(WeightStashing):
    """Any scheme, where windows have at least as many micro-batches as there are stages: all versions are made in time.

    Strategies are named by the scheme. newest: with a flush after every window. Versions are kept for ever.
    """

    def claims(self) -> Claims:
        schemes: tuple[Scheme, ...] = ("newest", "stashing", "vertical-sync", "two-buffered")
        return Claims(tuple(replace(self.strategy_of(scheme), name=scheme) for scheme in schemes))

    def strategy_of(self, scheme: Scheme) -> Strategy:
        return stale_strategy(scheme, scheme, microbatches="any", restores=False, observes=ASYNCHRONOUS - {"live"})

    def version_for_forward(self, k: int) -> int:
        return RULES[self.strategy](self.work.before, self.stage, self.layout.pp, 0).forward

    def needed(self) -> set[int]:
        return set(self.stash)

    @property
    def begins_before(self) -> int:
        return self.feed.position if self.strategy == "newest" else super().begins_before
