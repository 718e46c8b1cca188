"""What models that are split over ranks communicate and keep, in closed form: one function per way of splitting.

A form lists the collectives of one rank in one update, forward and backward, as `Message`s. N rows of L positions, T = N · L
tokens, H the width; a micro-batch's activations have T · H elements. With P tensor ranks, of a layer (plain): what enters
its two column-parallel blocks is summed backward, what leaves its two row-parallel ones forward, so that it has four
all-reduces of T · H elements. Sources:

tensor: Shoeybi et al. 2019, Megatron-LM, arXiv 1909.08053, section 3. sequence: Korthikanti et al. 2022, Reducing activation
recomputation, section 4.2.2; textbook reduce-scatters are all-reduces of which each rank keeps its part. Context: Llama
Team 2024, The Llama 3 herd of models, section 3.3.2 (gather); Liu et al. 2023, Ring attention, section 3 (ring); Jacobs et
al. 2023, DeepSpeed Ulysses, section 3.2 (ulysses). Experts: Lepikhin et al. 2020, GShard, section 3.2. Pipelines: Narayanan
et al. 2021, Efficient large-scale language model training on GPU clusters, section 3.3.1.

Parts of unequal sizes are padded to the largest to be gathered; micro-batches of unequal sizes are filled up where stages
take one shape only (torch.distributed.pipelining). As in `reference.ledger`, scalars and integers (how large the parts of
other ranks are, which experts tokens go to) are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from equivtests.cases.layout import Group, Layout
from equivtests.cases.parameters import parameters
from equivtests.reference.ledger import PARTS, BytesPerParameter, Expected, Kept, Payload, Travel
from equivtests.reference.shares import Scheme, Share, expert_of, linear_layers, plain_things, size

ENDS = "pp ends"
"""The ranks of a pipeline that hold the first and the last stage."""


@dataclass(frozen=True)
class Message:
    """One collective of this rank: operation, axes of its group, elements as `reference.ledger` counts them.

    counted: whether it is one operation; otherwise what is said is how much all such operations move together.
    """

    operation: str
    axes: str
    elements: int
    counted: bool = True


Messages = Iterator[Message]
Form = Callable[[Share], Messages]


# ------------------------------------------------------------------------------------------- tensor ranks


def tensor(given: Share) -> Messages:
    """Tensor parallelism, with sequence parallelism where the scheme says so."""
    for rows, length in given.batches:
        if given.model.decoder:
            yield from tensor_decoder(given, rows, given.positions(length))
        else:
            yield from tensor_plain(given, rows * length)
    yield Message("all_reduce", "tp", sum(partial_gradients(given)), counted=False)


def tensor_decoder(given: Share, rows: int, length: int) -> Messages:
    """One micro-batch through the stages of this rank; length: positions of this context rank."""
    if given.begins:
        yield from leave(given, rows, length)  # the vectors of tokens, each of which one rank holds
    for _ in range(2 * len(given.layers)):  # attention, feedforward
        yield from enter(given, rows, length)
        yield from leave(given, rows, length)
    if given.ends:
        for _ in range(1 + given.model.has("extra_head")):
            yield from enter(given, rows, length)
            yield from vocabulary_loss(given, rows * length)
        if given.model.has("z_loss"):
            yield from log_partition(rows * length)


def activations(given: Share, operation: str, rows: int, length: int) -> Message:
    """What stands between the layers, whole; parts of the sequence may be padded."""
    whole = length if operation == "all_reduce" else padded(length, given.ranks("tp"))
    return Message(operation, "tp", rows * whole * given.model.width)


def enter(given: Share, rows: int, length: int) -> Messages:
    """Into column-parallel layers: nothing (or the parts of the sequence are gathered); backward the ranks' sum."""
    if given.scheme.sequence:
        yield activations(given, "all_gather", rows, length)
    yield activations(given, "all_reduce", rows, length)


def leave(given: Share, rows: int, length: int) -> Messages:
    """Out of a row-parallel layer: the ranks' sum; backward nothing (or the parts of the sequence are gathered)."""
    yield activations(given, "all_reduce", rows, length)
    if given.scheme.sequence:
        yield activations(given, "all_gather", rows, length)


def vocabulary_loss(given: Share, tokens: int) -> Messages:
    """Cross-entropy of logits cut along the vocabulary: the partition, the target's logit, with smoothing the mean logit."""
    yield from log_partition(tokens)
    for _ in range(1 + given.model.has("smoothing")):
        yield Message("all_reduce", "tp", tokens)


def log_partition(tokens: int) -> Messages:
    """The largest logit, and the sum of the exponentials."""
    yield Message("all_reduce", "tp", tokens)
    yield Message("all_reduce", "tp", tokens)


