"""Processes that measure together: started here, alive for several jobs, and gone afterwards whatever happens."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol, Self

_ONE_THREAD = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


class WorkerFailed(RuntimeError):
    """A worker raised or died; the message quotes what it said last."""


@dataclass(frozen=True)
class Seat:
    """Where one worker runs: what stands before its command, the network interface and the address it has."""

    prefix: tuple[str, ...] = ()
    interface: str = "lo"
    address: str = "127.0.0.1"


class Detailed(Protocol):
    """Is told how far a job is, such as a `Progress`."""

    def detail(self, text: str) -> None: ...


class WorldOptions(Protocol):
    """What a world needs to know of the options of whoever starts it."""

    @property
    def timeout_s(self) -> float: ...

    @property
    def device(self) -> str: ...


class BenchWorld:
    """A worker in each seat, joined by Gloo, with one thread each. `run(job)` does a job in all of them.

    Workers get no signals from the terminal: they end when this ends.
    """

    def __init__(self, seats: Sequence[Seat], options: WorldOptions) -> None:
        self.size = len(seats)
        self._folder = tempfile.TemporaryDirectory(prefix="oktopk-bench-")
        self._events: queue.Queue[tuple[int, dict[str, Any]]] = queue.Queue()
        self._workers: list[subprocess.Popen[str]] = []
        self._readers: list[threading.Thread] = []
        self._logs: list[IO[str]] = []
        try:
            for rank, seat in enumerate(seats):
                self._start(rank, seat, seats, options)
        except BaseException:
            self.close()
            raise

    def run(self, job: dict[str, Any], progress: Detailed) -> list[Any]:
        """Results by rank; WorkerFailed (and nobody is left) where one of them failed."""
        for worker in self._workers:
            with suppress(BrokenPipeError):  # one that has died says so through its events
                assert worker.stdin is not None
                worker.stdin.write(json.dumps(job) + "\n")
                worker.stdin.flush()
        results: dict[int, Any] = {}
        while len(results) < self.size:
            rank, event = self._events.get()
            if "result" in event:
                results[rank] = event["result"]
            elif "progress" in event:
                progress.detail(str(event["progress"]))
            else:
                reason = event.get("error") or f"ended without a word: {self._last_words(rank)}"
                self.close()
                raise WorkerFailed(f"worker {rank} of {self.size}: {reason}")
        return [results[rank] for rank in range(self.size)]

    def close(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.wait()
        for reader in self._readers:
            reader.join()
        for worker in self._workers:
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    with suppress(BrokenPipeError):
                        pipe.close()
        for log in self._logs:
            log.close()
        self._workers, self._readers, self._logs = [], [], []
        self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, rank: int, seat: Seat, seats: Sequence[Seat], options: WorldOptions) -> None:
        place = {
            "rank": rank,
            "size": len(seats),
            "store": f"{self._folder.name}/store",
            "addresses": [each.address for each in seats],
            "timeout_s": options.timeout_s,
        }
        environment = {**os.environ, **dict.fromkeys(_ONE_THREAD, "1"), "GLOO_SOCKET_IFNAME": seat.interface}
        if options.device == "cpu":  # some hooks of DDP synchronise with a GPU whenever there is one
            environment["CUDA_VISIBLE_DEVICES"] = ""
        log = (Path(self._folder.name) / f"log{rank}").open("w+")
        self._logs.append(log)
        worker = subprocess.Popen(
            [*seat.prefix, sys.executable, "-m", "oktopk.workbench.bench.worker", json.dumps(place)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            start_new_session=True,
        )
        self._workers.append(worker)
        reader = threading.Thread(target=self._listen, args=(rank, worker), daemon=True)
        self._readers.append(reader)
        reader.start()

    def _listen(self, rank: int, worker: subprocess.Popen[str]) -> None:
        assert worker.stdout is not None
        for line in worker.stdout:
            self._events.put((rank, json.loads(line)))
        self._events.put((rank, {"ended": True}))

    def _last_words(self, rank: int) -> str:
        self._logs[rank].seek(0)
        lines = self._logs[rank].read().strip().splitlines()
        return lines[-1] if lines else "nothing on its standard error"
