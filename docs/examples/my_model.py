"""A model of my own behind equivtests: a convolution and a recurrent layer between one embedding, in and out."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from equivtests.own import OwnModel

SYMBOLS, LENGTH = 31, 12


class Reader(nn.Module):
    """Predicts the next symbol."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, 6)
        self.neighbours = nn.Conv1d(6, 10, kernel_size=3)
        self.memory = nn.GRU(10, 6, batch_first=True)

    def forward(self, symbols):
        x = self.embedding(symbols).transpose(1, 2)
        x = torch.tanh(self.neighbours(F.pad(x, (2, 0)))).transpose(1, 2)
        x, _ = self.memory(x)
        return x @ self.embedding.weight.T


class MyModel(OwnModel):
    length = LENGTH

    def build(self):
        torch.manual_seed(0)
        return Reader()

    def sample(self, number):
        symbols = np.random.default_rng(number).integers(SYMBOLS, size=LENGTH + 1)
        return symbols[:-1], symbols[1:]

    def losses(self, module, inputs, targets, valid):
        losses = F.cross_entropy(module(inputs).flatten(0, 1), targets.flatten(), reduction="none")
        return (losses.view_as(targets) * valid).sum(dim=1)
