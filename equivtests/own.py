"""Your own model as the reference. Importing this imports no torch, and nothing here imports your code.

A case that names a model of somebody's own (`model.own = "module:Class"`) is data: the class is looked up among the models
that were loaded because the command line named them (`--model`), and never imported for the sake of the case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from equivtests.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX = "model."
"""Before the names that your module gives its parameters: it is the only child of the module that frameworks are given."""

UNKNOWN = -1
"""Number of inputs that are no sample's."""


class OwnModel:
    """What the suite has to know of a model of yours. Made without arguments, in the main process and on every rank.

    length: most valid tokens of one sample (1 where a sample has one loss). learning_rate: at which plain SGD trains it.
    """

    length: int = 8
    learning_rate: float = 0.125

    def build(self) -> nn.Module:
        """The module with its first weights: the same ones at every call, in every process (seed it here)."""
        raise TypeError(f"{type(self).__name__}.build() is not written: return your torch module")

    def sample(self, number: int) -> tuple[Any, Any]:
        """(inputs, targets) of sample `number`, counted from 0: arrays, of the same shapes for every sample.

        Inputs must differ from sample to sample: they tell which samples reached a forward pass.
        """
        raise TypeError(f"{type(self).__name__}.sample() is not written: return (inputs, targets) of one sample")

    def losses(self, module: nn.Module, inputs: Tensor, targets: Tensor, valid: Tensor) -> Tensor:
        """For each of N samples the sum of the losses of its valid tokens, (N,). valid: bool (N, length).

        inputs, targets: the samples' arrays, stacked; floating ones in the dtype of the weights. A sum, not a mean: who
        divides by what is the question that the suite puts to the framework.
        """
        raise TypeError(f"{type(self).__name__}.losses() is not written: return one summed loss per sample")

    def units(self, module: nn.Module) -> Sequence[nn.Module]:
        """Submodules that a framework may wrap one by one below the whole module; each must be used by calling it."""
        return ()


@dataclass(eq=False)
class Loaded:
    """A model that was loaded. modules: what the reference keeps of it, by dtype.

    double: whether its module computes in float64 when it is cast to it, without rounding to less on the way.
    """

    spec: str
    model: OwnModel
    double: bool = True
    modules: dict[Any, Any] = field(default_factory=dict)
    _samples: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    _numbers: dict[str, dict[bytes, int]] = field(default_factory=dict)

    def build(self) -> nn.Module:
        """The module anew; torch's random state is left as it was."""
        import torch

        with torch.random.fork_rng(devices=[]):
            return self.model.build()

    @cached_property
    def module(self) -> nn.Module:
        """A module to read names, shapes and first values from; nobody trains it."""
        return self.build()

    @cached_property
    def weights(self) -> Mapping[str, np.ndarray]:
        """The first weights by canonical name, float64."""
        return {PREFIX + n: p.detach().double().numpy() for n, p in self.module.named_parameters()}

    @cached_property
    def trained(self) -> frozenset[str]:
        """Names of the parameters that take a gradient."""
        return frozenset(PREFIX + n for n, p in self.module.named_parameters() if p.requires_grad)

    @cached_property
    def buffers(self) -> Mapping[str, np.ndarray]:
        """The buffers, which must not change, by canonical name."""
        return {PREFIX + n: b.detach().clone().numpy() for n, b in self.module.named_buffers()}

    def sample(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """(inputs, targets) of one sample: int64, bool or float64."""
        if number not in self._samples:
            inputs, targets = self.model.sample(number)
            self._samples[number] = plain(inputs), plain(targets)
        return self._samples[number]

    def numbers(self, inputs: np.ndarray, count: int) -> np.ndarray:
        """Numbers of the samples whose inputs these are, int64 (N,); UNKNOWN for any but the first `count` samples."""
        dtype = str(inputs.dtype)
        if dtype not in self._numbers:
            rows = {n: self.sample(n)[0].astype(inputs.dtype) for n in range(count)}
            self._numbers[dtype] = {row.tobytes(): n for n, row in rows.items()}
        table = self._numbers[dtype]
        return np.array([table.get(row.tobytes(), UNKNOWN) for row in inputs], dtype=np.int64)


def plain(values: Any) -> np.ndarray:
    """An array of one of the dtypes that samples have."""
    array = np.asarray(values)
    wide = {"f": np.float64, "i": np.int64, "u": np.int64, "b": np.bool_}.get(array.dtype.kind)
    if wide is None:
        raise TypeError(f"an array of {array.dtype}, but samples are made of numbers")
    return np.asarray(array, dtype=wide, order="C")


_LOADED: dict[str, Loaded] = {}


def register(spec: str, model: OwnModel) -> Loaded:
    """Make a model known by its name."""
    _LOADED[spec] = Loaded(spec, model)
    return _LOADED[spec]


def known(spec: str) -> bool:
    return spec in _LOADED


def loaded(spec: str) -> Loaded:
    """The model of this name. Raises ModelError if the command line did not name it."""
    if spec not in _LOADED:
        raise ModelError(
            f"the case is about {spec}, which is somebody's own code and is not imported unasked: "
            f"if you trust it, add --model {spec}"
        )
    return _LOADED[spec]


def claim(spec: str) -> str:
    """What a verdict on a case of this model says less than others ("" for the suite's own models)."""
    if not spec:
        return ""
    precision = "" if loaded(spec).double else ", partly in float32"
    return (
        f"weaker claim: the reference is {spec} itself on one device{precision}; "
        "a mistake in its own code stands on both sides"
    )
