"""What models that are split over ranks communicate and keep: numbers by hand, and what must add up on any layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from equivtests.cases.case import Case, Model, Windows
from equivtests.cases.layout import layout_of
from equivtests.cases.parameters import parameters
from equivtests.reference import ledger
from equivtests.reference.ledger import BytesPerParameter, Payload
from equivtests.reference.shares import Share, size, span, zigzag_size
from equivtests.reference.split_ledger import SPLIT_EXPECTED, scheme_of, split_bytes, split_expected

# Rows of 8 positions: two and one on the first data rank, one and three on the second.
WINDOWS: Windows = ((((4, 3), (2,)), ((3,), (4, 1, 1))),)
GPT = Model("gpt", width=8, heads=4, depth=2, vocabulary=16, features=("bias",))  # heads of two features
MOE = Model("moe", width=8, depth=1, vocabulary=16, experts=4, top_k=2)


def share(algorithm: str, label: str, rank: int = 0, model: Model = GPT, **options: Any) -> Share:
    layout = layout_of(label)
    assert layout is not None
    lengths = options.pop("lengths", ())
    case = Case("by-hand", model, tuple(w[: layout.dp] for w in WINDOWS), layout, accumulation=2, lengths=lengths)
    return Share(case, rank, 0, scheme_of(algorithm), **options)


def moved(algorithm: str, label: str, rank: int = 0, **options: Any) -> dict[str, tuple[int, int | None]]:
    """(elements, operations) by operation and axes, without the gradients that are summed over data ranks."""
    expected = split_expected(algorithm, share(algorithm, label, rank, **options))
    return {" ".join(t): (p.elements, p.count) for t, p in expected.items() if t[1] not in ("dp cp", "edp")}


# ---------------------------------------------------------------------------------------------- tensor ranks


def test_a_layer_of_tensor_ranks_has_four_all_reduces_of_tokens_times_width() -> None:
    """The closed form of a whole transformer (`tensor_parallel_bytes`) and the list of its collectives agree."""
    shallow, deep = (
        split_expected("tp", share("tp", "tp4", model=dataclasses.replace(GPT, depth=depth))) for depth in (1, 3)
    )
    tokens = (2 + 1) * 8
    assert deep["all_reduce", "tp"].elements - shallow["all_reduce", "tp"].elements == 2 * 4 * tokens * 8
    difference = ledger.sent_bytes(deep) - ledger.sent_bytes(shallow)
    assert difference == ledger.tensor_parallel_bytes(2, tokens * 8 * 4, 4, all_reduces=4)


def test_tensor_ranks_sum_what_their_vocabularies_and_blocks_give() -> None:
    """Per token: the embedding, four in each layer, the head backward (8 elements each); three pieces of the loss."""
    assert moved("tp", "tp2") == {"all_reduce tp": (24 * (8 * (1 + 2 * 4 + 1) + 3), 2 * (1 + 2 * 4 + 1 + 3))}
    assert moved("tp", "dp2-tp2", rank=3)["all_reduce tp"][0] == 32 * 83, "the other data rank has 32 tokens"


def test_losses_have_their_own_pieces() -> None:
    """Smoothing: one more per head. A second head: entered once more, with a loss of its own. A z-loss: two."""
    loss = dataclasses.replace(GPT, features=("bias", "extra_head", "smoothing", "z_loss"))
    assert moved("tp", "tp2", model=loss) == {"all_reduce tp": (24 * (8 * 11 + 2 * 4 + 2), 2 * (11 + 2 * 4 + 2))}


def test_heads_that_ranks_share_have_parts_of_gradients() -> None:
    """Norms over a head's two features, and one head of keys and values (a matrix and a bias more for the values)."""
    shared = dataclasses.replace(GPT, depth=1, features=("bias", "qk_norm", "shared_kv"))
    elements, count = moved("tp", "tp2", model=shared)["all_reduce tp"]
    assert elements == 24 * (8 * 6 + 3) + 2 + 2 + 2 * 8 + 2 * 8 + 2
    assert count is None, "in as many buckets as one likes"


def test_sequence_parallel_ranks_gather_where_the_others_have_the_whole() -> None:
    """Per token: gathered entering and leaving each block, entering the head, behind the embedding; sums as ever."""
    norms = 5 * 2 * 8 + 4 * 8  # five norms with biases; biases behind the row-parallel layers
    assert moved("tp-sequence", "tp2") == {
        "all_reduce tp": (24 * 83 + norms, None),
        "all_gather tp": (24 * 8 * (1 + 2 * 4 + 1), 2 * 10),
    }
    padded = moved("tp-sequence", "tp2", lengths=(7,))["all_gather tp"]
    assert padded == moved("tp-sequence", "tp2")["all_gather tp"], "seven positions are gathered as twice four"


