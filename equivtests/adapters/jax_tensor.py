"""JAX on CPUs: tensor parallelism by sharding annotations, from which the compiler makes the collectives.

Written like https://docs.jax.dev/en/latest/the-training-cookbook.html
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from equivtests.adapters import jax_models as models
from equivtests.adapters.adapter import Claims, Strategy
from equivtests.adapters.jax import CUT, JAX, SHARED
from equivtests.adapters.jax_models import Batch, Weights

ROWS = ("o", "down")
WHOLE = ("positions", "norm", "norm1", "norm2", "q_norm", "k_norm")


class JAXTensor(JAX):
    """jax-tp: layers are cut as in Megatron, columns and then rows; data ranks hold copies."""

    def claims(self) -> Claims:
        options: dict[str, Any] = {"worlds": frozenset(range(1, 17)), "axes": frozenset({"dp", "tp"}), "lengths": False}
        strategy = Strategy("jax-tp", shards=CUT, **SHARED | options)
        mutants = ("equivtests.mutants.outside.jax_tensor",)
        return Claims((strategy,), framework=f"jax {jax.__version__}", group="own", preload=("jax",), mutants=mutants)

    def filled(self, name: str, array: np.ndarray) -> np.ndarray:
        """JAX cuts into equal parts: zeros fill up what the tensor ranks do not divide."""
        missing = [(0, -n % self.case.layout.tp if d == self.cut(name) else 0) for d, n in enumerate(array.shape)]
        return np.pad(array, missing)

    def sharding(self, path: tuple[Any, ...], array: np.ndarray) -> NamedSharding:
        """path: keys of the training state, "weights" or "optimizer" and then a parameter's name."""
        cut = self.cut(path[1].key) if array.ndim else None
        return NamedSharding(self.mesh, P() if cut is None else P(*[None] * cut, "model"))

    def cut(self, name: str) -> int | None:
        """The dimension that is cut over the model axis; None: all is whole. mlp: columns and rows by turns."""
        *_, layer, kind = name.split(".")
        if layer in WHOLE:
            return None
        rows = layer in ROWS or (layer.isdigit() and int(layer) % 2 == 1)
        return 0 if not rows else 1 if kind == "weight" else None

    def loss_and_gradients(self, weights: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
        """Of the whole window; weights stay cut, and gradients are cut alike."""
        loss, gradients = self.accumulate(weights, batch, models.totals(batch))
        cut = {name: self.shardings["weights"][name] for name in gradients}
        return loss, jax.lax.with_sharding_constraint(gradients, cut)
