"""Every communication and every stage of a worker, one after the other, in a compact file.

A file is one line of JSON (`Header`) and records of a fixed size after it, so what a killed run left can be read.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from oktopk.comm.counting import CommRecord

FORMAT = 1
OPERATIONS = ("all_reduce", "all_gather_v", "all_to_all_v", "send", "recv", "broadcast", "barrier")
STAGES = ("io", "forward", "backward", "wait", "validate", "checkpoint")
NAMES = (*OPERATIONS, *STAGES)
NOBODY = -1
RECORD = np.dtype(
    [
        ("call", "<u4"),  # rows of one call share a number
        ("step", "<u4"),
        ("name", "u1"),  # place in NAMES
        ("peer", "<i2"),  # NOBODY: a stage, or a collective whose ways only the library below knows
        ("messages_sent", "<u2"),
        ("messages_received", "<u2"),
        ("bytes_sent", "<u8"),
        ("bytes_received", "<u8"),
        ("start_s", "<f8"),  # on the worker's monotonic clock
        ("seconds", "<f4"),  # of the whole call, the same in all of its rows
    ]
)
_ROWS_AT_ONCE = 4096
_CODES = {name: code for code, name in enumerate(NAMES)}


class ProfileError(ValueError):
    """A file that is no profile; the message names it and says why."""


@dataclass(frozen=True)
class Header:
    format: int
    rank: int
    size: int
    host: str
    wall_minus_monotonic_s: float
    """Added to `start_s` it gives the time of day, so that workers of one machine can be laid side by side."""


class Profiler(Protocol):
    """What a trainer tells, from any thread. `step` says where training is; whoever knows sets it."""

    step: Callable[[], int]

    def communication(self, record: CommRecord) -> None: ...
    def stage(self, name: str) -> AbstractContextManager[None]: ...
    def close(self) -> None: ...


class NoProfile:
    """Nothing is recorded."""

    def __init__(self) -> None:
        self.step: Callable[[], int] = lambda: 0

    def communication(self, record: CommRecord) -> None:
        del record

    def stage(self, name: str) -> AbstractContextManager[None]:
        del name
        return nullcontext()

    def close(self) -> None:
        pass


class FileProfile:
    """Collects rows and writes some thousand at a time."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb")
        offset = time.time() - time.monotonic()
        header = Header(FORMAT, rank, size, socket.gethostname(), offset)
        self._file.write(json.dumps(asdict(header)).encode() + b"\n")
        self._lock = threading.Lock()
        self._rows: list[tuple[Any, ...]] = []
        self._calls = 0
        self.step: Callable[[], int] = lambda: 0

    def communication(self, record: CommRecord) -> None:
        name, times = _CODES[record.operation], (record.start_s, record.seconds)
        if record.sent_to:
            by_peer = enumerate(zip(record.sent_to, record.received_from, strict=True))
            self._add(name, times, [(peer, a > 0, b > 0, a, b) for peer, (a, b) in by_peer if a or b])
        else:
            peer = NOBODY if record.peer is None else record.peer
            moved = record.messages_sent, record.messages_received, record.bytes_sent, record.bytes_received
            self._add(name, times, [(peer, *moved)])

    @contextmanager
    def stage(self, name: str) -> Generator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self._add(_CODES[name], (start, time.monotonic() - start), [(NOBODY, 0, 0, 0, 0)])

    def close(self) -> None:
        """May be called again."""
        with self._lock:
            if not self._file.closed:
                self._write()
                self._file.close()

    def _add(self, name: int, times: tuple[float, float], moved: Sequence[tuple[int, int, int, int, int]]) -> None:
        with self._lock:
            self._calls += 1
            call = self._calls, self.step(), name
            self._rows += [(*call, *each, *times) for each in moved]
            if len(self._rows) >= _ROWS_AT_ONCE:
                self._write()

    def _write(self) -> None:
        rows, self._rows = self._rows, []
        self._file.write(np.array(rows, dtype=RECORD).tobytes())
        self._file.flush()


def read_profile(path: Path) -> tuple[Header, np.ndarray[Any, Any]]:
    """The header and an array of RECORD; half a record at the end, as a killed run leaves it, is left out."""
    raw = path.read_bytes()
    line, newline, rest = raw.partition(b"\n")
    header = _read_header(line) if newline else None
    if header is None or header.format != FORMAT:
        raise ProfileError(f"{path}: is no profile of format {FORMAT}; make it again with --profile")
    return header, np.frombuffer(rest, dtype=RECORD, count=len(rest) // RECORD.itemsize)


def _read_header(line: bytes) -> Header | None:
    try:
        values = json.loads(line)
        header = Header(**values)
    except (ValueError, TypeError):
        return None
    kinds = {"format": int, "rank": int, "size": int, "host": str, "wall_minus_monotonic_s": float}
    return header if all(type(values[key]) is kind for key, kind in kinds.items()) else None


def profile_files(run_folder: Path) -> list[Path]:
    """By rank."""
    ranks = {path: path.stem.removeprefix("rank_") for path in (run_folder / "profile").glob("rank_*.bin")}
    return sorted((path for path, rank in ranks.items() if rank.isdecimal()), key=lambda path: int(ranks[path]))
