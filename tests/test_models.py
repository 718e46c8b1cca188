"""What the model families mean, and the seams where a split model is cut: stages, sequence, vocabulary, dropout, experts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import cases, decoders
from torch import Tensor, nn

from equivtests.cases.case import DOUBLE, Case, Layout, Model, Precision, Semantics
from equivtests.cases.windows import MicroBatch, decode_ids, sample, window_of
from equivtests.errors import CaseError
from equivtests.models.build import build
from equivtests.models.gpt import GPT, Attention
from equivtests.models.moe import DROPPED, MoE
from equivtests.models.parts import Dropout, DropoutStream
from equivtests.models.sequence import WholeSequence
from equivtests.models.staged import Staged
from equivtests.models.vocabulary import WholeVocabulary
from equivtests.reference import update as one
from equivtests.reference.expectation import canonical_weights, expect
from equivtests.reference.rows import rows_of

PLAIN = Semantics()
PACKED = Model("gpt", depth=2, features=("packed",))
EXPERTS = Model("moe", experts=4, top_k=2, capacity=3, features=("balance",))
STAGED = [
    Model("chain", depth=3),
    Model("mlp", depth=3, features=("bias", "dropout")),
    Model("mlp", features=("pairs",)),
    Model("gpt", depth=3, features=("dropout", "packed", "z_loss")),
    Model("moe", depth=3, experts=3, features=("balance",)),
]


def single(model: Model, *counts: int, precision: Precision = DOUBLE, **rest: Any) -> Case:
    """One window, one rank, one micro-batch of rows with these numbers of valid tokens."""
    return Case("single", model, (((counts or (5, 2, 0),),),), Layout(1), precision=precision, **rest)


def fed(case: Case) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(inputs, targets, valid, ids) of the only micro-batch."""
    (micro,) = window_of(case, 0, 0).microbatches
    return tensors(micro)


def tensors(micro: MicroBatch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs, targets, valid, ids = (torch.from_numpy(a) for a in (micro.inputs, micro.targets, micro.valid, micro.ids))
    return inputs, targets, valid, ids


def decoder(case: Case) -> GPT:
    module, _ = build(case)
    assert isinstance(module, GPT)
    return module


def token_losses(module: GPT, inputs: Tensor, targets: Tensor) -> Tensor:
    """The loss of every token, (N, L), by making one after the other the only valid one."""
    ids = torch.zeros(len(inputs), dtype=torch.int64)
    found = torch.zeros(targets.shape, dtype=torch.float64)
    for row, place in np.ndindex(*targets.shape):
        valid = torch.zeros(targets.shape, dtype=torch.bool)
        valid[row, place] = True
        found[row, place] = module(inputs, targets, valid, ids, False)["main"].detach()
    return found


# ------------------------------------------------------------------------------------------------ stages


@pytest.mark.parametrize("model", STAGED, ids=lambda m: f"{m.family}-{'-'.join(m.features)}")
def test_stages_on_different_devices_make_the_whole_model(model: Model) -> None:
    """Two copies, each without the layers of the other: begin and layer 0 on one, the others and the end on the other."""
    case = single(model)
    inputs, targets, valid, ids = fed(case)
    first, second, whole = (build(case)[0] for _ in range(3))
    assert isinstance(first, Staged) and isinstance(second, Staged)
    for module, gone in ((first, range(1, model.depth)), (second, range(1))):
        for i in gone:
            drop(module, i)
    x = first.layer(0, first.begin(inputs, ids), inputs)
    for i in range(1, second.depth):
        x = second.layer(i, x, inputs)
    terms, expected = second.end(x, targets, valid, False), whole(inputs, targets, valid, ids, False)
    assert set(terms) == set(expected) and torch.equal(terms["main"], expected["main"])
    if "balance" in terms:  # every stage holds that of its own layers
        assert isinstance(first, GPT)
        parts = terms["balance"] + first.balance(x)
        assert float(parts.detach()) == pytest.approx(float(expected["balance"].detach()), rel=1e-14)


def drop(module: Staged, i: int) -> None:
    """A layer whose values would show."""
    held = getattr(module, module.stack)
    held[i] = nn.Parameter(torch.full((1,), torch.nan)) if module.stack == "factors" else nn.Identity()


@pytest.mark.parametrize("model", STAGED, ids=lambda m: f"{m.family}-{'-'.join(m.features)}")
def test_the_stack_is_the_prefix_of_canonical_names(model: Model) -> None:
    module, _ = build(single(model))
    assert isinstance(module, Staged) and module.depth == model.depth
    prefixes = {".".join(n.split(".")[:2]) for n, _ in module.named_parameters() if n.startswith(f"{module.stack}.")}
    assert prefixes == {f"{module.stack}.{i}" for i in range(model.depth)}


# ---------------------------------------------------------------------------------------- packed sequences


def test_documents_and_positions_by_hand() -> None:
    """Token 0 is the last of its document, also at the first place, at the last, and twice in a row."""
    inputs = torch.tensor([[3, 5, 0, 7, 0, 0, 2], [0, 4, 4, 4, 4, 4, 0]])
    sequence = WholeSequence(packed=True)
    documents = sequence.documents(inputs)
    assert documents is not None
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1]]
    assert sequence.positions(inputs).tolist() == [[0, 1, 2, 0, 1, 0, 0], [0, 0, 1, 2, 3, 4, 5]]