MLP = Model("mlp", width=6, depth=3, inputs=5, outputs=4, features=("bias",))


@pytest.mark.parametrize(
    ("algorithm", "per_token"),
    [
        # columns, rows, columns: forward behind the rows, backward before the last columns, whose outputs are gathered
        ("tp", {"all_reduce tp": 6 + 6, "all_gather tp": 4}),
        # each gathered forward (7 padded to 8), summed backward but for the first, which is fed data
        ("tp-column", {"all_reduce tp": 6 + 6, "all_gather tp": 6 + 6 + 4}),
        ("tp-row", {"all_reduce tp": 6 + 6 + 4, "all_gather tp": 6 + 6}),
    ],
)
def test_stacks_of_linear_layers(algorithm: str, per_token: dict[str, int]) -> None:
    found = moved(algorithm, "tp2", model=MLP)
    assert {travel: elements for travel, (elements, _) in found.items()} == {t: 24 * n for t, n in per_token.items()}


# --------------------------------------------------------------------------------------------- context ranks


def test_gathered_keys() -> None:
    """Per layer: keys and values of all 24 positions of rows forward, their gradients backward."""
    both = {"all_gather cp": (2 * 2 * 24 * 8, 2 * 2 * 2), "all_reduce cp": (2 * 2 * 24 * 8, 2 * 2 * 2)}
    assert moved("cp-gather", "cp4") == both
    odd = moved("cp-gather", "cp4", lengths=(5,))
    assert odd["all_gather cp"][0] == 2 * 2 * 3 * 8 * 8, "parts of two and one positions are gathered as four times two"
    assert odd["all_reduce cp"][0] == 2 * 2 * 3 * 5 * 8


def test_keys_on_a_ring() -> None:
    """Per layer and row: three hops of keys and values forward; four with their gradients backward, the last one home."""
    hop = 2 * 3 * 8  # two positions of three rows
    both = (2 * (3 * 2 * hop + 4 * 4 * hop), 2 * 2 * (3 + 4))
    assert moved("cp-ring", "cp4") == {"send cp": both, "recv cp": both}


def test_exchanged_heads() -> None:
    """Per layer four times from positions to heads (two positions, four heads) and back (eight positions, one head)."""
    assert moved("cp-ulysses", "cp4") == {"all_to_all cp": (2 * 4 * 3 * (2 * 8 + 8 * 2), 2 * 2 * 4 * 2)}


@given(st.integers(0, 40), st.integers(1, 6))
def test_parts_of_a_sequence_are_the_whole(length: int, ranks: int) -> None:
    for part in (size, zigzag_size):
        parts = [part(length, ranks, rank) for rank in range(ranks)]
        assert sum(parts) == length
        assert max(parts) - min(parts) <= (1 if part is size else 2)
    assert [span(length, ranks, r)[1] for r in range(ranks)] == [span(length, ranks, r)[0] for r in range(1, ranks)] + [
        length
    ]


# ---------------------------------------------------------------------------------------------- expert ranks

ROUTED = {"layers.0.moe": np.array([[10, 20, 0, 18], [3, 30, 31, 0]])}  # tokens from each data rank to each expert


def test_dispatched_tokens() -> None:
    """Rank 0 sends its 48 choices and takes those of both ranks for experts 0 and 1; there and back, twice."""
    assert moved("ep", "dp2-ep2", model=MOE, routed=ROUTED) == {"all_to_all ep": (2 * (48 + 63) * 8, None)}
    other = moved("ep", "dp2-ep2", rank=1, model=MOE, routed=ROUTED)
    assert other == {"all_to_all ep": (2 * (64 + 49) * 8, None)}


def test_gathered_tokens() -> None:
    """Micro-batches of 16 and 8, of 8 and 24 tokens: 8 features and two factors in, 8 features out."""
    assert moved("ep-gather", "dp2-ep2", model=MOE) == {
        "all_gather ep": (2 * (16 + 24) * (8 + 2 + 8), 6),
        "all_reduce ep": ((24 + 32) * (8 + 2 + 8), 6),
    }


def test_experts_are_reduced_over_the_ranks_that_hold_the_same() -> None:
    expected = split_expected("ep", share("ep", "dp2-ep2", model=MOE))
    experts = 2 * (16 * 8 + 8 * 16)
    others = sum(p.size for p in parameters(MOE)) - 2 * experts
    assert expected["all_reduce", "dp cp"] == Payload(others, "float32", 2)
    assert ("all_reduce", "edp") not in expected, "each expert lies on one rank"


# ------------------------------------------------------------------------------------------------- pipelines


