"""The command explain-versions: which weights a scheme of stale pipelines uses, and from which update that shows."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from equivtests.cases.staleness import SCHEME_MEANING, Staleness
from equivtests.cli.options import text_of
from equivtests.errors import CaseError
from equivtests.reference.schedules import prescribed
from equivtests.reference.timeline import Operation, Timeline
from equivtests.reference.versions import (
    RULES,
    Table,
    Used,
    by_operation,
    first_difference,
    live_by_stage,
    not_made,
    version_table,
)
from equivtests.report import timeline as timeline_report
from equivtests.report import versions as report

OTHER_NAMES = {
    "synchronous": "newest",
    "gpipe": "newest",
    "1f1b": "newest",
    "pipedream": "stashing",
    "pipedream-vertical-sync": "vertical-sync",
    "pipedream-2bw": "two-buffered",
    "2bw": "two-buffered",
    "no-stashing": "unstashed",
    "pipemare": "unstashed",
    "spectrain": "predicted",
}
"""Names that people use, and the schemes of `RULES` that they mean. PipeMare: without its corrections."""

UPDATE = "W_s(t+1) = W_s(t) - lr · ∂_s f_t(W_0(v_0(t)), …, W_{P-1}(v_{P-1}(t)))"
FORMULAS = {
    "newest": "v_s(t) = t",
    "stashing": "v_s(t) = max(0, t - (P-1-s))",
    "vertical-sync": "v_s(t) = max(0, t - (P-1))",
    "two-buffered": "v_s(t) = max(0, t - 1)",
    "unstashed": "v_s(t) = max(0, t - (P-1-s)) forward, t backward",
    "predicted": "v_s(t) = max(0, t - (P-1-s)) + prediction of t - v_s(t) updates along the momentum",
    "table": "v_s(t) as in the table",
}
"""What `v_s(t)` is; of two-buffered t counts groups of micro-batches, of all others mini-batches."""

WHAT = (
    "choose what to explain: --schedule NAME --stages P --minibatches M, or --table FILE (a table of your own: JSON, "
    "[mini-batch][stage] = [forward, backward] or [forward, backward, ahead])"
)


@dataclass(frozen=True)
class Explained:
    """What the command line asks for. group: micro-batches of a mini-batch."""

    scheme: str
    table: Table
    group: int
    name: str

    @property
    def stages(self) -> int:
        return len(self.table[0])

    @property
    def orders(self) -> Timeline:
        """1F1B without flushes; synchronous training drains the pipeline after every mini-batch."""
        if self.scheme != "newest":
            return prescribed("1f1b", self.stages, 1, len(self.table) * self.group)
        one = prescribed("1f1b", self.stages, 1, self.group)
        return tuple(
            tuple(
                Operation(o.kind, o.stage, t * self.group + o.microbatch) for t in range(len(self.table)) for o in order
            )
            for order in one
        )

    def headline(self) -> str:
        meant = f" ({self.scheme})" if self.scheme not in (self.name, "table") else ""
        groups = f", micro-batches of each: {self.group}" if self.group > 1 else ""
        return f"{self.name}{meant}: stages: {self.stages}, mini-batches: {len(self.table)}{groups}"


def add_options(sub: argparse.ArgumentParser) -> None:
    names = "; ".join([", ".join(RULES), ", ".join(f"{name} = {rule}" for name, rule in OTHER_NAMES.items())])
    sub.add_argument("--schedule", metavar="NAME", help=f"the scheme: {names} (pipemare without its corrections)")
    sub.add_argument("--table", type=Path, metavar="FILE", help="a table of your own instead (JSON)")
    sub.add_argument("--stages", type=int, metavar="P", help="pipeline stages, one per rank")
    sub.add_argument("--minibatches", type=int, metavar="M", help="mini-batches, each of which makes an update")
    groups = "micro-batches of a mini-batch (two-buffered: at least P, default P; stashing and the like: 1)"
    sub.add_argument("--microbatches", type=int, metavar="m", help=groups)
    sub.add_argument("--timeline", action="store_true", help="also show when each pass runs, and with which version")
    sub.add_argument("--svg", type=Path, metavar="FILE", help="also write a picture of the version table")


def explain_versions(options: argparse.Namespace) -> int:
    asked = asked_for(options)
    print(asked.headline())
    print(SCHEME_MEANING[asked.scheme])
    print(f"{UPDATE}, {FORMULAS[asked.scheme]}\n")
    print(report.text(asked.table) + "\n")
    print("\n".join(facts(asked)))
    if options.timeline:
        print("\n" + with_times(asked))
    if options.svg:
        options.svg.write_text(report.svg(asked.table, asked.headline()))
    return 0


# -------------------------------------------------------------------------------------------- what is asked


def asked_for(options: argparse.Namespace) -> Explained:
    """Raises CaseError for a scheme that is not known, numbers that it is not defined for, or a table that cannot be."""
    if (options.schedule is None) == (options.table is None):
        raise CaseError(WHAT)
    if options.table is not None:
        table = table_in(options.table, options.stages, options.minibatches)
        return Explained("table", table, group_of("table", len(table[0]), options.microbatches), str(options.table))
    name, stages, minibatches = options.schedule, options.stages, options.minibatches
    scheme = OTHER_NAMES.get(name, name)
    if scheme not in RULES:
        raise CaseError(f"--schedule {name}: unknown; known are {', '.join([*RULES, *OTHER_NAMES])}")
    if stages is None or minibatches is None:
        raise CaseError(f"--schedule {name} needs --stages and --minibatches")
    try:
        table = version_table(scheme, stages, minibatches)
    except ValueError as error:
        raise CaseError(f"--schedule {name}: {error}") from None
    return Explained(scheme, table, group_of(scheme, stages, options.microbatches), name)


def group_of(scheme: str, stages: int, chosen: int | None) -> int:
    """Micro-batches of a mini-batch; two-buffered needs P of them (PipeDream-2BW, section 3.1)."""
    least = stages if scheme == "two-buffered" else 1
    group = least if chosen is None else chosen
    if group < least:
        raise CaseError(f"--microbatches {group}: {scheme} with {stages} stages needs groups of at least {least}")
    if group > 1 and scheme not in ("newest", "two-buffered", "table"):
        raise CaseError(f"--microbatches {group}: with {scheme} every micro-batch makes an update; leave it out")
    return group


def table_in(path: Path, stages: int | None, minibatches: int | None) -> Table:
    """The table of a file. Raises CaseError, naming the mini-batch where it cannot be."""
    try:
        rows = json.loads(text_of(path))
    except (ValueError, RecursionError) as error:
        raise CaseError(f"{path}: not JSON: {error}") from None
    if not well_formed(rows):
        raise CaseError(f"{path}: not a table: [mini-batch][stage] = [forward, backward] or [forward, backward, ahead]")
    given = tuple(tuple(tuple(row) for row in line) for line in rows)
    refuse(path, given, len(given) if minibatches is None else minibatches, len(given[0]) if stages is None else stages)
    return tuple(tuple(Used(*row) for row in line) for line in given)


def well_formed(rows: Any) -> bool:
    """Whether it is a list of lists of lists of integers, none of them empty."""
    if not (isinstance(rows, list) and rows and all(isinstance(line, list) and line for line in rows)):
        return False
    cells = [row for line in rows for row in line]
    return all(isinstance(row, list) and row and all(type(number) is int for number in row) for row in cells)


def refuse(path: Path, given: tuple[tuple[tuple[int, ...], ...], ...], length: int, width: int) -> None:
    """Raise CaseError for wrong sizes, and for the first mini-batch that breaks a rule of `Staleness`."""
    if len(given) != length:
        raise CaseError(f"{path}: {len(given)} mini-batch(es), but --minibatches {length}")
    for t, line in enumerate(given):
        if len(line) != width:
            raise CaseError(f"{path}: mini-batch {t} has {len(line)} stage(s), needed are {width}")
        for holds, rule in Staleness("table", given[: t + 1]).problems(t + 1, width):
            if not holds:
                raise CaseError(f"{path}: mini-batch {t}: {rule}")


# -------------------------------------------------------------------------------------------------- answers


def facts(asked: Explained) -> list[str]:
    """Lines: live versions, staleness, and where the scheme parts from the others."""
    return [live(asked), stale(asked), *parting(asked)]


def live(asked: Explained) -> str:
    order = "1F1B order, flushed after every mini-batch" if asked.scheme == "newest" else "1F1B order without flushes"
    words = not_made(asked.table, asked.orders, asked.group)
    if words:
        return f"live versions by stage: unknown, for it cannot run in {order}: {words}"
    most = live_by_stage(asked.table, asked.orders, asked.group)
    moved = any(used.ahead for row in asked.table for used in row)
    copies = "; predictions from them, one for each mini-batch in flight, not counted" if moved else ""
    return f"most live versions by stage, in {order}: {', '.join(map(str, most))}{copies}"


def stale(asked: Explained) -> str:
    """How many updates the versions are behind once that no longer changes; a rule goes on as long as that takes."""
    table, reached = asked.table, len(asked.table)
    if asked.scheme in RULES:
        table = version_table(asked.scheme, asked.stages, max(reached, asked.stages + 2))
    start, behind = steady(table)
    forward, backward = (", ".join(str(row[n]) for row in behind) for n in (0, 1))
    numbers = forward if forward == backward else f"forward {forward}; backward {backward}"
    when = (
        f"in the steady state, from mini-batch {start} on"
        if asked.scheme in RULES
        else f"mini-batches {start} to {reached - 1}"
    )
    return f"updates behind by stage, {when}{'' if start < reached else ' (not reached)'}: {numbers}"


def steady(table: Table) -> tuple[int, tuple[tuple[int, int], ...]]:
    """(the first mini-batch from which on staleness is constant; by stage that of the forward and the backward pass)."""
    behind = [tuple((t - used.forward, t - used.backward) for used in row) for t, row in enumerate(table)]
    return max((t + 1 for t, row in enumerate(behind) if row != behind[-1]), default=0), behind[-1]


def parting(asked: Explained) -> list[str]:
    """From which update on each other scheme prescribes other weights."""
    others = (name for name in RULES if name != asked.scheme)
    return [parts_from(asked.table, name, version_table(name, asked.stages, len(asked.table))) for name in others]


def parts_from(table: Table, name: str, other: Table) -> str:
    called = "newest (synchronous)" if name == "newest" else name
    t, hidden = first_difference(table, other), first_difference(seen_by_gradients(table), seen_by_gradients(other))
    if t is None:
        return f"cannot be told apart from {called} with these numbers"
    later = "never" if hidden is None else f"at update {hidden + 1}"
    note = f"; where the first stage is one linear layer, {later}" if hidden != t else ""
    return f"parts from {called} at update {t + 1} (index {t}){note}"


def seen_by_gradients(table: Table) -> Table:
    """Without the backward version of the first stage: no gradient depends on it if that stage is one linear layer."""
    return tuple((replace(first, backward=first.forward), *rest) for first, *rest in table)


def with_times(asked: Explained) -> str:
    versions = by_operation(asked.table, asked.orders, asked.group)
    return timeline_report.text(asked.orders, "" if asked.scheme == "newest" else "1f1b", versions)
