"""The command shrink: the smallest case found that still fails first by the same quantity."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace

from equivtests.cases.case import dumps
from equivtests.chapters.certify import certify
from equivtests.chapters.run import Run
from equivtests.cli.options import case_of, only_run, pools_of
from equivtests.errors import CaseError, EquivtestsError
from equivtests.explain.shrink import shrink
from equivtests.judge.check import Verdict
from equivtests.ranks.pools import Runs


def shrink_case(options: argparse.Namespace) -> int:
    case = case_of(options)
    run = only_run(options, case)
    with closing(pools_of(options, case.layout.world)) as pools:
        quantity = failing_quantity(pools, run)
        if quantity is None:
            raise CaseError(f"{options.case}: {run.strategy.name} does not fail on it, there is nothing to shrink")
        smaller = shrink(case, lambda c: failing_quantity(pools, replace(run, case=c)) == quantity)
    options.output.write_text(dumps(smaller))
    print(f"{options.output}: {smaller.updates} updates on {smaller.layout.world} ranks, still fails by {quantity}")
    return 0


def failing_quantity(pools: Runs, run: Run) -> str | None:
    """The quantity that fails first, None if the run does not fail or the case is refused."""
    if run.strategy.refusal(run.case) is not None:
        return None
    try:
        result = certify(pools, run, confirm=False)
    except (EquivtestsError, IndexError):
        return None
    return result.first.quantity if result.first is not None and result.verdict is Verdict.FAIL else None
