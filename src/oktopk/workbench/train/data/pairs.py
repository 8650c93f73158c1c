"""What BERT is pretrained on: pairs of segments of which the second may be a random one, with words masked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from torch import Tensor

from oktopk.workbench.train.data.errors import DataError

IGNORED = -100
"""The label of a place that is not masked."""

_MASKED_PART = 0.15
_HIDDEN, _KEPT = 0.8, 0.9  # of the masked: up to the first [MASK], up to the second the piece itself, then a random one
_RANDOM_NEXT = 0.5
_PAD_TO_MULTIPLE = 8

Numbers = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Special:
    """The numbers of the special pieces."""

    pad: int
    unknown: int
    cls: int
    sep: int
    mask: int


@dataclass(frozen=True)
class Pair:
    """[CLS] first [SEP] second [SEP]: pieces, to which segment each belongs, and what was masked."""

    pieces: Numbers
    segments: Numbers
    labels: Numbers
    random_next: bool


@dataclass(frozen=True)
class PairBatch:
    """Padded to (batch, length). `attended` is 1 where there are pieces; `random_next`, (batch,), 1 if it is one."""

    pieces: Tensor
    segments: Tensor
    attended: Tensor
    labels: Tensor
    random_next: Tensor


class SentencePairs:
    """Pairs from documents, which are given as the pieces of their sentences.

    Sentences of a document that follow each other make up segments of at most half a sample, and of half their
    document. There is a pair for each segment that another one follows. Everything else about a pair, whether its
    second segment is that one or a random one of another document, and what is masked, depends on
    (seed, epoch, index) alone.
    """

    def __init__(
        self,
        documents: Sequence[Sequence[Sequence[int]]],
        *,
        special: Special,
        num_pieces: int,
        sequence_length: int,
        seed: int,
    ) -> None:
        self._special, self._seed, self._most = special, seed, sequence_length
        self._ordinary = np.setdiff1d(np.arange(num_pieces), list(vars(special).values()))
        self._segments: list[Numbers] = []
        self._first: list[int] = []
        self._document: list[range] = []
        for sentences in documents:
            segments = _segments(sentences, (sequence_length - 3) // 2)
            start = len(self._segments)
            self._segments += segments
            self._document += [range(start, len(self._segments))] * len(segments)
            self._first += range(start, len(self._segments) - 1)
        if not self._first or len(self._document[0]) == len(self._segments):
            raise DataError(
                "the text has no two documents of which one has two sentences; put one sentence on a line and an "
                "empty line between documents"
            )

    def __len__(self) -> int:
        return len(self._first)

    @property
    def lengths(self) -> list[float]:
        """About how many pieces each pair has."""
        return [float(len(self._segments[i]) + len(self._segments[i + 1])) for i in self._first]

    def pair(self, index: int, epoch: int | None) -> Pair:
        """An epoch of None is for held-out text: always the same."""
        generator = np.random.default_rng((self._seed, 0 if epoch is None else epoch + 1, index))
        first = self._first[index]
        random_next = bool(generator.random() < _RANDOM_NEXT)
        one, other = (
            self._segments[first],
            self._segments[self._elsewhere(first, generator) if random_next else first + 1],
        )
        cls, sep = [self._special.cls], [self._special.sep]
        pieces = np.concatenate([cls, one, sep, other, sep])
        segments = np.repeat([0, 1], [len(one) + 2, len(other) + 1])
        places = np.concatenate([np.arange(len(one)) + 1, np.arange(len(other)) + len(one) + 2])
        labels = self._mask(pieces, places, generator)
        return Pair(pieces, segments, labels, random_next)

    def batch(self, indices: Sequence[int], epoch: int | None) -> PairBatch:
        pairs = [self.pair(index, epoch) for index in indices]
        longest = max(len(pair.pieces) for pair in pairs)
        shape = len(pairs), min(self._most, -(-longest // _PAD_TO_MULTIPLE) * _PAD_TO_MULTIPLE)
        pieces, labels = np.full(shape, self._special.pad), np.full(shape, IGNORED)
        segments, attended = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        for row, pair in enumerate(pairs):
            n = len(pair.pieces)
            pieces[row, :n], segments[row, :n], labels[row, :n] = pair.pieces, pair.segments, pair.labels
            attended[row, :n] = 1
        random_next = np.array([pair.random_next for pair in pairs], dtype=np.int64)
        return PairBatch(*(torch.from_numpy(each) for each in (pieces, segments, attended, labels, random_next)))

    def _elsewhere(self, segment: int, generator: Generator) -> int:
        """A segment of another document."""
        own = self._document[segment]
        found = int(generator.integers(len(self._segments) - len(own)))
        return found if found < own.start else found + len(own)

    def _mask(self, pieces: Numbers, places: Numbers, generator: Generator) -> Numbers:
        """Changes `pieces`; the labels are what was there."""
        count = max(1, round(_MASKED_PART * len(places)))
        chosen = generator.permutation(places)[:count]
        labels = np.full(len(pieces), IGNORED)
        labels[chosen] = pieces[chosen]
        luck = generator.random(count)
        random_pieces = generator.choice(self._ordinary, count)
        pieces[chosen[luck < _HIDDEN]] = self._special.mask
        pieces[chosen[luck >= _KEPT]] = random_pieces[luck >= _KEPT]
        return labels


def _segments(sentences: Sequence[Sequence[int]], most: int) -> list[Numbers]:
    """Sentences that follow each other, joined to at most so many pieces; a longer one is cut off there."""
    cut = [list(sentence[:most]) for sentence in sentences if sentence]
    limit = min(most, -(-sum(map(len, cut)) // 2))
    joined: list[list[int]] = []
    for sentence in cut:
        if joined and len(joined[-1]) + len(sentence) <= limit:
            joined[-1] += sentence
        else:
            joined.append(sentence)
    return [np.array(pieces, dtype=np.int64) for pieces in joined]
