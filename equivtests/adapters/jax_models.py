"""The model families as pure functions in jax.numpy: weights by canonical name and a batch in, sums of loss terms out."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from equivtests.cases import numbers
from equivtests.cases.case import Case, Model
from equivtests.cases.parameters import parameters
from equivtests.cases.windows import DOCUMENT_END, MicroBatch, Window, empty_micro_batch

Weights = dict[str, jax.Array]
Terms = dict[str, jax.Array]
"""By name of a loss term, a scalar: main, extra, z, pairs."""

KEEP = 0.75  # probability that dropout keeps an element
SMOOTHING = 0.125  # weight of the uniform distribution in a smoothed target

FACTORS = {"main": 1.0, "extra": 0.25, "z": 2.0**-6, "pairs": 2.0**-6}  # of the loss terms in the objective


class Batch(NamedTuple):
    """Rows of K micro-batches (or of one, without the first axis): N rows of L positions each.

    inputs, targets: integers (K, N, L) for gpt, else floats (K, N, L, features). valid: bool (K, N, L). rows: bool (K, N),
    False for rows that only fill up the shape. conditional: bool (K, N). dropout: factors (K, N, L, D), or D = 0.
    """

    inputs: jax.Array
    targets: jax.Array
    valid: jax.Array
    rows: jax.Array
    conditional: jax.Array
    dropout: jax.Array


# ---------------------------------------------------------------------------------------------- batches


def pack(case: Case, window: Window, draw: int) -> Batch:
    """A rank's micro-batches as numpy arrays of one shape in all windows of the case, filled up with empty rows."""
    missing = case.accumulation - len(window.microbatches)
    micros = [*window.microbatches, *[empty_micro_batch(case)] * missing]
    padded = [padded_columns(case, micro, draw) for micro in micros]
    return Batch(*(np.stack(column) for column in zip(*padded, strict=True)))


def padded_columns(case: Case, micro: MicroBatch, draw: int) -> Batch:
    """One micro-batch, filled up to the most rows that any micro-batch of the case has."""
    size = max((len(rows) for window in case.windows for rank in window for rows in rank), default=1)
    rows = np.ones(micro.rows, dtype=bool)
    columns = (micro.inputs, micro.targets, micro.valid, rows, rows & micro.conditional, dropout(case, micro, draw))
    return Batch(*(pad(column, max(1, size), case.precision.weights) for column in columns))


def pad(column: np.ndarray, size: int, dtype: str) -> np.ndarray:
    """`column` with `size` rows; floats in the dtype of the weights, integers as int32."""
    kind = {"f": np.dtype(dtype), "i": np.dtype(np.int32)}.get(column.dtype.kind, column.dtype)
    filled = np.zeros((size, *column.shape[1:]), kind)
    filled[: len(column)] = column
    return filled


def dropout(case: Case, micro: MicroBatch, draw: int) -> np.ndarray:
    """Factors 0 or 1/KEEP of the one dropout site, float64 (N, L, width); the decisions do not depend on the layout."""
    model = case.model
    shape = (model.length, model.width if model.has("dropout") else 0)
    streams = [numbers.real(case.seed, f"dropout.{model.family}.{draw}.{i}", shape) for i in micro.ids]
    return (np.array(streams).reshape(len(streams), *shape) < 2 * KEEP - 1) / KEEP


# ---------------------------------------------------------------------------------------------- models


def differentiated(model: Model) -> list[str]:
    """The trained weights that the loss depends on: jax.grad has zeros for all others, and zero is not absent."""
    return [p.name for p in parameters(model) if p.trained and p.name != "unused.weight"]


def totals(window: Batch) -> Terms:
    """What each loss term is divided by: the valid tokens of the whole window, or its rows."""
    tokens, rows = jnp.maximum(window.valid.sum(), 1), jnp.maximum(window.rows.sum(), 1)
    return {"main": tokens, "extra": tokens, "z": rows, "pairs": rows}


def objective(case: Case, weights: Weights, batch: Batch, divisors: Terms) -> jax.Array:
    """What is differentiated for one micro-batch; added up, it is the window's loss."""
    terms = FAMILIES[case.model.family](case.model, weights, batch)
    return case.magnitude * sum(FACTORS[name] * value / divisors[name] for name, value in terms.items())


def in_use(name: str, batch: Batch) -> jax.Array:
    """Whether any row of the window uses a weight; bool scalar."""
    return batch.conditional.any() if name == "branch.weight" else jnp.array(True)


