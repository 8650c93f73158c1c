"""The README's examples, run as a user would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from oktopk.registry import reducer_names
from oktopk.settings import Settings
from tests.worlds import ROOT

README = (ROOT / "README.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
BIN = Path(sys.executable).parent


def run(command: list[str], code: str, folder: Path) -> str:
    script = folder / "train.py"
    script.write_text(code)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(script)], cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_there_are_two_short_examples() -> None:
    assert len(EXAMPLES) == 2
    assert all(len(code.splitlines()) <= 30 for code in EXAMPLES)


def test_ddp_one_liner(tmp_path: Path) -> None:
    launcher = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "2"]
    out = run(launcher, EXAMPLES[0], tmp_path)
    assert out.startswith("10 dense steps, then 50 sparse steps\nfinal loss ")
    assert float(out.split()[-1]) < 0.3


@pytest.mark.parametrize(
    "launcher",
    [[], [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2"]],
    ids=["alone", "mpirun"],
)
def test_wrapper(launcher: list[str], tmp_path: Path) -> None:
    out = run([*launcher, sys.executable], EXAMPLES[1], tmp_path)
    found = re.fullmatch(r"sparse: (\d+) of 33793 elements applied, (\d+) bytes sent\n", out)
    assert found, out
    assert round(0.02 * 33793) <= int(found[1]) <= 1.02 * 0.02 * 33793
    assert int(found[2]) < 4 * 33793


def test_every_reducer_and_setting_is_in_the_tables() -> None:
    for name in reducer_names():
        assert f"`{name}`" in README, name
    for name in Settings.__dataclass_fields__:
        assert f"`{name}`" in README, name
