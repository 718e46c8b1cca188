"""Optimizers and clipping as pure functions in jax.numpy, with the formulas and the state of torch's."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from equivtests.cases.case import Case, Optimizer
from equivtests.cases.parameters import decays

Arrays = dict[str, jax.Array]
State = dict[str, Any]
"""Of one parameter: arrays of its shape, and for adam the number of its updates `step`, float32 ()."""

CLIP_EPS = 1e-6


def zeros(o: Optimizer, weight: np.ndarray) -> State:
    """The state of a parameter before its first update, as numpy arrays."""
    moments = {"momentum": ("momentum_buffer",), "sgd": ()}.get(o.name, ("exp_avg", "exp_avg_sq"))
    steps = {"step": np.zeros((), np.float32)} if o.name in ("adam", "adamw") else {}
    return {key: np.zeros_like(weight) for key in moments} | steps


def clip(o: Optimizer, gradients: Arrays) -> tuple[Arrays, Arrays]:
    """Gradients whose norm over the whole model is at most the limit; and norm and clip, if there is a limit."""
    if o.clip is None:
        return gradients, {}
    total = norm(gradients, o.clip_norm)
    factor = jnp.minimum(1, o.clip / (total + CLIP_EPS))
    return {name: factor * g for name, g in gradients.items()}, {"norm": total, "clip": factor}


def norm(gradients: Arrays, order: str) -> jax.Array:
    """Norm ("2" or "inf") of all gradients together; a scalar."""
    if order == "inf":
        return jnp.stack([jnp.abs(g).max() for g in gradients.values()]).max()
    return jnp.sqrt(sum((g * g).sum() for g in gradients.values()))


def step(
    case: Case, name: str, rate: float, gradient: jax.Array, weight: jax.Array, state: State
) -> tuple[jax.Array, State]:
    """(new weight, new state) of one parameter."""
    o = case.optimizer
    decay = o.weight_decay if decays(case, name) else 0.0
    if o.name == "adamw":
        weight = weight * (1 - rate * decay)
    else:
        gradient = gradient + decay * weight
    if o.name == "sgd":
        return weight - rate * gradient, {}
    if o.name == "momentum":
        buffer = o.momentum * state["momentum_buffer"] + gradient
        return weight - rate * buffer, {"momentum_buffer": buffer}
    direction, new = adam(o, gradient, state)
    return weight - rate * direction, new


def adam(o: Optimizer, gradient: jax.Array, state: State) -> tuple[jax.Array, State]:
    """(direction, new state) from moments whose bias is corrected."""
    (beta1, beta2), steps = o.betas, state["step"] + 1
    first = beta1 * state["exp_avg"] + (1 - beta1) * gradient
    second = beta2 * state["exp_avg_sq"] + (1 - beta2) * gradient * gradient
    n = steps.astype(gradient.dtype)
    direction = first / (1 - beta1**n) / (jnp.sqrt(second / (1 - beta2**n)) + o.eps)
    return direction, {"exp_avg": first, "exp_avg_sq": second, "step": steps}
