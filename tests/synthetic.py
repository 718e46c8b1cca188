"""Records of correct runs without processes: the reference in the case's own precision, cut the way strategies cut.

A run is first a list of whole values (`values_of`), which `place` cuts into what each rank shows. A test that changes a
value on all ranks changes the list; one that changes what a single rank shows changes the record.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import FEATURES, Case
from equivtests.cases.windows import window_of
from equivtests.record.observation import Observation, Place, Record
from equivtests.reference import update as one
from equivtests.reference.expectation import canonical_weights
from equivtests.reference.rows import rows_of

Cut = Literal["whole", "flat", "box"]
CUTS: tuple[Cut, ...] = ("whole", "flat", "box")
OBSERVED = frozenset(
    {"inputs", "tokens", "loss", "gradient", "norm", "clip", "lr", "weight", "state", "buffer", "step"}
    | {"loss_scale", "random_state", "cursor"}
)
STRATEGY = Strategy("synthetic", features=frozenset(FEATURES), loss_scale=True, replicates=True, observes=OBSERVED)


@dataclass(frozen=True)
class Value:
    """One whole array that ranks show; rank: the only one that does (None: all). parted: cut if the strategy cuts."""

    kind: str
    name: str
    update: int
    array: np.ndarray
    parted: bool = False
    rank: int | None = None
    microbatch: int | None = None


def values_of(case: Case) -> list[Value]:
    """What a correct run shows."""
    return list(_run(case))


def _run(case: Case) -> Iterator[Value]:
    weights, states, made = canonical_weights(case, getattr(torch, case.precision.weights)), {}, 0
    width = case.model.width if case.model.depth > 1 else case.model.outputs
    buffers = {name: np.zeros(width, case.precision.weights) for name in buffers_of(case)}
    yield from _entering(case, 0, made, weights, states, buffers)
    for update in range(case.updates):
        yield Value("tokens", "tokens", update, np.array(case.tokens(update)))
        if case.tokens(update):
            yield from _inputs(case, update)
            found = one.gradients(case, case.semantics, update, made, weights, by_rank(case, update))
            yield Value("loss", "loss", update, np.array(found.loss))
            yield from (Value("gradient", n, update, g.numpy(), parted=True) for n, g in found.values.items())
            total = one.norm(found.values, case.optimizer.clip_norm)
            coefficient = one.clip_coefficient(case, case.semantics, total)
            rate = case.optimizer.rate(made)
            scalars = {"norm": total, "clip": coefficient, "lr": rate}
            yield from (Value(kind, kind, update, np.array(x)) for kind, x in scalars.items())
            weights, states = one.apply(case, case.semantics, made, weights, found.values, coefficient, states)
            for name, value in buffers.items():
                target, _ = found.toward(name)
                assert target is not None
                buffers[name] = (value + 0.25 * (target.double().numpy() - value)).astype(value.dtype)
            made += 1
        yield from _entering(case, update + 1, made, weights, states, buffers)


def buffers_of(case: Case) -> list[str]:
    """Names of the buffers that the model of a case has."""
    names = {"running": ("running.mean",), "batch_norm": ("batch_norm.mean", "batch_norm.var")}
    return [name for feature, held in names.items() if case.model.has(feature) for name in held]


def by_rank(case: Case, update: int) -> one.Split:
    """The rows of each rank as one group, computed and added up in the case's precision."""
    rank, precision = torch.from_numpy(rows_of(case, update).rank), case.precision
    groups = [torch.nonzero(rank == r).flatten() for r in range(case.layout.dp)]
    dtypes = (getattr(torch, precision.compute), getattr(torch, precision.reduce))
    return one.Split([g for g in groups if len(g)], *dtypes)


def _inputs(case: Case, update: int) -> Iterator[Value]:
    for rank in range(case.layout.dp):
        for k, micro in enumerate(window_of(case, update, rank).microbatches):
            if micro.rows:
                array = micro.inputs if case.model.family == "gpt" else micro.inputs.astype(case.precision.weights)
                yield Value("inputs", "inputs", update, array, rank=rank, microbatch=k)


