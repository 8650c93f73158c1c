"""Slow links on one machine: a network namespace for each rank, joined by a bridge, both ends of every cable shaped.

The bridge has a namespace of its own, so nothing is left or changed in the machine's own network. Names carry the
process number of who made them; those of processes that are gone are removed by the next to come.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from oktopk.workbench.console.words import LOOPBACK, bits_per_s
from oktopk.workbench.worlds.world import Seat

_PREFIX = "oktopk-bench-"
_LATENCY_MS = 50
_LEAST_BURST_BYTES = 256 * 1024
_TICKS_PER_S = 250
"""Of the kernel: a bucket that holds less than a tick's worth of bytes never reaches the rate."""


class LinksUnavailable(RuntimeError):
    """No namespaces can be made here; the message says why and what would help."""


@dataclass(frozen=True)
class Tools:
    ip: str
    tc: str

    @staticmethod
    def find() -> Tools:
        """LinksUnavailable without root or without the programs."""
        if os.geteuid() != 0:
            raise LinksUnavailable("shaped links need root; run as root, or leave them out")
        found = {name: os.environ.get(f"OKTOPK_{name.upper()}") or shutil.which(name) for name in ("ip", "tc")}
        for name, path in found.items():
            if path is None or shutil.which(path) is None:
                raise LinksUnavailable(
                    f"shaped links need the program {name!r} ({path or 'not on the PATH'}); "
                    f"install iproute2 or set OKTOPK_{name.upper()} to its path"
                )
        return Tools(str(found["ip"]), str(found["tc"]))


def burst_bytes(rate: str) -> int:
    """What may pass at once before the rate holds."""
    return max(_LEAST_BURST_BYTES, bits_per_s(rate) // 8 // _TICKS_PER_S)


@contextmanager
def seats(size: int, link: str) -> Generator[list[Seat]]:
    """Seats for workers on loopback, or in namespaces with links of that rate; gone afterwards, whatever happens."""
    if link == LOOPBACK:
        yield [Seat()] * size
        return
    tools = Tools.find()
    remove_stale(tools)
    mine = f"{_PREFIX}{os.getpid()}-"
    try:
        yield _build(tools, mine, size, link)
    finally:
        for name in _namespaces(tools):
            if name.startswith(mine):
                _try(tools.ip, "netns", "delete", name)


def remove_stale(tools: Tools) -> None:
    """What a process left behind that could not clean up."""
    for name in _namespaces(tools):
        owner = name.removeprefix(_PREFIX).split("-")[0]
        if name.startswith(_PREFIX) and owner.isdigit() and not _alive(int(owner)):
            _try(tools.ip, "netns", "delete", name)


def _build(tools: Tools, mine: str, size: int, link: str) -> list[Seat]:
    shape = ["root", "tbf", "rate", f"{bits_per_s(link)}bit", "burst", f"{burst_bytes(link)}b"]
    shape += ["latency", f"{_LATENCY_MS}ms"]
    switch = f"{mine}switch"
    _do(tools.ip, "netns", "add", switch)
    _do(tools.ip, "-n", switch, "link", "add", "bridge0", "type", "bridge")
    _do(tools.ip, "-n", switch, "link", "set", "bridge0", "up")
    made: list[Seat] = []
    for rank in range(size):
        home, cable, port, address = f"{mine}{rank}", f"okt{rank}", f"port{rank}", f"10.77.0.{1 + rank}"
        _do(tools.ip, "netns", "add", home)
        _do(tools.ip, "-n", home, "link", "set", "lo", "up")
        _do(tools.ip, "-n", switch, "link", "add", port, "type", "veth", "peer", "name", cable, "netns", home)
        _do(tools.ip, "-n", switch, "link", "set", port, "master", "bridge0", "up")
        _do(tools.ip, "-n", home, "addr", "add", f"{address}/24", "dev", cable)
        _do(tools.ip, "-n", home, "link", "set", cable, "up")
        _do(tools.tc, "-n", switch, "qdisc", "add", "dev", port, *shape)  # what comes in
        _do(tools.tc, "-n", home, "qdisc", "add", "dev", cable, *shape)  # what goes out
        made.append(Seat((tools.ip, "netns", "exec", home), cable, address))
    return made


def _namespaces(tools: Tools) -> list[str]:
    listed = subprocess.run([tools.ip, "netns", "list"], capture_output=True, text=True, check=False)
    return [line.split()[0] for line in listed.stdout.splitlines() if line.strip()]


def _alive(process_number: int) -> bool:
    try:
        os.kill(process_number, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _do(*command: str) -> None:
    done = _try(*command)
    if done.returncode:
        said = " ".join((done.stderr or done.stdout).split()) or f"exit code {done.returncode}"
        raise LinksUnavailable(f"no shaped links here: `{' '.join(command)}` failed: {said}")


def _try(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, check=False)
