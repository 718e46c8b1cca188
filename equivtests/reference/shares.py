"""What one rank has of a model that is split over ranks: positions of sequences, layers, parts of parameters.

Written apart from the adapters that cut models: `reference.split_ledger` derives from it what has to travel and to be kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from equivtests.cases.case import Case, Model
from equivtests.cases.layout import Layout
from equivtests.cases.parameters import Parameter, parameters
from equivtests.reference.schedules import placement

Batch = tuple[int, int]
"""Rows and positions of a micro-batch."""

Cut = tuple[int, int]
"""Dimension of a parameter, and how many equal things along it are dealt out: heads, features, tokens."""


def span(total: int, parts: int, index: int) -> tuple[int, int]:
    """(start, stop) of part `index` of `total` things, the first parts larger by one where they do not divide."""
    each, rest = divmod(total, parts)
    return index * each + min(index, rest), (index + 1) * each + min(index + 1, rest)


def size(total: int, parts: int, index: int) -> int:
    """How many things that part is."""
    start, stop = span(total, parts, index)
    return stop - start


def zigzag_size(total: int, parts: int, index: int) -> int:
    """Positions of rank `index` if each even part is halved and the rank has a half from the front and one from the back.

    The first half is larger by one where two do not divide a part. Llama Team 2024, The Llama 3 herd of models,
    section 3.3.2.
    """
    halves = (index, 2 * parts - 1 - index)
    return sum((size(total, parts, half // 2) + (half % 2 == 0)) // 2 for half in halves)


@dataclass(frozen=True)
class Scheme:
    """How a strategy cuts, where its axes do not tell.

    linear: of a stack of linear layers, every other one by its inputs (pairs), or all by outputs (columns) or inputs (rows).
    sequence: tensor ranks have a part of each sequence between the layers. zigzag: see `zigzag_size`. filled: every data
    rank has as many micro-batches, each as large as its largest, with at least one row.
    """

    linear: Literal["pairs", "columns", "rows"] = "pairs"
    sequence: bool = False
    zigzag: bool = False
    filled: bool = False


@dataclass(frozen=True)
class Share:
    """One rank in one update of a case.

    schedule: row of `reference.schedules.SCHEDULES` that says which rank holds which stage. routed: by mixture of experts,
    int64 (data ranks, experts): the tokens of the window that the experts take from each data rank.
    """

    case: Case
    rank: int
    update: int
    scheme: Scheme = Scheme()
    schedule: str = "1f1b"
    routed: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def layout(self) -> Layout:
        return self.case.layout

    @property
    def model(self) -> Model:
        return self.case.model

    def ranks(self, axis: str) -> int:
        return self.layout.degree(axis)

    def index(self, axis: str) -> int:
        """This rank's number along an axis."""
        return self.layout.at(self.rank)[axis]

    def span(self, axis: str, total: int) -> tuple[int, int]:
        return span(total, self.ranks(axis), self.index(axis))

    def part(self, axis: str, total: int) -> int:
        """How many of `total` things this rank has, if they are dealt out evenly along an axis."""
        return size(total, self.ranks(axis), self.index(axis))

    # ------------------------------------------------------------------ what it is fed

    @property
    def batches(self) -> tuple[Batch, ...]:
        """The micro-batches of its data rank, with sequences in their whole length."""
        return self.fed(self.rank)

    def fed(self, rank: int) -> tuple[Batch, ...]:
        """The micro-batches of a rank's data rank."""
        window = self.case.windows[self.update]
        own = window[self.layout.data_rank(rank)]
        batches = [(len(rows), self.case.length(k)) for k, rows in enumerate(own)]
        if not self.scheme.filled:
            return tuple(batches)
        count = max(map(len, window))
        batches += [(1, self.model.length)] * (count - len(batches))
        return ((max(1, *(rows for rows, _ in batches)), max(length for _, length in batches)),) * count

    def positions(self, length: int, index: int | None = None) -> int:
        """How many of the positions of a sequence a context rank has (None: this one)."""
        index = self.index("cp") if index is None else index
        return (zigzag_size if self.scheme.zigzag else size)(length, self.ranks("cp"), index)

    def between(self, length: int) -> int:
        """How many positions stand between the layers of this rank."""
        here = self.positions(length)
        return self.part("tp", here) if self.scheme.sequence else here

    @property
    def features(self) -> int:
        """Features of this rank's attention heads."""
        return self.part("tp", self.model.heads) * (self.model.width // self.model.heads)

    # ------------------------------------------------------------------ stages

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """The pipeline rank of every stage."""
        return placement(self.schedule, self.layout.pp, self.layout.virtual)

    @cached_property
    def layers(self) -> list[int]:
        """The layers of this rank."""
        held = zip(self.stages, self.layout.layers_of(self.model.depth), strict=True)
        return [layer for owner, layers in held if owner == self.index("pp") for layer in layers]

    @property
    def begins(self) -> bool:
        """Whether the first stage is here."""
        return self.stages[0] == self.index("pp")

    @property
    def ends(self) -> bool:
        """Whether the last stage is here."""
        return self.stages[-1] == self.index("pp")

    def in_a_stage_here(self, name: str) -> bool:
        first, *rest = name.split(".")
        if first in ("layers", "factors"):
            return int(rest[0]) in self.layers
        if first == "embedding":
            return self.begins or (self.ends and self.model.has("tied"))
        return self.begins if first == "positions" else self.ends

    # ------------------------------------------------------------------ parameters

    @cached_property
    def held(self) -> dict[str, int]:
        """Elements that are here, by parameter; without those of which nothing is here."""
        sizes = {p.name: self.elements(p) for p in parameters(self.model) if self.in_a_stage_here(p.name)}
        return {name: n for name, n in sizes.items() if n}

    @cached_property
    def trained(self) -> dict[str, int]:
        """The same of what takes a gradient."""
        frozen = {p.name for p in parameters(self.model) if not p.trained}
        return {name: n for name, n in self.held.items() if name not in frozen}

    def elements(self, parameter: Parameter) -> int:
        """Elements on this rank of a parameter of its stages."""
        expert = expert_of(parameter.name)
        if expert is not None:
            return parameter.size if expert in range(*self.span("ep", self.model.experts)) else 0
        cut = tensor_cut(self.model, self.scheme, self.ranks("tp"), parameter)
        if cut is None:
            return parameter.size
        dimension, things = cut
        each = parameter.shape[dimension] // things
        return parameter.size // parameter.shape[dimension] * each * self.part("tp", things)


def expert_of(name: str) -> int | None:
    """The number of the expert that a parameter is of."""
    _, _, rest = name.partition(".experts.")
    return int(rest.split(".")[0]) if rest else None


def tensor_cut(model: Model, scheme: Scheme, ranks: int, parameter: Parameter) -> Cut | None:
    """How tensor parallelism deals out a parameter; None: every rank has all of it. Shoeybi et al. 2019, section 3.

    Column-parallel layers lose rows of their weight and of their bias; row-parallel ones columns of their weight.
    """
    if ranks == 1 or parameter.name == "positions.weight" or "norm" in parameter.name:
        return None
    things = decoder_things(model, ranks) if model.decoder else plain_things(model, scheme)
    layer, _, kind = parameter.name.rpartition(".")
    by_rows, count = things[layer if not model.decoder else layer.rpartition(".")[2]]
    if not count or (by_rows and kind == "bias"):
        return None
    return (1 if by_rows else 0), count


def decoder_things(model: Model, ranks: int) -> dict[str, tuple[bool, int]]:
    """By layer of a decoder: whether it is row-parallel, and how many things are dealt out (0: it is whole on every rank).

    Heads of keys and values are dealt out where the ranks divide them and the heads of queries.
    """
    dealt = model.kv if model.kv % ranks == 0 and model.heads % ranks == 0 else 0
    columns = dict.fromkeys(("embedding", "head", "extra_head"), model.vocabulary) | {"q": model.heads}
    columns |= dict.fromkeys(("k", "v"), dealt) | dict.fromkeys(("gate", "up"), 2 * model.width)
    rows = {"o": model.heads, "down": 2 * model.width}
    return {n: (False, count) for n, count in columns.items()} | {n: (True, count) for n, count in rows.items()}


def plain_things(model: Model, scheme: Scheme) -> dict[str, tuple[bool, int]]:
    """The same for the linear layers of linear, mlp and gated_mlp, all of whose features are dealt out."""
    found = {}
    for i, (name, (outputs, inputs)) in enumerate(linear_layers(model).items()):
        second = name == "down" or (name.startswith("layers.") and i % 2 == 1)
        by_rows = scheme.linear == "rows" or (scheme.linear == "pairs" and second)
        found[name] = (by_rows, inputs if by_rows else outputs)
    return found


def linear_layers(model: Model) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of the linear layers of a model that has nothing else, in order."""
    weights = [p for p in parameters(model) if p.name.endswith(".weight")]
    return {p.name.removesuffix(".weight"): (p.shape[0], p.shape[1]) for p in weights}
