"""Observations: an array, the moment it existed, and where it belongs in the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

KINDS = {
    "inputs": "what reached a forward pass (the sample ids are decoded from it); one per micro-batch",
    "tokens": "valid tokens of the whole window as this rank counted them; int64 ()",
    "loss": "the loss that was differentiated, before any loss scale; partial sum or whole",
    "gradient": "gradient of one parameter after accumulation and synchronization, before clipping",
    "norm": "norm of the whole model's gradient, before clipping",
    "clip": "factor that clipping applied (1 when it did not clip)",
    "lr": "learning rate of the update",
    "weight": "one parameter entering the update",
    "state": "one tensor of the optimizer's state entering the update, named parameter/key",
    "buffer": "one buffer of the model entering the update",
    "step": "number of optimizer updates made, entering the update",
    "loss_scale": "loss scale entering the update",
    "random_state": "the state of the dropout stream entering the update",
    "cursor": "position of the data loader entering the update",
    "weight_norm": "2-norm of all weights after the update, as the framework logs it",
    "output": "what the model put out for one micro-batch, before the loss; rows x positions x features",
    "routed": "tokens of the window that every expert of a layer was given and kept; int64 (experts,), part of a sum",
    "mask": "a dropout mask of one micro-batch, named by its site: whether an element is kept; rows x positions x features",
    "timeline": "the operations of this pipeline rank in order; int64 (n, 4): kind, stage, micro-batch, version",
    "live": "most versions of the weights that this rank kept at once since its last update; int64 ()",
    "arrival": "window and version of the gradient that a server processed as this update; int64 (2,)",
    "bytes": "bytes that this rank keeps between micro-batches: weights, gradients, state without scalars (named so)",
}
"""The kinds of observation. State-like kinds carry the number of the update that they enter."""

SINGLE = frozenset({"tokens", "loss", "norm", "clip", "lr", "step", "loss_scale"}) | {
    "random_state",
    "cursor",
    "weight_norm",
    "bytes",
    "live",
}
"""Kinds that are one number."""


@dataclass(frozen=True)
class Place:
    """Where an array belongs.

    shape: of the whole tensor. box: (start, stop) per dimension, or interval: (start, stop) of the flattened tensor; neither
    means all of it. replica: number of the copy this is a part of. partial: how the ranks' arrays combine to the value
    ("" when the array is the value itself; "sum" or "mean" over the ranks that show a part of this copy). parts: how many
    ranks those are (0: all).
    """

    shape: tuple[int, ...]
    box: tuple[tuple[int, int], ...] | None = None
    interval: tuple[int, int] | None = None
    replica: int = 0
    partial: Literal["", "sum", "mean"] = ""
    parts: int = 0

    @property
    def size(self) -> int:
        """Number of elements that an array at this place has."""
        if self.interval is not None:
            return self.interval[1] - self.interval[0]
        if self.box is not None:
            return math.prod(stop - start for start, stop in self.box)
        return math.prod(self.shape)

    @property
    def problem(self) -> str:
        """Why this is no place ("" if it is one)."""
        if min(self.shape, default=0) < 0:
            return f"shape {self.shape} has a negative size"
        if self.parts < 0 or (self.parts and not self.partial):
            return f"parts {self.parts}: how many ranks share a partial value, 0 for all of them"
        if self.interval is not None and not _within([self.interval], (math.prod(self.shape),)):
            return f"interval {self.interval} does not lie in the shape {self.shape}"
        if self.box is not None and not _within(list(self.box), self.shape):
            return f"box {list(self.box)} does not lie in the shape {self.shape}"
        return ""


def _within(sides: list[tuple[int, int]], shape: tuple[int, ...]) -> bool:
    fits = (0 <= start <= stop <= size for (start, stop), size in zip(sides, shape, strict=False))
    return len(sides) == len(shape) and all(fits)


@dataclass(frozen=True)
class Observation:
    """One array that one rank showed. `dtype` is the tag of the array's values ("bfloat16" comes as uint16)."""

    kind: str
    name: str
    rank: int
    update: int
    microbatch: int | None
    place: Place
    dtype: str
    array: np.ndarray

    def values(self) -> np.ndarray:
        """The values as an array numpy can compute with (bfloat16 widened to float32, exactly)."""
        if self.dtype == "bfloat16":
            return (self.array.astype(np.uint32) << 16).view(np.float32)
        return self.array


