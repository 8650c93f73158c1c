"""What a link carries: one plain TCP stream from rank 0 to rank 1, measured where it arrives."""

from __future__ import annotations

import socket
import time

from oktopk.workbench.bench import peers as bench_peers
from oktopk.workbench.bench.options import Options
from oktopk.workbench.worlds.jobs import Job, Station, Tell

_PORT = 29777
_WARMUP_S = 0.4
"""Until the first burst has passed and TCP has found its speed."""
_SECONDS = 1.2
_CHUNK_BYTES = 1 << 20


def measure(station: Station, options: Options, job: Job, tell: Tell) -> float | None:
    """Bits per second, on the rank that receives; None on the others."""
    del job
    tell("measuring the raw link")
    speed: float | None = None
    if station.rank == 1:
        with socket.create_server((station.addresses[1], _PORT)) as server:
            server.settimeout(options.timeout_s)
            bench_peers.barrier()
            stream, _ = server.accept()
            with stream:
                speed = _receive(stream)
    else:
        bench_peers.barrier()
        if station.rank == 0:
            with socket.create_connection((station.addresses[1], _PORT), options.timeout_s) as stream:
                _send(stream)
    bench_peers.barrier()
    return speed


def _send(stream: socket.socket) -> None:
    chunk = bytes(_CHUNK_BYTES)
    deadline = time.monotonic() + _WARMUP_S + _SECONDS
    while time.monotonic() < deadline:
        stream.sendall(chunk)


def _receive(stream: socket.socket) -> float:
    buffer = bytearray(_CHUNK_BYTES)
    first = time.monotonic()
    start, received, last = 0.0, 0, 0.0
    while count := stream.recv_into(buffer):
        last = time.monotonic()
        if start:
            received += count
        elif last - first > _WARMUP_S:
            start = last
    return 8 * received / max(last - start, 1e-9)
