"""A user's own module as the reference, and what it must be like to serve as one.

The module is the one that the framework trains, so a mistake in its own code stands on both sides. What is independent
here is all the rest: which samples form a window, denominators, reduction, clipping, and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equivtests.cases.case import MAX_SAMPLES
from equivtests.errors import ModelError
from equivtests.own import PREFIX, Loaded

Weights = dict[str, Tensor]

PROBES = 4
"""Samples that a model is examined on."""


class Losses(nn.Module):
    """The summed loss per sample as a function of parameters that bear canonical names."""

    def __init__(self, own: Loaded) -> None:
        super().__init__()
        self.own, self.model = own, own.build()

    def forward(self, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        return self.own.model.losses(self.model, inputs, targets, valid)


def module_in(own: Loaded, dtype: torch.dtype) -> Losses:
    """The module in a dtype, kept for the next call."""
    if dtype not in own.modules:
        own.modules[dtype] = Losses(own).to(dtype)
    return own.modules[dtype]


def row_losses(own: Loaded, weights: Weights, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
    """Summed loss of every row, (N,), all rows as one batch, at weights that take gradients."""
    module = module_in(own, next(iter(weights.values())).dtype)
    return torch.func.functional_call(module, weights, (inputs, targets, valid))


# ---------------------------------------------------------------------------------------------- examining


def examine(own: Loaded) -> None:
    """Raise ModelError, in one line, if the model cannot serve as a reference; find out whether float64 is its truth."""
    for demand, doing in DEMANDS:
        try:
            problem = next(demand(own), "")
        except Exception as error:
            text = (str(error).splitlines() or [""])[0]
            raise ModelError(f"model {own.spec}: {doing} raised {type(error).__name__}: {text}") from error
        if problem:
            raise ModelError(f"model {own.spec}: {problem}")
    own.double = not rounds_inside(own)


def modules_are_built(own: Loaded) -> Iterator[str]:
    """build() returns a module on the CPU with something to train."""
    if not isinstance(own.module, nn.Module):
        yield f"build() returned a {type(own.module).__name__}, not a torch module"
        return
    for name, parameter in own.module.named_parameters():
        if parameter.device.type != "cpu" or not parameter.is_floating_point():
            yield f"parameter {name} is {parameter.dtype} on {parameter.device}: build floating-point weights on the CPU"
        elif not parameter.isfinite().all():
            yield f"parameter {name} is not finite"
    if not own.trained:
        yield "no parameter takes a gradient"


def builds_agree(own: Loaded) -> Iterator[str]:
    """The first weights do not depend on the process: not on the random state, not on how often they were built."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1 + torch.initial_seed() % 2**32)
        again = own.build()
    first, second = dict(own.module.state_dict()), dict(again.state_dict())
    other = sorted(n for n in first.keys() | second.keys() if n not in first or n not in second)
    other += [n for n in first if n in second and not torch.equal(first[n], second[n])]
    if other:
        yield f"build() gave other values of {other[0]} when called again: seed it inside, with torch.manual_seed"


def samples_tell_themselves_apart(own: Loaded) -> Iterator[str]:
    """Samples have one shape, repeat, and their inputs differ."""
    first, seen = own.sample(0), dict[bytes, int]()
    if not (isinstance(own.model.length, int) and own.model.length >= 1):
        yield f"length is {own.model.length!r}; it is the largest number of valid tokens of a sample, at least 1"
    for number in range(MAX_SAMPLES):
        for role, array, like in zip(("inputs", "targets"), own.sample(number), first, strict=True):
            if (array.shape, array.dtype) != (like.shape, like.dtype):
                words = f"{array.dtype} {array.shape}, those of sample 0 {like.dtype} {like.shape}"
                yield f"{role} of sample {number} are {words}"
        inputs = own.sample(number)[0]
        key = (inputs.astype(np.float32) if inputs.dtype.kind == "f" else inputs).tobytes()
        if key in seen:
            yield f"samples {seen[key]} and {number} have the same inputs: nobody could tell which of them was fed"
            return
        seen[key] = number
    again = Loaded(own.spec, own.model).sample(1)
    if not all(map(np.array_equal, again, own.sample(1))):
        yield "sample(1) gave other arrays when called again: seed it with the number"


