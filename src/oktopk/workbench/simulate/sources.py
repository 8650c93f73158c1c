"""Where simulated ranks take their gradients from: made from a seed, or recorded in a run."""

from __future__ import annotations

import math
import re
from collections import Counter
from functools import cached_property
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.simulate.gradients import Synthetic, draw_base

_FILE = re.compile(r"step_(\d+)_bucket_(\d+)\.npy")
_Layout = tuple[tuple[int, int], ...]  # (bucket, elements)


class GradientSource(Protocol):
    """Gradients of n elements for any rank and step, the same ones whenever they are asked for."""

    n: int
    about: str
    """One line for people."""
    most_ranks: float
    """How many ranks it can serve; may be infinite."""

    def check(self, num_ranks: int) -> None:
        """UsageError where it has not enough different gradients for so many ranks."""
        ...

    def notes(self, num_ranks: int, num_steps: int) -> list[str]:
        """What a reader must know of how so many ranks and steps were served; a line for each."""
        ...

    def write(self, rank: int, step: int, out: Tensor) -> None:
        """Into `out`, a flat fp32 tensor of n elements on the CPU."""
        ...


class SyntheticSource:
    """`Synthetic` for every rank. Holds one noise vector for each rank it was asked for, and one base for all."""

    def __init__(self, n: int, seed: int) -> None:
        self.n = n
        self.about = f"synthetic gradients, seed {seed}"
        self.most_ranks = math.inf
        self._seed = seed
        self._ranks: dict[int, Synthetic] = {}

    @cached_property
    def _base(self) -> NDArray[np.float32]:
        return draw_base(self.n, self._seed)

    def check(self, num_ranks: int) -> None:
        del num_ranks

    def notes(self, num_ranks: int, num_steps: int) -> list[str]:
        del num_ranks, num_steps
        return []

    def write(self, rank: int, step: int, out: Tensor) -> None:
        if rank not in self._ranks:
            self._ranks[rank] = Synthetic(self.n, rank, self._seed, self._base)
        self._ranks[rank].write(step, out)


class RecordedSource:
    """What a run recorded (`gradients/rank_R/step_S_bucket_B.npy`): all buckets, one behind the other, or one of them.

    Simulated rank r takes recorded rank r % R, r // R recorded steps ahead; behind the last recorded step comes the
    first again. Steps whose buckets are not those of most steps are left out: the same place would be another weight.
    """

    def __init__(self, run: Path, bucket: int | None = None) -> None:
        self._folder = run / "gradients" if (run / "gradients").is_dir() else run
        self._run = run
        self._num_ranks = self._count_ranks()
        sizes = self._sizes(bucket)
        layouts = Counter(sizes.values())
        layout, _ = max(layouts.items(), key=lambda item: (item[1], max(s for s in sizes if sizes[s] == item[0])))
        self._layout: _Layout = layout
        self._steps = sorted(step for step, found in sizes.items() if found == layout)
        self._left_out = sorted(set(sizes) - set(self._steps))
        self._check_files()
        self.n = sum(numel for _, numel in layout)
        self.most_ranks: float = self._num_ranks * len(self._steps)
        which = "all buckets" if bucket is None else f"bucket {bucket}"
        self.about = f"{run}: {which} of {len(self._steps)} recorded steps of {self._num_ranks} ranks"

    def check(self, num_ranks: int) -> None:
        if num_ranks > self.most_ranks:
            needed = -(-num_ranks // self._num_ranks)
            raise UsageError(
                f"--ranks: {num_ranks}: {self._run} holds {self.most_ranks} different gradients "
                f"({self._num_ranks} ranks, {len(self._steps)} steps), and two ranks must not have the same; "
                f"record at least {needed} steps, or simulate at most {self.most_ranks} ranks"
            )

    def notes(self, num_ranks: int, num_steps: int) -> list[str]:
        found: list[str] = []
        if self._left_out:
            found.append(f"recorded steps {_listed(self._left_out)} have other buckets than the rest: left out")
        offsets = -(-num_ranks // self._num_ranks)
        if offsets > 1:
            found.append(
                f"{self._num_ranks} ranks were recorded: rank r of more stands for rank r % {self._num_ranks}, "
                f"r // {self._num_ranks} recorded steps ahead"
            )
        if num_steps + offsets - 1 > len(self._steps):
            found.append(
                f"{len(self._steps)} steps were recorded, {num_steps} are simulated: behind the last comes the first"
            )
        return found

    def write(self, rank: int, step: int, out: Tensor) -> None:
        place = (step + rank // self._num_ranks) % len(self._steps)
        values, start = out.numpy(), 0
        for bucket, numel in self._layout:
            path = self._path(rank % self._num_ranks, self._steps[place], bucket)
            values[start : start + numel] = _load(path)
            if not np.isfinite(values[start : start + numel]).all():
                raise UsageError(f"--gradients: '{path}': holds NaN or Inf, which no rank would send; leave it out")
            start += numel

    def _count_ranks(self) -> int:
        count = 0
        while (self._folder / f"rank_{count}").is_dir():
            count += 1
        if not count:
            raise UsageError(
                f"--gradients: '{self._run}': holds no recorded gradients (gradients/rank_0); "
                "train with --record-gradients to make some"
            )
        return count

    def _sizes(self, bucket: int | None) -> dict[int, _Layout]:
        """The wanted buckets of every step that rank 0 recorded."""
        found: dict[int, list[tuple[int, int]]] = {}
        known: set[int] = set()
        for path in sorted((self._folder / "rank_0").iterdir()):
            matched = _FILE.fullmatch(path.name)
            if not matched:
                continue
            known.add(int(matched[2]))
            if bucket in (None, int(matched[2])):
                found.setdefault(int(matched[1]), []).append((int(matched[2]), _load(path).size))
        if not known:
            raise UsageError(
                f"--gradients: '{self._folder / 'rank_0'}': holds no step_*_bucket_*.npy; "
                "train with --record-gradients to make some"
            )
        if not found:
            raise UsageError(f"--bucket: {bucket}: was not recorded; choose from {_listed(sorted(known))}")
        return {step: tuple(sorted(buckets)) for step, buckets in found.items()}

    def _check_files(self) -> None:
        """Every rank, step and bucket is there, and of one size: before the work, not in the middle of it."""
        for rank in range(self._num_ranks):
            for step in self._steps:
                for bucket, numel in self._layout:
                    path = self._path(rank, step, bucket)
                    found = _load(path).size
                    if found != numel:
                        raise UsageError(f"--gradients: '{path}': {found} elements, those of rank 0 are {numel}")

    def _path(self, rank: int, step: int, bucket: int) -> Path:
        return self._folder / f"rank_{rank}" / f"step_{step:06d}_bucket_{bucket:02d}.npy"


def _load(path: Path) -> NDArray[np.float32]:
    """Read when it is used; UsageError for what is not a whole flat fp32 array."""
    try:
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise UsageError(f"--gradients: '{path}': is missing; record all ranks and steps alike") from error
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"--gradients: '{path}': cannot be read ({error}); record it again") from error
    if values.dtype != np.float32 or values.ndim != 1 or not values.size:
        raise UsageError(
            f"--gradients: '{path}': must be flat fp32 and not empty, is {values.dtype} of shape {values.shape}"
        )
    return values


def _listed(numbers: list[int]) -> str:
    shown = ", ".join(str(number) for number in numbers[:5])
    return shown + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")
