"""What the forward passes did, where a framework shows it: outputs, dropout masks, the experts that tokens went to."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from equivtests.judge.assemble import Whole, assemble, equal_bits
from equivtests.judge.check import Check, Verdict
from equivtests.judge.tolerance import equal, rounded
from equivtests.judge.truth import seen_by, truth_at
from equivtests.judge.view import View
from equivtests.record.observation import Observation
from equivtests.reference import update as one
from equivtests.reference.expectation import loss_unit, output_distances
from equivtests.reference.forward import dropout_masks
from equivtests.reference.rows import rows_of
from equivtests.reference.versions import made_before

Checks = Iterator[Check]
Fed = tuple[str, int, int]
"""Name, data rank, micro-batch."""


def by_microbatch(view: View, kind: str, update: int) -> dict[Fed, list[Observation]]:
    """The observations of a kind, those of each micro-batch of each data rank together."""
    found: dict[Fed, list[Observation]] = {}
    for o in view.observations(kind, update):
        found.setdefault((o.name, view.case.layout.data_rank(o.rank), o.microbatch or 0), []).append(o)
    return found


def name_of(fed: Fed) -> str:
    """What a check of one micro-batch is called."""
    site, data, microbatch = fed
    return f"{'' if site == 'output' else f'{site}, '}micro-batch {microbatch} of data rank {data}"


def chosen_rows(view: View, update: int, data: int, microbatch: int) -> np.ndarray:
    """Which rows of the window are those of a micro-batch, bool (N,)."""
    rows = rows_of(view.case, update)
    return (rows.rank == data) & (rows.micro == microbatch)


def length_of(view: View, microbatch: int) -> int:
    return view.case.model.length if view.case.model.own else view.case.length(microbatch)


def put_together(view: View, parts: list[Observation]) -> Whole:
    """The tensor that the parts of one micro-batch make."""
    return assemble(parts, view.record.world)


# ------------------------------------------------------------------------------------------------- masks


def masks(view: View, update: int) -> Checks:
    """Dropout keeps what the case's stream says: alike on all copies of a token, and again when it is recomputed."""
    shown = by_microbatch(view, "mask", update)
    if not shown:
        if view.case.model.has("dropout") and not view.expectation.steps[update].skipped:
            yield from view.absent("dropout mask", update, "mask", "mask")
        return
    truth = dropout_masks(view.case, update, view.expectation.steps[update].steps)
    for (site, data, k), parts in shown.items():
        name = name_of((site, data, k))
        first, redrawn = first_draws(parts)
        whole = put_together(view, first)
        wanted = truth[site][chosen_rows(view, update, data, k)][:, : length_of(view, k)] if site in truth else None
        if wanted is None:
            yield view.failed(
                "dropout mask", update, name, f"the model has no dropout there, but at {', '.join(truth)}"
            )
        elif whole.problem:
            yield view.failed("dropout mask", update, name, whole.problem, whole.rank)
        elif redrawn is not None:
            words = "drawn again for the same tokens (by recomputation?), and it was another one"
            yield view.failed("dropout mask", update, name, words, redrawn)
        elif equal(whole.values, wanted).verdict is Verdict.PASS:
            yield Check("dropout mask", update, name, Verdict.PASS)
        else:
            words = other_mask(whole.values, wanted, truth[site])
            yield view.failed("dropout mask", update, name, words, parts[0].rank)


def first_draws(parts: list[Observation]) -> tuple[list[Observation], int | None]:
    """The first mask of every rank and place, and a rank that later drew another one there."""
    seen: dict[tuple[int, object], Observation] = {}
    redrawn = None
    for o in parts:
        first = seen.setdefault((o.rank, o.place), o)
        if not equal_bits(first.array, o.array):
            redrawn = o.rank
    return list(seen.values()), redrawn


def other_mask(observed: np.ndarray, wanted: np.ndarray, all_rows: np.ndarray) -> str:
    """What a wrong mask is, as far as it can be told."""
    if observed.shape != wanted.shape:
        return f"has shape {observed.shape}, must be {wanted.shape}"
    words = f"{int((observed != wanted).sum())} of {wanted.size} decisions differ from the case's stream"
    length = wanted.shape[1]
    same = [i for row in observed for i in np.flatnonzero([np.array_equal(row, m[:length]) for m in all_rows])]
    if len(same) == len(observed):
        return f"{words}: it is the mask of rows {', '.join(map(str, same))} of this window"
    for parts in (2, 4, 8):
        cut = np.array_split(observed, parts, axis=1) if length % parts == 0 else []
        if cut and all(np.array_equal(cut[0], part) for part in cut):
            return f"{words}: {parts} parts of the sequence have one and the same mask"
    return words


# ------------------------------------------------------------------------------------------------- routing


def routing(view: View, update: int) -> Checks:
    """Every token went to the experts that the router chose, once, but for those that were full."""
    names = view.names("routed", update)
    if view.expectation.steps[update].skipped or not names:
        if view.case.model.experts and not view.expectation.steps[update].skipped:
            yield from view.absent("routing", update, "routed", "routed")
        return
    truth = truth_at(view, update).routed
    for name in dict.fromkeys([*truth, *names]):
        whole = view.whole("routed", name, update)
        if whole is None:
            yield view.failed("routing", update, name, "no rank showed the tokens of its experts")
        elif name not in truth:
            yield view.failed("routing", update, name, f"no layer of experts; those are {', '.join(truth)}")
        elif whole.problem:
            yield view.failed("routing", update, name, whole.problem, whole.rank)
        else:
            wanted = truth[name].numpy()
            yield view.compared("routing", update, name, whole.values, wanted, equal(whole.values, wanted))


# ------------------------------------------------------------------------------------------------- outputs


def outputs(view: View, update: int) -> Checks:
    """What the model put out for every micro-batch, before the loss."""
    shown = by_microbatch(view, "output", update)
    if not shown:
        if not view.expectation.steps[update].skipped:
            yield from view.absent("output", update, "output", "output")
        return
    truth, distances = truth_and_distances(view, update)
    for (site, data, k), parts in shown.items():
        name = name_of((site, data, k))
        whole, rows = put_together(view, parts), chosen_rows(view, update, data, k)
        wanted = truth[rows][:, : length_of(view, k)]
        if whole.problem:
            yield view.failed("output", update, name, whole.problem, whole.rank)
            continue
        signal = float(np.linalg.norm(wanted))
        noise = max(float(np.linalg.norm(d[rows][:, : length_of(view, k)])) for d in distances)
        radius = max(noise, loss_unit(view.case) * signal)
        distance = rounded(whole.values, wanted, radius, signal, view.threshold)
        yield view.compared("output", update, name, whole.values, wanted, distance)


def truth_and_distances(view: View, update: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Outputs (N, L, V) at the observed weights, float64, and how far rounding to the case's precision leads away."""
    draw = made_before(view.case, update)
    truth = one.outputs_at(view.case, update, draw, seen_by(view, update).forward).numpy()
    return truth, output_distances(view.case, view.expectation.semantics, update)