def probe(own: Loaded, chosen: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
    """(inputs, targets, valid) of a few samples in float64, of which the last has no valid token."""
    length = own.model.length
    arrays = [own.sample(number) for number in range(PROBES)]
    counts = np.linspace(length, 0, PROBES).astype(np.int64)
    valid = torch.from_numpy(np.arange(length)[None] < counts[:, None])
    inputs, targets = (torch.from_numpy(np.stack([pair[i] for pair in arrays])) for i in range(2))
    return inputs[chosen], targets[chosen], valid[chosen]


def probed(own: Loaded, dtype: torch.dtype = torch.float64, chosen: slice = slice(None)) -> Tensor:
    """Losses of the probe in the module itself."""
    inputs, targets, valid = (x.to(dtype) if x.is_floating_point() else x for x in probe(own, chosen))
    return module_in(own, dtype)(inputs, targets, valid)


def losses_are_numbers(own: Loaded) -> Iterator[str]:
    """One finite loss per sample, in float32 and in float64."""
    for dtype in (torch.float32, torch.float64):
        found = probed(own, dtype)
        if not isinstance(found, Tensor) or found.shape != (PROBES,):
            shape = f"shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            yield f"losses() gave {shape} for {PROBES} samples: return ({PROBES},), the summed loss of each"
            return
        if not found.isfinite().all() or not found.requires_grad:
            yield f"losses() in {dtype} are {found.tolist()}: finite numbers with a gradient are needed"


def nothing_is_drawn(own: Loaded) -> Iterator[str]:
    """No dropout: a forward pass gives the same twice, and leaves buffers alone."""
    module = module_in(own, torch.float64)
    before = {n: b.clone() for n, b in module.named_buffers()}
    with torch.random.fork_rng(devices=[]):
        first = probed(own)
        torch.manual_seed(1 + torch.initial_seed() % 2**32)
        second = probed(own)
    changed = [n for n, b in module.named_buffers() if n not in before or not torch.equal(b, before[n])]
    if changed:
        name = changed[0].removeprefix(PREFIX)
        yield f"a forward pass changes buffer {name} (batch norm?): use eval(), or a layer without running statistics"
    if not torch.equal(first, second):
        yield "losses() differ when called again: the module draws random numbers (dropout?); build it with p = 0"


def samples_do_not_mix(own: Loaded) -> Iterator[str]:
    """The loss of a sample is the same alone and in a batch: else no split over ranks equals the whole."""
    whole = probed(own).detach()
    alone = torch.cat([probed(own, chosen=slice(i, i + 1)).detach() for i in range(PROBES)])
    if not torch.allclose(whole, alone, rtol=1e-5, atol=1e-7 * float(whole.abs().max())):
        at = int((whole - alone).abs().argmax())
        yield (
            f"sample {at} has loss {float(whole[at]):.9g} in a batch of {PROBES} and {float(alone[at]):.9g} alone: its loss "
            "depends on the other samples (a mean over the batch, batch norm, contrastive terms?)"
        )


def invalid_tokens_do_not_count(own: Loaded) -> Iterator[str]:
    """A sample without a valid token has loss zero and adds nothing to any gradient."""
    module = module_in(own, torch.float64)
    last = probed(own, chosen=slice(PROBES - 1, PROBES))
    parameters = [p for p in module.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(last.sum(), parameters, allow_unused=True)
    if float(last.detach().abs().sum()) != 0 or any(g is not None and bool((g != 0).any()) for g in gradients):
        yield f"a sample without a valid token has loss {float(last.detach().sum()):g} or a gradient: multiply by `valid`"


def weights_are_the_modules_own(own: Loaded) -> Iterator[str]:
    """The loss at given weights is that of a module with these weights: it keeps no copies of them."""
    moved = {n: torch.from_numpy(w * (1 + 2.0**-6)) for n, w in own.weights.items()}
    given = row_losses(own, moved, *probe(own)).detach()
    other = Losses(own).to(torch.float64)
    with torch.no_grad():
        for name, parameter in other.named_parameters():
            parameter.copy_(moved[name])
    held = other(*probe(own)).detach()
    if not torch.allclose(given, held, rtol=1e-5, atol=1e-7 * float(held.abs().max())):
        yield "the module computes from copies of its parameters: the reference cannot put weights into it"


DEMANDS: tuple[tuple[Callable[[Any], Iterator[str]], str], ...] = (
    (modules_are_built, "build()"),
    (builds_agree, "build()"),
    (samples_tell_themselves_apart, "sample()"),
    (losses_are_numbers, "losses(), called in float32 and in float64 (the reference computes in float64),"),
    (nothing_is_drawn, "losses()"),
    (samples_do_not_mix, "losses()"),
    (invalid_tokens_do_not_count, "losses()"),
    (weights_are_the_modules_own, "losses()"),
)
"""What a model must be like, and what is being done when it raises."""


def rounds_inside(own: Loaded) -> bool:
    """Whether the module, cast to float64, rounds to less on the way (`x.float()`): its loss then moves in steps."""
    names = sorted(own.trained)
    weights = {n: torch.from_numpy(w).requires_grad_(n in own.trained) for n, w in own.weights.items()}
    loss = row_losses(own, weights, *probe(own)).sum()
    gradients = torch.autograd.grad(loss, [weights[n] for n in names], allow_unused=True)
    moved, expected = {n: w.detach() for n, w in weights.items()}, 0.0
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is not None:
            step = 2.0**-30 * moved[name].abs() * gradient.sign()
            moved[name], expected = moved[name] + step, expected + float((gradient * step).sum())
    difference = float(row_losses(own, moved, *probe(own)).detach().sum() - loss.detach())
    return loss.dtype != torch.float64 or abs(difference - expected) > 2.0**-7 * abs(expected)