def test_a_row_that_is_not_packed_is_one_document() -> None:
    inputs = torch.tensor([[3, 0, 0, 7]])
    assert WholeSequence().documents(inputs) is None
    assert WholeSequence().positions(inputs).tolist() == [[0, 1, 2, 3]]


def test_a_packed_row_gives_the_losses_of_its_documents_alone() -> None:
    module = decoder(single(PACKED))
    rows = [[3, 5, 6, 0], [7, 0], [1, 2, 9, 11]]
    inputs, targets = (torch.tensor([sum(part, [])]) for part in (rows, [[t + 1 for t in row] for row in rows]))
    whole = token_losses(module, inputs, targets)[0]
    alone = [token_losses(module, torch.tensor([row]), torch.tensor([row]) + 1)[0] for row in rows]
    assert torch.allclose(whole, torch.cat(alone), rtol=1e-12, atol=0)


@pytest.mark.parametrize("packed", [True, False])
def test_only_packed_rows_hide_earlier_documents(packed: bool) -> None:
    """Another first document: nothing changes in the second; without packing, everything does."""
    module = decoder(single(PACKED if packed else Model("gpt", depth=2)))
    inputs = torch.tensor([[3, 5, 0, 7, 8, 9]])
    other = torch.tensor([[6, 4, 0, 7, 8, 9]])
    a, b = (token_losses(module, x, torch.ones_like(x)) for x in (inputs, other))
    assert not torch.equal(a[:, :3], b[:, :3])
    assert torch.equal(a[:, 3:], b[:, 3:]) == packed


@given(st.data(), st.integers(0, 9), st.integers(0, 168))
def test_a_packed_sample_has_several_documents_and_still_its_id(data: st.DataObject, seed: int, number: int) -> None:
    model = data.draw(decoders("gpt", {"packed"}))
    inputs, targets = sample(model, seed, number)
    assert 0 in inputs[2:-1] and np.array_equal(inputs[1:], targets[:-1])
    assert decode_ids(model, inputs[None]).tolist() == [number]


# ------------------------------------------------------------------------------------------ shared heads


def test_grouped_heads_are_heads_with_equal_keys_and_values() -> None:
    """Two key/value heads for four query heads: the same as four, the first two equal and the last two equal."""
    grouped = single(Model("gpt", width=16, heads=4, kv_heads=2, features=("bias", "qk_norm")))
    repeated = decoder(grouped.replace(model=Model("gpt", width=16, heads=4, features=("bias", "qk_norm"))))
    module = decoder(grouped)
    weights = dict(module.named_parameters())
    with torch.no_grad():
        for name, parameter in repeated.named_parameters():
            value = weights[name]
            if value.shape != parameter.shape:
                value = value.unflatten(0, (2, -1)).repeat_interleave(2, dim=0).flatten(0, 1)
            parameter.copy_(value)
    inputs, targets, valid, ids = fed(grouped)
    a, b = (m(inputs, targets, valid, ids, False)["main"] for m in (module, repeated))
    assert float(a.detach()) == pytest.approx(float(b.detach()), rel=1e-13)


@pytest.mark.parametrize(("heads", "kv", "expected"), [(4, 4, [0, 1, 2, 3]), (4, 2, [0, 0, 1, 1]), (2, 1, [0, 0])])
def test_which_head_of_keys_a_query_head_uses(heads: int, kv: int, expected: list[int]) -> None:
    assert Attention(Model("gpt", heads=heads, kv_heads=kv), WholeSequence()).kv_of == expected


