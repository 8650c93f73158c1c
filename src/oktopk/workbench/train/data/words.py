"""Text as a stream of words, in the layout of the Penn Treebank: one sentence a line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.sampler import shard
from oktopk.workbench.train.data.text_files import read_lines

UNKNOWN, END = "<unk>", "<eos>"
IGNORED = -100
"""The target of what is only padding."""
_HELD_OUT_COLUMNS = 16


def find_texts(folder: Path) -> tuple[Path, Path]:
    """The training and the held-out text: train.txt and valid.txt (or test.txt), or ptb.train.txt and so on."""
    if not folder.is_dir():
        raise DataError(f"data_dir={str(folder)!r}: no such folder; leave data_dir out to train on generated text")
    train = _find(folder, "train.txt")
    held_out = _find(folder, "valid.txt") or _find(folder, "test.txt")
    if train is None or held_out is None:
        lacking = "train.txt" if train is None else "valid.txt or test.txt"
        raise DataError(f"{folder}: has no {lacking}, nor one named as ptb.train.txt; one sentence a line")
    return train, held_out


def _find(folder: Path, name: str) -> Path | None:
    if (folder / name).is_file():
        return folder / name
    found = sorted(folder.glob(f"*.{name}"))
    if len(found) > 1:
        raise DataError(f"{folder}: has {found[0].name} and {found[1].name}; leave one, or name it {name}")
    return found[0] if found else None


@dataclass(frozen=True)
class Vocabulary:
    """Words and their numbers, which are their places in `words`."""

    words: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, most: int) -> Vocabulary:
        """The `most` frequent words of a text, by frequency, then by alphabet; `<unk>` and `<eos>` are among them."""
        counts = Counter(word for sentence in _sentences(path) for word in sentence)
        if not counts:
            raise DataError(f"{path}: has no words; it must have one sentence a line")
        always = {UNKNOWN: counts.pop(UNKNOWN, 0), END: counts.pop(END)}
        kept = sorted(counts.items(), key=_by_frequency)[: most - len(always)]
        return cls(tuple(word for word, _ in sorted([*kept, *always.items()], key=_by_frequency)))

    def encode(self, path: Path) -> Tensor:
        """The text as one stream of numbers, each sentence followed by `<eos>`."""
        numbers = {word: number for number, word in enumerate(self.words)}
        unknown = numbers[UNKNOWN]
        stream = (numbers.get(word, unknown) for sentence in _sentences(path) for word in sentence)
        tokens = torch.from_numpy(np.fromiter(stream, dtype=np.int32))
        if not len(tokens):
            raise DataError(f"{path}: has no words; it must have one sentence a line")
        return tokens


def _sentences(path: Path) -> Iterator[list[str]]:
    """A line without words is no sentence."""
    return ([*words, END] for line in read_lines(path) if (words := line.split()))


def _by_frequency(item: tuple[str, int]) -> tuple[int, str]:
    return -item[1], item[0]


class TrainingColumns:
    """One stream, cut into `batch_size * size` contiguous columns of which each worker has its own `batch_size`.

    Batch i has the next `steps` words of each column, so that a state can be carried from batch to batch. What is left
    at the end of the columns and is less than a batch is left out.
    """

    def __init__(self, tokens: Tensor, *, batch_size: int, steps: int, rank: int, size: int) -> None:
        self._steps = steps
        rows = len(tokens) // (batch_size * size)
        columns = tokens[: rows * batch_size * size].view(batch_size * size, rows)
        self._mine = columns[rank * batch_size : (rank + 1) * batch_size].t().contiguous()
        self.num_batches = max(0, rows - 1) // steps

    def batch(self, index: int) -> tuple[Tensor, Tensor]:
        """Words and the words that follow them: int64, (steps, batch_size)."""
        start = index * self._steps
        words = self._mine[start : start + self._steps + 1].long()
        return words[:-1], words[1:]


class HeldOutColumns:
    """Every word of a stream once as a target, the first after an `<eos>`; the same whatever the number of workers.

    The stream is cut into (at most) 16 contiguous columns, which are dealt to the workers.
    """

    def __init__(self, tokens: Tensor, end: int, *, steps: int, rank: int, size: int) -> None:
        self._steps = steps
        n = len(tokens)
        before = torch.cat([torch.tensor([end], dtype=tokens.dtype), tokens[:-1]])
        num_columns = min(_HELD_OUT_COLUMNS, n)
        borders = [n * column // num_columns for column in range(num_columns + 1)]
        mine = list(shard(num_columns, rank, size))
        rows = max((borders[column + 1] - borders[column] for column in mine), default=0)
        self._inputs = torch.full((rows, len(mine)), end)
        self._targets = torch.full((rows, len(mine)), IGNORED)
        for place, column in enumerate(mine):
            span = slice(borders[column], borders[column + 1])
            self._inputs[: span.stop - span.start, place] = before[span].long()
            self._targets[: span.stop - span.start, place] = tokens[span].long()

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Words and targets, IGNORED where a column has ended: int64, (up to steps, columns of this worker)."""
        for start in range(0, len(self._inputs), self._steps):
            yield self._inputs[start : start + self._steps], self._targets[start : start + self._steps]
