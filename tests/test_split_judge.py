"""Judging records of split models without processes: what ranks share, what they hold parts of, what forward passes did."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from synthetic import OBSERVED, changed, record_of, with_part

from equivtests.adapters.adapter import Strategy
from equivtests.cases.case import FEATURES, Case, Model, Optimizer
from equivtests.cases.layout import Layout
from equivtests.explain.diagnose import diagnose
from equivtests.judge.check import Check, Judgement, Verdict
from equivtests.judge.judge import judge_view
from equivtests.judge.view import View
from equivtests.record.observation import Observation, Place, Record
from equivtests.reference.expectation import canonical_weights, expect
from equivtests.reference.forward import dropout_masks
from equivtests.reference.rows import rows_of
from equivtests.reference.schedules import prescribed
from equivtests.reference.timeline import KIND_CODES
from equivtests.reference.update import gradients, outputs_at

WINDOWS = ((((8, 3), (1, 5)), ((2, 6), (7, 2))),)
MODEL = Model("moe", width=8, depth=2, vocabulary=16, experts=4, features=("balance", "dropout"))
LAYOUTS = {
    "tp": Layout(2, tp=2),
    "turned": Layout(2, tp=2, order=("pp", "tp", "cp", "dp")),
    "cp": Layout(2, cp=2),
    "pp": Layout(2, pp=2),
}
STRATEGY = Strategy(
    "split",
    worlds=frozenset({4}),
    axes=frozenset({"dp", "tp", "cp", "pp", "ep"}),
    families=frozenset({"moe"}),
    features=frozenset(FEATURES),
    observes=OBSERVED | {"output", "mask", "routed", "timeline"},
)


def case_of(layout: Layout) -> Case:
    return Case("split", MODEL, WINDOWS, layout, Optimizer("sgd", lr=0.5, clip=0.125), accumulation=2)


def record(case: Case) -> Record:
    """The record of a correct run in which every rank holds the whole model (which the vacuity check alone objects to)."""
    layout = case.layout
    plain = record_of(case.replace(layout=Layout(layout.dp)))
    shown = [o for r in range(layout.world) for o in plain.observations if o.rank == layout.data_rank(r)]
    ranks = [r for r in range(layout.world) for o in plain.observations if o.rank == layout.data_rank(r)]
    moved = [dataclasses.replace(o, rank=r, place=placed(layout, o, r)) for o, r in zip(shown, ranks, strict=True)]
    extra = [o for r in range(layout.world) for o in forward_of(case, r)]
    return Record(layout.world, "cpu", [*moved, *extra])


def placed(layout: Layout, o: Observation, rank: int) -> Place:
    if o.kind == "loss":
        return Place((), partial="mean", parts=layout.dp, replica=layout.copy(rank, "dp"))
    return dataclasses.replace(o.place, replica=rank)


def forward_of(case: Case, rank: int) -> list[Observation]:
    """Outputs, masks and routed tokens of the first update, and the operations of a pipeline."""
    weights, data, rows = canonical_weights(case), case.layout.data_rank(rank), rows_of(case, 0)
    outputs, masks = outputs_at(case, 0, 0, weights).numpy(), dropout_masks(case, 0, 0)["moe"]
    found = []
    for k in range(2):
        mine = (rows.rank == data) & (rows.micro == k)
        found.append(shown("output", "output", rank, k, outputs[mine].astype(np.float32)))
        found.append(shown("mask", "moe", rank, k, masks[mine]))
    for name, tokens in gradients(case, case.semantics, 0, 0, weights).routed.items():
        found.append(shown("routed", name, rank, None, tokens.numpy()))
    coordinate = case.layout.at(rank)["pp"]
    order = prescribed("1f1b", case.layout.pp, 1, 2)[coordinate]
    ran = np.array([[KIND_CODES[o.kind], o.stage, o.microbatch, 0] for o in order])
    return [*found, shown("timeline", "timeline", rank, None, ran)]


def shown(kind: str, name: str, rank: int, k: int | None, array: np.ndarray) -> Observation:
    return Observation(kind, name, rank, 0, k, Place(array.shape, replica=rank), str(array.dtype), array)


def judged(case: Case, found: Record, schedule: str | None = "1f1b") -> tuple[Judgement, list[str]]:
    """The judgement without what vacuity says, and the explanation of the first difference."""
    view = View(case, dataclasses.replace(STRATEGY, schedule=schedule), found, expect(case, case.semantics))
    judgement = judge_view(view)
    judgement.checks = [check for check in judgement.checks if check.quantity != "vacuity"]
    first = judgement.first
    return judgement, [] if first is None else [first.detail, *diagnose(view, first)]


def first_of(case: Case, found: Record) -> tuple[Check, str]:
    judgement, lines = judged(case, found)
    assert judgement.verdict is Verdict.FAIL and judgement.first is not None
    return judgement.first, "\n".join(lines)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_correct_split_record_passes_in_every_quantity_of_forward_passes(layout: Layout) -> None:
    judgement, _ = judged(case_of(layout), record(case_of(layout)))
    assert judgement.verdict is Verdict.PASS
    assert {"samples", "schedule", "dropout mask", "routing", "output", "loss", "gradient"} <= {
        check.quantity for check in judgement.checks
    }


def alter(found: Record, kind: str, rank: int, change: Callable[[np.ndarray], np.ndarray], name: str = "") -> Record:
    """The record with the first observation of a kind on a rank changed."""
    chosen = next(o for o in found.observations if o.kind == kind and o.rank == rank and name in o.name)
    return with_part(found, chosen, changed(chosen, change))


def other(array: np.ndarray) -> np.ndarray:
    """The same with its first element replaced."""
    copied = array.copy()
    copied.reshape(-1)[0] = not copied.reshape(-1)[0] if copied.dtype == bool else copied.reshape(-1)[0] + 1
    return copied


WRONG: dict[str, tuple[str, str]] = {
    # kind shown otherwise by one rank of a tensor pair: (quantity, part of the explanation)
    "inputs": ("samples", "share their data, but were fed different inputs"),
    "mask": ("dropout mask", "copies differ along tp"),
    "routed": ("routing", "copies differ along tp"),
    "output": ("output", "copies differ along tp"),
    "loss": ("loss", "copies differ along tp"),
    "gradient": ("gradient", "copies differ along tp"),
    "norm": ("norm", "copies differ along tp"),
    "weight": ("initial weights", "copies differ along tp"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize("layout", [LAYOUTS["tp"], LAYOUTS["turned"]], ids=["default", "turned"])
def test_tensor_ranks_that_differ_are_told_with_their_axis(kind: str, layout: Layout) -> None:
    case = case_of(layout)
    check, lines = first_of(case, alter(record(case), kind, 3, other))
    quantity, words = WRONG[kind]
    assert check.quantity == quantity and words in lines


def on_all(found: Record, kind: str, change: Callable[[np.ndarray], np.ndarray]) -> Record:
    """The record in which every rank shows a kind otherwise."""
    moved = [changed(o, change) if o.kind == kind else o for o in found.observations]
    return dataclasses.replace(found, observations=moved)


@pytest.mark.parametrize(
    ("kind", "quantity"),
    [("mask", "dropout mask"), ("routed", "routing"), ("output", "output"), ("timeline", "schedule")],
)
def test_what_all_ranks_show_wrong_alike_is_wrong_too(kind: str, quantity: str) -> None:
    case = case_of(LAYOUTS["pp"])
    change = np.flipud if kind == "timeline" else other
    assert first_of(case, on_all(record(case), kind, change))[0].quantity == quantity


@pytest.mark.parametrize("kind", ["mask", "routed", "output", "timeline"])
def test_what_was_promised_and_not_shown_is_missing(kind: str) -> None:
    case = case_of(LAYOUTS["pp"])
    found = record(case)
    left = [o for o in found.observations if o.kind != kind]
    check, lines = first_of(case, dataclasses.replace(found, observations=left))
    assert f"observe({kind!r}, …) was not called" in lines or "no rank showed" in lines


def test_a_mask_that_is_drawn_again_must_be_the_same() -> None:
    case = case_of(LAYOUTS["tp"])
    found = record(case)
    drawn = next(o for o in found.observations if o.kind == "mask")
    again = dataclasses.replace(found, observations=[*found.observations, drawn])
    assert judged(case, again)[0].verdict is Verdict.PASS
    check, lines = first_of(case, dataclasses.replace(found, observations=[*found.observations, changed(drawn, other)]))
    assert check.quantity == "dropout mask" and "it was another one" in lines and check.rank == drawn.rank


def test_the_mask_of_other_samples_is_named() -> None:
    case = case_of(LAYOUTS["tp"])
    masks = dropout_masks(case, 0, 0)["moe"]
    found = record(case)
    for rank in (2, 3):  # both ranks of data rank 1 keep what data rank 0 keeps
        found = alter(found, "mask", rank, lambda array: masks[: len(array)])
    assert "it is the mask of rows 0, 1 of this window" in first_of(case, found)[1]


def pieces(array: np.ndarray, kind: str, spans: list[tuple[int, int]], o: Observation) -> list[Observation]:
    """Parts of a sequence, along its positions."""
    boxes = [((0, len(array)), span, *((0, n) for n in array.shape[2:])) for span in spans]
    parts = [array[:, slice(*span)] for span in spans]
    return [
        dataclasses.replace(o, array=part, place=Place(array.shape, box=box, replica=0))
        for part, box in zip(parts, boxes, strict=True)
    ]


ZIGZAG = {0: [(0, 2), (6, 8)], 1: [(2, 4), (4, 6)]}


def cut_sequences(case: Case, found: Record) -> Record:
    """The record in which context ranks show their pieces of every sequence: the outer ones, or the inner ones."""
    shown: list[Observation] = []
    for o in found.observations:
        cut = o.kind in ("inputs", "output", "mask")
        shown += pieces(o.array, o.kind, ZIGZAG[case.layout.at(o.rank)["cp"]], o) if cut else [o]
    return dataclasses.replace(found, observations=shown)


def test_pieces_of_sequences_are_put_together() -> None:
    case = case_of(LAYOUTS["cp"])
    assert judged(case, cut_sequences(case, record(case)))[0].verdict is Verdict.PASS


def test_a_piece_that_no_rank_was_fed_is_named() -> None:
    case = case_of(LAYOUTS["cp"])
    found = cut_sequences(case, record(case))
    lost = next(o for o in found.observations if o.kind == "inputs" and o.rank == 3)
    check, lines = first_of(case, with_part(found, lost))
    assert check.quantity == "samples" and "input elements reached no rank" in lines


def cut_gradient(case: Case, found: Record, change: Callable[[np.ndarray], np.ndarray]) -> Record:
    """The record in which tensor ranks show halves of one gradient, those of tensor rank 1 changed."""
    shown: list[Observation] = []
    for o in found.observations:
        if (o.kind, o.name) != ("gradient", "head.weight"):
            shown.append(o)
            continue
        half, rows = case.layout.at(o.rank)["tp"], o.array.shape[0] // 2
        part = o.array[half * rows : (half + 1) * rows]
        place = Place(o.array.shape, box=((half * rows, (half + 1) * rows), (0, o.array.shape[1])), replica=o.rank // 2)
        shown.append(dataclasses.replace(o, array=change(part) if half else part, place=place))
    return dataclasses.replace(found, observations=shown)


def test_the_rank_whose_part_of_a_tensor_is_wrong_is_named() -> None:
    case = case_of(LAYOUTS["tp"])
    assert judged(case, cut_gradient(case, record(case), lambda part: part))[0].verdict is Verdict.PASS
    check, lines = first_of(case, cut_gradient(case, record(case), lambda part: 2 * part))
    assert check.quantity == "gradient" and check.name == "head.weight"
    assert "only the part of tp rank 1 is wrong (ranks 1, 3)" in lines


def share_gradient(case: Case, found: Record, factor: float) -> Record:
    """The record in which tensor ranks show parts of a sum of one gradient: `factor` of it, and the rest."""
    shown: list[Observation] = []
    for o in found.observations:
        if (o.kind, o.name) == ("gradient", "norm.weight"):
            first = case.layout.at(o.rank)["tp"] == 0
            o = dataclasses.replace(o, array=(o.array * np.float32(factor if first else 1 - factor)))
        shown.append(o)
    return dataclasses.replace(found, observations=shown)


def test_a_reduction_that_is_missing_along_an_axis_is_named() -> None:
    """Ranks differ, but their sum is right."""
    case = case_of(LAYOUTS["tp"])
    check, lines = first_of(case, share_gradient(case, record(case), 0.25))
    assert check.quantity == "gradient" and "the sum over tp is right: the reduction over tp is missing" in lines


def test_parts_of_a_sum_that_are_shown_as_such_are_added_up() -> None:
    case = case_of(LAYOUTS["tp"])
    found = share_gradient(case, record(case), 0.25)
    shown = [
        dataclasses.replace(
            o, place=Place(o.place.shape, partial="sum", parts=2, replica=case.layout.copy(o.rank, "tp"))
        )
        if (o.kind, o.name) == ("gradient", "norm.weight")
        else o
        for o in found.observations
    ]
    # the sum of two roundings is not the rounding of the sum: compared as a gradient, not bit for bit
    judgement, _ = judged(case, dataclasses.replace(found, observations=shown))
    assert {c.verdict for c in judgement.checks if c.quantity == "gradient"} == {Verdict.PASS}


def timeline(case: Case, found: Record, rank: int, rows: Any) -> Record:
    return alter(found, "timeline", rank, lambda array: np.array(rows(array)))


BROKEN: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "lost": (lambda rows: rows[:-1], "backward never ran"),
    "twice": (lambda rows: [*rows, rows[0]], "forward ran 2 times"),
    "another order": (lambda rows: rows[[0, 2, 1, 3]], "1f1b prescribes the"),
    "stale": (lambda rows: rows + [0, 0, 0, 1], "used weight version 1; the newest is 0"),
    "malformed": (lambda rows: rows - [0, 1, 0, 0], "must not be negative"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_timeline_that_is_not_the_schedules_is_named(how: str) -> None:
    case = case_of(LAYOUTS["pp"])
    change, words = BROKEN[how]
    check, lines = first_of(case, timeline(case, record(case), 0, change))
    assert check.quantity == "schedule" and words in lines


def test_a_pipeline_rank_without_timeline_is_named() -> None:
    case = case_of(LAYOUTS["pp"])
    found = record(case)
    lost = next(o for o in found.observations if o.kind == "timeline" and o.rank == 1)
    check, lines = first_of(case, with_part(found, lost))
    assert check.quantity == "schedule" and "rank 1 showed no timeline" in lines


def test_a_model_that_no_rank_holds_part_of_was_not_split() -> None:
    case = case_of(LAYOUTS["tp"])
    view = View(case, dataclasses.replace(STRATEGY, schedule=None), record(case), expect(case, case.semantics))
    failed = [c for c in judge_view(view).checks if c.verdict is Verdict.FAIL]
    assert [(c.quantity, c.name) for c in failed] == [("vacuity", "shards")] and "cut over tp" in failed[0].detail
