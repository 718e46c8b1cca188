"""JAX: one program over the global batch, from which the compiler makes the collectives. No torch."""

from __future__ import annotations

import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from equivtests.adapters import jax_models as models
from equivtests.adapters.adapter import MANDATORY, PLAIN_FEATURES, Adapter, Claims, Strategy
from equivtests.adapters.context import Ranks
from equivtests.adapters.jax_models import Batch, Weights
from equivtests.cases.case import Case
from equivtests.cases.parameters import decays, initial, parameters
from equivtests.cases.windows import Feed, Window
from equivtests.record.observation import Observe, Place

CLIP_EPS = 1e-6
State = dict[str, Any]
"""weights: by name; optimizer: by name a dict of arrays, for what is differentiated; step: updates made, int32 ()."""


class JAX(Adapter):
    """jax-dp: weights on every rank. jax-fsdp: weights and optimizer state cut over the ranks. Rows are always cut."""

    def claims(self) -> Claims:
        own: dict[str, Any] = {
            # an array has no strides: "transposed" means nothing
            "features": PLAIN_FEATURES - {"transposed"}
            | {"conditional", "dropout", "extra_head", "pairs", "unused", "z_loss"},
            "observes": MANDATORY | {"tokens", "norm", "clip", "lr", "state", "step", "cursor"},
            "arithmetic": "own",
        }
        cut = frozenset({"weights", "gradients", "state"})
        return Claims(
            (Strategy("jax-dp", **own), Strategy("jax-fsdp", shards=cut, **own)),
            framework=f"jax {jax.__version__}",
            group="own",
            mutants=("equivtests.mutants.outside.jax",),
        )

    def setup(self, case: Case, ranks: Ranks) -> None:
        self.case, self.ranks = case, ranks
        meet(ranks)
        jax.config.update("jax_enable_x64", case.precision.weights == "float64")
        self.mesh = jax.make_mesh((ranks.world,), ("data",), (AxisType.Auto,))
        state = self.initial_state()
        self.shardings = jax.tree.map(self.sharding, state)
        self.state = jax.tree.map(place, state, self.shardings)
        self.train_step = jax.jit(self.step, out_shardings=(self.shardings, None))

    def initial_state(self) -> State:
        """The state before the first update, as whole numpy arrays."""
        weights = {name: value.astype(self.case.precision.weights) for name, value in initial(self.case).items()}
        trained = frozenset(p.name for p in parameters(self.case.model) if p.trained)
        keys = {"adam": ("exp_avg", "exp_avg_sq"), "adamw": ("exp_avg", "exp_avg_sq"), "momentum": ("momentum_buffer",)}
        optimizer = {}
        for name in sorted(models.differentiated(self.case.model, trained)):
            optimizer[name] = {key: np.zeros_like(weights[name]) for key in keys.get(self.case.optimizer.name, ())}
            if "exp_avg" in optimizer[name]:
                optimizer[name]["step"] = np.zeros((), np.float32)
        return {"weights": weights, "optimizer": optimizer, "step": np.zeros((), np.int32)}

    def sharding(self, array: np.ndarray) -> NamedSharding:
        """jax-fsdp cuts the first dimension that the ranks divide; what has none is on every rank."""
        world = self.ranks.world
        sizes = enumerate(array.shape) if self.strategy == "jax-fsdp" else ()
        cut = next((axis for axis, size in sizes if size % world == 0), None)
        return NamedSharding(self.mesh, P() if cut is None else P(*[None] * cut, "data"))

    # ------------------------------------------------------------------ one update, compiled

    def step(self, state: State, batch: Batch, rate: float) -> tuple[State, dict[str, Any]]:
        """The state after an update on the global batch, and what there is to show of it."""
        loss, gradients = self.loss_and_gradients(state["weights"], batch)
        norm, factor = self.clip(gradients)
        new = {"weights": dict(state["weights"]), "optimizer": {}, "step": state["step"] + 1}
        tokens = batch.valid.sum()
        used = {name: models.in_use(name, batch) for name in gradients}
        for name, gradient in gradients.items():
            before = state["weights"][name], state["optimizer"][name]
            after = self.optimize(name, gradient * factor, rate, *before)
            kept = [jnp.where(used[name], new, old) for new, old in zip(*map(jax.tree.leaves, (after, before)))]
            new["weights"][name], new["optimizer"][name] = jax.tree.unflatten(jax.tree.structure(before), kept)
        new = jax.tree.map(lambda new, old: jnp.where(tokens > 0, new, old), new, state)
        shown = {"tokens": tokens, "loss": loss, "norm": norm, "clip": factor, "gradient": gradients, "used": used}
        return new, shown

    def loss_and_gradients(self, weights: Weights, batch: Batch) -> tuple[jax.Array, Weights]:
        """Loss and gradients of the whole window, micro-batch by micro-batch, each over all ranks at once."""
        totals = {"tokens": jnp.maximum(batch.valid.sum(), 1), "rows": jnp.maximum(batch.rows.sum(), 1)}
        trained = {name: weights[name] for name in self.shardings["optimizer"]}
        everywhere = NamedSharding(self.mesh, P())

        def objective(trained: Weights, micro: Batch) -> jax.Array:
            gathered = jax.lax.with_sharding_constraint(weights | trained, everywhere)
            terms = models.loss_terms(self.case.model, gathered, micro)
            parts = [models.TERMS[name][0] * value / totals[models.TERMS[name][1]] for name, value in terms.items()]
            return self.case.magnitude * sum(parts)

        def add(total: Any, micro: Batch) -> tuple[Any, None]:
            return jax.tree.map(jnp.add, total, jax.value_and_grad(objective)(trained, micro)), None

        zero = jnp.zeros((), self.case.precision.weights), jax.tree.map(jnp.zeros_like, trained)
        return jax.lax.scan(add, zero, batch)[0]

    def clip(self, gradients: Weights) -> tuple[jax.Array, jax.Array]:
        """(norm of the whole model's gradient, factor on gradients)."""
        o, leaves = self.case.optimizer, list(gradients.values())
        if o.clip_norm == "inf":
            norm = jnp.stack([jnp.abs(g).max() for g in leaves]).max()
        else:
            norm = jnp.sqrt(sum((g * g).sum() for g in leaves))
        limit = jnp.inf if o.clip is None else o.clip
        return norm, jnp.minimum(1, limit / (norm + CLIP_EPS)).astype(norm.dtype)

    def optimize(self, name: str, gradient: jax.Array, rate: float, weight: jax.Array, state: State) -> Any:
        """(new weight, new state) of one parameter by the case's optimizer."""
        o = self.case.optimizer
        decay = o.weight_decay if decays(self.case, name) else 0.0
        if o.name != "adamw":
            gradient = gradient + decay * weight
        if o.name == "sgd":
            return weight - rate * gradient, state
        if o.name == "momentum":
            buffer = o.momentum * state["momentum_buffer"] + gradient
            return weight - rate * buffer, {"momentum_buffer": buffer}
        (beta1, beta2), count = o.betas, state["step"] + 1
        first = beta1 * state["exp_avg"] + (1 - beta1) * gradient
        second = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
        mean, square = first / (1 - beta1**count), second / (1 - beta2**count)
        decayed = weight * (1 - rate * decay) if o.name == "adamw" else weight
        new = decayed - (rate * mean / (jnp.sqrt(square) + o.eps)).astype(weight.dtype)
        return new, {"exp_avg": first, "exp_avg_sq": second, "step": count}

    # ------------------------------------------------------------------ one update, on the host

    def run(self, feed: Feed, observe: Observe) -> None:
        self.show_state(observe, feed.position)
        super().run(feed, observe)

    def update(self, window: Window, observe: Observe) -> None:
        steps = int(self.state["step"])
        rate = self.case.optimizer.rate(steps)
        rows = NamedSharding(self.mesh, P(None, "data"))
        local = models.pack(self.case, window, steps)
        batch = jax.tree.map(lambda array: jax.make_array_from_process_local_data(rows, array), local)
        self.state, shown = self.train_step(self.state, batch, rate)
        show(observe, "tokens", "tokens", shown["tokens"], window.update)
        if shown["tokens"] > 0:
            self.show_inputs(observe, batch, window.update)
            self.show_update(observe, shown, rate, window.update)
        self.show_state(observe, window.update + 1)

    def show_inputs(self, observe: Observe, batch: Batch, update: int) -> None:
        """The rows of this rank's part of the global batch, without those that fill it up."""
        inputs, rows = (np.asarray(array.addressable_data(0)) for array in (batch.inputs, batch.rows))
        for k, kept in enumerate(rows):
            if kept.any():
                observe("inputs", "inputs", inputs[k][kept], update=update, microbatch=k)

    def show_update(self, observe: Observe, shown: dict[str, Any], rate: float, update: int) -> None:
        for kind in ("loss", "norm", "clip"):
            show(observe, kind, kind, shown[kind], update)
        observe("lr", "lr", np.float64(rate), update=update, place=Place((), replica=self.ranks.rank))
        for name, gradient in shown["gradient"].items():
            if shown["used"][name]:
                show(observe, "gradient", name, gradient, update)

    def show_state(self, observe: Observe, update: int) -> None:
        for name, weight in self.state["weights"].items():
            show(observe, "weight", name, weight, update)
        for name, entries in self.state["optimizer"].items():
            for key, array in entries.items():
                show(observe, "state", f"{name}/{key}", array, update)
        show(observe, "step", "step", self.state["step"], update)
        observe("cursor", "cursor", self.feed.position, update=update, place=Place((), replica=self.ranks.rank))


def meet(ranks: Ranks) -> None:
    """Initialize JAX over all ranks, once per process."""
    if not jax.distributed.is_initialized():
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_share_binary_between_hosts", True)  # one rank compiles, for all of them
        address = ranks.agree("coordinator", free_address)
        jax.distributed.initialize(address, num_processes=ranks.world, process_id=ranks.rank)


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return "{}:{}".format(*free.getsockname())


def place(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A global array of which this rank holds its part."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def show(observe: Observe, kind: str, name: str, array: jax.Array, update: int) -> None:
    """Observe this rank's part of a global array, which knows where it belongs."""
    part = array.addressable_shards[0]
    box = tuple(side.indices(size)[:2] for side, size in zip(part.index, array.shape, strict=True))
    where = Place(array.shape, box=box, replica=part.replica_id)
    observe(kind, name, np.asarray(part.data), update=update, place=where)
