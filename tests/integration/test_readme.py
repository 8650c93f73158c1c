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
    said = re.search(r"It prints\n\n```\n(.*?)```", README, re.DOTALL)
    assert said
    assert out.splitlines()[0] == said[1].splitlines()[0]
    assert float(out.split()[-1]) == pytest.approx(float(said[1].split()[-1]), abs=0.01)  # other CPUs round otherwise


def test_adamw_alone(tmp_path: Path) -> None:
    out = run([sys.executable], EXAMPLES[1], tmp_path)
    found = re.fullmatch(r"sparse: (\d+) of 33793 elements applied, 0 bytes sent\n", out)
    assert found, out
    assert int(found[1]) == round(0.02 * 33793)


def test_adamw_under_mpirun_sends_what_the_readme_says(tmp_path: Path) -> None:
    launcher = [str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", "2", sys.executable]
    out = run(launcher, EXAMPLES[1], tmp_path)
    pattern = r"sparse: (\d+) of 33793 elements applied, (\d+) bytes sent"
    found, said = re.fullmatch(pattern + "\n", out), re.search(pattern, README)
    assert found, out
    assert said
    k = round(0.02 * 33793)
    assert k <= int(found[1]) <= k + k // 64
    assert int(found[1]) == int(said[1])
    assert int(found[2]) == pytest.approx(int(said[2]), rel=0.01)  # gaps are a byte or two, by rounding


def test_every_reducer_and_setting_is_in_the_tables() -> None:
    for name in reducer_names():
        assert f"`{name}`" in README, name
    for name in Settings.__dataclass_fields__:
        assert f"`{name}`" in README, name
