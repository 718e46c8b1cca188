"""Chapter ledger: what travels between ranks, and what they keep, is what the strategy implies."""

from __future__ import annotations

from equivtests.chapters.run import Result, Run
from equivtests.chapters.update import broken, finish
from equivtests.judge.ledger import judge_ledger
from equivtests.judge.tolerance import THRESHOLD
from equivtests.judge.view import View
from equivtests.ranks.pools import Runs
from equivtests.record.observation import Record
from equivtests.reference.expectation import expect


def run_ledger(pools: Runs, run: Run, threshold: float = THRESHOLD) -> Result:
    """Run a case with its collectives recorded, and judge them. The strategy must declare an algorithm."""
    outcome = pools.run(run.job(ledger=True))
    if outcome.record is None:
        return broken(run, outcome)
    return judge_ledger_run(run, outcome.record, threshold)


def judge_ledger_run(run: Run, record: Record, threshold: float = THRESHOLD) -> Result:
    """Judge a record that holds collectives, wherever it was made."""
    expectation = expect(run.case, run.contract)
    view = View(run.case, run.strategy, record, expectation, threshold)
    return finish(run, judge_ledger(view), view, [record])
