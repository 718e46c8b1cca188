"""A pipeline's timeline for a reader: as a table in text, and as a picture (SVG). The same input gives the same bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from xml.sax.saxutils import escape

from equivtests.reference.schedules import SCHEDULES
from equivtests.reference.timeline import (
    EQUAL,
    KIND_WORDS,
    Costs,
    Operation,
    Timed,
    Timeline,
    peak_live,
    peak_live_by_stage,
    simulate,
)

Versions = Mapping[Operation, int]
"""The weight version that each operation used."""


def text(timeline: Timeline, schedule: str = "", versions: Versions | None = None, costs: Costs = EQUAL) -> str:
    """A table: one line per rank, one column per time slot; below it idle fractions and live activations.

    schedule: a key of `SCHEDULES`, whose closed form is then shown beside what the timeline gives. versions: shown
    behind every operation. Raises ValueError for a timeline that cannot be executed.
    """
    timed = simulate(timeline, costs)
    slots = _slots(timed)
    rows = [["rank", *map(str, range(max(map(len, slots))))]]
    rows += [[str(rank), *_cells(line, timeline, versions)] for rank, line in enumerate(slots)]
    width = max(len(cell) for row in rows for cell in row[1:])
    table = ["  ".join([row[0].rjust(4), *(cell.ljust(width) for cell in row[1:])]).rstrip() for row in rows]
    return "\n".join(
        [headline(timeline, schedule), "", *table, "", _legend(timeline, versions), *facts(timed, schedule)]
    )


def orders(timeline: Timeline, versions: Versions | None = None) -> str:
    """A line per rank with its operations in order, for timelines whose times cannot be told."""
    lines = [f"rank {r}: {' '.join(_label(o, timeline, versions) for o in ran)}" for r, ran in enumerate(timeline)]
    return "\n".join(lines)


def headline(timeline: Timeline, schedule: str = "") -> str:
    P, V, M = _numbers(timeline)
    return f"{schedule or 'pipeline'}: {P} ranks, {V} stage(s) per rank, {M} micro-batches"


def facts(timed: Timed, schedule: str = "") -> Iterator[str]:
    """Lines: idle fraction of all ranks and of each, most live activations by rank and by stage."""
    closed = SCHEDULES[schedule].idle_fraction(*_numbers(timed.timeline)) if schedule else None
    form = f"; closed form of {schedule} at equal costs: {_fraction(closed)}" if closed is not None else ""
    yield f"idle fraction: {_fraction(timed.idle)}{form}"
    yield f"idle fraction by rank: {', '.join(map(_fraction, timed.idle_by_rank))}"
    yield f"most live activations by rank: {', '.join(map(str, peak_live(timed.timeline)))}"
    yield f"most live activations by stage: {', '.join(map(str, peak_live_by_stage(timed.timeline)))}"


def _numbers(timeline: Timeline) -> tuple[int, int, int]:
    """Ranks, stages per rank, micro-batches."""
    operations = [operation for rank in timeline for operation in rank]
    stages = max(operation.stage for operation in operations) + 1
    return len(timeline), math.ceil(stages / len(timeline)), max(operation.microbatch for operation in operations) + 1


def _fraction(value: Fraction) -> str:
    return f"{value} ({float(value):.3f})" if value.denominator > 1 else str(value)


def _unit(timed: Timed) -> Fraction:
    """The longest slot that all starts and ends are multiples of."""
    times = [*timed.starts.values(), *timed.ends.values()]
    denominator = math.lcm(*(time.denominator for time in times))
    return Fraction(math.gcd(*(int(time * denominator) for time in times)), denominator)


def _slots(timed: Timed) -> list[list[tuple[Operation, bool] | None]]:
    """By rank and time slot: the operation that runs, and whether it starts there; None: idle."""
    unit = _unit(timed)
    slots: list[list[tuple[Operation, bool] | None]] = []
    for operations in timed.timeline:
        line: list[tuple[Operation, bool] | None] = [None] * int(timed.makespan / unit)
        for operation in operations:
            first, end = int(timed.starts[operation] / unit), int(timed.ends[operation] / unit)
            line[first:end] = [(operation, n == first) for n in range(first, end)]
        slots.append(line)
    return slots


def _cells(line: list[tuple[Operation, bool] | None], timeline: Timeline, versions: Versions | None) -> Iterator[str]:
    for slot in line:
        yield ".." if slot is None else _label(slot[0], timeline, versions) if slot[1] else "--"


def _label(operation: Operation, timeline: Timeline, versions: Versions | None) -> str:
    """Such as 0F; with several stages per rank 2:0F; with versions 0F@5."""
    stage = f"{operation.stage}:" if _numbers(timeline)[1] > 1 else ""
    version = f"@{versions[operation]}" if versions is not None else ""
    return f"{stage}{operation.microbatch}{operation.kind}{version}"


def _kinds(timeline: Timeline) -> list[str]:
    there = {operation.kind for operations in timeline for operation in operations}
    return [kind for kind in KIND_WORDS if kind in there]


def _legend(timeline: Timeline, versions: Versions | None) -> str:
    kinds = ", ".join(f"{kind} {KIND_WORDS[kind]}" for kind in _kinds(timeline))
    stage = "stage:" if _numbers(timeline)[1] > 1 else ""
    version = "@weight version" if versions is not None else ""
    return f"{stage}micro-batch, kind{version} ({kinds}); -- the same goes on; .. idle"


# ------------------------------------------------------------------------------------------------ picture

COLOURS = {"F": "#56b4e9", "B": "#e69f00", "I": "#f0e442", "W": "#8fd19e"}
"""Told apart with any colour vision (after Okabe and Ito); the kind is also written in every box."""
CHARACTER, ROW, LEFT, TOP, LINE = 8, 30, 64, 36, 18  # pixels


def svg(timeline: Timeline, schedule: str = "", versions: Versions | None = None, costs: Costs = EQUAL) -> str:
    """A picture: a row per rank, a box per operation; it needs no other file. Arguments and errors as for `text`."""
    timed = simulate(timeline, costs)
    labels = {o: _label(o, timeline, versions) for operations in timeline for o in operations}
    unit, slot = _unit(timed), CHARACTER * (max(map(len, labels.values())) + 2)
    below = [_legend(timeline, versions).partition(";")[0], *facts(timed, schedule)]
    title, bottom = headline(timeline, schedule), TOP + len(timeline) * ROW
    width = max(LEFT + int(timed.makespan / unit) * slot + 12, 24 + CHARACTER * max(map(len, below)))
    height = bottom + LINE * (len(below) + 1)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        ' role="img" aria-labelledby="title description" font-family="sans-serif" font-size="12">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="description">{escape("; ".join(below))}</desc>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _written(12, 22, title),
    ]
    for rank, operations in enumerate(timeline):
        y = TOP + rank * ROW
        lines += [_written(12, y + 17, f"rank {rank}"), _rect(LEFT, y, int(timed.makespan / unit) * slot, "#eeeeee")]
        for operation in operations:
            start, end = timed.starts[operation], timed.ends[operation]
            x, length = LEFT + int(start / unit) * slot, int((end - start) / unit) * slot
            lines += [
                f"<g><title>{escape(_in_words(operation, timed, versions))}</title>",
                _rect(x, y, length, COLOURS[operation.kind]),
                _written(x + length // 2, y + 17, labels[operation], anchor="middle"),
                "</g>",
            ]
    lines += [_written(12, bottom + LINE * (n + 1), line) for n, line in enumerate(below)]
    return "\n".join([*lines, "</svg>"]) + "\n"


def _in_words(operation: Operation, timed: Timed, versions: Versions | None) -> str:
    version = f", weight version {versions[operation]}" if versions is not None else ""
    return f"{operation}, time {timed.starts[operation]} to {timed.ends[operation]}{version}"


def _rect(x: int, y: int, width: int, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{ROW - 4}" fill="{colour}" stroke="#ffffff"/>'


def _written(x: int, y: int, words: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(words)}</text>'
