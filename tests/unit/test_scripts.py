"""The job scripts: up to date, complete, shellcheck-clean, and what they would run is a valid command."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk.registry import REDUCERS
from oktopk.workbench.cli import _parser, setting_names
from oktopk.workbench.train.config import TrainConfig, load_config
from tests.worlds import ROOT

SCRIPTS = ROOT / "scripts"
MAKE_JOBS = SCRIPTS / "make_jobs.py"
JOBS = sorted([*SCRIPTS.glob("slurm/*.sh"), *SCRIPTS.glob("pbs/*.sh")])
PRESETS = {"debug": "lstm_debug", "extended": "lstm_extended"}
WORKERS = {"debug": 8, "extended": 16}


def printed(script: Path, *arguments: str, folder: Path = ROOT, **environment: str) -> list[str]:
    """The words of the one line that `bash script --print` says, with no scheduler and no launcher in sight."""
    names = ("DATA_DIR", "EXTRA", "RANKS_PER_NODE")
    clean = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(("SLURM_", "PBS_"))}
    done = subprocess.run(
        ["bash", str(script), "--print", *arguments],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    return shlex.split(done.stdout)


def config_of(words: list[str]) -> tuple[str, TrainConfig]:
    """The preset, and what `oktopk train` would make of the words that follow it."""
    start = next(index for index, word in enumerate(words) if Path(word).name == "oktopk")
    assert words[start + 1] == "train"
    options = _parser().parse_args(words[start + 1 :])
    values = {name: getattr(options, name) for name in setting_names()}
    assert values["workers"] is None, "srun and mpiexec decide how many there are"
    return options.preset, load_config(options.preset, {k: v for k, v in values.items() if v is not None})


def test_every_reducer_has_all_four() -> None:
    wanted = {f"{kind}/{name}_{size}.sh" for kind in ("slurm", "pbs") for name in REDUCERS for size in PRESETS}
    assert {path.relative_to(SCRIPTS).as_posix() for path in JOBS} == wanted
    assert all(os.access(path, os.X_OK) for path in JOBS)


def test_they_are_what_the_template_gives(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, MAKE_JOBS, "--check"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stdout
    copy = tmp_path / "scripts"
    shutil.copytree(SCRIPTS, copy)
    command = [sys.executable, str(copy / "make_jobs.py")]
    (copy / "slurm" / "oktopk_debug.sh").write_text("exit 0\n")
    (copy / "pbs" / "gone_debug.sh").write_text("exit 0\n")
    found = subprocess.run([*command, "--check"], capture_output=True, text=True, timeout=30)
    assert found.returncode == 1
    assert [line.split(":")[0] for line in found.stdout.splitlines()] == [
        "scripts/pbs/gone_debug.sh",
        "scripts/slurm/oktopk_debug.sh",
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    assert subprocess.run([*command, "--check"], timeout=30).returncode == 0


@pytest.mark.parametrize("script", JOBS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_print_gives_a_valid_command(script: Path) -> None:
    compressor, size = script.stem.split("_")
    words = printed(script)
    assert words[0] == {"slurm": "srun", "pbs": "mpiexec"}[script.parent.name]
    preset, config = config_of(words)
    assert preset == PRESETS[size]
    assert (config.compressor, config.name, config.data_dir) == (compressor, script.stem, "")
    assert config.quiet, "no progress bars in a log"
    steps_per_epoch = math.ceil(config.task_settings.corpus_train / (config.batch_size * WORKERS[size]))
    assert 0 < config.warmup_steps < config.epochs * steps_per_epoch, "some steps must be sparse"
    assert "WORKERS" not in script.read_text()


@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_settings_are_passed_on(kind: str, tmp_path: Path) -> None:
    script = SCRIPTS / kind / "oktopk_debug.sh"
    environment = {"DATA_DIR": "/data/an 4", "EXTRA": "--lr 0.5  --seed 3"}
    words = printed(script, "--density", "0.25", "--out-dir", "my runs", folder=tmp_path, **environment)
    assert "oktopk" in words, "no .venv in that folder: the one on the PATH"
    _, config = config_of(words)
    assert (config.data_dir, config.out_dir) == ("/data/an 4", "my runs")
    assert (config.lr, config.seed, config.density) == (0.5, 3, 0.25)


def test_header_and_launcher_agree_on_the_workers(tmp_path: Path) -> None:
    for size, workers in WORKERS.items():
        slurm = (SCRIPTS / "slurm" / f"oktopk_{size}.sh").read_text()
        assert f"#SBATCH --nodes={workers // 4}\n" in slurm
        assert "#SBATCH --ntasks-per-node=4\n" in slurm
        pbs = SCRIPTS / "pbs" / f"oktopk_{size}.sh"
        assert f"#PBS -l select={workers // 4}:" in pbs.read_text()
        assert printed(pbs)[:5] == ["mpiexec", "-n", str(workers), "--ppn", "4"]
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nc\n")
    script = SCRIPTS / "pbs" / "oktopk_debug.sh"
    words = printed(script, PBS_NODEFILE=str(nodes), RANKS_PER_NODE="2", PBS_O_WORKDIR=str(tmp_path))
    assert words[:6] == ["mpiexec", "-n", "6", "--ppn", "2", "oktopk"]


@pytest.mark.parametrize("kind", ["slurm", "pbs"])
def test_without_print_the_launcher_runs_that_command(kind: str, tmp_path: Path) -> None:
    script = SCRIPTS / kind / "topkA_debug.sh"
    for name in ("srun", "mpiexec"):
        fake = tmp_path / name
        fake.write_text('#!/bin/bash\nprintf "ran %s\\n" "$#"\nexit 7\n')
        fake.chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    words = printed(script, folder=tmp_path)
    environment = {"PATH": path, "HOME": str(tmp_path)}
    done = subprocess.run(["bash", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=30)
    assert done.returncode == 7, "the launcher's exit code is the job's"
    assert done.stdout.splitlines() == [shlex.join(words), f"ran {len(words) - 1}"]


def test_shellcheck_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", *map(str, JOBS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
