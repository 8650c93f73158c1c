"""The next token, from all tokens before it: a transformer decoder with a norm before each layer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

_INITIAL_SPREAD = 0.02


@dataclass(frozen=True, kw_only=True)
class GptShape:
    """The defaults are the smallest GPT-2 without biases: 124,337,664 parameters (with its biases 124,439,808)."""

    num_tokens: int = 50257
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    sequence_length: int = 1024
    dropout: float = 0.0


class Gpt(nn.Module):
    """`forward(tokens)` -> scores (batch, length, num_tokens) of each following token.

    `tokens`: (batch, length), int64, of at most `sequence_length`. The scores' weight is the embedding's.
    """

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.num_tokens, shape.hidden_size)
        self.positions = nn.Embedding(shape.sequence_length, shape.hidden_size)
        self.dropout = nn.Dropout(shape.dropout)
        blocks = [_Block(shape) for _ in range(shape.num_layers)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(shape.hidden_size, bias=False)
        self.scores = nn.Linear(shape.hidden_size, shape.num_tokens, bias=False)
        self.scores.weight = self.embedding.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=_INITIAL_SPREAD)
        for block in blocks:  # 2 * num_layers of these are added up: their sum has the spread of one
            for last in (block.attention.project, block.narrow):
                nn.init.normal_(last.weight, std=_INITIAL_SPREAD / math.sqrt(2 * shape.num_layers))

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.embedding(tokens) + self.positions(places))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))


class _Block(nn.Module):
    """Attention, then two linear layers of which the first is 4 times as wide; each is added to its input."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        hidden = shape.hidden_size
        self.attention_norm = nn.LayerNorm(hidden, bias=False)
        self.attention = _CausalAttention(shape)
        self.norm = nn.LayerNorm(hidden, bias=False)
        self.widen = nn.Linear(hidden, 4 * hidden, bias=False)
        self.activation = nn.GELU(approximate="tanh")
        self.narrow = nn.Linear(4 * hidden, hidden, bias=False)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x)))
        return x + self.dropout(self.narrow(self.activation(self.widen(self.norm(x)))))


class _CausalAttention(nn.Module):
    """Each place attends to itself and to the places before it."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self._num_heads = shape.num_heads
        self._dropout = shape.dropout
        self.query_key_value = nn.Linear(shape.hidden_size, 3 * shape.hidden_size, bias=False)
        self.project = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.query_key_value(x).unflatten(2, (3, self._num_heads, -1))
        query, key, value = heads.permute(2, 0, 3, 1, 4)  # (batch, heads, length, width of a head) each
        attended = nn.functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self._dropout if self.training else 0.0, is_causal=True
        )
        return self.project(attended.transpose(1, 2).flatten(2))
