"""The ledger chapter: what travels between ranks in each update, and what every rank keeps.

What counts as payload is one rule, `is_payload`: collectives of more than one floating-point element in groups of more
than one rank. It leaves out the bookkeeping that frameworks add as they please: integers (token counts, maps of used
parameters, bucket indices), scalars (losses, norms) and barriers. Payload is summed per operation and axis of the layout,
so that it does not matter in how many buckets it travels, unless the algorithm says so. The axis is told by the ranks of
the group: the same payload over other ranks is another. What is issued before the first update is setup and not judged.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import numpy as np
import torch

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case
from equivtests.cases.layout import Group, Layout
from equivtests.cases.parameters import layers, parameters
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.view import View
from equivtests.record.observation import Collective
from equivtests.reference.forward import batch_of, row_sums
from equivtests.reference.ledger import (
    EXPECTED,
    ITEM_BYTES,
    PARTS,
    BytesPerParameter,
    Cut,
    Expected,
    Kept,
    LedgerInput,
    Payload,
    Travel,
    persistent_bytes,
)
from equivtests.reference.rows import rows_of
from equivtests.reference.shares import Share
from equivtests.reference.split_ledger import (
    ENDS,
    SPLIT_EXPECTED,
    is_split,
    ranks_along,
    scheme_of,
    split_bytes,
    split_expected,
)

CUTS = typing.get_args(Cut)
STATE_TENSORS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of optimizer state per parameter, each of its size and dtype."""

Issued = dict[Travel, list[Payload]]
"""What a rank issued, by operation and name of the axis; a payload per dtype."""


def judge_ledger(view: View) -> Judgement:
    """Compare the collectives and the kept bytes of a record with the closed forms of the declared algorithm. Pure."""
    return Judgement([*collectives(view), *kept_bytes(view)])


def ledger_input(case: Case, strategy: Strategy, update: int) -> LedgerInput:
    """What the closed forms need to know of a strategy and of one update of a case."""
    return LedgerInput(
        tuple(parameters(case.model)),
        shard=case.layout.shard,
        replicate=case.layout.replicate,
        microbatches=max(len(rank) for rank in case.windows[update]),
        gather=case.precision.compute,
        reduce=case.precision.reduce,
        cut=strategy.cut,
        units=layers(case.model) if strategy.units == "layers" else (),
        unused=frozenset({"unused.weight"} if case.model.has("unused") else ()),
    )


# ------------------------------------------------------------------------------------------- collectives


def is_payload(collective: Collective) -> bool:
    """Whether the ledger counts a collective; see the head of this module."""
    return collective.dtype in ITEM_BYTES and collective.elements > 1 and len(collective.group) > 1


def collectives(view: View) -> Iterator[Check]:
    """In every update that is made, every rank issues what the algorithm says, by operation and axis."""
    ranks = range(view.record.world)
    for update in view.updates:
        if view.case.tokens(update):
            expected = [expected_payloads(view, update, rank) for rank in ranks]
            issued = [payloads(view, rank, update) for rank in ranks]
            travels = [t for found in expected for t in found] + [t for found in issued for t in found]
            for travel in dict.fromkeys(travels):
                yield judge_travel(view, update, travel, expected, issued)


def expected_payloads(view: View, update: int, rank: int) -> Expected:
    """Payload per operation and name of the axis. Raises ValueError if the strategy declares no algorithm."""
    algorithm = view.strategy.algorithm
    if algorithm is None:
        raise ValueError(f"strategy {view.strategy.name!r} declares no algorithm: its collectives cannot be judged")
    return prescribed(view, update, rank, algorithm, view.strategy.cut)


def prescribed(view: View, update: int, rank: int, algorithm: str, cut: Cut) -> Expected:
    """What an algorithm says. cut: how it cuts tensors, where that is left open."""
    if is_split(algorithm):
        expected = split_expected(algorithm, share_of(view, update, rank, algorithm))
    else:
        given = dataclasses.replace(ledger_input(view.case, view.strategy, update), cut=cut, rank=rank)
        expected = EXPECTED[algorithm](given)
    return by_name(view.case.layout, rank, expected)


def share_of(view: View, update: int, rank: int, algorithm: str) -> Share:
    """What the closed forms of split models need to know of one rank."""
    schedule = view.strategy.schedule or "1f1b"
    return Share(view.case, rank, update, scheme_of(algorithm), schedule, routed(view, update))


def routed(view: View, update: int) -> dict[str, np.ndarray]:
    """`Share.routed`: to which experts the reference's router sends the tokens of each data rank."""
    key = f"routed {update}"
    if view.case.model.experts and key not in view.cache:
        rows, taken = rows_of(view.case, update), tokens_of_rows(view, update)
        by_rank = [rows.rank == rank for rank in range(view.case.layout.dp)]
        view.cache[key] = {name: np.array([t[own].sum(axis=0) for own in by_rank]) for name, t in taken.items()}
    return view.cache.get(key, {})


