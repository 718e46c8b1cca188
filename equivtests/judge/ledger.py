"""The ledger chapter: what travels between ranks in each update, and what every rank keeps.

What counts as payload is one rule, `is_payload`: collectives of more than one floating-point element in groups of more
than one rank. It leaves out the bookkeeping that frameworks add as they please: integers (token counts, maps of used
parameters, bucket indices), scalars (losses, norms) and barriers. Payload is summed per operation, so that it does not
matter in how many buckets it travels. What is issued before the first update is setup and not judged.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Iterator

import numpy as np

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import Case
from equivtests.cases.parameters import layers, parameters
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.view import View
from equivtests.record.observation import Collective
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
    persistent_bytes,
)

CUTS = typing.get_args(Cut)
STATE_TENSORS = {"sgd": 0, "momentum": 1, "adam": 2, "adamw": 2}
"""Tensors of optimizer state per parameter, each of its size and dtype."""


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
    """In every update that is made, every rank issues what the algorithm says, operation by operation."""
    for update in view.updates:
        if view.case.tokens(update):
            expected = expected_payloads(view, update)
            issued = [payloads(view, rank, update) for rank in range(view.record.world)]
            for operation in dict.fromkeys([*expected, *(o for rank in issued for o in rank)]):
                yield judge_operation(view, update, operation, expected, issued)


def expected_payloads(view: View, update: int) -> Expected:
    """Payload per operation. Raises ValueError if the strategy declares no algorithm."""
    algorithm = view.strategy.algorithm
    if algorithm is None:
        raise ValueError(f"strategy {view.strategy.name!r} declares no algorithm: its collectives cannot be judged")
    return travelling(EXPECTED[algorithm](ledger_input(view.case, view.strategy, update)))


def travelling(expected: Expected) -> Expected:
    """Without operations on groups of one rank, which move nothing."""
    return {operation: p for operation, p in expected.items() if p.ranks > 1 and p.elements}


def payloads(view: View, rank: int, update: int) -> dict[str, list[Payload]]:
    """What a rank issued in one update, by operation: one summed payload per dtype and group size."""
    sums: dict[tuple[str, str, int], int] = {}
    for c in view.record.collectives.get(rank, []):
        if c.update == update and is_payload(c):
            key = (c.operation, c.dtype, len(c.group))
            sums[key] = sums.get(key, 0) + c.elements
    found: dict[str, list[Payload]] = {}
    for (operation, dtype, ranks), elements in sums.items():
        found.setdefault(operation, []).append(Payload(elements, dtype, ranks))
    return found


def judge_operation(
    view: View, update: int, operation: str, expected: Expected, issued: list[dict[str, list[Payload]]]
) -> Check:
    """One operation of one update on all ranks: elements, dtype, group size; the first rank that differs is named."""
    wanted = [expected[operation]] if operation in expected else []
    seen = [rank.get(operation, []) for rank in issued]
    wrong = next((rank for rank, found in enumerate(seen) if found != wanted), None)
    if wrong is None:
        return Check("collectives", update, operation, Verdict.PASS)
    return Check(
        "collectives",
        update,
        operation,
        Verdict.FAIL,
        np.inf,
        wrong,
        in_words(wanted),
        in_words(seen[wrong]),
        meaning(view, update, operation, wanted, issued[wrong]),
    )


def in_words(found: list[Payload]) -> str:
    """A payload as a reader sees it."""
    listed = [f"{p.elements} elements of {p.dtype} in groups of {p.ranks} ranks" for p in found]
    return " and ".join(listed) or "nothing"


def meaning(view: View, update: int, operation: str, wanted: list[Payload], issued: dict[str, list[Payload]]) -> str:
    """What the declared algorithm is, and which other one issues just this or how often the payload travelled."""
    declared = f"{operation} payload per update and rank; declared algorithm: {view.strategy.algorithm}"
    others = [name for name in EXPECTED if name != view.strategy.algorithm and resembles(view, name, update, issued)]
    if others:
        return f"{declared}; what the rank issued is algorithm {' or '.join(others)}"
    if not issued:
        return f"{declared}; the rank issued no collective of floating-point tensors at all: nothing is synchronized"
    seen = issued.get(operation, [])
    if len(wanted) == len(seen) == 1 and seen[0].elements > wanted[0].elements:
        times, rest = divmod(seen[0].elements, wanted[0].elements)
        return declared if rest else f"{declared}; it travelled {times} times"
    return declared


def resembles(view: View, algorithm: str, update: int, issued: dict[str, list[Payload]]) -> bool:
    """Whether a rank issued just what another algorithm says, however it cuts tensors."""
    given = ledger_input(view.case, view.strategy, update)
    tried = [travelling(EXPECTED[algorithm](dataclasses.replace(given, cut=cut))) for cut in CUTS]
    return any(issued == {operation: [p] for operation, p in expected.items()} for expected in tried if expected)


# ------------------------------------------------------------------------------------------ kept memory


def kept_bytes(view: View) -> Iterator[Check]:
    """In every update that is made, every rank keeps its share of weights, gradients and state, no less and no more."""
    each = bytes_per_parameter(view.case)
    for update in view.updates:
        shown = {(o.name, o.rank): int(o.values().item()) for o in view.observations("bytes", update)}
        if not shown and "bytes" not in view.strategy.observes:
            continue
        given = ledger_input(view.case, view.strategy, update)
        shares = [persistent_bytes(given, rank, view.strategy.shards, each) for rank in range(view.record.world)]
        for part in PARTS if view.case.tokens(update) else ():
            kept = [(share[part], shown.get((part, rank))) for rank, share in enumerate(shares)]
            yield judge_part(view, update, part, kept)


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
    sharded = part in view.strategy.shards
    detail = f"claimed: {part} {f'cut over {view.case.layout.shard} ranks' if sharded else 'whole on every rank'}"
    if sharded and shown is not None and shown >= share.whole:
        detail += f", but the rank keeps all of it ({share.whole} bytes or more)"
    return Check("bytes", update, part, Verdict.FAIL, np.inf, rank, expected, observed, detail)
