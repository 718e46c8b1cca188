"""The replay chapter: a run in the order of arrival that another run recorded is that run again, bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from equivtests.judge.arrivals import arrivals_of, in_words
from equivtests.judge.check import Check, Judgement
from equivtests.judge.judge import failed
from equivtests.judge.tolerance import equal
from equivtests.judge.view import View

ENTERING = ("weight", "state")
"""Kinds of what enters an update."""


def judge_replayed(first: View, second: View) -> Judgement:
    """Compare what two runs showed, update by update in the order of arrival, up to the first that differs."""
    judgement, updates = Judgement(), first.case.updates
    order = arrivals_of(first.record, updates)
    for update in range(updates + 1):
        found = [check for kind in ENTERING for check in alike(first, second, "replayed state", kind, update)]
        if update < updates:
            found += same_arrival(first, second, update)
            found += alike(first, second, "replayed gradients", "gradient", order[update][0], update)
        judgement.checks += found
        if failed(found):
            break
    return judgement


def same_arrival(first: View, second: View, update: int) -> Iterator[Check]:
    """Whether an update of the second run processed the gradient that it was to process."""
    for check in alike(first, second, "replayed arrivals", "arrival", update):
        before, after = (view.whole("arrival", "arrival", update) for view in (first, second))
        if check.expected and before is not None and after is not None:
            check = replace(check, expected=in_words(before.values), observed=in_words(after.values), detail="")
        yield check


def alike(
    first: View, second: View, quantity: str, kind: str, number: int, update: int | None = None
) -> Iterator[Check]:
    """Checks of all tensors of a kind and number (of an update, or of a window), reported under `update`."""
    update = number if update is None else update
    for name in dict.fromkeys([*first.names(kind, number), *second.names(kind, number)]):
        before, after = first.whole(kind, name, number), second.whole(kind, name, number)
        if before is None or after is None:
            words = "only the first run showed it" if after is None else "only the second run showed it"
            yield second.failed(quantity, update, name, words)
        elif after.problem:
            yield second.failed(quantity, update, name, after.problem, after.rank)
        else:
            same = equal(after.values, before.values)
            yield second.compared(quantity, update, name, after.values, before.values, same)
