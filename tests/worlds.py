"""Real processes for tests: worlds of Gloo ranks that stay alive, and programs under mpirun."""

from __future__ import annotations

import importlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parent.parent


class GlooWorld:
    """`size` processes joined by Gloo over loopback. `run(fn, ...)` calls `fn` in all of them, results by rank."""

    backend = "gloo"

    def __init__(self, size: int, patience_s: float = 120.0) -> None:
        self.size = size
        self._patience_s = patience_s
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(self.backend, rank, size, f"{self._folder.name}/store", theirs), daemon=True
            )
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        answers = self.try_run(fn, *args)
        for rank, (ok, value) in enumerate(answers):
            assert ok, f"rank {rank} of {self.size}: {value}"
        return [value for _, value in answers]

    def try_run(self, fn: Callable[..., Any], *args: Any) -> list[tuple[bool, Any]]:
        """(True, result) or (False, traceback) for every rank."""
        for pipe in self._pipes:
            pipe.send((fn, args))
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(self._patience_s):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.size} hangs in {fn.__name__}")
            answers.append(pipe.recv())
        return answers

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()


class NcclWorld(GlooWorld):
    """The same over NCCL, one GPU for each rank."""

    backend = "nccl"


def _serve(backend: str, rank: int, size: int, store: str, pipe: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=dist.FileStore(store, size), rank=rank, world_size=size)
    while True:
        try:
            fn, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, fn(*args)))
        except BaseException:
            pipe.send((False, traceback.format_exc()))


def run_mpi(size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """`fn` in `size` processes started by mpirun, results by rank."""
    code, output, results = try_run_mpi(size, fn, *args, timeout_s=timeout_s)
    assert code == 0, output
    return [results[rank] for rank in range(size)]


def try_run_mpi(
    size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0
) -> tuple[int, str, dict[int, Any]]:
    """Exit code, output, and the results of those ranks that came to one."""
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [str(mpirun), "--allow-run-as-root", "--oversubscribe", "-np", str(size)]
    with tempfile.TemporaryDirectory() as folder:
        spec = json.dumps([fn.__module__, fn.__qualname__, folder])
        (Path(folder) / "args").write_bytes(pickle.dumps(args))
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.worlds", spec],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        files = {rank: Path(folder) / f"result{rank}" for rank in range(size)}
        results = {rank: pickle.loads(file.read_bytes()) for rank, file in files.items() if file.exists()}
        return done.returncode, done.stdout + done.stderr, results


def _under_mpi(module: str, name: str, folder: str) -> None:
    from mpi4py import MPI

    fn = getattr(importlib.import_module(module), name)
    result = fn(*pickle.loads((Path(folder) / "args").read_bytes()))
    (Path(folder) / f"result{MPI.COMM_WORLD.Get_rank()}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _under_mpi(*json.loads(sys.argv[1]))
