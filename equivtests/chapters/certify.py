"""The one way from a run to its result: run its chapter, and confirm a FAIL in fresh ranks before it is reported."""

from __future__ import annotations

from collections.abc import Callable

from equivtests.chapters.ledger import run_ledger
from equivtests.chapters.replay import run_replay
from equivtests.chapters.restore import run_restore
from equivtests.chapters.run import Chapter, Result, Run
from equivtests.chapters.update import run_update
from equivtests.judge.check import Verdict
from equivtests.judge.tolerance import THRESHOLD
from equivtests.ranks.job import Job, Outcome
from equivtests.ranks.pools import Runs

CHAPTERS: dict[Chapter, Callable[..., Result]] = {
    "update": run_update,
    "restore": run_restore,
    "replay": run_replay,
    "ledger": run_ledger,
}
"""How a run of each chapter is made and judged."""


class FreshPools(Runs):
    """Pools that run everything in ranks forked anew."""

    def __init__(self, pools: Runs) -> None:
        self.pools, self.nproc = pools, pools.nproc

    def run(self, job: Job) -> Outcome:
        return self.pools.run_fresh(job)

    run_fresh = run


def place_of(result: Result) -> tuple[str, int, str] | None:
    """Quantity, update and name of the first difference."""
    first = result.first
    return None if first is None else (first.quantity, first.update, first.name)


def certify(pools: Runs, run: Run, threshold: float = THRESHOLD, confirm: bool = True) -> Result:
    """The result of a run. A FAIL is repeated once in fresh ranks; if it does not repeat, it stays a FAIL (flaky)."""
    result = CHAPTERS[run.chapter](pools, run, threshold)
    if result.verdict is not Verdict.FAIL or not confirm:
        return result
    again = CHAPTERS[run.chapter](FreshPools(pools), run, threshold)
    result.confirmed = again.verdict is Verdict.FAIL and place_of(again) == place_of(result)
    if not result.confirmed:
        result.explanation.append(f"  FAIL (flaky): the same run in fresh ranks was judged {again.verdict}")
        result.records += again.records
    return result
