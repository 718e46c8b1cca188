"""Judging what travels and what is kept, on records made by hand: no ranks, no torch."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from equivtests.adapters.adapter import MANDATORY, Strategy
from equivtests.cases.case import Case, Layout, Model, Optimizer, Precision
from equivtests.cases.parameters import parameters
from equivtests.chapters.ledger import judge_ledger_run
from equivtests.chapters.run import Result, Run
from equivtests.judge.check import Check, Verdict
from equivtests.judge.ledger import axis_of, is_payload, ledger_input
from equivtests.record.observation import Collective, Observation, Place, Record

WINDOWS = (
    (((8,), (3,)), ((5,), (2,))),  # two micro-batches on both ranks
    (((0,),), ((0,),)),  # no valid token: skipped
    (((8,), (3,), (1,)), ((5,),)),  # three on one rank, one on the other
)
MODEL = Model("mlp", width=4, depth=2, inputs=5, outputs=3, features=("bias",))  # 20 + 4 + 12 + 3 = 39 elements
CASE = Case("by-hand", MODEL, WINDOWS, Layout(2), Optimizer("momentum", lr=0.125, momentum=0.5), accumulation=3)
DDP = Strategy("ddp", algorithm="all-reduce-per-microbatch", observes=MANDATORY | {"bytes"})
ZERO = Strategy(
    "zero", algorithm="zero1-reduce-scatter", cut="flat", shards=frozenset({"state"}), observes=MANDATORY | {"bytes"}
)
BOTH = (0, 1)


def all_reduce(update: int, elements: int, dtype: str = "float32", group: tuple[int, ...] = BOTH) -> Collective:
    return Collective("all_reduce", group, elements, dtype, update)


DDP_ISSUES = [all_reduce(0, 39), all_reduce(0, 39), *(all_reduce(2, n) for n in (20, 19, 39, 39))]
ZERO_ISSUES = [
    Collective(operation, BOTH, 40, "float32", update)
    for update in (0, 2)
    for operation in ("reduce_scatter", "all_gather")
]
WHOLE = {"weights": 39 * 4, "gradients": 39 * 4, "state": 39 * 4}


def record(issued: dict[int, list[Collective]], kept: dict[int, dict[str, int]]) -> Record:
    """A record of both made updates with the same kept bytes in each."""
    shown = [
        Observation("bytes", name, rank, update, None, Place(()), "int64", np.array(size))
        for update in (0, 2)
        for rank, parts in kept.items()
        for name, size in parts.items()
    ]
    return Record(2, "cpu", shown, issued)


def judged(
    strategy: Strategy,
    issued: list[Collective],
    on_rank_1: list[Collective] | None = None,
    kept: dict[int, dict[str, int]] | None = None,
    case: Case = CASE,
) -> Result:
    """Judge what rank 0 issued (rank 1 too, unless given) and what both keep (everything, unless given)."""
    ranks = {0: issued, 1: issued if on_rank_1 is None else on_rank_1}
    run = Run("ledger", "by.hand:Adapter", strategy, case)
    return judge_ledger_run(run, record(ranks, kept or {0: WHOLE, 1: WHOLE}))


def failure(result: Result) -> Check:
    assert result.verdict is Verdict.FAIL and result.first is not None
    return result.first


# ------------------------------------------------------------------------------------------- collectives


def test_declared_collectives_pass_in_whatever_buckets_they_travel() -> None:
    result = judged(DDP, DDP_ISSUES)
    assert result.verdict is Verdict.PASS and not result.explanation
    names = [(c.quantity, c.update, c.name) for c in result.judgement.checks]
    assert names[:2] == [("collectives", 0, "all_reduce over dp"), ("collectives", 2, "all_reduce over dp")]
    assert {n for _, _, n in names[2:]} == {"weights", "gradients", "state"}


BOOKKEEPING = [
    all_reduce(0, 9, "int64"),  # token counts
    all_reduce(0, 20, "int32"),  # map of used parameters
    all_reduce(0, 1, "float32"),  # loss, norm
    all_reduce(0, 1, "float64"),
    all_reduce(0, 39, "float32", group=(0,)),  # moves nothing
    Collective("broadcast", BOTH, 7, "int32", 0),  # bucket indices
    Collective("all_gather", BOTH, 64, "uint8", 0),  # pickled objects
    Collective("barrier", BOTH, 0, "", 0),
    all_reduce(1, 3, "int64"),  # counting the tokens of a window that is then skipped
    Collective("broadcast", BOTH, 39, "float32", -1),  # setup
]


@pytest.mark.parametrize("extra", BOOKKEEPING, ids=lambda c: f"{c.operation}-{c.dtype}-{c.elements}-u{c.update}")
def test_bookkeeping_and_setup_are_not_payload(extra: Collective) -> None:
    assert judged(DDP, [extra, *DDP_ISSUES]).verdict is Verdict.PASS


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_two_floating_point_elements_are_payload(dtype: str) -> None:
    assert is_payload(all_reduce(0, 2, dtype))
    assert not is_payload(all_reduce(0, 1, dtype))


def test_a_float_payload_of_another_operation_is_told() -> None:
    check = failure(judged(DDP, [*DDP_ISSUES, Collective("broadcast", BOTH, 39, "float32", 0)]))
    assert (check.quantity, check.name, check.expected) == ("collectives", "broadcast over dp", "nothing")
    assert check.observed == "39 elements of float32"


def test_the_first_rank_and_update_that_differ_are_named() -> None:
    check = failure(judged(DDP, DDP_ISSUES, on_rank_1=DDP_ISSUES[:-1]))
    assert (check.update, check.rank, check.name) == (2, 1, "all_reduce over dp")
    assert check.expected == "117 elements of float32"
    assert check.observed == "78 elements of float32"


def test_a_reduction_per_microbatch_is_recognized_where_one_is_declared() -> None:
    once = dataclasses.replace(DDP, algorithm="all-reduce")
    check = failure(judged(once, DDP_ISSUES))
    assert check.quantity == "collectives" and "78 elements" in check.observed
    assert "what the rank issued is algorithm all-reduce-per-microbatch" in check.detail


def test_a_payload_that_travels_twice_is_told_so() -> None:
    assert "it travelled 2 times" in failure(judged(DDP, [*DDP_ISSUES, *DDP_ISSUES])).detail


def test_a_wrapper_that_wrapped_nothing_fails() -> None:
    """An FSDP that is DDP, and one that does not communicate at all."""
    sharded = dataclasses.replace(DDP, algorithm="fsdp-full", cut="rows", shards=frozenset(WHOLE))
    plain = failure(judged(sharded, DDP_ISSUES))
    assert (plain.name, plain.observed) == ("reduce_scatter over dp", "nothing")
    assert "what the rank issued is algorithm all-reduce-per-microbatch" in plain.detail
    assert "nothing is synchronized" in failure(judged(sharded, [])).detail


def test_a_compression_that_does_not_compress_fails_by_its_dtype() -> None:
    case = CASE.replace(precision=Precision("float32", "float32", "float16"))
    check = failure(judged(DDP, DDP_ISSUES, case=case))
    assert "78 elements of float16" in check.expected and "78 elements of float32" in check.observed
    narrow = [dataclasses.replace(c, dtype="float16") for c in DDP_ISSUES]
    assert judged(DDP, narrow, case=case).verdict is Verdict.PASS
    mixed = failure(judged(DDP, [narrow[0], *DDP_ISSUES[1:]], case=case)).observed.split(" and ")
    assert mixed == [f"39 elements of {dtype}" for dtype in ("float16", "float32")]


def test_a_group_of_the_wrong_size_fails() -> None:
    case = CASE.replace(layout=Layout(2, replicate=2))
    hybrid = dataclasses.replace(ZERO, replicates=True)
    issued = [all_reduce(update, 39) for update in (0, 2)]
    assert judged(hybrid, issued, case=case).verdict is Verdict.PASS  # two replicas of one shard each
    check = failure(judged(hybrid, ZERO_ISSUES, case=case))
    assert (check.name, check.expected, check.observed) == ("all_reduce over dp", "39 elements of float32", "nothing")


def test_ranks_without_a_microbatch_take_part_in_every_reduction() -> None:
    assert [ledger_input(CASE, DDP, update).microbatches for update in (0, 2)] == [2, 3]


def test_without_a_declared_algorithm_nothing_can_be_judged() -> None:
    with pytest.raises(ValueError, match="declares no algorithm"):
        judged(dataclasses.replace(DDP, algorithm=None), DDP_ISSUES)


def test_an_unknown_algorithm_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ValueError, match="known are all-reduce"):
        Strategy("mine", algorithm="gossip")


# ------------------------------------------------------------------------------------------ kept memory

HALF = {0: WHOLE | {"state": 20 * 4}, 1: WHOLE | {"state": 20 * 4}}


def test_a_share_passes_with_and_without_padding() -> None:
    """39 elements over two ranks: 20 and 19, the second of which may keep one element of padding."""
    assert judged(ZERO, ZERO_ISSUES, kept=HALF).verdict is Verdict.PASS
    assert judged(ZERO, ZERO_ISSUES, kept=HALF | {1: WHOLE | {"state": 19 * 4}}).verdict is Verdict.PASS


def test_whole_state_on_a_rank_that_claims_a_share_fails() -> None:
    result = judged(ZERO, ZERO_ISSUES, kept={0: HALF[0], 1: WHOLE})
    check = failure(result)
    assert result.explanation[0] == "zero on by-hand: update 0: bytes of state differ first"
    assert (check.quantity, check.name, check.rank) == ("bytes", "state", 1)
    assert (check.expected, check.observed) == ("76 bytes (up to 80 with padding)", "156 bytes")
    assert check.detail == "claimed: state cut over 2 ranks, but the rank keeps all of it (156 bytes or more)"


@pytest.mark.parametrize("part", WHOLE)
def test_less_than_the_whole_of_an_unsharded_part_fails(part: str) -> None:
    check = failure(judged(DDP, DDP_ISSUES, kept={0: WHOLE, 1: WHOLE | {part: 38 * 4}}))
    assert (check.name, check.rank, check.detail) == (part, 1, f"claimed: {part} whole on every rank")


def test_a_promised_part_that_a_rank_does_not_show_fails() -> None:
    check = failure(judged(DDP, DDP_ISSUES, kept={0: WHOLE, 1: {"weights": 39 * 4, "gradients": 39 * 4}}))
    assert (check.name, check.rank, check.observed) == ("state", 1, "nothing: the rank did not show it")


def test_bytes_are_not_judged_where_they_are_not_promised() -> None:
    silent = dataclasses.replace(DDP, observes=MANDATORY)
    assert judged(silent, DDP_ISSUES, kept={0: {}}).verdict is Verdict.PASS
    assert failure(judged(DDP, DDP_ISSUES, kept={0: {}})).quantity == "bytes"


# ---------------------------------------------------------------------------------------- what users read


def test_the_explanation_can_be_read_by_a_stranger() -> None:
    once = dataclasses.replace(DDP, algorithm="all-reduce")
    *lines, command = judged(once, DDP_ISSUES).explanation
    assert command.startswith("  reproduce: python -m pytest --nproc 2 ") and "ledger" in command
    assert lines == [
        "ddp on by-hand: update 0: collectives of all_reduce over dp differ first",
        "  expected 39 elements of float32, observed 78 elements of float32",
        "  all_reduce payload per update and rank; declared algorithm: all-reduce; "
        "what the rank issued is algorithm all-reduce-per-microbatch",
        "  first seen on rank 0",
        "  1 more checks of this update did not pass; what follows from the first is not listed",
    ]


# ---------------------------------------------------------------------------------------- models that are split

DECODER = Model("gpt", width=8, depth=1, vocabulary=16, features=("bias",))
SPLIT = Case(
    "by-hand-split", DECODER, ((((8, 3), (2,)), ((5,), (6, 1))),), Layout(2, tp=2), accumulation=2
)  # two rows and one on data rank 0, one and two on the other
TENSOR = Strategy("tensor", axes=frozenset({"dp", "tp"}), algorithm="tp", observes=MANDATORY | {"bytes"})
TP, DP = {0: (0, 1), 1: (0, 1), 2: (2, 3), 3: (2, 3)}, {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
HELD = 16 * 8 // 2 + 8 * 8 + 4 * 8 + 4 * 64 // 2 + 8 // 2 * 2 + 8 + 2 * 128 // 2 + 16 // 2 + 8 + 2 * 8 + 16 * 8 // 2


def tensor_issues(rank: int, times: int = 1, group: dict[int, tuple[int, ...]] = TP) -> list[Collective]:
    """Of two micro-batches: the embedding, two blocks forward and backward, the head backward; three pieces of a loss."""
    activations = [Collective("all_reduce", group[rank], rows * 8 * 8, "float32", 0) for rows in (1, 2)]
    losses = [Collective("all_reduce", group[rank], rows * 8, "float32", 0) for rows in (1, 2)]
    gradient = Collective("all_reduce", DP[rank], HELD, "float32", 0)
    return [*activations * 6 * times, *losses * 3, gradient]


def judged_split(issued: dict[int, list[Collective]], held: int = HELD) -> Result:
    kept = {"weights": held * 4, "gradients": held * 4, "state": 0}
    shown = [
        Observation("bytes", name, rank, 0, None, Place(()), "int64", np.array(size))
        for rank in range(4)
        for name, size in kept.items()
    ]
    run = Run("ledger", "by.hand:Adapter", TENSOR, SPLIT)
    return judge_ledger_run(run, Record(4, "cpu", shown, issued))


def test_tensor_parallelism_passes_axis_by_axis() -> None:
    result = judged_split({rank: tensor_issues(rank) for rank in range(4)})
    assert result.verdict is Verdict.PASS, result.explanation
    names = [c.name for c in result.judgement.checks]
    assert names == ["all_reduce over tp", "all_reduce over dp", "weights", "gradients", "state"]


def test_a_group_of_the_right_size_and_the_wrong_ranks_is_named() -> None:
    check = failure(judged_split({rank: tensor_issues(rank, group=DP) for rank in range(4)}))
    assert (check.name, check.rank, check.observed) == ("all_reduce over tp", 0, "nothing")
    diagonal = {0: (0, 3), 1: (1, 2), 2: (1, 2), 3: (0, 3)}
    check = failure(judged_split({rank: tensor_issues(rank, group=diagonal) for rank in range(4)}))
    assert check.detail.endswith(
        "it is to go over tp (ranks 0, 1); the rank issued 1224 elements of float32 over ranks 0, 3"
    )


def test_one_rank_in_the_wrong_group_is_found_among_those_in_the_right_one() -> None:
    issued = {rank: tensor_issues(rank) for rank in range(3)} | {3: tensor_issues(3, group={3: (1, 3)})}
    assert failure(judged_split(issued)).rank == 3


def test_the_number_of_operations_is_judged_where_the_algorithm_says_it() -> None:
    halves = [dataclasses.replace(c, elements=c.elements // 2) for c in tensor_issues(0)[:12] for _ in range(2)]
    check = failure(
        judged_split({rank: tensor_issues(rank) for rank in (1, 2, 3)} | {0: halves + tensor_issues(0)[12:]})
    )
    assert check.expected == "1224 elements of float32 in 18 operations"
    assert check.observed == "1224 elements of float32 in 30 operations"


def test_buckets_of_gradients_are_not_counted() -> None:
    issued = {rank: tensor_issues(rank)[:-1] for rank in range(4)}
    for rank, found in issued.items():
        found += [Collective("all_reduce", DP[rank], n, "float32", 0) for n in (HELD - 100, 100)]
    assert judged_split(issued).verdict is Verdict.PASS


def test_a_rank_that_keeps_the_whole_model_fails() -> None:
    whole = sum(p.size for p in parameters(DECODER))
    check = failure(judged_split({rank: tensor_issues(rank) for rank in range(4)}, held=whole))
    assert (check.quantity, check.name) == ("bytes", "weights")
    assert check.detail.startswith("claimed: weights cut as dp2-tp2 says, but the rank keeps all of it")


PIPE = Layout(1, pp=4)


@pytest.mark.parametrize(
    ("operation", "group", "name"),
    [
        ("send", (1, 2), "pp"),
        ("all_reduce", (0, 1, 2, 3), "pp"),
        ("all_reduce", (0, 3), "pp ends"),
        ("all_reduce", (0, 2), "ranks 0, 2"),
    ],
)
def test_groups_are_named_by_the_axis_that_they_lie_on(operation: str, group: tuple[int, ...], name: str) -> None:
    assert axis_of(PIPE, group[0], operation, group) == name


def test_a_product_of_algorithms_is_declared_by_its_parts() -> None:
    assert Strategy("both", algorithm="cp-ring+tp+pipeline").algorithm == "cp-ring+tp+pipeline"
    with pytest.raises(ValueError, match="unknown 'all-reduce'"):
        Strategy("both", algorithm="tp+all-reduce")