def tokens_of_rows(view: View, update: int) -> dict[str, np.ndarray]:
    """By mixture of experts: the tokens of each row that each expert takes, int64 (N, E), rows ordered as `rows_of`."""
    case, rows, draw = view.case, rows_of(view.case, update), view.expectation.steps[update].steps
    batch = batch_of(case.model, case.seed, draw, rows, torch.arange(len(rows)), torch.float64)
    return {name: taken.numpy() for name, taken in row_sums(view.expectation.weights[update], batch).routed.items()}


def by_name(layout: Layout, rank: int, expected: Expected) -> Expected:
    """Axes by the names that the groups of recorded collectives have; without groups of one rank, which move nothing."""
    found: Expected = {}
    for (operation, axes), payload in expected.items():
        group = ranks_along(layout, rank, axes)
        travel = (operation, axis_of(layout, rank, operation, group))
        if len(group) > 1 and payload.elements:
            found[travel] = together(found[travel], payload) if travel in found else payload
    return found


def together(one: Payload, other: Payload) -> Payload:
    """Payloads of one operation over one group."""
    count = None if one.count is None or other.count is None else one.count + other.count
    return dataclasses.replace(one, elements=one.elements + other.elements, count=count)


def axis_of(layout: Layout, rank: int, operation: str, group: Group) -> str:
    """The axis whose group of this rank these ranks are; of a send or a receive, the axis along which the two differ."""
    if operation in ("send", "recv"):
        lines = [layout.group(rank, axis) for axis in ("tp", "cp", "pp", "ep", "dp")]
        group = next((line for line in lines if set(group) <= set(line)), group)
    elif layout.pp > 2 and group == ranks_along(layout, rank, ENDS):
        return ENDS
    return layout.name_of(rank, group)


def payloads(view: View, rank: int, update: int) -> Issued:
    """What a rank issued in one update, by operation and axis: one summed payload per dtype."""
    sums: dict[Travel, dict[str, Payload]] = {}
    for c in view.record.collectives.get(rank, []):
        if c.update == update and is_payload(c):
            travel = (c.operation, axis_of(view.case.layout, rank, c.operation, c.group))
            found, payload = sums.setdefault(travel, {}), Payload(c.elements, c.dtype, len(c.group), 1)
            found[c.dtype] = together(found[c.dtype], payload) if c.dtype in found else payload
    return {travel: list(found.values()) for travel, found in sums.items()}


def fits(wanted: list[Payload], seen: list[Payload]) -> bool:
    """Whether elements and dtypes are those wanted, and the number of operations, where it is prescribed."""
    return len(wanted) == len(seen) and all(
        (w.elements, w.dtype) == (s.elements, s.dtype) and w.count in (None, s.count)
        for w, s in zip(wanted, seen, strict=True)
    )


def judge_travel(view: View, update: int, travel: Travel, expected: list[Expected], issued: list[Issued]) -> Check:
    """One operation over one axis in one update on all ranks; the first rank that differs is named."""
    wanted = [[e[travel]] if travel in e else [] for e in expected]
    seen = [i.get(travel, []) for i in issued]
    wrong = next((rank for rank in range(len(seen)) if not fits(wanted[rank], seen[rank])), None)
    name = " over ".join(travel)
    if wrong is None:
        return Check("collectives", update, name, Verdict.PASS)
    counted = any(p.count is not None for p in wanted[wrong])
    words = (in_words(wanted[wrong], counted), in_words(seen[wrong], counted))
    told = meaning(view, update, wrong, travel, expected[wrong], issued[wrong])
    return Check("collectives", update, name, Verdict.FAIL, np.inf, wrong, *words, told)


def in_words(found: list[Payload], counted: bool) -> str:
    """A payload as a reader sees it."""
    listed = [f"{p.elements} elements of {p.dtype}{f' in {p.count} operations' if counted else ''}" for p in found]
    return " and ".join(listed) or "nothing"


def meaning(view: View, update: int, rank: int, travel: Travel, expected: Expected, issued: Issued) -> str:
    """What the declared algorithm is, and which other one issues just this, over which ranks, or how often."""
    operation, axis = travel
    declared = f"{operation} payload per update and rank; declared algorithm: {view.strategy.algorithm}"
    others = [name for name in kin(view.strategy.algorithm or "") if resembles(view, name, update, rank, issued)]
    if others:
        return f"{declared}; what the rank issued is algorithm {' or '.join(others)}"
    if not issued:
        return f"{declared}; the rank issued no collective of floating-point tensors at all: nothing is synchronized"
    strange = [t for t in issued if t[0] == operation and t not in expected]
    if travel in expected and strange:
        groups = {name: members(view.case.layout, rank, name) for name in (axis, *(t[1] for t in strange))}
        instead = " and ".join(f"{in_words(issued[t], False)} over {groups[t[1]]}" for t in strange)
        return f"{declared}; it is to go over {groups[axis]}; the rank issued {instead}"
    return declared + repeated(expected.get(travel), issued.get(travel, []))


