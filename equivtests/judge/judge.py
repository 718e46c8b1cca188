"""The verdict on one run."""

from __future__ import annotations

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.checks import AT_THE_END, COUNTERS, vacuity
from equivtests.judge.local import ALONE, named, same_everywhere, tells, views_of
from equivtests.judge.tolerance import THRESHOLD
from equivtests.judge.view import View
from equivtests.record.observation import Record
from equivtests.reference.expectation import Expectation


def judge(
    case: Case, strategy: Strategy, record: Record, expectation: Expectation, threshold: float = THRESHOLD
) -> Judgement:
    """Compare a record with what the case demands. Pure: no processes, no files, no clock.

    An update whose stage failed is the last one looked at: what follows from a fault is not another fault.
    """
    return judge_view(View(case, strategy, record, expectation, threshold))


def judge_view(view: View) -> Judgement:
    """The same for a view that is at hand."""
    judgement = Judgement()
    for update in view.updates:
        found = [named(alone, check) for alone in views_of(view) for check in checks_of_update(alone, update)]
        found += [] if failed(found) else same_everywhere(view, update)
        judgement.checks += found
        if failed(found):
            return judgement
    for alone in views_of(view):
        judgement.checks += [named(alone, check) for check in after_the_last(alone)]
    judgement.checks += tells(view)
    return judgement


def after_the_last(view: View) -> list[Check]:
    """All checks after the last update but whether the case can tell."""
    counted = [check for counter in COUNTERS for check in counter(view, view.case.updates)]
    return counted + [check for quantity in AT_THE_END if quantity is not vacuity for check in quantity(view)]


def checks_of_update(view: View, update: int) -> list[Check]:
    """All checks of one update; without the weights that enter it, nothing else can be computed."""
    found = list(ALONE[0](view, update))
    missing = [name for name in view.expectation.weights[0] if view.whole("weight", name, update) is None]
    if failed(found) or missing:
        words = "not shown: every rank shows the parameters that it holds, entering every update"
        return found if failed(found) else [*found, *(view.failed("weight update", update, n, words) for n in missing)]
    return found + [check for quantity in ALONE[1:] for check in quantity(view, update)]


def failed(checks: list[Check]) -> bool:
    return any(check.verdict is Verdict.FAIL for check in checks)
