"""The layout: how many ranks each parallel axis has, and which ranks form each of its groups."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import ClassVar, Literal

Axis = Literal["dp", "cp", "tp", "pp"]
ORDER: tuple[Axis, ...] = ("pp", "dp", "cp", "tp")

Group = tuple[int, ...]
"""Ranks, ascending."""


@dataclass(frozen=True)
class Layout:
    """Parallel degrees. The world has dp · cp · tp · pp ranks.

    dp: data-parallel ranks; replicate: copies of the shards among them (HSDP mesh: replicate x dp/replicate).
    cp: ranks that one sequence is cut over; tp: ranks that one layer is cut over; pp: ranks that the layers are cut over.
    virtual: stages of each pipeline rank. stages: layers of each of the pp · virtual stages; (): as even as they go.
    ep: ranks that the experts are cut over. They are data ranks: the dp · cp ranks of one model shard, in order, form groups
    of ep consecutive ones.
    order: the axes from the outermost to the innermost, whose coordinate changes from each rank to the next.
    """

    dp: int = 4
    replicate: int = 1
    cp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1
    virtual: int = 1
    stages: tuple[int, ...] = ()
    order: tuple[Axis, ...] = ORDER

    LATER: ClassVar[frozenset[str]] = frozenset({"cp", "tp", "pp", "ep", "virtual", "stages", "order"})

    @property
    def world(self) -> int:
        return self.dp * self.cp * self.tp * self.pp

    @property
    def shard(self) -> int:
        """Data ranks that one copy of the model is cut over, where the strategy shards."""
        return self.dp // self.replicate

    @property
    def axes(self) -> frozenset[str]:
        """The axes that have more than one rank."""
        return frozenset(axis for axis in ("dp", "cp", "tp", "pp", "ep") if self.degree(axis) > 1)

    @property
    def splits(self) -> frozenset[str]:
        """The axes that cut one model or one sequence over ranks."""
        return self.axes - {"dp"}

    def degree(self, axis: str) -> int:
        """Ranks of one group along an axis: dp, cp, tp, pp, ep, edp (data ranks with the same experts), shard, replicate."""
        return self.dp * self.cp // self.ep if axis == "edp" else int(getattr(self, axis))

    # ------------------------------------------------------------------ ranks and coordinates

    def at(self, rank: int) -> dict[str, int]:
        """The coordinates of a rank on every axis, ep and edp, shard and replicate among them."""
        return dict(_coordinates(self)[rank])

    def data_rank(self, rank: int) -> int:
        """Which of the dp parts of a window a rank is fed."""
        return _coordinates(self)[rank]["dp"]

    def group(self, rank: int, *axes: str) -> Group:
        """The ranks that differ from `rank` in no coordinate but those of these axes."""
        free = {part for axis in axes for part in _PARTS[axis]}
        table = _coordinates(self)
        fixed = [part for part in _PARTS["world"] if part not in free]
        if free & {"edp", "ep"}:
            fixed = [part for part in fixed if part not in ("dp", "cp", "shard", "replicate")]
        elif free & {"shard", "replicate"}:
            fixed = [part for part in fixed if part not in ("dp", "ep", "edp")]
        else:
            fixed = [part for part in fixed if part not in ("shard", "replicate", "ep", "edp")]
        return tuple(r for r in range(self.world) if all(table[r][part] == table[rank][part] for part in fixed))

    def partition(self, *axes: str) -> tuple[Group, ...]:
        """All groups along these axes, by their first rank."""
        return tuple(sorted({self.group(rank, *axes) for rank in range(self.world)}))

    def copy(self, rank: int, *cut: str) -> int:
        """Number of the copy that a rank holds part of, of what is cut over these axes: the first rank of the copy."""
        return self.group(rank, *cut)[0] if cut else rank

    def name_of(self, rank: int, group: Group) -> str:
        """The axis, or axes ("dp·cp"), whose group of this rank these ranks are; else the ranks themselves."""
        return _names(self, rank).get(group) or f"ranks {', '.join(map(str, group))}"

    # ------------------------------------------------------------------ stages

    @property
    def stage_count(self) -> int:
        return self.pp * self.virtual

    def layers_of(self, depth: int) -> tuple[range, ...]:
        """The layers of every stage, in order."""
        sizes = self.stages or tuple(_even(depth, self.stage_count))
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        return tuple(range(start, start + size) for start, size in zip(starts, sizes, strict=True))

    # ------------------------------------------------------------------ names

    @property
    def label(self) -> str:
        """The layout in the name of a case: w4 for plain data parallelism, else such as dp2-tp2 or pp2v2."""
        if not self.splits:
            return f"w{self.dp}"
        parts = [f"{axis}{self.degree(axis)}" for axis in ("dp", "cp", "ep", "tp", "pp") if self.degree(axis) > 1]
        if self.replicate > 1:
            parts[0] += f"r{self.replicate}"
        if self.virtual > 1:
            parts[-1] += f"v{self.virtual}"
        turned = [axis for axis in self.order if self.degree(axis) > 1]
        if turned != [axis for axis in ORDER if self.degree(axis) > 1]:
            parts += ["by", *turned]
        return "-".join(parts) or "w1"

    def problems(self, depth: int) -> Iterator[tuple[bool, str]]:
        """(holds, what must hold) for every rule of a layout of a model with `depth` layers."""
        degrees = (self.dp, self.replicate, self.cp, self.tp, self.pp, self.ep, self.virtual)
        whole = min(degrees) >= 1
        yield whole, "layout degrees must be at least 1"
        yield self.dp % max(1, self.replicate) == 0, f"layout.replicate {self.replicate} must divide dp {self.dp}"
        yield (
            not whole or self.dp * self.cp % self.ep == 0,
            f"layout.ep {self.ep} must divide the data ranks dp · cp = {self.dp * self.cp}",
        )
        yield sorted(self.order) == sorted(ORDER), f"layout.order must name each of {', '.join(ORDER)} once"
        yield self.virtual == 1 or self.pp > 1, "layout.virtual needs pipeline ranks (pp)"
        fits = not self.stages or (len(self.stages) == self.stage_count and sum(self.stages) == depth)
        yield fits, f"layout.stages must be {self.stage_count} numbers that add up to the depth {depth}"
        yield min(self.stages, default=0) >= 0, "layout.stages must not be negative"
        yield (
            self.pp == 1 or bool(self.stages) or depth >= self.stage_count,
            (f"{self.stage_count} stages, but only {depth} layers: say in layout.stages which stages have none"),
        )


_PARTS: dict[str, tuple[str, ...]] = {
    **{axis: (axis,) for axis in ("dp", "cp", "tp", "pp", "ep", "edp", "shard", "replicate")},
    "world": ("dp", "cp", "tp", "pp", "shard", "replicate", "ep", "edp"),
}


@cache
def _coordinates(layout: Layout) -> tuple[dict[str, int], ...]:
    """The coordinates of every rank."""
    found = []
    for values in product(*(range(layout.degree(axis)) for axis in layout.order)):
        at: dict[str, int] = dict(zip(layout.order, values, strict=True))
        data = at["dp"] * layout.cp + at["cp"]
        at |= {"replicate": at["dp"] // layout.shard, "shard": at["dp"] % layout.shard}
        found.append(at | {"edp": data // layout.ep, "ep": data % layout.ep})
    return tuple(found)


NAMED = (
    "tp",
    "cp",
    "pp",
    "ep",
    "dp",
    "shard",
    "replicate",
    "edp",
    "dp cp",
    "dp tp",
    "cp tp",
    "dp cp tp",
    "tp pp",
    "world",
)


@cache
def _names(layout: Layout, rank: int) -> dict[Group, str]:
    """What the groups of a rank are called; of several names, the first."""
    found: dict[Group, str] = {}
    for axes in NAMED:
        found.setdefault(layout.group(rank, *axes.split()), axes.replace(" ", "·"))
    return found


def _even(depth: int, stages: int) -> Iterator[int]:
    """Layers per stage, the first ones larger by one where it does not divide."""
    for stage in range(stages):
        yield depth // stages + (stage < depth % stages)


_LABEL = re.compile(
    r"(?:dp(?P<dp>\d+)(?:r(?P<replicate>\d+))?-?)?(?:cp(?P<cp>\d+)-?)?(?:ep(?P<ep>\d+)-?)?(?:tp(?P<tp>\d+)-?)?(?:pp(?P<pp>\d+)(?:v(?P<virtual>\d+))?-?)?"
    r"(?:by(?P<order>(?:-(?:dp|cp|tp|pp))+))?"
)


def layout_of(label: str) -> Layout | None:
    """The layout of a label, or None if it is none. Stages are not told by it, nor copies of the shards of w4."""
    if re.fullmatch(r"w[1-9]\d*", label):
        return Layout(int(label[1:]))
    match = _LABEL.fullmatch(label)
    if not label or match is None:
        return None
    found = match.groupdict()
    degrees = {axis: int(found[axis] or 1) for axis in ("dp", "replicate", "cp", "ep", "tp", "pp", "virtual")}
    turned = [axis for axis in (found["order"] or "").split("-") if axis]
    order = (*(axis for axis in ORDER if axis not in turned), *turned)
    if math.prod(degrees.values()) < 1 or len(order) != len(ORDER):
        return None
    return Layout(**degrees, order=order) if turned else Layout(**degrees)  # type: ignore[arg-type]
