"""Attention over a sequence that one device holds whole: positions, documents, who sees whom."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from equivtests.cases.windows import DOCUMENT_END


class WholeSequence:
    """What a decoder has to know of the sequence beyond one position. Replace it where ranks hold parts of sequences.

    packed: whether token 0 ends a document, so that the next position begins another one.
    """

    def __init__(self, packed: bool = False) -> None:
        self.packed = packed

    def positions(self, inputs: Tensor) -> Tensor:
        """Position of every token in its document, int64 (N, L), or (1, L) where all rows have the same."""
        index = torch.arange(inputs.shape[1], device=inputs.device)[None]
        if not self.packed:
            return index
        begins = F.pad(inputs[:, :-1] == DOCUMENT_END, (1, 0), value=True)
        return index - torch.where(begins, index, 0).cummax(dim=1).values

    def documents(self, inputs: Tensor) -> Tensor | None:
        """Number of the document that every token is in, from 0 in each row, int64 (N, L); None: rows are not packed."""
        if not self.packed:
            return None
        ends = (inputs == DOCUMENT_END).long()
        return ends.cumsum(dim=1) - ends

    def attention(self, q: Tensor, k: Tensor, v: Tensor, inputs: Tensor) -> Tensor:
        """softmax(q kᵀ / √d) v over earlier positions of the same document; all (N, heads, L, d), inputs (N, L)."""
        documents = self.documents(inputs)
        if documents is None:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        together = documents[:, None, :, None] == documents[:, None, None, :]
        return F.scaled_dot_product_attention(q, k, v, attn_mask=together.tril())
