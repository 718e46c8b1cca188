"""The optimizer step of one parameter as a pure function, in the dtype of its arguments.

The order of operations is that of torch's for-loop optimizers, so that in the same dtype the result is theirs bit for
bit. Adam: Kingma & Ba 2015, algorithm 1, with epsilon outside the bias-corrected root; AdamW: Loshchilov & Hutter 2019,
algorithm 2; momentum without dampening.
"""

from __future__ import annotations

from torch import Tensor

from equivtests.cases.case import Optimizer

State = dict[str, Tensor]
"""momentum: momentum_buffer; adam, adamw: step (), exp_avg, exp_avg_sq. Empty before the first step."""


def step(
    o: Optimizer, rate: float, decay: float, weight: Tensor, gradient: Tensor, state: State
) -> tuple[Tensor, State]:
    """(new weight, new state) of one parameter; all tensors of one shape, `state` as after the previous step."""
    if o.name in ("adam", "adamw"):
        return _adam(o, rate, decay, weight, gradient, state)
    gradient = gradient.add(weight, alpha=decay) if decay else gradient
    if o.momentum:
        buffer = state.get("momentum_buffer")
        buffer = gradient.clone() if buffer is None else buffer.mul(o.momentum).add_(gradient)
        return weight.add(buffer, alpha=-rate), {"momentum_buffer": buffer}
    return weight.add(gradient, alpha=-rate), {}


def _adam(
    o: Optimizer, rate: float, decay: float, weight: Tensor, gradient: Tensor, state: State
) -> tuple[Tensor, State]:
    beta1, beta2 = o.betas
    if decay and o.name == "adamw":
        weight = weight.mul(1 - rate * decay)
    elif decay:
        gradient = gradient.add(weight, alpha=decay)
    zero = gradient.new_zeros(gradient.shape)
    count = state["step"] + 1 if "step" in state else gradient.new_ones(())
    first = state.get("exp_avg", zero).lerp(gradient, 1 - beta1)
    second = state.get("exp_avg_sq", zero).mul(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    n = float(count)
    denominator = (second.sqrt() / (1 - beta2**n) ** 0.5).add_(o.eps)
    new = weight.addcdiv(first, denominator, value=-(rate / (1 - beta1**n)))
    return new, {"step": count, "exp_avg": first, "exp_avg_sq": second}


def decay_of(o: Optimizer, name: str, ndim: int, rule: str = "declared") -> float:
    """Weight decay of a parameter: that of the case unless vectors are exempt, or a semantics says all or none."""
    if rule == "none" or (rule == "declared" and ndim < 2 and not o.decay_vectors):
        return 0.0
    return o.weight_decay
