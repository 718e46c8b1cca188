"""The verdict on one run."""

from __future__ import annotations

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.checks import AT_THE_END, COUNTERS, PER_UPDATE
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
        found = checks_of_update(view, update)
        judgement.checks += found
        if failed(found):
            return judgement
    judgement.checks += [check for counter in COUNTERS for check in counter(view, view.case.updates)]
    judgement.checks += [check for quantity in AT_THE_END for check in quantity(view)]
    return judgement


def checks_of_update(view: View, update: int) -> list[Check]:
    """All checks of one update; without the weights that enter it, nothing else can be computed."""
    found = list(PER_UPDATE[0](view, update))
    missing = [name for name in view.expectation.weights[0] if view.whole("weight", name, update) is None]
    if failed(found) or missing:
        words = "not shown: every rank shows the parameters that it holds, entering every update"
        return found if failed(found) else [*found, *(view.failed("weight update", update, n, words) for n in missing)]
    return found + [check for quantity in PER_UPDATE[1:] for check in quantity(view, update)]


def failed(checks: list[Check]) -> bool:
    return any(check.verdict is Verdict.FAIL for check in checks)
