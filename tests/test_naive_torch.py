"""Naive uses of torch as it is that give wrong numbers without a word: each is planted as a mutant, or shown here."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from equivtests.cases.case import LossScale, Precision
from equivtests.chapters.run import Result, Run
from equivtests.judge.check import Verdict
from equivtests.mutants.kill import planted, strategy_of
from equivtests.mutants.situations import SHARDS, TWO_BY_THREE_MLP

PLANTED: dict[str, tuple[str, ...]] = {
    "DDP with default flags and a parameter that a pass does not use": ("ddp-unused-first-step",),
    "DDP around reentrant checkpointing of the first layers": ("stock-reentrant-checkpoint",),
    "DDP's flag of synchronization turned between forward and backward": ("ddp-toggle-late",),
    "a forward pass that goes past DDP": ("ddp-bypass-forward",),
    "a parameter that fully_shard has not seen": ("late-params-after-shard",),
    "HSDP with a seed of each rank's own": ("olmocore-hsdp-init",),
    "FSDP1 with the clipping of whole gradients": ("torch-fsdp1-plain-clip",),
    "FSDP1 and weight decay by the number of dimensions": ("fsdp-flat-weight-decay",),
    "pipelining with a mean left to scale_grads=False": ("stock-pipeline-does-not-scale",),
    "pipelining that scales a loss that is divided already": ("stock-pipeline-scales",),
    "pipelining with two calls of step before an update": ("stock-pipeline-steps-twice",),
    "pipelining with a sum, divided where it is reported": ("stock-pipeline-sum-loss",),
    "pipelining with a mean over the valid tokens of each micro-batch": ("stock-pipeline-mean-loss",),
    "a plain norm on the output of a ColwiseParallel layer": ("stock-plain-head-norms",),
    "a plain norm on a part of a sequence": ("stock-plain-sequence-norms",),
    "torch.distributed.nn under a loss that all ranks have": ("stock-nn-all-reduce", "stock-nn-all-gather"),
    "dist.all_reduce inside a graph": ("stock-all-reduce-in-graph",),
    "weights of a DTensor drawn on CPUs": ("stock-same-shards",),
    "dropout on a DTensor on CPUs": ("stock-same-dropout",),
}
"""Naive use: the mutants that plant it (tests/test_mutants.py shows that each is killed)."""

NAMES = {mutant.name for mutant in planted(nproc=4)}


@pytest.mark.parametrize("use", PLANTED)
def test_the_naive_use_is_a_mutant(use: str) -> None:
    assert set(PLANTED[use]) <= NAMES


ResultOf = Callable[[Run], Result]


def test_a_static_graph_that_begins_with_accumulation_ends_in_a_named_error(result_of: ResultOf) -> None:
    spec = "naive_adapters:StaticGraphAccumulates"
    result = result_of(Run("update", spec, strategy_of(spec, "ddp-static-graph"), TWO_BY_THREE_MLP))
    assert result.verdict is Verdict.ERROR and "INTERNAL ASSERT FAILED" in result.explanation[0]


SCALED = SHARDS.replace(precision=Precision(loss_scale=LossScale(2.0, 1000)))


def scaled(result_of: ResultOf, name: str) -> tuple[Result, set[float]]:
    """The result of a scaler on shards of which one overflows, and the scales that ranks have after the first update."""
    spec = f"naive_adapters:{name}"
    strategy = dataclasses.replace(strategy_of(spec, "fsdp1-full"), loss_scale=True)
    result = result_of(Run("update", spec, strategy, SCALED))
    scales = {float(o.array) for o in result.records[0].of("loss_scale") if o.update == 1}
    return result, scales


def test_a_plain_scaler_on_shards_lets_ranks_part_ways(result_of: ResultOf) -> None:
    """One rank skips the step and halves its scale, the other steps and doubles it."""
    result, scales = scaled(result_of, "PlainScaler")
    assert result.verdict is Verdict.FAIL and scales == {1.0, 4.0}
    assert result.first is not None and result.first.quantity == "weight update"
    assert not any("no weight moved at all" in line for line in result.explanation)


def test_the_scaler_for_shards_keeps_ranks_together(result_of: ResultOf) -> None:
    """All of them skip; a step that one device would have made is missing, and that is what is said."""
    result, scales = scaled(result_of, "ShardedScaler")
    assert scales == {1.0} and any("no weight moved at all" in line for line in result.explanation)
