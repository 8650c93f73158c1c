"""From log-probabilities to text, and how wrong the text is."""

from __future__ import annotations

from dataclasses import dataclass

import jiwer
from torch import Tensor

from oktopk.sparse_vector import ints

LABELS = "_'ABCDEFGHIJKLMNOPQRSTUVWXYZ "
BLANK = 0
_INDEX = {label: index for index, label in enumerate(LABELS) if index != BLANK}


def encode_text(text: str) -> list[int]:
    """The labels of a transcript; characters that are no label are left out."""
    return [_INDEX[character] for character in " ".join(text.upper().split()) if character in _INDEX]


def greedy(log_probabilities: Tensor, frames: Tensor) -> list[str]:
    """The likeliest label of each frame, repeats merged, blanks dropped; from (frames, batch, labels)."""
    best = log_probabilities.argmax(2).t().cpu()
    return [_collapse(ints(row[:count])) for row, count in zip(best, ints(frames), strict=True)]


def _collapse(labels: list[int]) -> str:
    kept = [
        label
        for position, label in enumerate(labels)
        if label != BLANK and (position == 0 or labels[position - 1] != label)
    ]
    return " ".join("".join(LABELS[label] for label in kept).split())


@dataclass(frozen=True)
class Errors:
    """Edits against a reference, and its length."""

    edits: int
    length: int


def word_errors(reference: str, hypothesis: str) -> Errors:
    out = jiwer.process_words(reference, hypothesis)
    return Errors(out.substitutions + out.deletions + out.insertions, len(reference.split()))


def character_errors(reference: str, hypothesis: str) -> Errors:
    out = jiwer.process_characters(reference, hypothesis)
    return Errors(out.substitutions + out.deletions + out.insertions, len(reference))
