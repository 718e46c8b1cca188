"""Chapter update: every update of a run is the one that a single device would have made."""

from __future__ import annotations

from equivtests.chapters.run import Result, Run
from equivtests.explain.report import explain, explain_failure
from equivtests.judge.arrivals import settled
from equivtests.judge.check import Judgement, Verdict
from equivtests.judge.judge import judge_view
from equivtests.judge.tolerance import THRESHOLD
from equivtests.judge.view import View
from equivtests.ranks.job import Outcome
from equivtests.ranks.pools import Runs
from equivtests.record.observation import Record
from equivtests.reference.expectation import expect


def run_update(pools: Runs, run: Run, threshold: float = THRESHOLD) -> Result:
    """Run a case on ranks and judge what they observed."""
    return conclude(run, pools.run(run.job()), threshold)


def conclude(run: Run, outcome: Outcome, threshold: float = THRESHOLD) -> Result:
    """The result of an update run from its outcome on ranks."""
    if outcome.record is None:
        return broken(run, outcome)
    return judge_update(run, outcome.record, threshold)


def judge_update(run: Run, record: Record, threshold: float = THRESHOLD) -> Result:
    """Judge a record of an update run, wherever it was made."""
    contract, disorder = settled(run.case, run.contract, record)
    view = View(run.case, run.strategy, record, expect(run.case, contract), threshold)
    return finish(run, Judgement(disorder) if disorder else judge_view(view), view, [record])


def finish(run: Run, judgement: Judgement, view: View, records: list[Record]) -> Result:
    """A result with its explanation; a declared divergence that shows as declared is known, one that does not is a FAIL."""
    lines = [*explained(run, view, judgement), *run.caveats]
    result = Result(run, judgement.verdict, judgement, None, lines, records)
    known = run.known
    if known is None:
        return result
    first = judgement.first
    if first is not None and judgement.verdict is Verdict.FAIL and first.quantity == known.quantity:
        result.verdict = Verdict.KNOWN
    elif judgement.verdict is Verdict.PASS:
        result.verdict = Verdict.FAIL
        words = f"declared to differ in {known.quantity} ({known.reason}), but it passes: remove the entry"
        result.explanation = [words, *run.caveats]
    return result


def explained(run: Run, view: View, judgement: Judgement) -> list[str]:
    """The explanation of what did not pass; one that breaks must not hide the verdict."""
    try:
        return explain(run, view, judgement)
    except Exception as error:
        first = judgement.first
        assert first is not None
        where = f"{first.quantity} of {first.name} at update {first.update}: {first.detail or first.observed}"
        return [
            f"{run.strategy.name} on {run.case.name}: {where}",
            f"  (no explanation: {type(error).__name__}: {error})",
        ]


def broken(run: Run, outcome: Outcome) -> Result:
    """A run that ended without a record: an ERROR, unless it is declared to end so."""
    assert outcome.failure is not None
    known = run.known
    declared = known is not None and known.quantity == "error" and known.message in outcome.failure.message
    verdict = Verdict.KNOWN if declared else Verdict.ERROR
    return Result(
        run, verdict, failure=outcome.failure, explanation=[*explain_failure(run, outcome.failure), *run.caveats]
    )
