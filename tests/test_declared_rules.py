"""A framework that documents another rule is certified against that rule, and only against that one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from declared_adapters import MASTER, MEANS

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import DOUBLE, Semantics
from equivtests.cases.grid import cases
from equivtests.cases.meaning import MEANING, in_words
from equivtests.chapters.certify import certify
from equivtests.chapters.plan import claims_of, plan, usable
from equivtests.chapters.run import Result, Run
from equivtests.judge.check import Verdict
from equivtests.mutants.situations import NO_VECTOR_DECAY, PAIR, TINY_MLP, TWO_BY_THREE, situation
from equivtests.ranks.pools import Pools
from equivtests.reference.expectation import expect

MASTER_CASE = situation("master", TINY_MLP, PAIR, NO_VECTOR_DECAY, precision=DOUBLE)


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    with closing(Pools(2, deadline=120.0)) as standing:
        yield standing


def result(pools: Pools, adapter: str, case: object, semantics: Semantics | None) -> Result:
    """Run an adapter of `declared_adapters` under a declared rule."""
    spec = f"declared_adapters:{adapter}"
    strategy = replace(claims_of(spec).strategies[0], semantics=semantics)
    return certify(pools, Run("update", spec, strategy, case), confirm=False)  # type: ignore[arg-type]


CLAIMED = {
    "MeanOfMeans": (MEANS, TWO_BY_THREE, "loss", "denominator = rank-microbatch"),
    "MasterCopy": (MASTER, MASTER_CASE, "weight update", "master = float32"),
}
"""Adapter: the rule it follows, a case that can tell, the quantity that differs from one device, the explanation."""


@pytest.mark.parametrize("adapter", CLAIMED)
def test_what_follows_its_declared_rule_passes(pools: Pools, adapter: str) -> None:
    rule, case, _, _ = CLAIMED[adapter]
    found = result(pools, adapter, case, rule)
    assert found.verdict is Verdict.PASS, found.explanation
    assert found.summary()["semantics"] == in_words(rule)


@pytest.mark.parametrize("adapter", CLAIMED)
def test_the_same_framework_fails_without_its_declaration_and_is_explained_by_the_rule(
    pools: Pools, adapter: str
) -> None:
    _, case, quantity, words = CLAIMED[adapter]
    found = result(pools, adapter, case, None)
    assert found.verdict is Verdict.FAIL
    assert found.first is not None and found.first.quantity == quantity
    assert any(f"`{words}`" in line for line in found.explanation), found.explanation


@pytest.mark.parametrize("adapter", CLAIMED)
def test_a_rule_that_is_declared_but_not_followed_fails(pools: Pools, adapter: str) -> None:
    rule, case, quantity, _ = CLAIMED[adapter]
    found = result(pools, "Plain", case, rule)
    assert found.verdict is Verdict.FAIL
    assert found.first is not None and found.first.quantity == quantity


def test_every_rule_has_plain_words() -> None:
    for words in map(in_words, (Semantics(), MASTER, MEANS)):
        assert words == [] or all(": " in line for line in words)
    values = {(field, value) for field, value in MEANING if value != getattr(Semantics(), field)}
    assert ("master", "float32") in values and ("denominator", "rank") in values


def test_a_master_copy_rounds_what_is_observed_but_not_the_truth() -> None:
    declared, plain = (expect(MASTER_CASE, rule) for rule in (MASTER, Semantics()))
    for name, weights in declared.weights[-1].items():
        assert torch.equal(weights, plain.weights[-1][name])
        assert declared.trajectory_radius[name] > 1e4 * plain.trajectory_radius[name]


def test_a_case_keeps_its_distance_from_kinks_under_the_rule_that_it_is_judged_by() -> None:
    for run in plan(["declared_adapters:MeanOfMeans"], "nightly", seeds=(0, 1)).runs:
        assert isinstance(run.strategy, Strategy)
        assert usable(run.case, lambda case: MEANS) == run.case
        expect(run.case, MEANS)


def test_a_declared_rule_runs_every_case_but_the_exact_ones() -> None:
    """Their proof is for the default: a mean over one rank's tokens is no number of the working precision."""
    declared, default = Strategy("declared", semantics=MEANS), Strategy("default")
    for case in cases("nightly", 4):
        words = "tolerance zero, which is proved for the default rule only" if case.exact else default.refusal(case)
        assert declared.refusal(case) == words
