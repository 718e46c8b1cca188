"""The proof that a dyadic case is exact: every partial sum of every reduction, in any order and any grouping, is a
number of the working precision. Two correct strategies then agree bit for bit, and the tolerance is zero.

Why the criterion is right. If all terms of a reduction are integer multiples of a quantum 2^q, so is every partial
sum, and its magnitude is at most Σ|terms|. With Σ|terms| < 2^p · 2^q it is an integer below 2^p times 2^q, which a
format of p significant bits holds exactly (exponent range permitting, checked apart). Terms are products of earlier,
exact results; |term| ≤ Σ|terms| makes each product exact too, so it does not matter whether multiplications are fused
with additions. A product needs at least the bits of either factor, which covers operands cast to a narrower format. q
is derived from the data, for each reduction: the lowest set bit of any of its terms. (That float32 and float64 agree in
one order of summation proves none of this: partial sums in another order may need more bits.)

The computation is carried out in float64 with numpy, forward and backward written by hand. As long as every operation
needs fewer than 53 bits, float64 itself is exact (by induction over the operations), and so are the values returned.

The mathematics, with T = M valid positions in the window and W data-parallel ranks:

    chain:    y = x·w_0·w_1·…·w_(P-1), in this order, at every position; P factors of shape (1,)
    linear:   y = x Wᵀ (+ b)
    mlp:      linear layers with ReLU between, none after the last (relu'(0) = 0); positions of a conditional
              micro-batch add x Bᵀ to the output, B = branch.weight
    loss:     magnitude · Σ over valid positions and outputs of (y - t)²/2, divided by T
    sgd:      w ← w - lr·(g + wd·w)
    momentum: b ← g + wd·w at a parameter's first update, m·b + g + wd·w later; w ← w - lr·b

An invalid position contributes nothing and is left out. `unused.weight` and the frozen first parameter have no
gradient; neither has branch.weight in a window where no micro-batch with rows is conditional. `transposed` changes no
value. A window without valid tokens is skipped. Scaling by powers of two (magnitude, 1/T, and the W and 1/W of
averaging) moves exponents only, so it may happen anywhere: the exponent range is checked with a headroom of T·W on
both sides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from equivtests.cases.case import Case
from equivtests.cases.parameters import decays, initial, parameters
from equivtests.cases.windows import window_of

Arrays = dict[str, np.ndarray]

ZERO = 4096
"""Exponent given to the lowest set bit of zero: above that of every other number, so that minima pass over it."""

MARGIN = 2.0**-30
"""Bits by which a requirement must stay below the available ones: covers the rounding of Σ|terms| and of log2."""


@dataclass(frozen=True)
class Format:
    """`bits`: significant bits p. Every magnitude must lie in [2^smallest, 2^(largest+1)).

    Subnormal numbers do not count, since devices may flush them to zero; float16 is never flushed.
    """

    bits: int
    smallest: int
    largest: int


FORMATS = {
    "float64": Format(53, -1022, 1023),
    "float32": Format(24, -126, 127),
    "float16": Format(11, -24, 15),
    "bfloat16": Format(8, -126, 127),
}


@dataclass(frozen=True)
class Proof:
    """Outcome for one case.

    bits: available to the operation that came closest to its limit, or exceeded it most. needed: log2 of its
    Σ|terms| / quantum; infinite for a case that is refused without computing, or outside the exponent range. where:
    the operation, or why the case was refused.
    loss: per update, 0.0 for a skipped window. gradients: per update, empty for a skipped window. weights: entering
    each update and after the last. float64; exact if the proof holds. If not, they end with the update that broke it.
    """

    holds: bool
    bits: int
    needed: float
    where: str
    loss: list[float] = field(default_factory=list)
    gradients: list[Arrays] = field(default_factory=list)
    weights: list[Arrays] = field(default_factory=list)


def prove(case: Case) -> Proof:
    """Compute all updates of the case and say whether each operation was exact in its working precision."""
    refused = refusal(case)
    if refused:
        return Proof(False, FORMATS[case.precision.compute].bits, math.inf, refused)
    run = _Run(case)
    for update in range(case.updates):
        run.update(update)
        if not run.arithmetic.holds:
            break
    tightest = run.arithmetic
    return Proof(tightest.holds, tightest.bits, tightest.needed, tightest.where, run.losses, run.gradients, run.weights)


def refusal(case: Case) -> str | None:
    """Why a case cannot be exact whatever its numbers are, or None."""
    model, optimizer, rules = case.model, case.optimizer, ", ".join(case.semantics.describe())
    inexact = [f for f in ("batch_norm", "dropout", "pairs", "running") if model.has(f)]
    odd = [f"update {u}: token total {t}" for u in range(case.updates) if (t := case.tokens(u)) and not _dyadic(t)]
    reasons = (
        (model.decoder, f"model {model.family}: norms, softmax and cross-entropy are never exact"),
        (model.family == "gated_mlp", "model gated_mlp: its sigmoid is never exact"),
        (bool(inexact), f"feature {', '.join(inexact)}: no exact arithmetic is written for it"),
        (optimizer.name not in ("sgd", "momentum"), f"optimizer {optimizer.name}: its square root is not exact"),
        (optimizer.clip is not None, "clipping: the coefficient is not exact"),
        (case.precision.loss_scale is not None, "loss scaling: no exact arithmetic is written for it"),
        (bool(rules), f"semantics {rules}: only the default is proved"),
        (not _dyadic(case.layout.dp), f"world size {case.layout.dp} is not a power of two"),
        (bool(odd), f"{', '.join(odd[:1])} is not a power of two"),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _dyadic(n: int) -> bool:
    return n > 0 and n & (n - 1) == 0


# ------------------------------------------------------------------------------------------ arithmetic


def lowest(x: np.ndarray) -> np.ndarray:
    """Exponent e of the lowest set bit of each entry, x = odd · 2^e; ZERO where x is 0. int64, shape of x."""
    mantissa, exponent = np.frexp(x)
    whole = np.ldexp(mantissa, 53).astype(np.int64)
    bit = np.frexp((whole & -whole).astype(np.float64))[1] - 1
    return np.where(whole == 0, ZERO, exponent - 53 + bit)


class Arithmetic:
    """float64 operations that keep account of the bits they need, each in the format it is done in.

    headroom: log2 of the scaling that may happen before or after any operation.
    """

    def __init__(self) -> None:
        self.headroom = 0
        self.bits, self.needed, self.where = 53, 0.0, "no operation"

    @property
    def holds(self) -> bool:
        return self.needed + MARGIN < self.bits

    def reduce(self, where: str, terms: np.ndarray, quanta: np.ndarray, form: Format) -> np.ndarray:
        """Sum over the last axis of `terms`, whose entries are multiples of 2^quanta (same shape)."""
        totals, quantum = np.abs(terms).sum(-1), quanta.min(-1)
        some = totals > 0
        if some.any():
            high, low = np.log2(totals[some]), quantum[some]
            self._note(where, float((high - low).max()), int(low.min()), float(high.max()), form)
        return np.asarray(terms.sum(-1))

    def matmul(self, where: str, a_MK: np.ndarray, b_KN: np.ndarray, form: Format) -> np.ndarray:
        """Matrix product, (M, N); its reductions run over K."""
        terms_MNK = a_MK[:, None, :] * b_KN.T[None, :, :]
        return self.reduce(where, terms_MNK, lowest(a_MK)[:, None, :] + lowest(b_KN).T[None, :, :], form)

    def combine(self, where: str, form: Format, *pairs: tuple[float | np.ndarray, float | np.ndarray]) -> np.ndarray:
        """Elementwise sum of products of the pairs."""
        factors = [np.broadcast_arrays(*(np.asarray(f, dtype=np.float64) for f in pair)) for pair in pairs]
        terms = np.stack([a * b for a, b in factors], -1)
        return self.reduce(where, terms, np.stack([lowest(a) + lowest(b) for a, b in factors], -1), form)

    def _note(self, where: str, needed: float, low: int, high: float, form: Format) -> None:
        if low - self.headroom < form.smallest or high + self.headroom >= form.largest + 1:
            needed, where = math.inf, f"{where}: exponent out of range"
        if form.bits - needed < self.bits - self.needed:
            self.bits, self.needed, self.where = form.bits, needed, where


# --------------------------------------------------------------------------------------------- the model


@dataclass(frozen=True)
class _Batch:
    """The M valid positions of a window. inputs (M, I), targets (M, O), microbatch (M,): its number over all ranks.

    branch (M, 1): 1.0 at positions of conditional micro-batches. branched: whether any such micro-batch has rows.
    """

    inputs: np.ndarray
    targets: np.ndarray
    microbatch: np.ndarray
    branch: np.ndarray
    branched: bool


def _gather(case: Case, update: int) -> _Batch:
    """All micro-batches of all ranks, valid positions only."""
    micros = [m for rank in range(case.layout.dp) for m in window_of(case, update, rank).microbatches]
    return _Batch(
        inputs=np.concatenate([m.inputs[m.valid] for m in micros]),
        targets=np.concatenate([m.targets[m.valid] for m in micros]),
        microbatch=np.repeat(np.arange(len(micros)), [m.tokens for m in micros]),
        branch=np.repeat([float(m.conditional) for m in micros], [m.tokens for m in micros])[:, None],
        branched=any(m.conditional for m in micros),
    )


def _layers(case: Case) -> list[tuple[str, str | None]]:
    """(weight, bias or None) of each layer in order. A factor of a chain is a layer of one weight."""
    model, bias = case.model, case.model.has("bias")
    if model.family == "chain":
        return [(f"factors.{i}", None) for i in range(model.depth)]
    names = ["linear"] if model.family == "linear" else [f"layers.{i}" for i in range(model.depth)]
    return [(f"{name}.weight", f"{name}.bias" if bias else None) for name in names]


def _matrix(weight: np.ndarray) -> np.ndarray:
    """A parameter as a matrix (outputs, inputs); vectors become one column."""
    return weight.reshape(len(weight), -1)


class _Run:
    """The updates of one case; `weights` has one entry more than there were updates."""

    def __init__(self, case: Case) -> None:
        self.case, self.arithmetic = case, Arithmetic()
        self.compute, self.storage = FORMATS[case.precision.compute], FORMATS[case.precision.weights]
        self.wire = FORMATS[case.precision.reduce]
        self.trained = {p.name for p in parameters(case.model) if p.trained}
        self.buffers: Arrays = {}
        self.steps = 0
        self.losses: list[float] = []
        self.gradients: list[Arrays] = []
        self.weights: list[Arrays] = [initial(case)]

    def update(self, update: int) -> None:
        """One window: forward, backward, optimizer. Appends to losses, gradients and weights."""
        loss, gradients = 0.0, dict[str, np.ndarray]()
        if self.case.tokens(update) == 0:
            weights = self.weights[-1]
        else:
            self.arithmetic.headroom = int(math.log2(self.case.tokens(update) * self.case.layout.dp))
            loss, gradients = self.differentiate(f"update {update}", _gather(self.case, update))
            weights = self.step(f"update {update}", gradients)
        self.losses.append(loss)
        self.gradients.append(gradients)
        self.weights.append(weights)

    def differentiate(self, where: str, batch: _Batch) -> tuple[float, Arrays]:
        """Loss and gradients of a window at the newest weights."""
        hidden, output_MO = self.forward(where, batch)
        error_MO = self.arithmetic.combine(f"{where}, error", self.compute, (output_MO, 1.0), (batch.targets, -1.0))
        scale = self.case.magnitude / len(batch.inputs)
        loss = self.loss(f"{where}, loss", error_MO, scale)
        return loss, self.backward(where, batch, hidden, error_MO * scale)

    def columns(self, layer: int, hidden_MK: np.ndarray, batch: _Batch) -> dict[str, np.ndarray]:
        """What each parameter of a layer is multiplied with, (M, its columns): input, ones, input of the branch."""
        weight, bias = _layers(self.case)[layer]
        columns = {weight: hidden_MK}
        if bias:
            columns[bias] = np.ones((len(hidden_MK), 1))
        if self.case.model.has("conditional") and layer == len(_layers(self.case)) - 1 and batch.branched:
            columns["branch.weight"] = batch.inputs * batch.branch
        return columns

    def forward(self, where: str, batch: _Batch) -> tuple[list[np.ndarray], np.ndarray]:
        """Inputs of each layer (M, K) and outputs (M, O). Bias and branch are terms of the same sum as the products."""
        hidden, value = [], batch.inputs
        for layer, (weight, _) in enumerate(_layers(self.case)):
            rectified = layer > 0 and self.case.model.family == "mlp"
            hidden.append(np.maximum(value, 0.0) if rectified else value)
            columns = self.columns(layer, hidden[-1], batch)
            matrix_KO = np.concatenate([_matrix(self.weights[-1][name]) for name in columns], 1).T
            operands_MK = np.concatenate(list(columns.values()), 1)
            value = self.arithmetic.matmul(f"{where}, {weight} output", operands_MK, matrix_KO, self.compute)
        return hidden, value

    def loss(self, where: str, error_MO: np.ndarray, scale: float) -> float:
        """scale · Σ error²/2 over all positions and outputs of the window."""
        flat = error_MO.ravel()
        quanta = 2 * lowest(flat) + int(math.log2(scale)) - 1
        return float(self.arithmetic.reduce(where, 0.5 * scale * flat * flat, quanta, self.compute))

    def backward(self, where: str, batch: _Batch, hidden: list[np.ndarray], delta_MO: np.ndarray) -> Arrays:
        """Gradients of the trained parameters; `delta` is that of the loss with respect to the outputs."""
        gradients: Arrays = {}
        for layer in reversed(range(len(hidden))):
            for name, columns_MK in self.columns(layer, hidden[layer], batch).items():
                if name in self.trained:
                    value = self.gradient(f"{where}, {name} gradient", delta_MO, columns_MK, batch.microbatch)
                    gradients[name] = value.reshape(self.weights[-1][name].shape)
            if layer > 0:
                delta_MO = self.propagate(where, layer, delta_MO, hidden[layer])
        return gradients

    def gradient(self, where: str, delta_MO: np.ndarray, columns_MK: np.ndarray, microbatch: np.ndarray) -> np.ndarray:
        """(O, K), summed over the window. On a narrower wire, sums of gradients of micro-batches must fit it, too."""
        form = min(self.compute, self.storage, key=lambda f: f.bits)
        value = self.arithmetic.matmul(where, delta_MO.T, columns_MK, form)
        if self.wire.bits < form.bits:
            rows = [microbatch == k for k in np.unique(microbatch)]
            parts = np.stack([delta_MO[row].T @ columns_MK[row] for row in rows], -1)
            self.arithmetic.reduce(f"{where} on the wire", parts, lowest(parts), self.wire)
        return value

    def propagate(self, where: str, layer: int, delta_MO: np.ndarray, hidden_MK: np.ndarray) -> np.ndarray:
        """The derivative with respect to the output of the layer before, (M, K)."""
        name = _layers(self.case)[layer][0]
        delta_MK = self.arithmetic.matmul(
            f"{where}, {name} input gradient", delta_MO, _matrix(self.weights[-1][name]), self.compute
        )
        return delta_MK * (hidden_MK > 0) if self.case.model.family == "mlp" else delta_MK

    def step(self, where: str, gradients: Arrays) -> Arrays:
        """Weights after the optimizer's update; parameters without gradient stay."""
        optimizer = self.case.optimizer
        factor = optimizer.schedule[min(self.steps, len(optimizer.schedule) - 1)]
        rate = float(self.arithmetic.combine(f"{where}, learning rate", self.storage, (optimizer.lr, factor)))
        weights = dict(self.weights[-1])
        for name, gradient in gradients.items():
            direction = self.direction(f"{where}, {name}", name, gradient)
            pairs: Sequence[tuple[float, np.ndarray]] = ((1.0, weights[name]), (-rate, direction))
            weights[name] = self.arithmetic.combine(f"{where}, {name} update", self.storage, *pairs)
        self.steps += 1
        return weights

    def direction(self, where: str, name: str, gradient: np.ndarray) -> np.ndarray:
        """The gradient with weight decay and momentum added, in this order."""
        optimizer = self.case.optimizer
        if optimizer.weight_decay and decays(self.case, name):
            pairs = ((1.0, gradient), (optimizer.weight_decay, self.weights[-1][name]))
            gradient = self.arithmetic.combine(f"{where} weight decay", self.storage, *pairs)
        if optimizer.name == "momentum" and name in self.buffers:
            pairs = ((optimizer.momentum, self.buffers[name]), (1.0, gradient))
            gradient = self.arithmetic.combine(f"{where} momentum", self.storage, *pairs)
        self.buffers[name] = gradient
        return gradient
