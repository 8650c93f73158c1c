"""Text as a stream of numbered tokens, and windows of that stream."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor

from oktopk.workbench.train.data.sampler import shard

if TYPE_CHECKING:
    from oktopk.workbench.train.data.wordpiece import Pieces

_LINES_AT_ONCE = 10_000
"""Pieces as the tokenizer returns them take a hundred times the memory of their numbers."""


class Tokens(Protocol):
    """How text becomes numbers in [0, num_tokens); `line_end` is the number of the end of a line."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def line_end(self) -> int: ...

    def encode(self, text: bytes) -> Tensor:
        """One integer for each token of a UTF-8 text that is not empty."""
        ...


@dataclass(frozen=True)
class ByteTokens:
    """Every byte is a token."""

    num_tokens: int = 256
    line_end: int = ord("\n")

    def encode(self, text: bytes) -> Tensor:
        return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class PieceTokens:
    """WordPieces, and one more token between two lines. Case and other white space are lost."""

    pieces: Pieces
    num_tokens: int
    line_end: int

    def encode(self, text: bytes) -> Tensor:
        lines = text.decode().split("\n")
        numbers = array("i")
        for first in range(0, len(lines), _LINES_AT_ONCE):
            for line in self.pieces.encode(lines[first : first + _LINES_AT_ONCE]):
                numbers.extend((*line, self.line_end))
        return torch.from_numpy(np.array(numbers[:-1], dtype=np.int32))


def windows(stream: Tensor, starts: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
    """The `length` tokens from each start on, and the tokens that follow them: int64, (starts, length)."""
    places = torch.tensor(starts)[:, None] + torch.arange(length + 1)
    chosen = stream[places].long()
    return chosen[:, :-1], chosen[:, 1:]


class HeldOutWindows:
    """Every token of a stream once as a target, the first after `line_end`; the same whatever the number of workers.

    The stream is cut into windows of `length`, the last perhaps shorter, which are dealt to the workers.
    """

    def __init__(self, stream: Tensor, line_end: int, *, length: int, rank: int, size: int) -> None:
        self._stream = torch.cat([torch.tensor([line_end], dtype=stream.dtype), stream])
        self._length = length
        all_starts = range(0, len(stream), length)
        self._mine = [all_starts[window] for window in shard(len(all_starts), rank, size)]

    def batches(self, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Tokens and the tokens that follow them, at most so many windows at a time; a shorter one is alone."""
        n = len(self._stream) - 1
        whole = [start for start in self._mine if start + self._length <= n]
        for first in range(0, len(whole), batch_size):
            yield windows(self._stream, whole[first : first + batch_size], self._length)
        for start in self._mine[len(whole) :]:
            yield windows(self._stream, [start], n - start)