def test_a_rank_with_one_query_head_takes_the_head_of_keys_that_it_is_told() -> None:
    """Query head 2 of 4 alone, with both key/value heads here: the part of the whole that this head adds."""
    model = Model("gpt", width=16, heads=4, kv_heads=2)
    whole, part = (decoder(single(model)).layers[0].attention for _ in range(2))
    assert isinstance(whole, Attention) and isinstance(part, Attention)
    x = torch.linspace(-1, 1, 2 * 8 * 16, dtype=torch.float64).reshape(2, 8, 16).sin()
    tokens = torch.ones(2, 8, dtype=torch.int64)
    with torch.no_grad():
        mine = slice(8, 12)
        part.q.weight = nn.Parameter(part.q.weight[mine])
        part.o.weight = nn.Parameter(part.o.weight[:, mine])
        part.kv_of = [1]
        others = torch.cat([whole.o.weight[:, :8], whole.o.weight[:, 12:]], dim=1)
        whole.o.weight[:, mine] = 0
        without = whole(x, tokens)
        whole.o.weight.copy_(torch.cat([others[:, :8], part.o.weight, others[:, 8:]], dim=1))
        assert torch.allclose(whole(x, tokens) - without, part(x, tokens), rtol=1e-12, atol=1e-14)


# ------------------------------------------------------------------------------------------- vocabulary


def test_smoothing_by_its_formula() -> None:
    """(1 - a) times the loss of the target, a times the mean of -log p over the vocabulary; a = 1/8."""
    logits = torch.tensor([[[1.0, -2.0, 0.5], [0.0, 3.0, 1.0]]], dtype=torch.float64)
    targets = torch.tensor([[2, 1]])
    minus_log_p = -np.log(np.exp(logits.numpy()) / np.exp(logits.numpy()).sum(-1, keepdims=True))[0]
    expected = [7 / 8 * minus_log_p[i, t] + minus_log_p[i].mean() / 8 for i, t in enumerate((2, 1))]
    assert WholeVocabulary(0.125).losses(logits, targets)[0].tolist() == pytest.approx(expected, rel=1e-14)