@dataclass(frozen=True)
class Collective:
    """One collective as it was issued: operation, ranks of its group, elements and dtype of its payload.

    `elements` counts the full (gathered or reduced) tensor: the output of an all-gather, the input of a reduce-scatter.
    The group of a send or a receive is the two ranks.
    """

    operation: str
    group: tuple[int, ...]
    elements: int
    dtype: str
    update: int


@dataclass
class Record:
    """All observations of one run, in the order they were made per rank; `collectives` by rank where they were recorded.

    device: what computed it, "cpu" or "cuda". start: the first update that it has to hold (a restored run starts in the
    middle).
    """

    world: int
    device: str = "cpu"
    observations: list[Observation] = field(default_factory=list)
    collectives: dict[int, list[Collective]] = field(default_factory=dict)
    start: int = 0

    def of(self, kind: str) -> list[Observation]:
        return [o for o in self.observations if o.kind == kind]


class Observe(Protocol):
    """What an adapter calls at the moment a value exists. See `Recorder.__call__`."""

    def __call__(
        self,
        kind: str,
        name: str,
        array: Any,
        *,
        update: int,
        microbatch: int | None = None,
        place: Place | None = None,
        dtype: str | None = None,
    ) -> None: ...


class Recorder:
    """The `observe` of one rank: copies what it is given and checks its form at once."""

    def __init__(self, rank: int, updates: int | None = None) -> None:
        """`updates`: number of updates of the case, if known."""
        self.rank, self.updates = rank, updates
        self.observations: list[Observation] = []

    def __call__(
        self,
        kind: str,
        name: str,
        array: Any,
        *,
        update: int,
        microbatch: int | None = None,
        place: Place | None = None,
        dtype: str | None = None,
    ) -> None:
        """Record `array` (anything numpy takes). Raises ValueError if the kind is unknown or the size does not fit."""
        if kind not in KINDS:
            raise ValueError(f"observe({kind!r}, …): unknown kind; known are {', '.join(KINDS)}")
        copied = np.array(array)
        self.refuse(kind, name, copied, update)
        where = place or Place(copied.shape)
        if where.problem:
            raise ValueError(f"observe({kind!r}, {name!r}): {where.problem}")
        if copied.size != where.size:
            raise ValueError(
                f"observe({kind!r}, {name!r}): array of {copied.size} elements at a place of {where.size} elements ({where})"
            )
        tag = dtype or str(copied.dtype)
        self.observations.append(Observation(kind, name, self.rank, int(update), microbatch, where, tag, copied))

    def refuse(self, kind: str, name: str, array: np.ndarray, update: int) -> None:
        """Raise ValueError for an array or an update number that no check could read."""
        problem = form_problem(kind, array)
        if problem:
            raise ValueError(f"observe({kind!r}, {name!r}): {problem}")
        last = self.updates
        if not isinstance(update, (int, np.integer)) or update < 0 or (last is not None and update > last):
            raise ValueError(f"observe({kind!r}, {name!r}): update={update!r}; the case's are 0 to {last}")


def form_problem(kind: str, array: np.ndarray) -> str:
    """Why an array cannot be of a kind, or "": numbers are demanded, and a single one where the kind is one number."""
    if array.dtype.kind not in "iufb":
        return f"dtype {array.dtype}, but numbers are needed"
    if kind == "bytes" and array.dtype.kind not in "iu":
        return f"dtype {array.dtype}, but bytes are counted in integers"
    return f"{array.size} elements, but it is one number" if kind in SINGLE and array.size != 1 else ""
