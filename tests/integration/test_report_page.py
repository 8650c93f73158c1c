"""The page in a real browser: nothing is refused, everything is there, it fits a phone and can be read in the dark."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oktopk.metrics.meter import STAGES
from oktopk.workbench.cli import main
from oktopk.workbench.report.html import page as page_of
from oktopk.workbench.report.load import load_run
from oktopk.workbench.report.write import write_report
from oktopk.workbench.train.data.an4_like import generate
from tests.runs import Recipe, write_run

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--enable-logging=stderr", "--v=0",
    "--allow-file-access-from-files",
)  # fmt: skip
LABELS = (
    "Training loss over steps", "Training loss over time", "Validation over steps", "Validation over time",
    "Sparsity over steps", "Elements chosen and applied, against k", "Thresholds over steps",
    "Bytes sent by the first worker in a step", "Message sizes by operation", "Time of a step by stage",
    "Bytes by worker", "Seconds of waiting and exchanging by worker", "Bytes from each worker to each other",
)  # fmt: skip
DARK = "--blink-settings=preferredColorScheme=0"
LIGHT = "--blink-settings=preferredColorScheme=1"
needs_browser = pytest.mark.skipif(BROWSER is None, reason="neither chromium nor google-chrome is on PATH")

# Opens the page in a frame as wide as a phone, and writes what it measured there into its own document.
HARNESS = """<!DOCTYPE html><meta charset="utf-8"><body style="margin:0">
<iframe src="{page}" style="width:360px;height:800px;border:0"></iframe><pre id="found"></pre>
<script>
window.onload = () => {{
  const page = document.querySelector("iframe").contentDocument, view = page.defaultView;
  page.querySelectorAll("details").forEach(each => each.open = true);
  const texts = [...page.querySelectorAll("svg text")].filter(each => each.textContent.trim());
  const scale = ({{a, b}}) => Math.hypot(a, b);
  const size = each => parseFloat(view.getComputedStyle(each).fontSize) * scale(each.getScreenCTM());
  const cells = [...page.querySelectorAll("[data-figure=who-to-whom] text:not([style*=currentColor])")];
  document.getElementById("found").textContent = JSON.stringify({{
    width: view.innerWidth,
    needed: page.documentElement.scrollWidth,
    texts: texts.length,
    smallest: Math.min(...texts.map(each => size(each))),
    background: view.getComputedStyle(page.body).backgroundColor,
    ink: [...new Set(texts.filter(each => !cells.includes(each)).map(each => view.getComputedStyle(each).fill))],
    lines: [...new Set([...page.querySelectorAll("[data-figure=loss-over-steps] path")]
      .map(each => view.getComputedStyle(each).stroke))],
  }});
}};
</script>"""


def browse(page: Path, profile: Path, *flags: str) -> tuple[str, list[str]]:
    """The document as the browser has it, and what its console said."""
    assert BROWSER
    command = [BROWSER, *FLAGS, *flags, f"--user-data-dir={profile}", "--dump-dom", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line or "Refused" in line]


def measure(page: Path, folder: Path, *flags: str) -> dict[str, Any]:
    harness = folder / "harness.html"
    harness.write_text(HARNESS.format(page=page.as_uri()))
    dom, _ = browse(harness, folder / "browser", *flags)
    found = re.search(r'<pre id="found">(.+?)</pre>', dom)
    assert found, dom[-500:]
    return json.loads(found[1].replace("&quot;", '"'))


def numbers(dom: str) -> dict[str, Any]:
    pairs = re.findall(r'data-key="([^"]*)" data-value="([^"]*)"', dom)
    return {key: json.loads(value) for key, value in pairs}


def labels(dom: str) -> list[str]:
    return re.findall(r'<svg[^>]*aria-label="([^"]*)"', dom)


def expected(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures of a run with both phases and without skipped steps."""
    found: dict[str, Any] = {"loss": steps[-1]["loss"], "bytes_total": sum(step["bytes_sent"] for step in steps)}
    for phase in ("dense", "sparse"):
        mine = [step for step in steps if step["phase"] == phase]
        found[f"steps_{phase}"] = len(mine)
        found[f"bytes_{phase}"] = sum(step["bytes_sent"] for step in mine) / len(mine)
        found[f"sparsity_{phase}"] = sum(step["sparsity"] for step in mine) / len(mine)
        for stage in ("io", "forward", "backward", "wait"):
            found[f"ms_{phase}_{stage}"] = 1e3 * sum(step["seconds"][stage] for step in mine) / len(mine)
        for stage in STAGES:
            total = sum(bucket["seconds"].get(stage, 0.0) for step in mine for bucket in step["buckets"])
            found[f"ms_{phase}_{stage}"] = 1e3 * total / len(mine)
    return found


