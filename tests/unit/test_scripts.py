"""The job scripts: shellcheck-clean, and what they would run is a valid command for every reducer and size."""

from __future__ import annotations

import math
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from oktopk.registry import REDUCERS
from oktopk.workbench.cli import _parser, setting_names
from oktopk.workbench.train.config import TrainConfig, load_config
from tests.worlds import ROOT

SCRIPTS = ROOT / "scripts"
SLURM, PBS = SCRIPTS / "slurm.sh", SCRIPTS / "pbs.sh"
JOBS = [SLURM, PBS]
LAUNCHERS = {SLURM: "srun", PBS: "mpiexec"}
PRESETS = {"debug": "lstm_debug", "extended": "lstm_extended"}
WORKERS = {"debug": 8, "extended": 16}
each_script = pytest.mark.parametrize("script", JOBS, ids=lambda path: path.stem)


def run(script: Path, *arguments: str, folder: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    """With no scheduler and no launcher in sight, and only those of the scripts' variables that are given."""
    names = ("COMPRESSOR", "CONFIG", "DATA_DIR", "EXTRA", "RANKS_PER_NODE")
    clean = {k: v for k, v in os.environ.items() if k not in names and not k.startswith(("SLURM_", "PBS_"))}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=30,
    )


def printed(script: Path, *arguments: str, folder: Path = ROOT, **environment: str) -> list[str]:
    """The words of the one line that `bash script --print` says."""
    done = run(script, "--print", *arguments, folder=folder, **environment)
    assert (done.returncode, done.stderr) == (0, "")
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


@each_script
@pytest.mark.parametrize("size", PRESETS)
@pytest.mark.parametrize("reducer", [*REDUCERS, "auto"])
def test_print_gives_a_valid_command(reducer: str, size: str, script: Path) -> None:
    words = printed(script, COMPRESSOR=reducer, CONFIG=size)
    assert words[0] == LAUNCHERS[script]
    preset, config = config_of(words)
    assert preset == PRESETS[size]
    assert (config.reducer, config.name, config.data_dir) == (reducer, f"{reducer}_{size}", "")
    assert config.quiet, "no progress bars in a log"
    steps_per_epoch = math.ceil(config.task_settings.corpus_train / (config.batch_size * WORKERS[size]))
    assert 0 < config.warmup_steps < config.epochs * steps_per_epoch, "some steps must be sparse"


@each_script
def test_unless_told_otherwise_it_is_oktopk_at_debug_size(script: Path) -> None:
    assert printed(script) == printed(script, COMPRESSOR="oktopk", CONFIG="debug")
    assert printed(script, COMPRESSOR="", CONFIG="") == printed(script)
    assert os.access(script, os.X_OK)


@each_script
@pytest.mark.parametrize(
    ("key", "value"), [("COMPRESSOR", "topk"), ("COMPRESSOR", "dense topkA"), ("CONFIG", "large"), ("CONFIG", "*")]
)
def test_a_wrong_word_is_one_clear_line(key: str, value: str, script: Path, tmp_path: Path) -> None:
    done = run(script, folder=tmp_path, **{key: value})
    assert (done.returncode, done.stdout) == (2, "")
    known = " ".join([*REDUCERS, "auto"] if key == "COMPRESSOR" else PRESETS)
    assert done.stderr == f"{key}='{value}': unknown; choose from {known}\n"


@each_script
def test_settings_are_passed_on(script: Path, tmp_path: Path) -> None:
    environment = {"DATA_DIR": "/data/an 4", "EXTRA": "--lr 0.5  --seed 3"}
    words = printed(script, "--density", "0.25", "--out-dir", "my runs", folder=tmp_path, **environment)
    assert "oktopk" in words, "no .venv in that folder: the one on the PATH"
    _, config = config_of(words)
    assert (config.data_dir, config.out_dir) == ("/data/an 4", "my runs")
    assert (config.lr, config.seed, config.density) == (0.5, 3, 0.25)


@each_script
def test_the_folders_own_environment_goes_first(script: Path, tmp_path: Path) -> None:
    program = tmp_path / ".venv" / "bin" / "oktopk"
    program.parent.mkdir(parents=True)
    program.touch(0o755)
    assert str(program) in printed(script, folder=tmp_path)


def test_header_readme_and_launcher_agree_on_the_workers(tmp_path: Path) -> None:
    readme = (SCRIPTS / "README.md").read_text()
    assert f"#SBATCH --nodes={WORKERS['debug'] // 4}\n" in SLURM.read_text()
    assert "#SBATCH --ntasks-per-node=4\n" in SLURM.read_text()
    assert f"#PBS -l select={WORKERS['debug'] // 4}:" in PBS.read_text()
    assert f"--nodes={WORKERS['extended'] // 4} " in readme
    assert f"-l select={WORKERS['extended'] // 4}:" in readme
    for size, workers in WORKERS.items():
        assert printed(PBS, CONFIG=size)[:5] == ["mpiexec", "-n", str(workers), "--ppn", "4"]
    nodes = tmp_path / "nodes"
    nodes.write_text("a\na\nb\nc\n")
    words = printed(PBS, PBS_NODEFILE=str(nodes), RANKS_PER_NODE="2", PBS_O_WORKDIR=str(tmp_path))
    assert words[:6] == ["mpiexec", "-n", "6", "--ppn", "2", "oktopk"]


@each_script
def test_without_print_the_launcher_runs_that_command(script: Path, tmp_path: Path) -> None:
    for name in LAUNCHERS.values():
        fake = tmp_path / name
        fake.write_text('#!/bin/bash\nprintf "ran %s\\n" "$#"\nexit 7\n')
        fake.chmod(0o755)
    words = printed(script, folder=tmp_path, COMPRESSOR="topkA")
    done = run(script, folder=tmp_path, COMPRESSOR="topkA", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.returncode == 7, "the launcher's exit code is the job's"
    assert done.stdout.splitlines() == [shlex.join(words), f"ran {len(words) - 1}"]


def test_shellcheck_is_clean() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (apt-get install shellcheck)")
    done = subprocess.run(["shellcheck", *map(str, JOBS)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout
