"""Who started us, and who we are among them."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass

import torch

from oktopk.comm.base import Communicator
from oktopk.comm.torchdist import initialize
from oktopk.registry import make_communicator
from oktopk.train.config import ConfigError, TrainConfig

Starter = str  # "torchrun", "mpirun", "srun" or "nobody"


@dataclass(frozen=True)
class Place:
    """This process among those that were started together."""

    starter: Starter
    rank: int
    size: int
    local_rank: int


@dataclass(frozen=True)
class Member:
    """A place with its communicator and device."""

    place: Place
    comm: Communicator
    device: torch.device

    @property
    def is_first(self) -> bool:
        return self.place.rank == 0


_STARTERS = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
    "mpirun (PMI)": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
    "srun": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"),
}


def find_place() -> Place:
    """From the environment that torchrun, mpirun or srun left; srun counts only inside a job step."""
    for starter, (rank, size, local) in _STARTERS.items():
        if starter == "srun" and "SLURM_STEP_ID" not in os.environ:
            continue
        if rank in os.environ and size in os.environ:
            number = int(os.environ[rank])
            return Place(starter, number, int(os.environ[size]), int(os.environ.get(local, number)))
    return Place("nobody", 0, 1, 0)


def join(config: TrainConfig, place: Place) -> Member:
    """Meet the others."""
    cuda = config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())
    if cuda and not torch.cuda.is_available():
        raise ConfigError("device='cuda': no CUDA device here; use --device cpu")
    device = torch.device("cuda", place.local_rank % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    kind = config.comm
    if kind == "nccl" and not cuda:
        raise ConfigError("comm='nccl': needs CUDA devices; use --comm gloo")
    if kind == "auto":
        alone_on_gpu = cuda and int(os.environ.get("LOCAL_WORLD_SIZE", place.size)) <= torch.cuda.device_count()
        kind = "mpi" if place.starter.startswith("mpirun") else "nccl" if alone_on_gpu else "gloo"
    if place.size == 1 and kind != "mpi":
        return Member(place, make_communicator("auto", config.timeout_s), device)
    if kind != "mpi":
        if place.starter != "torchrun":
            os.environ.setdefault("MASTER_ADDR", _first_host() if place.starter == "srun" else "127.0.0.1")
            os.environ.setdefault("MASTER_PORT", str(20000 + int(os.environ.get("SLURM_JOB_ID", 9500)) % 20000))
        initialize(kind, place.rank, place.size, config.timeout_s)
        return Member(place, make_communicator("torch", config.timeout_s), device)
    return Member(place, make_communicator("mpi", config.timeout_s), device)


def _first_host() -> str:
    """Of SLURM's node list, such as gpu[003-006,009] or a,b."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST") or socket.gethostname()
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", nodes)
    assert found is not None
    return found[1] + (found[2] or "")
