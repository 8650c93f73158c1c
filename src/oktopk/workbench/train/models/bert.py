"""BERT for pretraining, from transformers, made from numbers alone: nothing is ever looked up or downloaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers.models.bert.configuration_bert import BertConfig
from transformers.models.bert.modeling_bert import BertForPreTraining

_LEAST_POSITIONS = 512
"""As BERT has them, so that a shorter model can go on with longer samples."""


@dataclass(frozen=True, kw_only=True)
class BertShape:
    """The defaults are BERT-base: 110,106,428 parameters, the scores' weights shared with the embedding."""

    num_pieces: int = 30522
    hidden_size: int = 768
    num_layers: int = 12
    num_heads: int = 12
    sequence_length: int = 128
    dropout: float = 0.1
    pad: int = 0


def make_bert(shape: BertShape) -> nn.Module:
    """New weights, from torch's random numbers."""
    return BertForPreTraining(
        BertConfig(
            vocab_size=shape.num_pieces,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            intermediate_size=4 * shape.hidden_size,
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.dropout,
            max_position_embeddings=max(_LEAST_POSITIONS, shape.sequence_length),
            pad_token_id=shape.pad,
        )
    )


def scores(model: Any, pieces: Tensor, segments: Tensor, attended: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Of every piece at the `wanted` places of (batch, length), row by row; and of next and random, (batch, 2).

    Scoring a place costs as much as several layers, and only one in seven is asked for.
    """
    out = model.bert(input_ids=pieces, token_type_ids=segments, attention_mask=attended)
    return model.cls.predictions(out.last_hidden_state[wanted]), model.cls.seq_relationship(out.pooler_output)
