"""Who started us, and who we are among them."""

from __future__ import annotations

import os
import re
import socket
import sys
import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import FileStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from oktopk.comm.base import Communicator
from oktopk.comm.torchdist import initialize
from oktopk.registry import make_communicator
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.worlds.local_workers import STORE, end_with_launcher

COMM_NAMES = ("auto", "gloo", "nccl", "mpi")
DEVICE_NAMES = ("auto", "cpu", "cuda")
_OURS = "oktopk"
_LOOPBACK = "127.0.0.1"
_MOMENT_S = 2.0


@dataclass(frozen=True)
class Place:
    """This process among those that were started together.

    `starter` is the program that started them, "oktopk" for workers of our own, "nobody" for a process that is alone.
    """

    starter: str
    rank: int
    size: int
    local_rank: int
    local_size: int


@dataclass(frozen=True)
class Member:
    """A place with its communicator and device."""

    place: Place
    comm: Communicator
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.place.rank == 0


# starter -> where it says rank, size, rank on this machine, size on this machine; the first that is there counts
_VARIABLES: dict[str, tuple[tuple[str, ...], ...]] = {
    "torchrun": (("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    "mpirun": (
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    "srun": (("SLURM_PROCID",), ("SLURM_STEP_NUM_TASKS",), ("SLURM_LOCALID",), ("SLURM_NTASKS_PER_NODE",)),
    "mpiexec": (
        ("PMI_RANK",),
        ("PMI_SIZE",),
        ("PMI_LOCAL_RANK", "PALS_LOCAL_RANKID", "MPI_LOCALRANKID"),
        ("PMI_LOCAL_SIZE", "PALS_LOCAL_SIZE", "MPI_LOCALNRANKS"),
    ),
}


def find_place() -> Place:
    """From the environment that torchrun, mpirun, srun, mpiexec or our own launcher left."""
    for starter, (rank, size, local_rank, local_size) in _VARIABLES.items():
        number, total = _first(rank), _first(size)
        if number is not None and total is not None:
            here, num_here = _first(local_rank), _first(local_size)
            if starter == "torchrun" and STORE in os.environ:
                starter = _OURS
            elif starter == "srun":
                num_here = _slurm_tasks_here() or num_here
            return Place(
                starter,
                number,
                total,
                number if here is None else here,
                total if num_here is None else num_here,
            )
    return Place("nobody", 0, 1, 0, 1)


def refuse(program: str, error: Exception) -> int:
    """Say in one line what a user did wrong; the exit code.

    mpirun ends all workers as soon as one has failed, so the others get a moment to say the same.
    """
    sys.stderr.write(f"{program}: {error}\n")
    sys.stderr.flush()
    if find_place().size > 1:
        time.sleep(_MOMENT_S)
    return 2


def join(place: Place, comm: str, device_name: str, timeout_s: float) -> Member:
    """Meet the others, over one of COMM_NAMES, on one of DEVICE_NAMES."""
    if place.starter == _OURS:
        end_with_launcher()
    device = choose_device(device_name, place)
    kind = comm if comm != "auto" else _best_comm(device, place)
    if kind == "nccl" and device.type != "cuda":
        raise UsageError("comm='nccl': needs CUDA devices; use --comm gloo")
    if kind == "mpi" and place.starter == _OURS:
        raise UsageError("comm='mpi': --workers starts no MPI; start with mpirun, or use --comm gloo")
    if kind == "mpi":
        return Member(place, make_communicator("mpi", timeout_s), device)
    if place.size == 1:
        return Member(place, make_communicator("auto", timeout_s), device)
    initialize(kind, place.rank, place.size, timeout_s, _store(place, timeout_s))
    return Member(place, make_communicator("torch", timeout_s), device)


def check_device(name: str) -> None:
    """UsageError for `cuda` where there is none."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError("device='cuda': no CUDA device here; use --device cpu")


def choose_device(name: str, place: Place) -> torch.device:
    """One of DEVICE_NAMES; workers on one machine share out its GPUs."""
    check_device(name)
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _best_comm(device: torch.device, place: Place) -> str:
    """NCCL wants a GPU for each rank; ranks that share one meet over Gloo."""
    if place.starter in ("mpirun", "mpiexec"):
        return "mpi"
    return "nccl" if device.type == "cuda" and place.local_size <= torch.cuda.device_count() else "gloo"


def _store(place: Place, timeout_s: float) -> Store | None:
    """Where ranks on this machine leave each other their addresses; None where MASTER_ADDR and MASTER_PORT say it.

    A TCPStore that torch makes listens on all interfaces, so ranks that are all here get another one.
    """
    if place.starter == _OURS:
        return FileStore(os.environ[STORE], place.size)
    os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", 9500)) % 20000))
    if "MASTER_ADDR" in os.environ:
        return None
    if place.local_size < place.size:
        os.environ["MASTER_ADDR"] = _meeting_host(place)
        return None
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    return _loopback_store(place, int(os.environ["MASTER_PORT"]), timeout_s)


def _loopback_store(place: Place, port: int, timeout_s: float) -> TCPStore:
    listener = None
    if place.rank == 0:
        try:
            listener = socket.create_server((_LOOPBACK, port)).detach()  # the store closes it
        except OSError as error:
            raise UsageError(f"MASTER_PORT={port}: cannot be used here ({error}); set it to a free port") from error
    timeout = timedelta(seconds=timeout_s)
    return TCPStore(_LOOPBACK, port, place.size, place.rank == 0, timeout, master_listen_fd=listener)


def _meeting_host(place: Place) -> str:
    if place.starter == "srun":
        return first_host(os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or "")
    raise UsageError(
        f"comm: {place.starter} started {place.size} workers on several machines; set MASTER_ADDR to the address of "
        "the first, or use --comm mpi"
    )


def first_host(nodes: str) -> str:
    """Of SLURM's node list, such as gpu[003-006,009] or a,b."""
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    return found[1] + (found[2] or "") if found else socket.gethostname()


def _slurm_tasks_here() -> int | None:
    """How many tasks of this step run on this node, from SLURM_STEP_TASKS_PER_NODE, such as 4(x2),3."""
    counts: list[int] = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if not found:
            return None
        counts += [int(found[1])] * int(found[2] or 1)
    node = _first(("SLURM_NODEID",))
    if node is not None:
        return counts[node] if node < len(counts) else None
    return counts[0] if len(set(counts)) == 1 else None


def _first(names: tuple[str, ...]) -> int | None:
    for name in names:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None