def test_stages_exchange_activations_and_their_gradients() -> None:
    """24 tokens of 8 features, in two messages each way, at one border of two stages."""
    assert moved("pipeline", "pp2") == {"send pp": (24 * 8, 2), "recv pp": (24 * 8, 2)}


def test_what_a_chain_of_stages_sends_is_its_closed_form() -> None:
    four = dataclasses.replace(GPT, depth=4)
    sent = [split_expected("pipeline", share("pipeline", "pp4", rank, model=four)) for rank in range(4)]
    assert sum(ledger.sent_bytes(expected) for expected in sent) == ledger.pipeline_bytes(24 * 8 * 4, stages=4)


def test_stages_on_one_rank_exchange_nothing() -> None:
    """Two stages per rank in a v: the two in the middle lie on the last rank, which has two borders instead of three."""
    deep = dataclasses.replace(GPT, depth=4)
    loop = moved("pipeline", "pp2v2", rank=1, model=deep, schedule="interleaved-1f1b")
    turned = moved("pipeline", "pp2v2", rank=1, model=deep, schedule="zbv")
    assert (loop["send pp"][1], turned["send pp"][1]) == (3 * 2, 2 * 2)


def test_a_tied_embedding_is_summed_over_the_ends() -> None:
    tied = dataclasses.replace(GPT, depth=4, features=("tied",))
    ends = [moved("pipeline", "pp4", rank, model=tied).get("all_reduce pp ends") for rank in range(4)]
    assert ends == [(16 * 8, None), None, None, (16 * 8, None)]
    assert "all_reduce pp ends" not in moved("pipeline", "pp2v2", model=tied, schedule="zbv"), "both ends on one rank"


def test_filled_up_micro_batches_are_as_large_as_the_largest() -> None:
    """Two rows of eight tokens, twice."""
    assert moved("pipeline-filled", "pp2", lengths=(4, 8)) == {"send pp": (2 * 16 * 8, 2), "recv pp": (2 * 16 * 8, 2)}


# -------------------------------------------------------------------------------------------- any layout


def test_products_move_the_sum_of_their_axes() -> None:
    found = moved("tp+pipeline", "tp2-pp2")
    assert found["send pp"] == moved("pipeline", "pp2")["send pp"]
    whole, first, last = (moved("tp", "tp2")["all_reduce tp"][0], *(
        moved("tp+pipeline", "tp2-pp2", rank)["all_reduce tp"][0] for rank in (0, 3)
    ))  # fmt: skip
    assert first + last == whole, "every layer is somewhere"
    assert moved("tp-sequence+pipeline", "tp2-pp2")["send pp"][0] == found["send pp"][0] // 2


@pytest.mark.parametrize("algorithm", SPLIT_EXPECTED)
def test_one_rank_moves_nothing(algorithm: str) -> None:
    model = MOE if algorithm.startswith("ep") else GPT
    assert split_expected(algorithm, share(algorithm, "w1", model=model, routed=ROUTED)) == {}


EVERYWHERE = [
    ("tp", "tp2", GPT),
    ("tp", "tp2", dataclasses.replace(GPT, heads=2, vocabulary=13, features=("bias", "gated"))),
    ("tp-row", "tp2", MLP),
    ("tp-column", "tp2", MLP),
    ("pipeline", "pp2", GPT),
    ("pipeline", "pp2", MLP),
    ("ep", "dp2-ep2", MOE),
    ("tp+pipeline", "tp2-pp2", GPT),
]


@pytest.mark.parametrize(("algorithm", "label", "model"), EVERYWHERE)
def test_every_element_is_somewhere(algorithm: str, label: str, model: Model) -> None:
    """The parts of a parameter on all ranks are it, or whole copies of it on some."""
    layout = layout_of(label)
    assert layout is not None
    held = [share(algorithm, label, rank, model=model, routed=ROUTED).held for rank in range(layout.world)]
    for parameter in parameters(model):
        parts = [own[parameter.name] for own in held if parameter.name in own]
        assert sum(parts) == parameter.size or set(parts) == {parameter.size}


def test_kept_bytes_are_those_of_what_is_held() -> None:
    """Rank 0 of two tensor ranks: half of each matrix and of the biases of columns; norms and other biases whole."""
    layer = (4 * 64 + 2 * 128) // 2 + (8 + 8 + 16) // 2 + 8 + 8 + 2 * 16
    held = 2 * 16 * 8 // 2 + 8 * 8 + 2 * layer + 16
    kept = split_bytes(share("tp", "tp2"), BytesPerParameter(4, 4, 8))
    assert {part: (k.least, k.most) for part, k in kept.items()} == {
        "weights": (4 * held,) * 2,
        "gradients": (4 * held,) * 2,
        "state": (8 * held,) * 2,
    }
    assert kept["weights"].whole == 4 * sum(p.size for p in parameters(GPT))