def check_numbers(dom: str, steps: list[dict[str, Any]]) -> None:
    shown = numbers(dom)
    wanted = expected(steps)
    assert {key: shown[key] for key in wanted} == pytest.approx(wanted, rel=1e-12)
    for step in steps:
        assert shown[f"step_{step['step']}_loss"] == step["loss"]
        assert shown[f"step_{step['step']}_bytes_sent"] == step["bytes_sent"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("runs") / "made"
    steps = write_run(folder, Recipe(workers=3, status="failed", reason="a worker was lost", planned=420))
    return write_report([folder]), steps


@needs_browser
def test_a_browser_shows_all_of_it_and_refuses_nothing(made: Any, tmp_path: Path) -> None:
    page, steps = made
    dom, console = browse(page, tmp_path)
    assert console == []
    assert labels(dom) == list(LABELS)
    assert "This run did not finish: the last step logged is 59 of 420" in dom
    check_numbers(dom, steps)


@needs_browser
def test_a_page_that_wanted_more_would_be_refused_and_noticed(made: Any, tmp_path: Path) -> None:
    """That the checks above can fail."""
    page, _ = made
    spoilt = tmp_path / "spoilt.html"
    more = '<script>document.title = "x"</script><img src="https://example.invalid/x.png" alt="">'
    spoilt.write_text(page.read_text().replace("<h1>", f"{more}<h1>"))
    _, console = browse(spoilt, tmp_path / "browser")
    assert len([line for line in console if "Content Security Policy" in line]) >= 2


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_and_can_be_read_in_light_and_dark(scheme: str, made: Any, tmp_path: Path) -> None:
    page, _ = made
    found = measure(page, tmp_path, DARK if scheme == "dark" else LIGHT)
    assert found["width"] == 360
    assert found["needed"] <= 360, "the page scrolls sideways"
    assert found["texts"] > 100
    assert found["smallest"] >= 7.5
    background = luminance(found["background"])
    assert (background < 0.1) == (scheme == "dark")
    assert all(contrast(background, luminance(ink)) > 7.0 for ink in found["ink"])
    drawn = [colour for colour in found["lines"] if colour.startswith("rgb(")]
    assert len(drawn) >= 3
    readable = [colour for colour in drawn if contrast(background, luminance(colour)) > 2.0]
    assert len(readable) >= len(drawn) - 1, "all but the grid stand out"


@needs_browser
def test_a_table_of_many_runs_scrolls_in_its_own_box(made: Any, tmp_path: Path) -> None:
    run = load_run(made[0].parent)
    several = tmp_path / "several.html"
    several.write_text(page_of([(replace(run, name=f"run-{i}"), []) for i in range(9)], []))
    assert measure(several, tmp_path)["needed"] <= 360


@needs_browser
def test_something_too_wide_would_be_noticed(made: Any, tmp_path: Path) -> None:
    page, _ = made
    wide = tmp_path / "wide.html"
    wide.write_text(page.read_text().replace("<h1>", '<div style="width:500px">wide</div><h1>'))
    assert measure(wide, tmp_path)["needed"] >= 500


def luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: float, other: float) -> float:
    return (max(one, other) + 0.05) / (min(one, other) + 0.05)


@pytest.mark.slow
def test_a_real_run_with_profile_is_reported_and_traced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    generate(tmp_path / "an4", num_train=32, num_test=4, seed=3)
    tiny = ["--conv-channels", "2", "--hidden-size", "16", "--num-layers", "2", "--batch-size", "2", "--quiet"]
    train = ["train", "lstman4", *tiny, "--workers", "2", "--data-dir", "an4", "--warmup-steps", "4", "--profile"]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oktopk", *train, "--max-steps", "12"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    monkeypatch.chdir(tmp_path)
    assert main(["report", "runs/lstman4"]) == 0
    assert main(["trace", "runs/lstman4"]) == 0
    run = tmp_path / "runs" / "lstman4"
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    page = run / "report.html"
    dom = page.read_text()
    if BROWSER:
        dom, console = browse(page, tmp_path / "browser")
        assert console == []
    assert labels(dom) == list(LABELS)
    check_numbers(dom, steps)
    assert 'class="ending"' not in dom, "it finished, and nothing is missing"
    events = json.loads((run / "trace.json").read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in calls} == {0, 1}
    assert {"forward", "backward", "wait"} <= {event["name"] for event in calls if event["tid"] == 0}
    assert {"all_to_all_v", "all_reduce"} <= {event["name"] for event in calls if event["tid"] == 1}
    assert {event["args"]["step"] for event in calls if event["name"] == "forward"} == set(range(12))
    started = [min(event["ts"] for event in calls if event["pid"] == rank) for rank in (0, 1)]
    assert min(started) == 0.0