def members(layout: Layout, rank: int, axis: str) -> str:
    """An axis with the ranks of its group; ranks that are no axis have only themselves for a name."""
    if axis.startswith("ranks "):
        return axis
    ranks = ranks_along(layout, rank, axis if axis == ENDS else axis.replace("·", " "))
    return f"{axis} (ranks {', '.join(map(str, ranks))})"


def repeated(wanted: Payload | None, seen: list[Payload]) -> str:
    """How often a payload travelled, if it did so several times."""
    if wanted is None or len(seen) != 1 or seen[0].elements <= wanted.elements:
        return ""
    times, rest = divmod(seen[0].elements, wanted.elements)
    return "" if rest else f"; it travelled {times} times"


def kin(algorithm: str) -> list[str]:
    """Other algorithms that a strategy might be mistaken for: those of its kind."""
    kind = algorithm.split("-")[0]
    known = [n for n in SPLIT_EXPECTED if n.split("-")[0] == kind] if is_split(algorithm) else EXPECTED
    return [name for name in known if name != algorithm]


def resembles(view: View, algorithm: str, update: int, rank: int, issued: Issued) -> bool:
    """Whether a rank issued just what another algorithm says, however it cuts tensors."""
    cuts = CUTS[:1] if is_split(algorithm) else CUTS
    tried = [prescribed(view, update, rank, algorithm, cut) for cut in cuts]
    return any(
        issued.keys() == expected.keys() and all(fits([p], issued[travel]) for travel, p in expected.items())
        for expected in tried
        if expected
    )


# ------------------------------------------------------------------------------------------ kept memory


def kept_bytes(view: View) -> Iterator[Check]:
    """In every update that is made, every rank keeps its share of weights, gradients and state, no less and no more."""
    each = bytes_per_parameter(view.case)
    for update in view.updates:
        shown = {(o.name, o.rank): int(o.values().item()) for o in view.observations("bytes", update)}
        if not shown and "bytes" not in view.strategy.observes:
            continue
        shares = [kept_of(view, update, rank, each) for rank in range(view.record.world)]
        for part in PARTS if view.case.tokens(update) else ():
            kept = [(share[part], shown.get((part, rank))) for rank, share in enumerate(shares)]
            yield judge_part(view, update, part, kept)


def kept_of(view: View, update: int, rank: int, each: BytesPerParameter) -> dict[str, Kept]:
    """What a rank is to keep."""
    algorithm = view.strategy.algorithm
    if algorithm is not None and is_split(algorithm):
        return split_bytes(share_of(view, update, rank, algorithm), each)
    return persistent_bytes(ledger_input(view.case, view.strategy, update), rank, view.strategy.shards, each)


def bytes_per_parameter(case: Case) -> BytesPerParameter:
    """Weights, gradients and state are kept in the dtype of the weights."""
    size = ITEM_BYTES[case.precision.weights]
    return BytesPerParameter(size, size, size * STATE_TENSORS[case.optimizer.name])


def judge_part(view: View, update: int, part: str, kept: list[tuple[Kept, int | None]]) -> Check:
    """One part of one update on all ranks (share, bytes shown or None); the first rank that differs is named."""
    fits = [shown is not None and share.least <= shown <= share.most for share, shown in kept]
    rank = next((rank for rank, fitting in enumerate(fits) if not fitting), None)
    if rank is None:
        return Check("bytes", update, part, Verdict.PASS)
    share, shown = kept[rank]
    expected = f"{share.least} bytes" + (f" (up to {share.most} with padding)" if share.most > share.least else "")
    observed = "nothing: the rank did not show it" if shown is None else f"{shown} bytes"
    layout, split = view.case.layout, is_split(view.strategy.algorithm)
    sharded = split or part in view.strategy.shards
    over = f"as {layout.label} says" if split else f"over {layout.shard} ranks"
    detail = f"claimed: {part} {f'cut {over}' if sharded else 'whole on every rank'}"
    if sharded and shown is not None and shown >= share.whole:
        detail += f", but the rank keeps all of it ({share.whole} bytes or more)"
    return Check("bytes", update, part, Verdict.FAIL, np.inf, rank, expected, observed, detail)
