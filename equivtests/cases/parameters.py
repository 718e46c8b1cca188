"""Canonical parameters of a model: names, shapes and values, independent of any layout or framework."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from equivtests.cases import numbers
from equivtests.cases.case import Case, Model
from equivtests.own import loaded


@dataclass(frozen=True)
class Parameter:
    """`scale`: power of two on the canonical numbers; `offset`: 1 for gains of norms; `trained`: takes a gradient."""

    name: str
    shape: tuple[int, ...]
    scale: float = 0.5
    offset: float = 0.0
    trained: bool = True

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


def parameters(model: Model) -> list[Parameter]:
    """The parameters of a model in canonical order."""
    listed = list(_FAMILIES[model.family](model))
    if model.has("frozen"):
        first = listed[0]
        listed[0] = Parameter(first.name, first.shape, first.scale, first.offset, trained=False)
    if model.has("unused"):
        listed.append(Parameter("unused.weight", (3, model.width)))
    return listed


def initial(case: Case) -> dict[str, np.ndarray]:
    """Canonical initial weights: number · scale + offset, rounded to float32 (which only an offset needs); float64.

    Those of a user's own model are what its `build()` makes in this process.
    """
    if case.model.own:
        return dict(loaded(case.model.own).weights)
    draw = numbers.ternary if case.exact else numbers.real
    drawn = {
        p.name: draw(case.seed, f"weight.{p.name}", p.shape) * (1.0 if case.exact else p.scale) + p.offset
        for p in parameters(case.model)
    }
    return {name: value.astype(np.float32).astype(np.float64) for name, value in drawn.items()}


def decays(case: Case, name: str) -> bool:
    """Whether weight decay applies: to every parameter, or to matrices alone (by canonical shape)."""
    shape = next(p.shape for p in parameters(case.model) if p.name == name)
    return case.optimizer.decay_vectors or len(shape) >= 2


def layers(model: Model) -> tuple[frozenset[str], ...]:
    """Names of the parameters of each layer (`layers.0`, `layers.1`, …), in order; some families have none."""
    names = [[p.name for p in parameters(model) if p.name.startswith(f"layers.{i}.")] for i in range(model.depth)]
    return tuple(frozenset(layer) for layer in names if layer)


def _chain(model: Model) -> Iterator[Parameter]:
    for i in range(model.depth):
        yield Parameter(f"factors.{i}", (1,), scale=0.25, offset=0.0 if model.numbers == "dyadic" else 1.0)


def _linear(model: Model) -> Iterator[Parameter]:
    yield Parameter("linear.weight", (model.outputs, model.inputs))
    if model.has("bias"):
        yield Parameter("linear.bias", (model.outputs,))


def _mlp(model: Model) -> Iterator[Parameter]:
    sizes = [model.inputs] + [model.width] * (model.depth - 1) + [model.outputs]
    for i in range(model.depth):
        yield Parameter(f"layers.{i}.weight", (sizes[i + 1], sizes[i]))
        if model.has("bias") and not (i == 0 and model.has("batch_norm")):
            yield Parameter(f"layers.{i}.bias", (sizes[i + 1],))
    if model.has("conditional"):
        yield Parameter("branch.weight", (model.outputs, model.inputs))


def _gated_mlp(model: Model) -> Iterator[Parameter]:
    yield from _gated(model, "", model.inputs, model.width, model.outputs)


def _gpt(model: Model) -> Iterator[Parameter]:
    width, bias = model.width, model.has("bias")
    yield Parameter("embedding.weight", (model.vocabulary, width))
    yield Parameter("positions.weight", (model.length, width))
    for i in range(model.depth):
        yield from _block(f"layers.{i}", model)
    yield from _norm("norm", width, bias)
    if model.has("conditional"):
        yield Parameter("branch.weight", (width, width), 0.25)
    if not model.has("tied"):
        yield Parameter("head.weight", (model.vocabulary, width))
    if model.has("extra_head"):
        yield Parameter("extra_head.weight", (model.vocabulary, width))


def _norm(name: str, width: int, bias: bool) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (width,), 0.25, 1.0)
    if bias:
        yield Parameter(f"{name}.bias", (width,), 0.25)


def _block(name: str, model: Model) -> Iterator[Parameter]:
    width, bias, size = model.width, model.has("bias"), model.width // model.heads
    shared = model.kv * size
    yield from _norm(f"{name}.norm1", width, bias)
    for part, rows in (("q", width), ("k", shared), ("v", shared), ("o", width)):
        yield Parameter(f"{name}.attention.{part}.weight", (rows, width))
        if bias and part != "k":
            yield Parameter(f"{name}.attention.{part}.bias", (rows,), 0.25)
    if model.has("qk_norm"):
        yield Parameter(f"{name}.attention.q_norm.weight", (size,), 0.25, 1.0)
        yield Parameter(f"{name}.attention.k_norm.weight", (size,), 0.25, 1.0)
    yield from _norm(f"{name}.norm2", width, bias)
    if not model.experts:
        yield from _feedforward(f"{name}.mlp.", model)
        return
    yield Parameter(f"{name}.moe.router.weight", (model.experts, width))
    for expert in range(model.experts):
        yield from _feedforward(f"{name}.moe.experts.{expert}.", model)


def _feedforward(prefix: str, model: Model) -> Iterator[Parameter]:
    """The one of a block, or one expert."""
    sizes = (model.width, 2 * model.width, model.width)
    yield from _gated(model, prefix, *sizes) if model.has("gated") else _two_layers(model, prefix, *sizes)


def _gated(model: Model, prefix: str, inputs: int, hidden: int, outputs: int) -> Iterator[Parameter]:
    yield from _affine(model, f"{prefix}gate", (hidden, inputs))
    yield from _two_layers(model, prefix, inputs, hidden, outputs)


def _two_layers(model: Model, prefix: str, inputs: int, hidden: int, outputs: int) -> Iterator[Parameter]:
    yield from _affine(model, f"{prefix}up", (hidden, inputs))
    yield from _affine(model, f"{prefix}down", (outputs, hidden))


def _affine(model: Model, name: str, shape: tuple[int, int]) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", shape)
    if model.has("bias"):
        yield Parameter(f"{name}.bias", shape[:1], 0.25)


def _own(model: Model) -> Iterator[Parameter]:
    own = loaded(model.own)
    for name, value in own.weights.items():
        yield Parameter(name, value.shape, trained=name in own.trained)


_FAMILIES = {
    "chain": _chain,
    "linear": _linear,
    "mlp": _mlp,
    "gated_mlp": _gated_mlp,
    "gpt": _gpt,
    "moe": _gpt,
    "own": _own,
}
