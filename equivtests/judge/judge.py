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
    view = View(case, strategy, record, expectation, threshold)
    judgement = Judgement()
    for update in view.updates:
        found = [check for quantity in PER_UPDATE for check in quantity(view, update)]
        judgement.checks += found
        if failed(found):
            return judgement
    judgement.checks += [check for counter in COUNTERS for check in counter(view, case.updates)]
    judgement.checks += [check for quantity in AT_THE_END for check in quantity(view)]
    return judgement


def failed(checks: list[Check]) -> bool:
    return any(check.verdict is Verdict.FAIL for check in checks)
