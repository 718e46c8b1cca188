"""The closed forms of the ledger agree with simulations of what they describe, and with each other."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivtests.cases.case import Model
from equivtests.cases.parameters import Parameter, parameters
from equivtests.reference import ledger
from equivtests.reference.ledger import EXPECTED, BytesPerParameter, Kept, LedgerInput, Payload

MODEL = tuple(parameters(Model("mlp", features=("bias", "frozen"))))  # (8, 5) frozen, (8,), (3, 8), (3,)
FLOAT32_ADAM = BytesPerParameter(4, 4, 8)


def given_model(**changes: Any) -> LedgerInput:
    return LedgerInput(**{"parameters": MODEL, "shard": 4, "microbatches": 3, **changes})


# ------------------------------------------------------------------------------------------------ rings


def simulate_ring(chunks: int, ranks: int, rounds: int) -> list[int]:
    """Chunks that each rank sent when every rank passes one chunk to its neighbour in every round."""
    sent = [0] * ranks
    for _ in range(rounds):
        for rank in range(ranks):
            sent[rank] += chunks // ranks
    return sent


@given(st.integers(1, 9), st.integers(0, 50))
def test_ring_all_reduce_is_what_its_rounds_move(ranks: int, chunk: int) -> None:
    """In each of its rounds a rank sends one of P equal chunks; an all-reduce is a reduce-scatter and an all-gather."""
    size = chunk * ranks
    rounds = ledger.ring_all_reduce_rounds(ranks)
    assert simulate_ring(size, ranks, rounds) == [ledger.ring_all_reduce_bytes(size, ranks)] * ranks
    assert simulate_ring(size, ranks, rounds // 2) == [ledger.ring_shift_bytes(size, ranks)] * ranks


def test_a_ring_of_a_size_that_does_not_divide_is_not_rounded() -> None:
    assert ledger.ring_all_reduce_bytes(10, 4) == 15
    assert ledger.ring_all_reduce_bytes(10, 3) == Fraction(40, 3)


def test_seconds_add_latency_and_transfer() -> None:
    assert ledger.ring_all_reduce_seconds(8_000_000, 4, latency=0.5, bandwidth=4e6) == 6 * 0.5 + 12e6 / 4e6
    assert ledger.ring_all_reduce_seconds(8_000_000, 1, latency=0.5, bandwidth=4e6) == 0.0


BAD_INPUT = [
    lambda: ledger.ring_all_reduce_bytes(-1, 4),
    lambda: ledger.ring_all_reduce_bytes(cast(Any, 1.5), 4),
    lambda: ledger.ring_all_reduce_bytes(8, 0),
    lambda: ledger.ring_all_reduce_bytes(8, cast(Any, 2.0)),
    lambda: ledger.ring_all_reduce_bytes(8, True),
    lambda: ledger.ring_all_reduce_rounds(0),
    lambda: ledger.ring_all_reduce_seconds(8, 2, latency=-1.0, bandwidth=1.0),
    lambda: ledger.ring_all_reduce_seconds(8, 2, latency=0.0, bandwidth=0.0),
    lambda: ledger.ring_shift_bytes(8, 0),
    lambda: ledger.direct_all_reduce_bytes(8, 0),
    lambda: ledger.state_bytes(cast(Any, "zero4"), 1, FLOAT32_ADAM, 1),
    lambda: ledger.state_bytes("zero1", 1, FLOAT32_ADAM, 0),
    lambda: ledger.state_bytes("zero1", -1, FLOAT32_ADAM, 1),
    lambda: ledger.effective_batch(0, 1, 1),
    lambda: ledger.devices(1, 0),
    lambda: ledger.token_weighted_mean([1.0], [1, 2]),
    lambda: ledger.token_weighted_mean([], []),
    lambda: ledger.token_weighted_mean([1.0], [-1]),
    lambda: ledger.token_weighted_mean([1.0], cast(Any, [0.5])),
    lambda: ledger.shard_shape((4, 6), 1, 4),
    lambda: LedgerInput(MODEL, shard=0),
    lambda: LedgerInput(MODEL, shard=2, microbatches=-1),
    lambda: LedgerInput(MODEL, shard=2, units=(frozenset({"head"}),)),
    lambda: LedgerInput(MODEL, shard=2, unused=frozenset({"head"})),
    lambda: ledger.persistent_bytes(LedgerInput(MODEL, 2), 2, frozenset(), FLOAT32_ADAM),
    lambda: ledger.persistent_bytes(LedgerInput(MODEL, 2), 0, frozenset({"optimizer"}), FLOAT32_ADAM),
]


@pytest.mark.parametrize("call", BAD_INPUT)
def test_bad_input_raises_value_error(call: Any) -> None:
    with pytest.raises(ValueError):
        call()


# ------------------------------------------------------------------------------------- samples and tokens


@given(st.lists(st.tuples(st.integers(-64, 64), st.integers(0, 9)), min_size=1, max_size=8))
def test_the_average_of_local_objectives_is_the_token_weighted_mean(ranks: list[tuple[int, int]]) -> None:
    """W · S_r / T, averaged over W ranks; nothing at all for an empty window."""
    sums: list[Any] = [Fraction(s) for s, _ in ranks]
    tokens = [t for _, t in ranks]
    mean, local = ledger.token_weighted_mean(sums, tokens), ledger.local_objectives(sums, tokens)
    if mean is None or local is None:
        assert sum(tokens) == 0 and mean is local
    else:
        assert sum(local) / len(local) == mean == sum(sums) / sum(tokens)


# --------------------------------------------------------------------------------------- cutting tensors


def local_sizes(shards: ledger.Shards) -> list[int]:
    return [sum(own.values()) for own in shards.by_rank]


PADDING: dict[ledger.Cut, tuple[int, list[int]]] = {
    "tensors": (20, [15, 5, 0, 0]),
    "first": (20, [20, 0, 0, 0]),
    "turns": (20, [15, 5, 0, 0]),
    "flat": (20, [5, 5, 5, 5]),
    "aligned": (24, [6, 6, 5, 3]),  # 15, one element of padding, 5, three to divide by four ranks
    "rows": (8 * 3 + 8, [8, 8, 4, 0]),  # chunks of two rows, and of two elements
    "each": (16 + 8, [6, 6, 5, 3]),  # chunks of four elements, and of two
}


@pytest.mark.parametrize("cut", PADDING)
def test_padding_rules(cut: ledger.Cut) -> None:
    """A (5, 3) matrix and a vector of 5 on four ranks, by hand."""
    shards = ledger.shards_of([Parameter("w", (5, 3)), Parameter("b", (5,))], 4, cut, align=4)
    assert (shards.full, local_sizes(shards)) == PADDING[cut]


shapes = st.lists(st.lists(st.integers(1, 7), min_size=1, max_size=3), min_size=1, max_size=5)


@given(shapes, st.integers(1, 5), st.sampled_from(ledger.Cut.__args__))
def test_every_element_lies_on_one_rank(drawn: list[list[int]], ranks: int, cut: ledger.Cut) -> None:
    tensors = [Parameter(str(i), tuple(shape)) for i, shape in enumerate(drawn)]
    shards = ledger.shards_of(tensors, ranks, cut, align=4)
    for tensor in tensors:
        assert sum(own.get(tensor.name, 0) for own in shards.by_rank) == tensor.size
    assert shards.full >= sum(local_sizes(shards)) and (cut in ledger.WHOLE_TENSORS or shards.full % ranks == 0)
    if cut != "aligned":
        assert ledger.shards_of(tensors, 1, cut).full == sum(p.size for p in tensors)


def test_whole_tensors_go_to_the_emptiest_rank() -> None:
    tensors = [Parameter(str(n), (n,)) for n in (3, 9, 4, 8, 2)]
    assert [[p.size for p in part] for part in ledger.partition(tensors, 2)] == [[9, 3, 2], [8, 4]]
    assert [[p.size for p in part] for part in ledger.by_turns(tensors, 2)] == [[3, 4, 2], [9, 8]]


# ----------------------------------------------------------------------------------- expected collectives


def elements(expected: ledger.Expected) -> dict[str, int]:
    """Elements by operation."""
    return {operation: p.elements for (operation, _), p in expected.items()}


EXPECTED_OF_MODEL: dict[str, tuple[ledger.Cut, dict[str, int]]] = {
    "all-reduce": ("tensors", {"all_reduce": 35}),
    # chunks of 9, 9, 9 and 8 elements; the first rank sends numbers 0, 3, 2, then 1, 0, 3
    "ring": ("tensors", {"send": 26 + 26, "recv": 26 + 26}),
    # the first rank serves 8 elements: it gives away 27, and its 8 to three workers
    "parameter-server": ("turns", {"send": 27 + 3 * 8, "recv": 27 + 3 * 8}),
    "all-reduce-per-microbatch": ("tensors", {"all_reduce": 3 * 35}),
    "zero1-reduce-scatter": ("flat", {"reduce_scatter": 36, "all_gather": 36}),
    "zero1-all-reduce": ("tensors", {"all_reduce": 35, "broadcast": 35}),
    "zero2": ("flat", {"reduce_scatter": 3 * 36, "all_gather": 36}),
    "zero3": ("flat", {"reduce_scatter": 3 * 36, "all_gather": 3 * 2 * 76}),
    # all of it is the root's: gathered once
    "fsdp-full": ("rows", {"reduce_scatter": 3 * (36 + 8), "all_gather": 3 * (48 + 36)}),
    "fsdp-grad-op": ("aligned", {"reduce_scatter": 3 * 76, "all_gather": 3 * 76}),
}


@pytest.mark.parametrize("algorithm", EXPECTED)
def test_payload_of_three_microbatches_on_four_ranks(algorithm: str) -> None:
    """Counted by hand for a model with a frozen matrix and a bias that four ranks do not divide."""
    cut, counted = EXPECTED_OF_MODEL[algorithm]
    expected = EXPECTED[algorithm](given_model(reduce="bfloat16", cut=cut))
    assert elements(expected) == counted
    reduced = {"all_reduce", "reduce_scatter", "send", "recv"}
    assert all(p.dtype == ("bfloat16" if o in reduced else "float32") for (o, _), p in expected.items())


@pytest.mark.parametrize("algorithm", ["all-reduce", "zero1-reduce-scatter", "zero1-all-reduce"])
def test_synchronization_once_per_update_does_not_depend_on_accumulation(algorithm: str) -> None:
    assert EXPECTED[algorithm](given_model(microbatches=1)) == EXPECTED[algorithm](given_model(microbatches=8))


def test_groups_of_replicated_shards() -> None:
    """Four ranks as two copies of two shards: the ring of each operation is its own group."""
    expected = EXPECTED["zero3"](given_model(cut="flat", shard=2, replicate=2, microbatches=1))
    assert expected == {
        ("reduce_scatter", "shard"): Payload(36, "float32", 2),
        ("all_reduce", "replicate"): Payload(18, "float32", 2),
        ("all_gather", "shard"): Payload(2 * 76, "float32", 2),
    }


INNER = frozenset({"layers.1.weight", "layers.1.bias"})  # 24 and 3 elements; the root keeps 40 (frozen) and 8


@pytest.mark.parametrize(("cut", "twice", "once"), [("aligned", 28, 48), ("rows", 32 + 4, 48)])
def test_parameters_of_the_root_are_gathered_once(cut: ledger.Cut, twice: int, once: int) -> None:
    """FSDP does not reshard the root module's own parameters after the forward pass. Rows: 3 of 8 become 4 of 8."""
    given = given_model(cut=cut, units=(INNER,), microbatches=1)
    assert elements(EXPECTED["fsdp-full"](given))["all_gather"] == 2 * twice + once
    alone = given_model(cut=cut)
    assert EXPECTED["fsdp-full"](alone) == EXPECTED["fsdp-grad-op"](alone)


def test_parameters_without_gradient_are_gathered_and_not_reduced_by_fully_shard() -> None:
    """DDP and ZeRO reduce zeros for them."""
    unused = frozenset({"layers.1.weight"})
    for algorithm in ("fsdp-full", "fsdp-grad-op"):
        with_all, without = (given_model(cut="rows", microbatches=1, unused=names) for names in (frozenset(), unused))
        assert elements(EXPECTED[algorithm](without))["reduce_scatter"] == 8 + 4
        gathered = ("all_gather", "shard")
        assert EXPECTED[algorithm](without)[gathered] == EXPECTED[algorithm](with_all)[gathered]
    for algorithm in ("all-reduce", "zero1-reduce-scatter", "zero2", "zero3"):
        assert EXPECTED[algorithm](given_model(unused=unused)) == EXPECTED[algorithm](given_model())


def test_flat_units_with_a_trained_parameter_are_reduced_whole() -> None:
    """FullyShardedDataParallel reduces one vector per unit, frozen parameters included, and no unit that is frozen."""
    frozen, rest = frozenset({"layers.0.weight"}), frozenset({"layers.0.bias"})
    mixed = given_model(cut="aligned", units=(INNER,), microbatches=1)
    apart = given_model(cut="aligned", units=(INNER, frozen, rest), microbatches=1)
    assert elements(EXPECTED["fsdp-full"](mixed))["reduce_scatter"] == 28 + 48
    assert elements(EXPECTED["fsdp-full"](apart))["reduce_scatter"] == 28 + 8


# what fully_shard of torch 2.13 was seen to issue, per micro-batch on four ranks, for this model, both layers wrapped
SEEN = {
    "fsdp-full": {"reduce_scatter": 36 + 8, "all_gather": 2 * (48 + 36)},
    "fsdp-grad-op": {"reduce_scatter": 36 + 8, "all_gather": 48 + 36},
}


@pytest.mark.parametrize("algorithm", SEEN)
def test_padding_of_rows_is_that_of_fully_shard(algorithm: str) -> None:
    """nn.Linear(5, 8) with frozen weight, nn.Linear(8, 3): the three rows of the second are padded to four."""
    everything = frozenset(p.name for p in MODEL)
    expected = EXPECTED[algorithm](given_model(cut="rows", units=(everything,), microbatches=1))
    assert elements(expected) == SEEN[algorithm]


def test_one_rank_sends_nothing() -> None:
    for algorithm in EXPECTED.values():
        assert ledger.sent_bytes(algorithm(given_model(shard=1))) == 0


def test_narrow_gradients_send_fewer_bytes() -> None:
    wide, narrow = (EXPECTED["all-reduce"](given_model(reduce=dtype)) for dtype in ("float32", "bfloat16"))
    assert ledger.sent_bytes(wide) == 2 * ledger.sent_bytes(narrow) == Fraction(2 * 3, 4) * 35 * 4