class Counted(WholeVocabulary):
    """Losses that say how they were asked for."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return torch.full(targets.shape, 2.0)

    def log_partition(self, logits: Tensor) -> Tensor:
        return torch.full(logits.shape[:2], 3.0)


def test_every_loss_over_the_vocabulary_goes_through_one_object() -> None:
    case = single(Model("gpt", features=("extra_head", "smoothing", "z_loss")), 5, 2)
    module = decoder(case)
    module.vocabulary = Counted()
    assert {n: float(t) for n, t in module(*fed(case), False).items()} == {"main": 14, "extra": 14, "z": 63}


# --------------------------------------------------------------------------------- sequence and dropout


class Noted(WholeSequence):
    """Keeps the shapes of what it was asked to mix."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, ...]] = []

    def attention(self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        self.seen += [tuple(t.shape) for t in (q, k, v, inputs)]
        return super().attention(q, k, v, inputs)


def test_every_attention_asks_the_same_sequence() -> None:
    case = single(Model("gpt", depth=2, heads=4, kv_heads=2))
    module, noted = decoder(case), Noted()
    module.use_sequence(noted)
    module(*fed(case), False)
    assert noted.seen == [(3, 4, 8, 2), (3, 4, 8, 2), (3, 4, 8, 2), (3, 8)] * 2


def test_what_enters_the_layers_is_spread_before_dropout() -> None:
    """Half of the positions here: the layers get them, dropped out as in the whole sequence."""
    case = single(Model("gpt", features=("dropout",)))
    inputs, _, _, ids = fed(case)
    whole, half = decoder(case), decoder(case)
    assert half.dropout is not None
    half.spread = lambda x: x[:, 4:]
    half.dropout.rows = lambda n: (2 * n, slice(n, None))
    assert torch.equal(half.begin(inputs, ids), whole.begin(inputs, ids)[:, 4:])


def test_dropout_tells_what_it_keeps() -> None:
    dropout, seen = Dropout("site", DropoutStream(0)), dict[str, Tensor]()
    dropout.watch = seen.__setitem__
    x = torch.ones(2, 8, 4, dtype=torch.float64)
    kept = dropout(x, torch.tensor([4, 9])) > 0
    assert torch.equal(seen["site"], kept) and 0 < kept.sum() < kept.numel()


def test_scattered_positions_are_dropped_out_as_in_the_whole() -> None:
    """As where a rank holds the first and the last part of a sequence."""
    dropout, here = Dropout("site", DropoutStream(0)), torch.tensor([0, 1, 6, 7])
    x, ids = torch.linspace(1, 2, 64, dtype=torch.float64).reshape(2, 8, 4), torch.tensor([4, 9])
    whole = dropout(x, ids)
    dropout.rows = lambda n: (8, here)
    assert torch.equal(dropout(x[:, here], ids), whole[:, here])


# ------------------------------------------------------------------------------------------------ experts


def moe_of(model: Model) -> MoE:
    module = decoder(single(model)).layers[0].moe
    assert isinstance(module, MoE)
    return module


def hidden(rows: int = 2, length: int = 8, width: int = 8) -> Tensor:
    return torch.arange(rows * length * width, dtype=torch.float64).reshape(rows, length, width).mul(0.7).sin()


def choices(moe: MoE, x_BLD: Tensor) -> Iterator[tuple[int, int, list[tuple[float, int]]]]:
    """(row, position, [(probability, expert) of the chosen experts]), token by token."""
    logits = (x_BLD @ moe.router.weight.T).detach().numpy()
    for row, place in np.ndindex(*logits.shape[:2]):
        powers = np.exp(logits[row, place])
        ranked = sorted(((float(p), e) for e, p in enumerate(powers / powers.sum())), reverse=True)
        yield row, place, ranked[: moe.top_k]


@pytest.mark.parametrize("capacity", [0, 1, 3])
@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_experts_take_tokens_as_a_loop_over_tokens_says(top_k: int, capacity: int) -> None:
    model = Model("moe", experts=4, top_k=top_k, capacity=capacity, features=("balance",))
    moe, x = moe_of(model), hidden()
    expected, full = torch.zeros_like(x), np.zeros((2, 4), dtype=int)
    for row, place, chosen in choices(moe, x):
        for probability, e in chosen:
            if not capacity or full[row, e] < capacity:
                full[row, e] += 1
                expected[row, place] += probability * moe.experts[str(e)](x[row, place]).detach()
    assert torch.allclose(moe(x), expected, rtol=1e-12, atol=1e-14)
    assert moe.routed.tolist() == full.sum(axis=0).tolist()


def test_the_balance_loss_by_a_loop_over_tokens() -> None:
    """E times the sum of share times mean probability, for each row; drops do not count."""
    moe, x = moe_of(EXPERTS), hidden()
    moe(x)
    probability = (x @ moe.router.weight.T).softmax(-1).mean(dim=1).tolist()
    expected = sum(4 * probability[row][e] / 16 for row, _, chosen in choices(moe, x) for _, e in chosen)
    assert moe.balance is not None and float(moe.balance.detach()) == pytest.approx(expected, rel=1e-13)


def test_a_router_that_knows_nothing_is_balanced() -> None:
    """Equal probabilities: the balance loss of every row is 1, whoever is chosen."""
    moe = moe_of(EXPERTS)
    with torch.no_grad():
        moe.router.weight.zero_()
    moe(hidden(rows=3))
    assert moe.balance is not None and float(moe.balance.detach()) == pytest.approx(3)


def test_what_is_dropped_has_no_expert_and_no_weight() -> None:
    moe = moe_of(EXPERTS)
    chosen, weight = moe.route(hidden())
    assert (chosen == DROPPED).any() and torch.equal(chosen == DROPPED, weight == 0)
    assert int(moe.routed.sum()) == int((chosen != DROPPED).sum()) < chosen.numel()


@pytest.mark.parametrize("capacity", [0, 2])
def test_reference_and_module_route_the_same_tokens(capacity: int) -> None:
    model = Model("moe", depth=2, experts=4, top_k=2, capacity=capacity)
    case = single(model, 8, 3, 0, 6)
    module = decoder(case)
    module(*fed(case), False)
    routed = one.gradients(case, PLAIN, 0, 0, canonical_weights(case)).routed
    assert list(routed) == ["layers.0.moe", "layers.1.moe"]
    assert all(torch.equal(module.get_submodule(name).routed, tokens) for name, tokens in routed.items())
    total = sum(int(tokens.sum()) for tokens in routed.values())
    assert (total == 2 * 4 * 8 * 2) if capacity == 0 else (total < 2 * 4 * 8 * 2)


def test_full_experts_change_the_loss_and_the_gradients() -> None:
    losses = []
    for capacity in (0, 2, 8):
        case = single(Model("moe", experts=4, top_k=2, capacity=capacity))
        losses.append(one.gradients(case, PLAIN, 0, 0, canonical_weights(case)).loss)
    assert losses[0] != losses[1] and losses[0] == losses[2], "a row of eight tokens fills no expert of eight"


def test_tokens_that_are_not_valid_are_routed_too() -> None:
    few, many = (single(EXPERTS, n) for n in (1, 8))
    a, b = (one.gradients(c, PLAIN, 0, 0, canonical_weights(c)).routed["layers.0.moe"] for c in (few, many))
    assert torch.equal(a, b)


def test_an_expert_without_a_token_has_a_gradient_of_zero() -> None:
    """Not an absent one: weight decay and moments act on it."""
    case = single(Model("moe", experts=8, length=2, vocabulary=13), 2)
    module = decoder(case)
    sum(module(*fed(case), False).values()).backward()
    found = one.gradients(case, PLAIN, 0, 0, canonical_weights(case))
    idle = [e for e, tokens in enumerate(found.routed["layers.0.moe"].tolist()) if tokens == 0]
    assert len(idle) >= 6
    for name in (f"layers.0.moe.experts.{e}.up.weight" for e in idle):
        gradient = module.get_parameter(name).grad
        assert gradient is not None and not gradient.any() and not found.values[name].any()


def test_a_case_whose_experts_are_nearly_as_probable_is_refused() -> None:
    """bfloat16 would choose others."""
    coarse = Precision("float32", "bfloat16", "float32")
    case = single(EXPERTS, 8, 8, 8, precision=coarse)
    with pytest.raises(CaseError, match="a choice between two experts"):
        expect(case, PLAIN)
    assert expect(case.replace(precision=Precision()), PLAIN).steps[0].kink < 0.0625


def test_nothing_is_chosen_where_all_experts_are() -> None:
    case = single(Model("moe", experts=3, top_k=3))
    assert one.gradients(case, PLAIN, 0, 0, canonical_weights(case)).kink == float("inf")


# ------------------------------------------------------------------------------------- lengths, outputs


def test_micro_batches_are_cut_to_their_length() -> None:
    """Entry k of `lengths`, over and over; the first positions of the same samples, valid tokens among them."""
    windows = ((((5, 2), (3,), (4, 4)),),)
    case = Case("cut", Model("gpt"), windows, Layout(1), precision=DOUBLE, accumulation=3, lengths=(5, 3))
    micros = window_of(case, 0, 0).microbatches
    assert [m.inputs.shape for m in micros] == [m.valid.shape for m in micros] == [(2, 5), (1, 3), (2, 5)]
    whole = window_of(case.replace(lengths=()), 0, 0).microbatches
    assert all(np.array_equal(a.inputs, b.inputs[:, : a.inputs.shape[1]]) for a, b in zip(micros, whole, strict=True))
    assert [m.valid.sum(axis=1).tolist() for m in micros] == [[5, 2], [3], [4, 4]]


def test_the_reference_fills_up_shorter_rows_with_what_is_not_valid() -> None:
    windows = ((((5, 2), (3,)),),)
    case = Case("cut", Model("gpt"), windows, Layout(1), precision=DOUBLE, accumulation=2, lengths=(5, 3))
    rows = rows_of(case, 0)
    assert rows.inputs.shape == rows.valid.shape == (3, 8)
    assert not rows.inputs[:, 5:].any() and not rows.valid[:, 5:].any() and not rows.valid[2, 3:].any()
    assert rows.tokens.tolist() == [5, 2, 3] and decode_ids(case.model, rows.inputs).tolist() == [0, 1, 2]


def outputs_of(case: Case) -> Tensor:
    """What the head (or the last layer) of the module gives for the rows of the first window."""
    module, _ = build(case)
    last = module.get_submodule({"gpt": "head", "moe": "head", "gated_mlp": "down"}.get(case.model.family, "linear"))
    found: list[Tensor] = []
    last.register_forward_hook(lambda _, inputs, output: found.append(output.detach()))
    for rank in range(case.layout.dp):
        for micro in window_of(case, 0, rank).microbatches:
            module(*tensors(micro), micro.conditional)
    return torch.cat(found)


@settings(max_examples=30)
@given(cases(families=("linear", "gated_mlp", "gpt", "moe"), precisions=(DOUBLE,), updates=1, used=True))
def test_outputs_of_the_reference_are_those_of_the_module(case: Case) -> None:
    expected = outputs_of(case)
    found = one.outputs_at(case, 0, 0, canonical_weights(case))
    assert found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-10, atol=1e-11)
