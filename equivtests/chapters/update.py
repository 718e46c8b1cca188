"""Chapter update: every update of a run is the one that a single device would have made."""

from __future__ import annotations

from equivtests.chapters.run import Result, Run
from equivtests.explain.report import explain, explain_failure
from equivtests.judge.check import Judgement, Verdict
from equivtests.judge.judge import judge_view
from equivtests.judge.tolerance import THRESHOLD
from equivtests.judge.view import View
from equivtests.ranks.job import Job, Outcome
from equivtests.ranks.pools import Pools
from equivtests.record.observation import Record
from equivtests.reference.expectation import expect


def run_update(pools: Pools, run: Run, threshold: float = THRESHOLD) -> Result:
    """Run a case on ranks and judge what they observed."""
    execute = pools.run_fresh if run.isolated else pools.run
    return conclude(run, execute(Job(run.adapter, run.strategy.name, run.case)), threshold)


def conclude(run: Run, outcome: Outcome, threshold: float = THRESHOLD) -> Result:
    """The result of an update run from its outcome on ranks."""
    if outcome.record is None:
        return broken(run, outcome)
    return judge_update(run, outcome.record, threshold)


def judge_update(run: Run, record: Record, threshold: float = THRESHOLD) -> Result:
    """Judge a record of an update run, wherever it was made."""
    expectation = expect(run.case, run.strategy.contract(run.case))
    view = View(run.case, run.strategy, record, expectation, threshold)
    return finish(run, judge_view(view), view, [record])


def finish(run: Run, judgement: Judgement, view: View, records: list[Record]) -> Result:
    """A result with its explanation; a declared divergence that shows as declared is known, one that does not is a FAIL."""
    lines = explain(run, view, judgement) if judgement.first is not None else []
    result = Result(run, judgement.verdict, judgement, None, lines, records)
    known = run.known
    if known is None:
        return result
    first = judgement.first
    if first is not None and judgement.verdict is Verdict.FAIL and first.quantity == known.quantity:
        result.verdict = Verdict.KNOWN
    elif judgement.verdict is Verdict.PASS:
        result.verdict = Verdict.FAIL
        result.explanation = [
            f"declared to differ in {known.quantity} ({known.reason}), but it passes: remove the entry"
        ]
    return result


def broken(run: Run, outcome: Outcome) -> Result:
    """A run that ended without a record: an ERROR, unless it is declared to end so."""
    assert outcome.failure is not None
    declared = run.known is not None and run.known.quantity == "error"
    verdict = Verdict.KNOWN if declared else Verdict.ERROR
    return Result(run, verdict, failure=outcome.failure, explanation=explain_failure(run, outcome.failure))