def affine(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """xWᵀ + b, with the bias if there is one."""
    y = x @ weights[f"{name}.weight"].T
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def squared_error(outputs: jax.Array, batch: Batch) -> jax.Array:
    """Sum over valid positions of half the squared error."""
    error = jnp.where(batch.valid[..., None], outputs - batch.targets, 0)
    return 0.5 * (error * error).sum()


def chain(model: Model, weights: Weights, batch: Batch) -> Terms:
    """y = w_P · … · w_1 · x for every position."""
    y = batch.inputs
    for i in range(model.depth):
        y = weights[f"factors.{i}"] * y
    return {"main": squared_error(y, batch)}


def linear(model: Model, weights: Weights, batch: Batch) -> Terms:
    """y = xWᵀ + b."""
    return {"main": squared_error(affine(weights, "linear", batch.inputs), batch)}


def mlp(model: Model, weights: Weights, batch: Batch) -> Terms:
    """Linear layers with ReLU between them."""
    x = batch.inputs
    for i in range(model.depth):
        x = affine(weights, f"layers.{i}", x)
        if i < model.depth - 1:
            x = jax.nn.relu(x)
        if i == 0 and model.has("dropout"):
            x = x * batch.dropout
    if model.has("conditional"):
        x = x + jnp.where(batch.conditional[:, None, None], batch.inputs @ weights["branch.weight"].T, 0)
    terms = {"main": squared_error(x, batch)}
    return terms | {"pairs": pairs(x.sum(axis=1), batch.rows)} if model.has("pairs") else terms


def gated(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """silu(gate) · up."""
    return jax.nn.silu(affine(weights, f"{name}gate", x)) * affine(weights, f"{name}up", x)


def gated_mlp(model: Model, weights: Weights, batch: Batch) -> Terms:
    """y = down(silu(gate(x)) · up(x))."""
    return {"main": squared_error(affine(weights, "down", gated(weights, "", batch.inputs)), batch)}


def pairs(embeddings: jax.Array, rows: jax.Array) -> jax.Array:
    """Sum over pairs of different rows of the product of their embeddings (N, D)."""
    products = embeddings @ embeddings.T
    return jnp.where(rows[:, None] & rows[None, :] & ~jnp.eye(len(rows), dtype=bool), products, 0).sum()


def normalize(weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """Layer norm over the last axis."""
    centred = x - x.mean(axis=-1, keepdims=True)
    scaled = centred * jax.lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-5)
    gained = scaled * weights[f"{name}.weight"]
    return gained + weights[f"{name}.bias"] if f"{name}.bias" in weights else gained


def document_starts(model: Model, inputs: jax.Array) -> jax.Array:
    """Where the document of every position begins, (B, L); zero where rows are one document each."""
    if not model.has("packed"):
        return jnp.zeros_like(inputs)
    begins = jnp.pad(inputs[:, :-1] == DOCUMENT_END, ((0, 0), (1, 0)))
    return jax.lax.cummax(jnp.where(begins, jnp.arange(inputs.shape[1]), 0), axis=1)


def attention(model: Model, weights: Weights, name: str, x_BLD: jax.Array, starts_BL: jax.Array) -> jax.Array:
    """Causal attention inside of a document; each head of keys and values serves as many neighbouring heads of queries."""
    size = model.width // model.heads
    q, k, v = (affine(weights, f"{name}.{part}", x_BLD) for part in "qkv")
    q, k, v = (part.reshape(*x_BLD.shape[:2], -1, size) for part in (q, k, v))
    if model.has("qk_norm"):
        q, k = normalize(weights, f"{name}.q_norm", q), normalize(weights, f"{name}.k_norm", k)
    k, v = (jnp.repeat(part, model.heads // model.kv, axis=2) for part in (k, v))
    scores = jnp.einsum("blhd,bmhd->bhlm", q, k) / size**0.5
    positions = jnp.arange(x_BLD.shape[1])
    seen_BHLM = (positions <= positions[:, None]) & (positions >= starts_BL[:, None, :, None])
    mixed = jnp.einsum("bhlm,bmhd->blhd", jax.nn.softmax(jnp.where(seen_BHLM, scores, -jnp.inf)), v)
    return affine(weights, f"{name}.o", mixed.reshape(x_BLD.shape))


def gpt(model: Model, weights: Weights, batch: Batch) -> Terms:
    """Embedding and positions, pre-norm blocks, heads."""
    starts = document_starts(model, batch.inputs)
    x = weights["embedding.weight"][batch.inputs] + weights["positions.weight"][jnp.arange(model.length) - starts]
    if model.has("dropout"):
        x = x * batch.dropout
    for i in range(model.depth):
        block = f"layers.{i}"
        x = x + attention(model, weights, f"{block}.attention", normalize(weights, f"{block}.norm1", x), starts)
        x = x + feedforward(model, weights, f"{block}.mlp", normalize(weights, f"{block}.norm2", x))
    x = normalize(weights, "norm", x)
    if model.has("conditional"):
        x = x + jnp.where(batch.conditional[:, None, None], affine(weights, "branch", x), 0)
    return heads(model, weights, batch, x)


def feedforward(model: Model, weights: Weights, name: str, x: jax.Array) -> jax.Array:
    """up, GELU or the gate, down."""
    if model.has("gated"):
        return affine(weights, f"{name}.down", gated(weights, f"{name}.", x))
    return affine(weights, f"{name}.down", jax.nn.gelu(affine(weights, f"{name}.up", x), approximate=False))


def heads(model: Model, weights: Weights, batch: Batch, x_BLD: jax.Array) -> Terms:
    """Token losses of both heads, and the loss on the log-partition."""
    logits = x_BLD @ weights["embedding.weight" if model.has("tied") else "head.weight"].T
    terms = {"main": cross_entropy(model, logits, batch)}
    if model.has("extra_head"):
        terms["extra"] = cross_entropy(model, affine(weights, "extra_head", x_BLD), batch)
    if model.has("z_loss"):
        terms["z"] = jnp.where(batch.valid, jax.nn.logsumexp(logits, axis=-1) ** 2, 0).sum()
    return terms


def cross_entropy(model: Model, logits: jax.Array, batch: Batch) -> jax.Array:
    """Sum over valid positions of the token loss; logits (N, L, V)."""
    likelihoods = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(likelihoods, batch.targets[..., None], axis=-1)[..., 0]
    if model.has("smoothing"):
        losses = (1 - SMOOTHING) * losses - SMOOTHING * likelihoods.mean(axis=-1)
    return jnp.where(batch.valid, losses, 0).sum()


FAMILIES = {"chain": chain, "linear": linear, "mlp": mlp, "gated_mlp": gated_mlp, "gpt": gpt}
"""Loss terms of one micro-batch, as sums over its rows (scalars), of every family."""
