"""Mutants of JAX's tensor parallelism: what is written per device, and does not know of the others."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from equivtests.adapters.jax_models import Batch, Weights
from equivtests.adapters.jax_tensor import JAXTensor
from equivtests.mutants.mutant import mutant
from equivtests.mutants.split_situations import SPREAD, SPREAD_CLIPPED


@mutant(
    "jax-tp-norm-of-shards",
    strategy="jax-tp",
    case=SPREAD_CLIPPED,
    quantity="norm",
    source="facebookresearch/fairscale#167",
    mistake="each device clips by the norm of its own parts of the layers",
)
class NormOfShards(JAXTensor):
    """Inside shard_map a sum over an array is one over the part that is here."""

    def clip(self, gradients: Weights) -> tuple[Weights, dict[str, Any]]:
        cut = {name: self.shardings["weights"][name].spec for name in gradients}
        clip = jax.shard_map(super().clip, mesh=self.mesh, in_specs=(cut,), out_specs=(cut, P()), check_vma=False)
        return clip(gradients)


@mutant(
    "jax-tp-psum-again",
    strategy="jax-tp",
    case=SPREAD,
    quantity="gradient",
    source="https://docs.jax.dev/en/latest/notebooks/shard_map.html",
    mistake="gradients of weights that every device has whole are summed over the model axis, as Megatron does",
)
class PsumAgain(JAXTensor):
    """The compiler has done it: these gradients are whole."""

    def loss_and_gradients(self, weights: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
        loss, gradients = super().loss_and_gradients(weights, batch)
        whole = {name: gradient for name, gradient in gradients.items() if self.cut(name) is None}
        again = partial(jax.lax.psum, axis_name="model")
        return loss, gradients | jax.shard_map(again, mesh=self.mesh, in_specs=P(), out_specs=P())(whole)
