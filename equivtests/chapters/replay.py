"""Chapter replay: gradients arrive in any order; in the order that this was, the same run comes out again, bit for bit."""

from __future__ import annotations

from dataclasses import replace

from equivtests.chapters.run import Result, Run
from equivtests.chapters.update import broken, finish, judge_update
from equivtests.judge.arrivals import Arrivals, arrivals_of, settled
from equivtests.judge.check import Verdict
from equivtests.judge.replay import judge_replayed
from equivtests.judge.tolerance import THRESHOLD
from equivtests.judge.view import View
from equivtests.ranks.pools import Runs
from equivtests.record.observation import Record
from equivtests.reference.expectation import expect


def run_replay(pools: Runs, run: Run, threshold: float = THRESHOLD) -> Result:
    """Run in any order and judge that by the order that was recorded, then run in this order in fresh ranks and compare."""
    free = ordered(run, ())
    first = pools.run(free.job())
    if first.record is None:
        return broken(free, first)
    judged = judge_update(free, first.record, threshold)
    if judged.verdict is not Verdict.PASS:
        return judged
    second = pools.run_fresh(ordered(run, arrivals_of(first.record, run.case.updates)).job())
    if second.record is None:
        return broken(free, second)
    return judge_replay(free, first.record, second.record, threshold)


def ordered(run: Run, arrivals: Arrivals) -> Run:
    """The run whose case names an order of arrival; (): any."""
    contract = run.strategy.contract(run.case)
    staleness = replace(contract.staleness, arrivals=arrivals)
    return replace(run, case=run.case.replace(semantics=replace(contract, staleness=staleness)))


def judge_replay(run: Run, first: Record, second: Record, threshold: float = THRESHOLD) -> Result:
    """Compare the records of a run in any order and of its repetition.

    What is counted and measured of the first depends on its order, which is another one each time: it is left out, so that
    results of the same code are equal.
    """
    contract, _ = settled(run.case, run.contract, first)
    views = [View(run.case, run.strategy, record, expect(run.case, contract), threshold) for record in (first, second)]
    return finish(run, judge_replayed(*views), views[1], [first, second])