def tensor_plain(given: Share, tokens: int) -> Messages:
    """linear, mlp, gated_mlp. What enters the first layers is data, which has no gradient."""
    cuts, sizes, ranks = plain_things(given.model, given.scheme), linear_layers(given.model), given.ranks("tp")
    for i, (name, (outputs, inputs)) in enumerate(sizes.items()):
        by_rows, _ = cuts[name]
        first = i == 0 or name == "up"
        if by_rows:
            yield Message("all_reduce", "tp", tokens * outputs)
            if given.scheme.linear == "rows" and not first:
                yield Message("all_gather", "tp", tokens * padded(inputs, ranks))
            continue
        if not first:
            yield Message("all_reduce", "tp", tokens * inputs)
        if given.scheme.linear == "columns" or i == len(sizes) - 1:
            yield Message("all_gather", "tp", tokens * padded(outputs, ranks))


def partial_gradients(given: Share) -> Iterator[int]:
    """Elements of what every tensor rank holds whole and has a part of the gradient of: it saw some heads or positions."""
    ranks, model = given.ranks("tp"), given.model
    ends = [".q_norm.weight", ".k_norm.weight"]
    if model.decoder and (model.kv % ranks or model.heads % ranks):
        ends += [".k.weight", ".v.weight", ".v.bias"]
    if given.scheme.sequence:
        ends += [f".{norm}.{kind}" for norm in ("norm", "norm1", "norm2") for kind in ("weight", "bias")]
        ends += [".o.bias", ".down.bias"]
    yield from (elements for name, elements in given.trained.items() if f".{name}".endswith(tuple(ends)))


def padded(total: int, ranks: int) -> int:
    """Things that are gathered from even parts, each as large as the largest."""
    return math.ceil(total / ranks) * ranks


# ------------------------------------------------------------------------------------------ context ranks


def gathered_keys(given: Share) -> Messages:
    """In every layer keys and values of all positions are gathered; backward their gradients are summed."""
    ranks = given.ranks("cp")
    for rows, length in given.batches:
        largest = max(given.positions(length, rank) for rank in range(ranks))
        for _ in range(2 * len(given.layers)):
            yield Message("all_gather", "cp", rows * ranks * largest * given.features)
            yield Message("all_reduce", "cp", rows * length * given.features)


def ring(given: Share) -> Messages:
    """In every layer keys and values visit the other ranks; backward they and their gradients go all the way round."""
    ranks, index = given.ranks("cp"), given.index("cp")
    for rows, length in given.batches:
        sizes = [given.positions(length, rank) * rows * given.features for rank in range(ranks)]
        here = [sizes[(index - step) % ranks] for step in range(ranks)]  # whose keys are here, step by step
        for _ in given.layers:
            for old, new in zip(here, here[1:], strict=False):
                yield from passed_on("cp", 2 * old, 2 * new)
            for old, new in zip(here, [*here[1:], here[0]], strict=True):
                yield from passed_on("cp", 4 * old, 4 * new)


def passed_on(axis: str, sent: int, received: int) -> Messages:
    yield Message("send", axis, sent)
    yield Message("recv", axis, received)


def exchanged_heads(given: Share) -> Messages:
    """In every layer queries, keys and values go from positions to heads, and what is mixed back; backward the reverse."""
    heads, each = given.part("tp", given.model.heads), given.model.width // given.model.heads
    mine = size(heads, given.ranks("cp"), given.index("cp"))
    for rows, length in given.batches:
        for _ in range(4 * len(given.layers)):
            yield Message("all_to_all", "cp", rows * given.positions(length) * heads * each)
            yield Message("all_to_all", "cp", rows * length * mine * each)


# ------------------------------------------------------------------------------------------- expert ranks


def dispatched_tokens(given: Share) -> Messages:
    """Every choice of a token goes to its expert's rank and back; backward likewise. What goes to the rank itself counts.

    How many there are is up to the router: `Share.routed`. One sequence is not to lie on several ranks.
    """
    start, stop = given.span("ep", given.model.experts)
    group = [given.layout.data_rank(rank) for rank in given.layout.group(given.rank, "ep")]
    for tokens in given.routed.values():
        sent, received = tokens[given.layout.data_rank(given.rank)].sum(), tokens[group, start:stop].sum()
        yield Message("all_to_all", "ep", 2 * int(sent + received) * given.model.width, counted=False)


def gathered_tokens(given: Share) -> Messages:
    """All tokens, and the factors on their experts, are gathered; what the experts gave is summed. Then backward."""
    model, fed = given.model, [given.fed(rank) for rank in given.layout.group(given.rank, "ep")]
    for k in range(max(map(len, fed))):
        tokens = [rows * length for batches in fed for rows, length in batches[k : k + 1]]
        for _ in given.layers:
            for features in (model.width, model.top_k, model.width):
                yield Message("all_gather", "ep", len(fed) * max(tokens) * features)
                yield Message("all_reduce", "ep", sum(tokens) * features)


# -------------------------------------------------------------------------------------- pipelines and data


