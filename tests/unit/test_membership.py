"""Who started us, from the environment."""

from __future__ import annotations

import os
import socket

import pytest

from oktopk.workbench.console.words import UsageError
from oktopk.workbench.worlds.local_workers import STORE
from oktopk.workbench.worlds.membership import Place, _loopback_store, _meeting_host, find_place, join


@pytest.fixture(autouse=True)
def nobody_started_us(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("SLURM_", "OMPI_", "PMI_", "OKTOPK_")) or name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
            monkeypatch.delenv(name)


def srun(monkeypatch: pytest.MonkeyPatch, **variables: str) -> Place:
    """Of the sixth of eight tasks, the second on its node."""
    given = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    place = find_place()
    assert (place.starter, place.rank, place.size, place.local_rank) == ("srun", 5, 8, 1)
    return place


@pytest.mark.parametrize(
    ("tasks_per_node", "node", "here"),
    [
        ("4(x2)", "1", 4),
        ("8(x2)", "0", 8),
        ("3(x2),2", "0", 3),
        ("3(x2),2", "1", 3),
        ("3(x2),2", "2", 2),
        ("2(x3),1,1", "4", 1),
        ("1(x3),5", "3", 5),
        ("2", "0", 2),
        ("6,2", "1", 2),
        ("4(x2)", None, 4),  # all nodes are alike
    ],
)
def test_srun_says_how_many_tasks_this_node_has(
    tasks_per_node: str, node: str | None, here: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    which = {} if node is None else {"SLURM_NODEID": node}
    # the job's value is not the step's: srun may start other numbers of tasks than the job was given
    more = {"SLURM_STEP_TASKS_PER_NODE": tasks_per_node, "SLURM_NTASKS_PER_NODE": "7"}
    assert srun(monkeypatch, **which, **more).local_size == here


@pytest.mark.parametrize(
    "unusable",
    [
        {},
        {"SLURM_STEP_TASKS_PER_NODE": "", "SLURM_NODEID": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "many", "SLURM_NODEID": "0"},
        {"SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "2"},
        {"SLURM_STEP_TASKS_PER_NODE": "5,3"},
    ],
)
def test_without_the_steps_list_the_jobs_number_counts_and_then_the_whole(
    unusable: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert srun(monkeypatch, **unusable).local_size == 8
    assert srun(monkeypatch, **unusable, SLURM_NTASKS_PER_NODE="4").local_size == 4


def test_several_nodes_meet_on_the_first_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = {"SLURM_STEP_NODELIST": "gpu[003-004]", "SLURM_STEP_TASKS_PER_NODE": "4(x2)", "SLURM_NODEID": "1"}
    assert _meeting_host(srun(monkeypatch, **nodes)) == "gpu003"


def test_workers_of_our_own_are_told_from_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    assert find_place() == Place("torchrun", 1, 2, 1, 2)
    monkeypatch.setenv(STORE, "/nowhere/store")
    assert find_place() == Place("oktopk", 1, 2, 1, 2)


def test_mpi_cannot_join_workers_that_it_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oktopk.workbench.worlds.membership.end_with_launcher", lambda: None)
    with pytest.raises(UsageError, match="comm='mpi': --workers starts no MPI"):
        join(Place("oktopk", 0, 2, 0, 2), "mpi", "cpu", 5.0)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(UsageError, match=rf"MASTER_PORT={port}: cannot be used here .*set it to a free port"):
            _loopback_store(Place("mpirun", 0, 2, 0, 2), port, 5.0)
