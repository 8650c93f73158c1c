"""The next word: an embedding, LSTMs over time, one score for each word."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_INITIAL_RANGE = 0.1

State = tuple[Tensor, Tensor]
"""Hidden and cell state of all layers: (layers, batch, hidden) each."""


@dataclass(frozen=True, kw_only=True)
class LanguageModelConfig:
    """The defaults are `lstm` on the Penn Treebank: 66,034,000 parameters."""

    num_words: int = 10_000
    hidden_size: int = 1500
    num_layers: int = 2
    dropout: float = 0.65


class LanguageModel(nn.Module):
    """`forward(words, state)` -> scores (steps, batch, words) of each following word, and the state after the last.

    `words`: (steps, batch); a state of None is one of zeros. Dropout is on what goes into a layer and into the scores.
    """

    def __init__(self, config: LanguageModelConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.dropout = nn.Dropout(config.dropout)
        self.embedding = nn.Embedding(config.num_words, hidden)
        # one by one: the dropout between the layers of a single nn.LSTM keeps a state of its own on CUDA, which no
        # seed reaches, and a resumed run would not be the same
        self.lstms = nn.ModuleList(nn.LSTM(hidden, hidden) for _ in range(config.num_layers))
        self.decoder = nn.Linear(hidden, config.num_words)
        nn.init.uniform_(self.embedding.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
        nn.init.uniform_(self.decoder.weight, -_INITIAL_RANGE, _INITIAL_RANGE)
        nn.init.zeros_(self.decoder.bias)

    def forward(self, words: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        x = self.embedding(words)
        after: list[State] = []
        for layer, lstm in enumerate(self.lstms):
            before = None if state is None else (state[0][layer : layer + 1], state[1][layer : layer + 1])
            x, own = lstm(self.dropout(x), before)
            after.append(own)
        hidden, cell = zip(*after, strict=True)
        return self.decoder(self.dropout(x)), (torch.cat(hidden), torch.cat(cell))
