"""Chapter restore: a checkpoint of the middle, loaded in fresh ranks, goes on as if nothing had happened."""

from __future__ import annotations

import tempfile

from equivtests.chapters.run import Result, Run
from equivtests.chapters.update import broken, finish, judge_update
from equivtests.judge.check import Verdict
from equivtests.judge.restore import going_on, judge_restored
from equivtests.judge.tolerance import THRESHOLD
from equivtests.judge.view import View
from equivtests.ranks.pools import Runs
from equivtests.record.observation import Record
from equivtests.reference.expectation import expect


def run_restore(pools: Runs, run: Run, threshold: float = THRESHOLD) -> Result:
    """Run with a save in the middle, judge it, load in fresh ranks, judge again."""
    with tempfile.TemporaryDirectory(prefix="equivtests-restore-") as directory:
        saved = pools.run(run.job(save_to=directory))
        if saved.record is None:
            return broken(run, saved)
        uninterrupted = judge_update(run, saved.record, threshold)
        if uninterrupted.verdict is not Verdict.PASS:
            return uninterrupted
        loaded = pools.run_fresh(run.job(load_from=directory))
    if loaded.record is None:
        return broken(run, loaded)
    return judge_restore(run, saved.record, loaded.record, threshold)


def judge_restore(run: Run, whole: Record, restored: Record, threshold: float = THRESHOLD) -> Result:
    """Judge the records of an uninterrupted and of a restored run."""
    expectation = expect(run.case, run.contract)
    before = View(run.case, run.strategy, whole, expectation, threshold)
    restored = going_on(restored)
    after = View(run.case, run.strategy, restored, expectation, threshold)
    return finish(run, judge_restored(before, after), after, [whole, restored])
