"""Mutants of the JAX adapter: collectives written by hand that do not add up to the global batch, and other habits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from equivtests.adapters import jax_models as models
from equivtests.adapters.jax import JAX, State
from equivtests.adapters.jax_models import Batch, Terms, Weights
from equivtests.mutants.mutant import mutant
from equivtests.mutants.situations import CLIPPED_SHARDS, MIDDLE, TWO_BY_THREE, TWO_BY_THREE_GPT, UNUSED_ONCE

DOCS = "https://docs.jax.dev/en/latest"


def on_each_device(adapter: JAX, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of (weights, batch, totals) on the rows of one device, as pmap had it: nothing is summed unasked."""
    specs = (P(), P(None, "data"), P())
    return jax.shard_map(function, mesh=adapter.mesh, in_specs=specs, out_specs=P(), check_vma=False)


@mutant(
    "jax-mean-of-local-means",
    strategy="jax-dp",
    case=TWO_BY_THREE_GPT,
    quantity="loss",
    source="huggingface/transformers#18297, #19494",
    mistake="each device takes the mean over its own tokens, and pmean averages over devices",
)
class MeanOfLocalMeans(JAX):
    """The recipe of many training scripts for pmap and shard_map."""

    def accumulate(self, weights: Weights, batch: Batch, totals: Terms) -> tuple[jax.Array, Weights]:
        def local(weights: Weights, rows: Batch, totals: Terms) -> Any:
            return jax.lax.pmean(JAX.accumulate(self, weights, rows, models.totals(rows)), "data")

        return on_each_device(self, local)(weights, batch, totals)


@mutant(
    "jax-forgotten-psum",
    strategy="jax-dp",
    case=TWO_BY_THREE,
    quantity="gradient",
    source=f"jax-ml/jax#3970; {DOCS}/notebooks/shard_map.html",
    mistake="the loss is summed over devices, the gradients are not",
)
class ForgottenPsum(JAX):
    """Without check_vma nobody sees that what is declared to be replicated differs from device to device."""

    def accumulate(self, weights: Weights, batch: Batch, totals: Terms) -> tuple[jax.Array, Weights]:
        def local(weights: Weights, rows: Batch, totals: Terms) -> Any:
            loss, gradients = JAX.accumulate(self, weights, rows, totals)
            return jax.lax.psum(loss, "data"), gradients

        return on_each_device(self, local)(weights, batch, totals)


@mutant(
    "jax-psum-twice",
    strategy="jax-dp",
    case=TWO_BY_THREE,
    quantity="gradient",
    source=f"jax-ml/jax#36886, #28372; {DOCS}/notebooks/shard_map.html",
    mistake="gradients of replicated weights come summed over devices, and are summed over devices again",
)
class PsumTwice(JAX):
    """What pmap needed is kept where jit, or shard_map with check_vma, does it unasked."""

    def accumulate(self, weights: Weights, batch: Batch, totals: Terms) -> tuple[jax.Array, Weights]:
        loss, gradients = super().accumulate(weights, batch, totals)
        again = partial(jax.lax.psum, axis_name="data")
        return loss, jax.shard_map(again, mesh=self.mesh, in_specs=P(), out_specs=P())(gradients)


@mutant(
    "jax-padding-counted",
    strategy="jax-dp",
    case=TWO_BY_THREE_GPT,
    quantity="loss",
    source="AI-Hypercomputer/maxtext#366",
    mistake="the loss is divided by all positions of the batch, those that only fill it up included",
)
class PaddingCounted(JAX):
    """Masked token losses are averaged by jnp.mean."""

    def accumulate(self, weights: Weights, batch: Batch, totals: Terms) -> tuple[jax.Array, Weights]:
        return super().accumulate(weights, batch, totals | {"main": batch.valid.size})


@mutant(
    "jax-zero-for-absent",
    strategy="jax-dp",
    case=UNUSED_ONCE,
    quantity="gradient",
    source="google-deepmind/optax#290; KellerJordan/Muon#54",
    mistake="the loss is differentiated by all weights: those it does not use get zeros, so they decay",
)
class ZeroForAbsent(JAX):
    """jax.grad knows no absent gradient."""

    def trained(self) -> list[str]:
        return list(self.shapes)


@mutant(
    "jax-constant-rate",
    strategy="jax-dp",
    case=MIDDLE,
    quantity="weight update",
    source=f"{DOCS}/notebooks/Common_Gotchas_in_JAX.html",
    mistake="the schedule is read while the step is traced, so the first learning rate is compiled into it",
)
class ConstantRate(JAX):
    """The logged learning rate moves, the one in the program does not."""

    def step(self, state: State, batch: Batch, rate: float) -> tuple[State, dict[str, Any]]:
        return super().step(state, batch, self.case.optimizer.rate(0))


@mutant(
    "jax-norm-of-shards",
    strategy="jax-fsdp",
    case=CLIPPED_SHARDS,
    quantity="norm",
    source="facebookresearch/fairscale#167",
    mistake="each device clips by the norm of its own shards",
)
class NormOfShards(JAX):
    """Inside shard_map a sum over an array is one over the shard."""

    def clip(self, gradients: Weights) -> tuple[Weights, Weights]:
        cut = {name: self.shardings["weights"][name].spec for name in gradients}
        clip = jax.shard_map(super().clip, mesh=self.mesh, in_specs=(cut,), out_specs=(cut, P()), check_vma=False)
        return clip(gradients)