def _entering(case: Case, update: int, made: int, weights: Any, states: Any, buffers: Any) -> Iterator[Value]:
    yield from (Value("weight", n, update, w.numpy(), parted=True) for n, w in weights.items())
    for name, state in states.items():
        yield from (Value("state", f"{name}/{key}", update, t.numpy(), parted=t.ndim > 0) for key, t in state.items())
    yield from (Value("buffer", name, update, value) for name, value in buffers.items())
    scaling = case.precision.loss_scale
    scale = scaling.initial * 2.0 ** (made // scaling.growth_interval) if scaling else 1.0
    scalars = {"step": made, "random_state": made, "cursor": update, "loss_scale": scale}
    yield from (Value(kind, kind, update, np.array(x)) for kind, x in scalars.items())


# ----------------------------------------------------------------------------------------------- placing


def place(case: Case, values: list[Value], cut: Cut = "whole") -> Record:
    """The record in which every rank shows its part of the values (losses as parts of a mean)."""
    shown = [o for value in values for rank in ranks_of(case, value) for o in _shown(case, value, rank, cut)]
    return Record(case.layout.world, "cpu", shown)


def ranks_of(case: Case, value: Value) -> range:
    return range(case.layout.world) if value.rank is None else range(value.rank, value.rank + 1)


def _shown(case: Case, value: Value, rank: int, cut: Cut) -> Iterator[Observation]:
    array, shape = value.array, value.array.shape
    where = Place(shape, replica=rank)
    if value.kind == "loss":
        where = Place(shape, partial="mean")
        array = array * case.layout.world if rank == 0 else np.zeros_like(array)
    elif value.parted and cut != "whole":
        shard, copy = rank % case.layout.shard, rank // case.layout.shard
        where = cut_place(shape, cut, case.layout.shard, shard, copy)
        array = array.reshape(-1)[slice(*where.interval)] if where.interval else array[slice(*where.box[0])]
    tag, shown = str(array.dtype), array.copy()
    yield Observation(value.kind, value.name, rank, value.update, value.microbatch, where, tag, shown)


def cut_place(shape: tuple[int, ...], cut: Cut, shards: int, shard: int, copy: int = 0) -> Place:
    """Equal intervals of the flat tensor, or equal boxes of rows, the last ones short or empty."""
    length = math.prod(shape) if cut == "flat" else shape[0]
    each = -(-length // shards)
    span = (min(shard * each, length), min((shard + 1) * each, length))
    if cut == "flat":
        return Place(shape, interval=span, replica=copy)
    return Place(shape, box=(span, *((0, n) for n in shape[1:])), replica=copy)


def record_of(case: Case, cut: Cut = "whole") -> Record:
    """The record of a correct run."""
    return place(case, values_of(case), cut)


# ------------------------------------------------------------------------------------------------- faults


def altered(values: list[Value], chosen: Value, change: Callable[[np.ndarray], np.ndarray]) -> list[Value]:
    """The values with one of them changed, on all ranks alike."""
    return [dataclasses.replace(v, array=change(v.array)) if v is chosen else v for v in values]


def with_part(record: Record, chosen: Observation, *parts: Observation) -> Record:
    """The record in which one observation is replaced by others (by none: dropped)."""
    found = [p for o in record.observations for p in (parts if o is chosen else (o,))]
    return dataclasses.replace(record, observations=found)


def changed(o: Observation, change: Callable[[np.ndarray], np.ndarray]) -> Observation:
    return dataclasses.replace(o, array=change(o.array))


def largest(array: np.ndarray) -> int:
    return int(np.argmax(np.abs(array)))


def at_largest(change: Callable[[Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
    """A change of the element with the largest value."""

    def apply(array: np.ndarray) -> np.ndarray:
        flat = array.copy().reshape(-1)
        flat[largest(flat)] = change(flat[largest(flat)])
        return flat.reshape(array.shape)

    return apply


def one_ulp(array: np.ndarray) -> np.ndarray:
    """The element with the largest value moved to the next number of its dtype."""
    return at_largest(lambda x: np.nextafter(x, x.dtype.type(np.inf)))(array)
