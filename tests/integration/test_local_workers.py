"""Workers that `--workers N` starts: nobody from outside can reach them, and none is left behind."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest

from oktopk.workbench.worlds import local_workers
from oktopk.workbench.worlds.local_workers import start_local_workers

TINY = [
    "--conv-channels", "2", "--hidden-size", "16", "--batch-size", "2", "--corpus-train", "16", "--corpus-test", "4",
    "--quiet", "--report", "False", "--validate-every", "1000", "--checkpoint-every", "-1", "--epochs", "100000",
]  # fmt: skip


def patiently(look: Callable[[], bool], what: str, patience_s: float = 60.0) -> None:
    deadline = time.monotonic() + patience_s
    while not look():
        assert time.monotonic() < deadline, f"no {what} within {patience_s:g} s"
        time.sleep(0.05)


# --- what /proc says


def children(parent: int) -> list[int]:
    """Of a process, and theirs."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "stat").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            state, its_parent = text.rpartition(")")[2].split()[:2]
            if int(its_parent) == parent and state != "Z":
                found += [int(entry.name), *children(int(entry.name))]
    return found


def is_there(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def rank_of(process: int) -> str:
    words = Path(f"/proc/{process}/environ").read_bytes().split(b"\0")
    return next((word[5:].decode() for word in words if word.startswith(b"RANK=")), "")


def listening(process: int) -> list[IPv4Address | IPv6Address]:
    """The addresses on which a process accepts TCP connections."""
    links = [os.readlink(link) for link in Path(f"/proc/{process}/fd").iterdir() if link.is_symlink()]
    mine = {link.removeprefix("socket:[").removesuffix("]") for link in links if link.startswith("socket:[")}
    found: list[IPv4Address | IPv6Address] = []
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in mine:
                raw = bytes.fromhex(fields[1].split(":")[0])
                words = [raw[i : i + 4][::-1] for i in range(0, len(raw), 4)]  # each in the machine's byte order
                found.append((IPv4Address if name == "tcp" else IPv6Address)(b"".join(words)))
    return found


def on_loopback(address: IPv4Address | IPv6Address) -> bool:
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


# --- real training


class Training:
    """`oktopk train demo --workers 2`, endless, with a temporary folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.workers: list[int] = []
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self._metrics = folder / "runs" / "demo" / "metrics.jsonl"
        environment = {k: v for k, v in os.environ.items() if k not in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")}
        self.launcher = subprocess.Popen(
            [sys.executable, "-m", "oktopk", "train", "demo", *TINY, "--workers", "2"],
            cwd=folder,
            env={**environment, "TMPDIR": str(self.temporary), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def until_it_trains(self) -> list[int]:
        """The workers, by rank."""
        patiently(lambda: self._trains() or self.launcher.poll() is not None, "step", 120.0)
        assert self.launcher.poll() is None, self.launcher.communicate()
        by_rank = {rank_of(process): process for process in children(self.launcher.pid)}
        self.workers = [by_rank["0"], by_rank["1"]]
        return self.workers

    def meeting_folders(self) -> list[Path]:
        return list(self.temporary.glob("oktopk-*"))

    def _trains(self) -> bool:
        return self._metrics.is_file() and self._metrics.stat().st_size > 0


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Training]:
    run = Training(tmp_path)
    try:
        yield run
    finally:
        started = {*run.workers, *children(run.launcher.pid)}
        run.launcher.kill()
        for process in filter(is_there, started):
            os.kill(process, signal.SIGKILL)
        run.launcher.communicate()


def test_nothing_listens_but_on_loopback(training: Training) -> None:
    workers = training.until_it_trains()
    assert set(workers) <= set(children(training.launcher.pid))
    assert listening(workers[0]), "Gloo listens, or this test sees nothing"
    for process in (training.launcher.pid, *children(training.launcher.pid)):
        outside = [address for address in listening(process) if not on_loopback(address)]
        assert not outside, f"rank {rank_of(process) or 'none'} listens on {outside}"
    (folder,) = training.meeting_folders()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    training.launcher.terminate()
    training.launcher.communicate(timeout=30)
    assert training.launcher.returncode == 128 + signal.SIGTERM
    assert not [process for process in workers if is_there(process)]
    assert training.meeting_folders() == []


def test_a_worker_that_is_killed_is_named_and_ends_the_run(training: Training) -> None:
    workers = training.until_it_trains()
    os.kill(workers[1], signal.SIGKILL)
    _, said = training.launcher.communicate(timeout=30)
    assert training.launcher.returncode == 128 + signal.SIGKILL
    assert said.count("oktopk: worker 1 was killed by SIGKILL; its log is runs/demo/logs/rank_1.log\n") == 1
    assert "oktopk: worker 0: rank 0 of 2" in said, "the other says what it saw"
    assert "Traceback" not in said
    assert not is_there(workers[0])
    assert training.meeting_folders() == []


def test_workers_end_when_the_launcher_is_killed(training: Training) -> None:
    workers = training.until_it_trains()
    training.launcher.kill()
    patiently(lambda: not any(map(is_there, workers)), "end of the workers", 10.0)
    assert training.meeting_folders() == []


def test_ctrl_c_ends_all_without_a_traceback(training: Training, tmp_path: Path) -> None:
    workers = training.until_it_trains()
    training.launcher.send_signal(signal.SIGINT)
    _, said = training.launcher.communicate(timeout=30)
    assert training.launcher.returncode == 128 + signal.SIGINT
    assert "Traceback" not in said
    assert not any(map(is_there, workers))
    assert '"status": "failed"' in (tmp_path / "runs" / "demo" / "run.json").read_text()
    assert training.meeting_folders() == []


# --- small programs as workers


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


PREAMBLE = """
import os, signal, sys, time
rank = int(os.environ["RANK"])
def say(*words):  # in one piece: print may write a line in several
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())
"""


def workers_of(program: str) -> list[str]:
    return ["-c", PREAMBLE + textwrap.dedent(program)]


def test_workers_know_their_place_and_speak_for_themselves(temporary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    names = "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"
    code = start_local_workers(3, workers_of(f"say(*(os.environ[name] for name in {names}))"))
    assert code == 0
    assert sorted(capfd.readouterr().out.splitlines()) == [f"{rank} 3 {rank} 3 lo lo" for rank in range(3)]
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("ending", ["sys.exit(7)", "os.kill(os.getpid(), signal.SIGSEGV)"])
def test_the_first_failure_is_the_exit_status_and_others_may_speak(
    ending: str, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = f"""
        if rank == 1:
            {ending}
        time.sleep(1)
        say("worker", rank, "speaks")
        sys.exit(3)
        """
    code = start_local_workers(3, workers_of(program), temporary / "logs")
    said = capfd.readouterr()
    killed = "SIGSEGV" in ending
    assert code == (128 + signal.SIGSEGV if killed else 7)
    assert sorted(said.out.splitlines()) == ["worker 0 speaks", "worker 2 speaks"]
    assert said.err == ("oktopk: worker 1 was killed by SIGSEGV\n" if killed else ""), "there is no log to name"


def test_workers_that_hang_after_a_failure_are_ended(
    monkeypatch: pytest.MonkeyPatch, temporary: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local_workers, "GRACE_S", 1.0)
    program = """
        if rank == 0:
            sys.exit(5)
        if rank == 1:
            signal.signal(signal.SIGTERM, lambda *_: say("told to end"))
        while True:
            time.sleep(1)
        """
    begin = time.monotonic()
    assert start_local_workers(3, workers_of(program)) == 5
    assert time.monotonic() - begin < 30
    said = capfd.readouterr()
    assert said.out == "told to end\n", "SIGTERM first, then SIGKILL"
    assert said.err == "", "signals of our own are not news"
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_are_passed_on_once(number: signal.Signals, tmp_path: Path) -> None:
    program = f"""
        def leave(number, frame):
            say("worker", rank, "got", number)
            time.sleep(0.5)
            sys.exit(0)
        signal.signal({number.value}, leave)
        say("ready")
        while True:
            time.sleep(1)
        """
    start = "import sys; from oktopk.workbench.worlds.local_workers import start_local_workers as start; "
    launcher = subprocess.Popen(
        [sys.executable, "-c", f"{start} sys.exit(start(2, {workers_of(program)!r}))"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert launcher.stdout is not None
    assert [launcher.stdout.readline() for _ in range(2)] == ["ready\n"] * 2
    os.killpg(launcher.pid, number)  # as a terminal does
    out, err = launcher.communicate(timeout=30)
    assert launcher.returncode == 128 + number
    assert sorted(out.splitlines()) == [f"worker {rank} got {number.value}" for rank in range(2)]
    assert err == ""
    assert list(tmp_path.iterdir()) == []


def test_groups_made_later_meet_through_the_same_file(temporary: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = """
        import torch
        from torch import distributed as dist
        from oktopk.comm.torchdist import TorchDistCommunicator
        from oktopk.workbench.worlds.membership import find_place, join
        place = find_place()
        member = join(place, "gloo", "cpu", 60.0)
        first = dist.new_group([0, 1])
        for parent in (None, first) if rank < 2 else (None,):
            comm = TorchDistCommunicator(60.0, parent)
            ones = torch.ones(3)
            comm.all_reduce(ones)
            say(place.starter, rank, comm.size, ones.tolist())
        member.comm.barrier()
        """
    assert start_local_workers(3, workers_of(program)) == 0
    whole = [f"oktopk {rank} 3 [3.0, 3.0, 3.0]" for rank in range(3)]
    part = [f"oktopk {rank} 2 [2.0, 2.0, 2.0]" for rank in range(2)]
    assert sorted(capfd.readouterr().out.splitlines()) == sorted(whole + part)
    assert list(temporary.iterdir()) == []


# --- workers that others start on this machine


def test_ranks_under_mpirun_on_one_machine_meet_on_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = """
        from oktopk.workbench.worlds.membership import find_place, join
        comm = join(find_place(), "gloo", "cpu", 60.0).comm
        comm.barrier()
        print("met", flush=True)
        input()
        """
    ranks: list[subprocess.Popen[str]] = []
    names = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "MASTER_ADDR"
    environment = {k: v for k, v in os.environ.items() if k not in names}
    for rank in range(2):
        place = {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program)],
                env={**environment, **place},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for rank in ranks:
            assert rank.stdout is not None
            assert rank.stdout.readline() == "met\n"
        found = [listening(rank.pid) for rank in ranks]
        assert len(found[0]) > len(found[1]) > 0, "the first has the store as well"
        assert all(on_loopback(address) for addresses in found for address in addresses)
        for rank in ranks:
            rank.communicate("\n", timeout=30)
        assert [rank.returncode for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
