"""Compiled once, found again by every later process: a cache that misses would also grow without end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba", reason="numba is not installed: there is nothing to cache")

SCRIPT = """
import torch
from oktopk.kernels import numba_loops as loops
from oktopk.kernels.base import UpdateRule, Velocity
from oktopk.kernels.numba_ops import NumbaKernels
from oktopk.sparse_vector import SparseVector
kernels = NumbaKernels()
values = torch.arange(1.0, 200.0)
some = SparseVector(torch.arange(0, 199, 2), values[::2].clone(), 199)
kernels.accumulate(values, values, torch.empty(199), 3.0, 500, torch.device("cpu"))()
velocity = Velocity(values, torch.empty(199), UpdateRule(momentum=0.9))
kernels.accumulate(values, values, torch.empty(199), 3.0, 500, torch.device("cpu"), velocity)()
kernels.above(values, 3.0, 500), kernels.kth_magnitude(values, 5), kernels.histogram(values, 0, 23, 256)
kernels.sum([some, some]), kernels.restrict(some, some.indices), kernels.write(values, some)
kernels.subtract(values, some), kernels.hash_words(values.view(torch.int32))
kernels.decode_gaps(kernels.encode_gaps(some.indices, 1), 1, len(some))
names = '''accumulate accumulate_velocity above kth_magnitude histogram merge common scatter subtract
encode_gaps decode_gaps hash_words'''.split()
print(sum(sum(getattr(loops, name).stats.cache_misses.values()) for name in names))
"""


def misses(cache: Path) -> int:
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    return int(done.stdout)


def test_a_second_process_compiles_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    assert misses(tmp_path) > 0
    files = sorted(path.name for path in tmp_path.rglob("*.nb*"))
    assert misses(tmp_path) == 0
    assert sorted(path.name for path in tmp_path.rglob("*.nb*")) == files
