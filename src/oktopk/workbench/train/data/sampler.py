"""Which samples a rank reads, and when."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_JITTER = 0.05


class _FullBatches:
    """Full batches, the same number of them for every rank: random samples are repeated until all are full."""

    def __init__(self, num_samples: int, batch_size: int, rank: int, size: int, seed: int) -> None:
        self._num_samples = num_samples
        self._batch_size = batch_size
        self._rank = rank
        self._size = size
        self._seed = seed

    @property
    def num_batches(self) -> int:
        """Batches per epoch and rank; the same on all ranks."""
        return math.ceil(self._num_samples / (self._batch_size * self._size))

    def _shuffled(self, generator: np.random.Generator) -> NDArray[np.int64]:
        """The indices of an epoch, of all ranks."""
        total = self.num_batches * self._batch_size * self._size
        return generator.permutation(_fill_up(self._num_samples, total, generator))


class BucketedBatches(_FullBatches):
    """Full batches of utterances of similar duration, the same number of them for every rank.

    An epoch, given by (seed, epoch) alone:
    1. fill up: random utterances are repeated until all ranks' batches are full,
    2. sort by duration, give or take 5 %,
    3. cut into groups of `size` batches, and deal each group's utterances to the ranks in turn,
    4. shuffle the groups.
    """

    def __init__(self, *, durations: Sequence[float], batch_size: int, rank: int, size: int, seed: int) -> None:
        _check(batch_size, rank, size, seed)
        if not durations:
            raise ValueError("durations is empty: there must be at least one utterance")
        for index, duration in enumerate(durations):
            if not 0.0 <= duration < math.inf:
                raise ValueError(f"durations[{index}]={duration!r}: must be a finite number of seconds, at least 0")
        super().__init__(len(durations), batch_size, rank, size, seed)
        self._durations = np.asarray(durations, dtype=np.float64)

    def batches(self, epoch: int) -> list[list[int]]:
        """This rank's batches of indices into durations; over all ranks each index appears at least once."""
        generator = _generator(self._seed, epoch)
        filled = self._shuffled(generator)  # equal durations: in random order
        keys = self._durations[filled] * generator.uniform(1 - _JITTER, 1 + _JITTER, len(filled))
        groups = filled[np.argsort(keys, kind="stable")].reshape(self.num_batches, self._batch_size, self._size)
        return groups[generator.permutation(self.num_batches), :, self._rank].tolist()


class ShuffledBatches(_FullBatches):
    """Full batches of samples in random order, the same number of them for every rank.

    An epoch, given by (seed, epoch) alone: random samples are repeated until all ranks' batches are full; all are
    shuffled, and dealt to the ranks in turn.
    """

    def __init__(self, *, num_samples: int, batch_size: int, rank: int, size: int, seed: int) -> None:
        _check(batch_size, rank, size, seed)
        if num_samples < 1:
            raise ValueError(f"num_samples={num_samples!r}: there must be at least one sample")
        super().__init__(num_samples, batch_size, rank, size, seed)

    def batches(self, epoch: int) -> list[list[int]]:
        """This rank's batches of indices; over all ranks each appears as often as the others or once more."""
        shuffled = self._shuffled(_generator(self._seed, epoch))
        return shuffled.reshape(self.num_batches, self._batch_size, self._size)[:, :, self._rank].tolist()


class RandomPlaces:
    """Batches of `batch_size` random places in [0, num_places), each given by (seed, epoch, rank, index) alone."""

    def __init__(self, *, num_places: int, batch_size: int, rank: int, size: int, seed: int) -> None:
        _check(batch_size, rank, size, seed)
        if num_places < 1:
            raise ValueError(f"num_places={num_places!r}: there must be at least one place")
        self._num_places = num_places
        self._batch_size = batch_size
        self._rank = rank
        self._seed = seed

    def batch(self, epoch: int, index: int) -> list[int]:
        """This rank's batch number `index` of an epoch."""
        return (
            _generator(self._seed, epoch, self._rank, index).integers(self._num_places, size=self._batch_size).tolist()
        )


def shard(n: int, rank: int, size: int) -> range:
    """This rank's part of n samples; over all ranks each appears exactly once."""
    _check_rank(rank, size)
    if n < 0:
        raise ValueError(f"n={n!r}: must be a whole number, at least 0")
    return range(rank, n, size)


def _generator(seed: int, epoch: int, *place: int) -> np.random.Generator:
    if epoch < 0:
        raise ValueError(f"epoch={epoch!r}: must be a whole number, at least 0")
    return np.random.default_rng((seed, epoch, *place))


def _fill_up(n: int, total: int, generator: np.random.Generator) -> NDArray[np.int64]:
    """So many indices below n, each as often as the others or once more; which, is random."""
    repeats, left = divmod(total, n)
    return np.concatenate([np.tile(np.arange(n), repeats), generator.permutation(n)[:left]])


def _check(batch_size: int, rank: int, size: int, seed: int) -> None:
    _check_rank(rank, size)
    for key, value, least in (("batch_size", batch_size, 1), ("seed", seed, 0)):
        if value < least:
            raise ValueError(f"{key}={value!r}: must be a whole number, at least {least}")


def _check_rank(rank: int, size: int) -> None:
    if size < 1:
        raise ValueError(f"size={size!r}: must be a whole number, at least 1")
    if not 0 <= rank < size:
        raise ValueError(f"rank={rank!r}: must be in [0, {size}), the number of ranks")
