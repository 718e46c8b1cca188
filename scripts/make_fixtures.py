"""Write fixtures/NAME.json for mutants: their cases, made small while the mutant fails first by the same quantity.

Usage: python scripts/make_fixtures.py NAME [NAME …]
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from equivtests.cases.case import Case
from equivtests.cases.fixture import Fixture, dumps
from equivtests.chapters.certify import certify
from equivtests.errors import EquivtestsError
from equivtests.explain.shrink import shrink
from equivtests.judge.check import Verdict
from equivtests.mutants.kill import planted, run_of
from equivtests.mutants.mutant import Mutant
from equivtests.ranks.pools import Pools

FIXTURES = Path(__file__).parent.parent / "fixtures"


def still_killed(pools: Pools, mutant: Mutant, case: Case) -> bool:
    """Whether the parent claims and passes the case and the mutant fails it first by its quantity."""
    smaller = replace(mutant, case=case)
    parent = run_of(smaller, mutant.parent)
    try:
        if parent.strategy.refusal(case) or certify(pools, parent, confirm=False).verdict is not Verdict.PASS:
            return False
        result = certify(pools, run_of(smaller, mutant.adapter), confirm=False)
    except (EquivtestsError, IndexError):
        return False
    return result.verdict is Verdict.FAIL and result.first is not None and result.first.quantity == mutant.quantity


def fixture_of(pools: Pools, mutant: Mutant) -> Fixture:
    case = shrink(mutant.case, lambda smaller: still_killed(pools, mutant, smaller)).replace(name=mutant.name)
    return Fixture(
        mutant.name, mutant.mistake, mutant.source, mutant.chapter, mutant.adapter, mutant.parent, mutant.strategy,
        mutant.quantity, case,
    )  # fmt: skip


def main(names: list[str]) -> None:
    mutants = {mutant.name: mutant for mutant in planted(4)}
    with closing(Pools(4)) as pools:
        for name in names:
            fixture = fixture_of(pools, mutants[name])
            (FIXTURES / f"{name}.json").write_text(dumps(fixture))
            print(f"{name}: {fixture.case.windows} on {fixture.case.model.family}")


if __name__ == "__main__":
    main(sys.argv[1:])
