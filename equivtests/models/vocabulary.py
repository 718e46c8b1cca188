"""Losses over a vocabulary whose logits one device holds whole."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F

from equivtests.models.parts import widen

SMOOTHING = 0.125
"""The weight of the uniform distribution in a smoothed target."""


class WholeVocabulary:
    """Token losses, in at least float32. Replace it where ranks hold parts of the vocabulary.

    smoothing: a in (1 - a) · (-log p of the target) + a · mean over the vocabulary of -log p
    (Szegedy et al. 2016, Rethinking the Inception architecture, section 7).
    """

    def __init__(self, smoothing: float = 0.0) -> None:
        self.smoothing = smoothing

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Loss of every token, (N, L); logits (N, L, V), targets int64 (N, L)."""
        flat = widen(logits).flatten(0, 1)
        losses = F.cross_entropy(flat, targets.flatten(), reduction="none", label_smoothing=self.smoothing)
        return losses.unflatten(0, targets.shape)

    def log_partition(self, logits: Tensor) -> Tensor:
        """log Σ exp(logit) of every token, (N, L)."""
        return widen(logits).logsumexp(dim=-1)