# ------------------------------------------------------------------------------------------------- memory


def test_persistent_bytes_of_each_part() -> None:
    """Frozen parameters have no gradient and no state; the last of four ranks lacks the padded element."""
    cut = frozenset({"gradients", "state"})
    given = given_model(cut="flat")
    first, last = (ledger.persistent_bytes(given, rank, cut, FLOAT32_ADAM) for rank in (0, 3))
    assert first["gradients"] == Kept(least=9 * 4, most=9 * 4, whole=35 * 4)
    assert first["state"] == Kept(least=9 * 8, most=9 * 8, whole=35 * 8)
    assert last["gradients"] == Kept(least=8 * 4, most=9 * 4, whole=35 * 4)
    assert last["state"] == Kept(least=8 * 8, most=9 * 8, whole=35 * 8)
    assert first["weights"] == last["weights"] == Kept(least=75 * 4, most=76 * 4, whole=75 * 4)


STAGES: dict[ledger.Stage, frozenset[str]] = {
    "replicated": frozenset(),
    "zero1": frozenset({"state"}),
    "zero2": frozenset({"state", "gradients"}),
    "zero3": frozenset({"state", "gradients", "weights"}),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("cut", ["flat", "aligned", "each", "rows"])
def test_layout_and_closed_form_agree_where_sizes_divide(stage: ledger.Stage, cut: ledger.Cut) -> None:
    """Two ways to the same bytes: rank by rank from the layout, and N · (whole + sharded / D)."""
    layout = LedgerInput((Parameter("a", (8, 3)), Parameter("b", (4,))), shard=4, cut=cut)
    for rank in range(4):
        kept = ledger.persistent_bytes(layout, rank, STAGES[stage], FLOAT32_ADAM)
        assert sum(part.least for part in kept.values()) == ledger.state_bytes(stage, 28, FLOAT32_ADAM, 4)
        assert all(part.least == part.most for part in kept.values())


def test_replicas_keep_the_same_shards() -> None:
    layout, cut = given_model(shard=2, replicate=2, cut="rows"), STAGES["zero3"]
    kept = [ledger.persistent_bytes(layout, rank, cut, FLOAT32_ADAM) for rank in range(4)]
    assert kept[:2] == kept[2:] and kept[0] != kept[1]