def boundaries(given: Share) -> Messages:
    """What leaves a stage goes to the rank of the next one; backward its gradient returns."""
    layers = given.layout.layers_of(given.model.depth)
    for stage, (source, target) in enumerate(zip(given.stages, given.stages[1:], strict=False), start=1):
        if source == target:
            continue
        for rows, length in given.batches:
            elements = rows * given.between(length) * features_before(given, layers[stage].start)
            for here, there in ((source, target), (target, source)):  # forward, backward
                if given.index("pp") in (here, there):
                    yield Message("send" if given.index("pp") == here else "recv", "pp", elements)


def features_before(given: Share, layer: int) -> int:
    """Features of what enters a layer, or after the last one what leaves it."""
    model = given.model
    if model.family == "mlp" and layer in (0, model.depth):
        return model.outputs if layer else model.inputs
    return 1 if model.family == "chain" else model.width


def tied_ends(given: Share) -> Messages:
    """The gradients of a parameter that both ends of a pipeline have a copy of are summed."""
    if given.model.has("tied") and given.begins != given.ends:
        yield Message("all_reduce", ENDS, given.trained.get("embedding.weight", 0), counted=False)


def gradients(given: Share) -> Messages:
    """Gradients are summed over the data ranks; those of experts over the data ranks that hold the same ones."""
    experts = sum(n for name, n in given.trained.items() if expert_of(name) is not None)
    yield Message("all_reduce", "dp cp", sum(given.trained.values()) - experts, counted=False)
    yield Message("all_reduce", "edp", experts, counted=False)


# ----------------------------------------------------------------------------------------- all of a strategy


@dataclass(frozen=True)
class Algorithm:
    """What travels beside the gradients, and fields of `Scheme` that say how the model is cut."""

    form: Form
    cut: Mapping[str, Any] = field(default_factory=dict)


def pipeline(given: Share) -> Messages:
    yield from boundaries(given)
    yield from tied_ends(given)


SPLIT_EXPECTED: dict[str, Algorithm] = {
    "tp": Algorithm(tensor),
    "tp-column": Algorithm(tensor, {"linear": "columns"}),
    "tp-row": Algorithm(tensor, {"linear": "rows"}),
    "tp-sequence": Algorithm(tensor, {"sequence": True}),
    "cp-gather": Algorithm(gathered_keys),
    "cp-gather-zigzag": Algorithm(gathered_keys, {"zigzag": True}),
    "cp-ring": Algorithm(ring),
    "cp-ring-zigzag": Algorithm(ring, {"zigzag": True}),
    "cp-ulysses": Algorithm(exchanged_heads),
    "ep": Algorithm(dispatched_tokens),
    "ep-gather": Algorithm(gathered_tokens),
    "pipeline": Algorithm(pipeline),
    "pipeline-filled": Algorithm(pipeline, {"filled": True}),
}
"""What one update communicates, by declared algorithm. A product of axes joins them: "cp-ring+tp+pipeline"."""


def is_split(algorithm: str | None) -> bool:
    """Whether an algorithm is one of this module, or a product of some."""
    return algorithm is not None and all(part in SPLIT_EXPECTED for part in algorithm.split("+"))


def scheme_of(algorithm: str) -> Scheme:
    """How an algorithm, or a product of some, cuts the model."""
    cuts = [SPLIT_EXPECTED[part].cut for part in algorithm.split("+")]
    return Scheme(**{name: value for cut in cuts for name, value in cut.items()})


def split_expected(algorithm: str, given: Share) -> Expected:
    """Payload per operation and axes of one rank, without what moves nothing and without scalars."""
    found: dict[Travel, list[Message]] = {}
    for form in (*(SPLIT_EXPECTED[part].form for part in algorithm.split("+")), gradients):
        for message in form(given):
            if message.elements > 1 and len(ranks_along(given.layout, given.rank, message.axes)) > 1:
                found.setdefault((message.operation, message.axes), []).append(message)
    return {travel: summed(given, travel[1], messages) for travel, messages in found.items()}


def summed(given: Share, axes: str, messages: Sequence[Message]) -> Payload:
    ranks = len(ranks_along(given.layout, given.rank, axes))
    count = len(messages) if all(m.counted for m in messages) else None
    return Payload(sum(m.elements for m in messages), given.case.precision.compute, ranks, count)


def ranks_along(layout: Layout, rank: int, axes: str) -> Group:
    """The group of a rank that the axes of a `Travel` name."""
    if axes == ENDS:
        pipe = layout.group(rank, "pp")
        return (pipe[0], pipe[-1])
    return layout.group(rank, *axes.split())


def split_bytes(given: Share, each: BytesPerParameter) -> dict[str, Kept]:
    """What a rank keeps from one micro-batch to the next, by part, as `reference.ledger.persistent_bytes` counts."""
    sizes = dict(zip(PARTS, (each.weights, each.gradients, each.optimizer), strict=True))
    whole = sum(p.size for p in parameters(given.model))
    own = {part: sum((given.held if part == "weights" else given.trained).values()) for part in PARTS}
    return {part: Kept(n * sizes[part], n * sizes[part], whole * sizes[part]) for part, n in own.items()}
