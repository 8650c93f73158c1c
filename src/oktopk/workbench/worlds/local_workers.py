"""Workers on this machine: plain processes that meet through a file in a private folder, so nobody else can join.

torch's launchers keep a store that listens on all interfaces, without a password.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

STORE = "OKTOPK_STORE"
"""The environment variable that tells a worker the file through which it meets the others."""
GRACE_S = 5.0
"""Workers that fail together get this long to say so, and as long again between SIGTERM and SIGKILL."""

Events = queue.SimpleQueue[tuple[int | None, int]]
"""(rank, return code) of a worker that ended, or (None, signal) of a signal to the launcher.

A SimpleQueue: a signal handler may put into it while the same thread waits for it.
"""


def start_local_workers(num_workers: int, arguments: Sequence[str], log_folder: Path | None = None) -> int:
    """Run `python arguments...` in `num_workers` processes on this machine and wait for them.

    Their output goes straight to ours. When one fails, the others get GRACE_S seconds before they are ended.
    SIGINT and SIGTERM to this process are passed on. No worker outlives the call, or this process.

    Args:
        num_workers: how many processes to start.
        arguments: what follows the interpreter on each worker's command line.
        log_folder: where worker N keeps `rank_N.log`, where workers keep logs.

    Returns:
        0 when all workers succeed. Otherwise the exit code of the first that failed, which is 128 + signal for one
        that was killed; or 128 + signal for a signal to this process.
    """
    events: Events = queue.SimpleQueue()
    workers: list[subprocess.Popen[bytes]] = []
    with _signals_into(events), tempfile.TemporaryDirectory(prefix="oktopk-", ignore_cleanup_errors=True) as folder:
        try:
            for rank in range(num_workers):
                workers.append(_start(rank, num_workers, arguments, Path(folder) / "store"))
                threading.Thread(target=_report_end, args=(rank, workers[rank], events), daemon=True).start()
            return _wait(workers, events, log_folder)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
                assert worker.stdin is not None
                worker.stdin.close()


def end_with_launcher() -> None:
    """Called by a worker: from now on it ends when the process that started it does, whatever it waits for.

    The launcher holds the other end of the worker's standard input and never writes to it.
    """

    def watch() -> None:
        os.read(0, 1)
        store = Path(os.environ[STORE])
        with suppress(OSError):  # the launcher had no time to tidy up; another worker may have been faster
            store.unlink(missing_ok=True)
            store.parent.rmdir()
        os._exit(1)

    threading.Thread(target=watch, name="oktopk-launcher", daemon=True).start()


def _start(rank: int, size: int, arguments: Sequence[str], store: Path) -> subprocess.Popen[bytes]:
    environment = {
        **os.environ,
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        STORE: str(store),
        # left alone, they listen on the address that the hostname stands for
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
    }
    # a session of its own: Ctrl-C in a terminal must reach a worker once, through the launcher
    return subprocess.Popen(
        [sys.executable, *arguments], stdin=subprocess.PIPE, env=environment, start_new_session=True
    )


def _report_end(rank: int, worker: subprocess.Popen[bytes], events: Events) -> None:
    events.put((rank, worker.wait()))


def _wait(workers: Sequence[subprocess.Popen[bytes]], events: Events, log_folder: Path | None) -> int:
    """Until all have ended; the exit status."""
    running = dict(enumerate(workers))
    status = 0
    deadline: float | None = None
    next_signals: list[int] = []  # for those that still run at the deadline
    interfered = False  # who dies of a signal now may have got it from us
    while running:
        try:
            rank, number = events.get(timeout=None if deadline is None else max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            interfered = True
            _send(next_signals.pop(0), running.values())
            deadline = time.monotonic() + GRACE_S if next_signals else None
            continue
        if rank is None:
            interfered = True
            status = status or 128 + number
            _send(number, running.values())
            next_signals, deadline = [signal.SIGKILL], time.monotonic() + GRACE_S
            continue
        del running[rank]
        if number < 0 and not interfered:
            _say_killed(rank, -number, log_folder)
        if number and not status:
            status = number if number > 0 else 128 - number
            next_signals, deadline = [signal.SIGTERM, signal.SIGKILL], time.monotonic() + GRACE_S
    return status


def _send(number: int, workers: Iterable[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.send_signal(number)


def _say_killed(rank: int, number: int, log_folder: Path | None) -> None:
    """A worker that was killed could not say so itself."""
    known = {each.value: each.name for each in signal.Signals}
    log = log_folder / f"rank_{rank}.log" if log_folder else None
    where = f"; its log is {log}" if log and log.is_file() else ""
    sys.stderr.write(f"oktopk: worker {rank} was killed by {known.get(number, f'signal {number}')}{where}\n")
    sys.stderr.flush()


@contextmanager
def _signals_into(events: Events) -> Generator[None]:
    """Inside, SIGINT and SIGTERM are events; one that was ignored before still is."""

    def put(number: int, frame: FrameType | None) -> None:
        del frame
        events.put((None, number))

    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    caught = {number: handler for number, handler in before.items() if handler is not signal.SIG_IGN}
    for number in caught:
        signal.signal(number, put)
    try:
        yield
    finally:
        for number, handler in caught.items():
            signal.signal(number, handler)
