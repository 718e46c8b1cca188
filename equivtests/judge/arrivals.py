"""The order in which gradients reached parameter servers: as it is declared, or as it may be where any order is right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from equivtests.cases.case import Case, Semantics
from equivtests.cases.staleness import Staleness
from equivtests.judge.check import Check, Verdict
from equivtests.judge.view import View
from equivtests.record.observation import Record
from equivtests.reference.versions import applies

Arrivals = tuple[tuple[int, int], ...]
"""By update: (window whose gradient was processed, version that it was computed at)."""


def arrivals_of(record: Record, updates: int) -> Arrivals:
    """What a record says of every update that some server showed an arrival of, up to the first that is missing."""
    shown: dict[int, tuple[int, int]] = {}
    for o in record.of("arrival"):
        if o.array.size == 2 and o.array.dtype.kind in "iu":
            window, version = o.array.reshape(-1).tolist()
            shown.setdefault(o.update, (window, version))
    known = next((update for update in range(updates) if update not in shown), updates)
    return tuple(shown[update] for update in range(known))


def arrivals(view: View, update: int) -> Iterator[Check]:
    """Every server processed the same gradient; that is the one whose turn it is."""
    rule = view.expectation.semantics.staleness
    if rule.versions != "arrivals":
        return
    whole = view.whole("arrival", "arrival", update)
    if whole is None:
        yield from view.absent("arrivals", update, "arrival", "arrival")
        return
    wanted = np.array(rule.arrivals[update], dtype=np.int64)
    if whole.problem:
        yield view.failed("arrivals", update, "arrival", whole.problem, whole.rank)
    elif whole.values.shape != wanted.shape or whole.values.dtype.kind not in "iu":
        words = f"dtype {whole.values.dtype}, shape {whole.values.shape}, but it is two integers, window and version"
        yield view.failed("arrivals", update, "arrival", words)
    elif np.array_equal(whole.values, wanted):
        yield Check("arrivals", update, "arrival", Verdict.PASS)
    else:
        told = (in_words(wanted), in_words(whole.values))
        yield Check("arrivals", update, "arrival", Verdict.FAIL, np.inf, None, *told)


def in_words(arrival: np.ndarray) -> str:
    return "window {} at version {}".format(*arrival.reshape(-1)[:2])


# ------------------------------------------------------------------------------------------------ any order


def processed_before(rule: Staleness, update: int) -> frozenset[int]:
    """Windows whose gradients arrived earlier."""
    return frozenset(window for window, _ in rule.arrivals[:update])


def on_their_way(rule: Staleness, update: int, made: int) -> frozenset[int]:
    """Windows whose gradients may have been computed, but had not arrived, when `update` entered after `made` updates."""
    return frozenset(window for window, version in rule.arrivals[update:] if version <= made)


def settled(case: Case, semantics: Semantics, record: Record) -> tuple[Semantics, list[Check]]:
    """(the rule with the order that the record says, where any order is right; what is wrong with that order).

    An order that cannot be gives no truth to compare with: in the rule, windows then arrive as they are numbered.
    """
    rule = semantics.staleness
    if rule.versions != "arrivals" or rule.arrivals:
        return semantics, []
    found = arrivals_of(record, case.updates)
    wrong = broken_rules(case, rule, found)
    order = tuple((window, window) for window in range(case.updates)) if wrong else found
    return replace(semantics, staleness=replace(rule, arrivals=order)), wrong


def broken_rules(case: Case, rule: Staleness, found: Arrivals) -> list[Check]:
    """What an order that nobody prescribed must not be like.

    Every window is processed once, those of one worker in order and at versions that never go back, from a version that was
    there, and no later than the bound allows where workers wait for it.
    """
    checks = [broken(update, words) for update, words in disorder(case, rule, found)]
    if not checks and len(found) < case.updates:
        checks = [broken(len(found), f"no server showed which gradient update {len(found)} processed")]
    return checks


def broken(update: int, words: str) -> Check:
    return Check("arrivals", update, "arrival", Verdict.FAIL, np.inf, detail=words)


def disorder(case: Case, rule: Staleness, found: Arrivals) -> Iterator[tuple[int, str]]:
    """(update, words) of what is wrong with an order."""
    rule, made = replace(rule, arrivals=found), 0
    last: dict[tuple[int, ...], tuple[int, int]] = {}
    for update, (window, version) in enumerate(found):
        if not 0 <= window < case.updates:
            yield update, f"window {window} was processed, but there are only {case.updates}"
            return
        worker = fed_by(case, window)
        before, oldest = last.get(worker, (-1, 0))
        if window in (w for w, _ in found[:update]):
            yield update, f"the gradient of window {window} was processed twice"
        elif window < before:
            yield update, f"window {window} was processed after window {before} of the same worker"
        if version > made:
            yield update, f"window {window} claims version {version}, but only {made} updates were made"
        elif version < oldest:
            yield update, f"window {window} was computed at version {version}, an earlier one of its worker at {oldest}"
        if rule.late == "refused" and rule.bound is not None and made - version > rule.bound:
            yield (
                update,
                f"window {window} is {made - version} updates late, the bound is {rule.bound}: no worker waited",
            )
        last[worker] = (window, version)
        made += applies(case, rule, update, made)[0] is not None


def fed_by(case: Case, window: int) -> tuple[int, ...]:
    """The ranks that a window feeds: the worker that computes its gradient."""
    return tuple(rank for rank, batches in enumerate(case.windows[window]) if batches)
