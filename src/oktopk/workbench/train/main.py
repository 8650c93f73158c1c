"""From a config to a finished run, on however many workers."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import torch

from oktopk.checks.conservation import GuardViolation
from oktopk.comm.base import CommunicationError, Communicator
from oktopk.comm.counting import CountingCommunicator
from oktopk.sparse_vector import ints
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.recording.profile import FileProfile, NoProfile, Profiler
from oktopk.workbench.report.write import write_report
from oktopk.workbench.train.checkpoint import CheckpointError
from oktopk.workbench.train.config import ConfigError, TrainConfig
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.runlog import open_rank_log
from oktopk.workbench.train.show import Display, Silent, Terminal
from oktopk.workbench.train.tasks import build_workload
from oktopk.workbench.train.trainer import Trainer, TrainingStopped
from oktopk.workbench.worlds.local_workers import start_local_workers
from oktopk.workbench.worlds.membership import Member, find_place, join

logger = logging.getLogger("oktopk")
_FAILURES = (ConfigError, DataError, CheckpointError, TrainingStopped, CommunicationError, GuardViolation, ValueError)


def run_training(config: TrainConfig, arguments: Sequence[str]) -> int:
    """The exit code. Where nobody started us and several workers are wanted, start `python arguments...` for each."""
    place = find_place()
    if place.starter == "nobody" and config.workers > 1:
        run_folder = replace(config, name=_unused_name(config)).run_folder
        return start_local_workers(config.workers, arguments, run_folder / "logs")
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // place.local_size))  # workers on one machine share its cores
    member = join(place, config.comm, config.device, config.timeout_s)
    try:
        train(config, member, Terminal(config.quiet) if member.is_first else Silent())
    except _FAILURES as error:
        sys.stderr.write(f"oktopk: worker {place.rank}: {error}\n")  # at once: workers speak at the same moment
        sys.stderr.flush()
        if isinstance(error, TrainingStopped):  # on all workers: a launcher would silence those that speak last
            with suppress(CommunicationError):
                member.comm.barrier()
        # not sys.exit: a worker that waits for the others at exit would make them wait too
        if place.size > 1:
            sys.stdout.flush()
            os._exit(2)
        return 2
    except KeyboardInterrupt:
        if place.size == 1:
            raise
        os._exit(128 + signal.SIGINT)  # at once and without a traceback: the others are told too
    return 0


def train(config: TrainConfig, member: Member, display: Display) -> None:
    """On a worker that has met the others. Raises what stops training, TrainingStopped on all workers alike."""
    config = replace(config, name=_agreed_name(config, member))
    profiler = _profiler(config, member)
    if config.profile:
        member = replace(member, comm=CountingCommunicator(member.comm, profiler.communication))
    workload = build_workload(config, member)
    handler = open_rank_log(config.run_folder, member.place.rank)
    try:
        trainer = Trainer(config, member, workload, display, profiler)
        record = trainer.run()
        profiler.close()
        member.comm.barrier()  # all profiles are whole
        if config.report and member.is_first:
            _write_report(config)
        display.summary(trainer, record)
        member.comm.barrier()
    except _FAILURES as error:
        logger.error("%s", error)
        raise
    finally:
        profiler.close()
        logger.removeHandler(handler)
        handler.close()


def _write_report(config: TrainConfig) -> None:
    """A page that cannot be made must not spoil a training that went well."""
    try:
        write_report([config.run_folder])
    except (UsageError, OSError) as error:
        logger.warning("no report: %s", error)


def _profiler(config: TrainConfig, member: Member) -> Profiler:
    if not config.profile:
        return NoProfile()
    rank = member.place.rank
    return FileProfile(config.run_folder / "profile" / f"rank_{rank}.bin", rank, member.place.size)


def _unused_name(config: TrainConfig) -> str:
    """`name`, or name-2, name-3... where a run of that name was already logged and is not resumed."""
    name, number = config.name, 1
    while not config.resume and (replace(config, name=name).run_folder / "metrics.jsonl").exists():
        number += 1
        name = f"{config.name}-{number}"
    return name


def _agreed_name(config: TrainConfig, member: Member) -> str:
    """The first worker's choice, before any worker writes."""
    if config.resume:
        return config.name
    return _from_first(_unused_name(config) if member.is_first else "", member.comm, member.device)


def _from_first(text: str, comm: Communicator, device: torch.device) -> str:
    raw = text.encode()
    length = torch.tensor([len(raw)], device=device)
    comm.broadcast(length, 0)
    content = torch.zeros(int(length.item()), dtype=torch.uint8)
    if comm.rank == 0:
        content = torch.tensor(list(raw), dtype=torch.uint8)
    content = content.to(device)
    comm.broadcast(content, 0)
    return bytes(ints(content)).decode()
