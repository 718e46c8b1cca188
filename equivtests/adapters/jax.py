"""JAX on CPUs: one program for the global batch, from which the compiler makes the collectives. No torch.

Written like https://docs.jax.dev/en/latest/the-training-cookbook.html and https://docs.jax.dev/en/latest/multi_process.html
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from equivtests.adapters import jax_models as models
from equivtests.adapters import jax_optimizers as optimizers
from equivtests.adapters.adapter import MANDATORY, PLAIN_FEATURES, Adapter, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.jax_models import Batch, Terms, Weights
from equivtests.adapters.jax_ranks import local, meet, mesh_of, place, show
from equivtests.cases.case import Case
from equivtests.cases.parameters import initial, parameters
from equivtests.cases.windows import Feed, Window
from equivtests.record.observation import Observe, Place

SHARED: dict[str, Any] = {
    "families": frozenset(models.FAMILIES),
    "features": PLAIN_FEATURES - {"transposed"}  # arrays have no strides
    | {"conditional", "dropout", "extra_head", "gated", "packed", "pairs", "smoothing", "unused", "z_loss"},
    "lengths": False,  # `pack` gives all micro-batches one shape
    "observes": MANDATORY | {"tokens", "norm", "clip", "lr", "state", "step"},
    "arithmetic": "own",
}
CUT = frozenset({"weights", "gradients", "state"})
MUTANTS = ("equivtests.mutants.outside.jax",)

State = dict[str, Any]
"""weights: arrays by name. optimizer: the state of each trained weight, by name and key. step: updates made, int32 ()."""


class JAX(Adapter):
    """jax-dp: weights on every rank. jax-fsdp: rows of weights, gradients and state cut over the ranks."""

    def claims(self) -> Claims:
        dp, fsdp = Strategy("jax-dp", **SHARED), Strategy("jax-fsdp", shards=CUT, **SHARED)
        return Claims((dp, fsdp), framework=f"jax {jax.__version__}", group="own", preload=("jax",), mutants=MUTANTS)

    def setup(self, case: Case, ranks: Ranks) -> None:
        meet(ranks)
        jax.config.update("jax_enable_x64", case.precision.weights == "float64")
        self.case, self.ranks = case, ranks
        self.mesh = mesh_of(case.layout)
        self.shapes = {p.name: p.shape for p in parameters(case.model)}
        state = self.initial_state()
        self.shardings = jax.tree_util.tree_map_with_path(self.sharding, state)
        self.state = jax.tree.map(place, state, self.shardings)
        self.train_step = jax.jit(self.step, out_shardings=(self.shardings, None))

    def initial_state(self) -> State:
        """The state entering the first update, as numpy arrays."""
        weights = {n: self.filled(n, w.astype(self.case.precision.weights)) for n, w in initial(self.case).items()}
        optimizer = {name: optimizers.zeros(self.case.optimizer, weights[name]) for name in self.trained()}
        return {"weights": weights, "optimizer": optimizer, "step": np.zeros((), np.int32)}

    def trained(self) -> list[str]:
        return models.differentiated(self.case.model)

    def filled(self, name: str, array: np.ndarray) -> np.ndarray:
        """JAX cuts into equal parts: rows of zeros fill up what the ranks do not divide."""
        missing = -len(array) % self.ranks.world if self.strategy == "jax-fsdp" else 0
        return np.pad(array, [(0, missing)] + [(0, 0)] * (array.ndim - 1))

    def sharding(self, path: tuple[Any, ...], array: np.ndarray) -> NamedSharding:
        return NamedSharding(self.mesh, P("data") if self.strategy == "jax-fsdp" and array.ndim else P())

    # ------------------------------------------------------------------ one update, compiled

    def step(self, state: State, batch: Batch, rate: float) -> tuple[State, dict[str, Any]]:
        """The next state, and what there is to show of this update."""
        tokens = batch.valid.sum()
        loss, gradients = self.loss_and_gradients(state["weights"], batch)
        clipped, shown = self.clip(gradients)
        used = {name: (tokens > 0) & models.in_use(name, batch) for name in gradients}
        new = {"weights": dict(state["weights"]), "optimizer": {}, "step": state["step"] + (tokens > 0)}
        for name, gradient in clipped.items():
            old = state["weights"][name], state["optimizer"][name]
            moved = optimizers.step(self.case, name, rate, gradient, *old)
            new["weights"][name], new["optimizer"][name] = jax.tree.map(partial(jnp.where, used[name]), moved, old)
        return new, shown | {"tokens": tokens, "loss": loss, "gradients": gradients, "used": used}

    def loss_and_gradients(self, weights: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
        """Of the whole window. Weights that are cut are gathered before, and gradients are cut after."""
        whole = jax.lax.with_sharding_constraint(weights, NamedSharding(self.mesh, P()))
        loss, gradients = self.accumulate(whole, batch, models.totals(batch))
        cut = {name: self.shardings["weights"][name] for name in gradients}
        return loss, jax.lax.with_sharding_constraint(gradients, cut)

    def accumulate(self, weights: Weights, batch: Batch, totals: Terms) -> tuple[jax.Array, Weights]:
        """Loss and gradients, micro-batch by micro-batch; each holds the rows of all ranks."""

        def objective(trained: Weights, micro: Batch) -> jax.Array:
            whole = {name: w[tuple(map(slice, self.shapes[name]))] for name, w in (weights | trained).items()}
            return models.objective(self.case, whole, micro, totals)

        def add(total: Any, micro: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(objective)(trained, micro)), None

        trained = {name: weights[name] for name in self.trained()}
        zero = jnp.zeros((), self.case.precision.weights), jax.tree.map(jnp.zeros_like, trained)
        return jax.lax.scan(add, zero, batch)[0]

    def clip(self, gradients: Weights) -> tuple[Weights, dict[str, Any]]:
        """Clipped gradients, and what there is to show of it."""
        return optimizers.clip(self.case.optimizer, gradients)

    # ------------------------------------------------------------------ one update, on the host

    def run(self, feed: Feed, observe: Observe) -> None:
        self.show_state(observe, feed.position)
        super().run(feed, observe)

    def update(self, window: Window, observe: Observe) -> None:
        step = int(self.state["step"])
        rate, by_rows = self.case.optimizer.rate(step), NamedSharding(self.mesh, P(None, "data"))
        batch = jax.make_array_from_process_local_data(by_rows, models.pack(self.case, window, step))
        self.state, shown = self.train_step(self.state, batch, rate)
        self.show_update(observe, window.update, batch, shown)
        observe("lr", "lr", np.float64(rate), update=window.update, place=Place((), replica=self.ranks.rank))
        self.show_state(observe, window.update + 1)

    def show_update(self, observe: Observe, update: int, batch: Batch, shown: dict[str, Any]) -> None:
        for k, rows in enumerate(local(batch.rows)):
            if rows.any():  # not those that only fill up the shape
                observe("inputs", "inputs", local(batch.inputs)[k][rows], update=update, microbatch=k)
        for kind in shown.keys() & {"tokens", "loss", "norm", "clip"}:
            show(observe, kind, kind, shown[kind], update=update)
        for name, gradient in shown["gradients"].items():
            if shown["used"][name]:
                show(observe, "gradient", name, gradient, update=update, shape=self.shapes[name])

    def show_state(self, observe: Observe, update: int) -> None:
        for name, weight in self.state["weights"].items():
            show(observe, "weight", name, weight, update=update, shape=self.shapes[name])
        for name, state in self.state["optimizer"].items():
            for key, array in state.items():
                shape = self.shapes[name] if array.ndim else ()
                show(observe, "state", f"{name}/{key}", array, update=update, shape=shape)
        show(observe, "step", "step", self.state["step"], update=update)
