"""Nothing passes by accident: every planted mistake is killed by the quantity that must fail first."""

import pytest

from equivtests.judge.check import QUANTITIES
from equivtests.mutants.kill import planted

MUTANTS = planted(nproc=4)


@pytest.mark.parametrize("planted_mutant", MUTANTS, ids=lambda m: m.name)
def test_mutant_fails_first_by_its_quantity_where_its_parent_passes(planted_mutant, kill):
    kill(planted_mutant)


def test_every_mutant_derives_from_a_correct_parent():
    assert all(m.parent != m.adapter for m in MUTANTS)


def test_there_are_enough_mutants():
    assert len(MUTANTS) >= 45


def test_every_compared_quantity_has_a_mutant_that_only_it_finds_first():
    assert set(QUANTITIES) == {m.quantity for m in MUTANTS}
