"""`oktopk bench`, as its users run it, with the smallest settings. Nothing here asks how long anything took."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.metrics.meter import STAGES
from oktopk.workbench.bench import peers as bench_peers
from oktopk.workbench.bench.options import OURS
from oktopk.workbench.cli import main
from oktopk.workbench.console.words import bits_per_s, size
from oktopk.workbench.simulate.gradients import Synthetic
from oktopk.workbench.simulate.volume import volume
from oktopk.workbench.worlds import links as netns
from tests import gradients
from tests.worlds import ROOT, GlooWorld


def can_shape() -> str | None:
    """Why there are no shaped links here, or None."""
    try:
        with netns.seats(2, "1gbit"):
            return None
    except netns.LinksUnavailable as error:
        return str(error)


WHY_NOT = can_shape()
needs_links = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))


def bench(folder: Path, *arguments: str) -> dict[str, Any]:
    assert main(["bench", *arguments, "--out", str(folder)]) == 0
    content = json.loads((folder / f"{arguments[0]}.json").read_text())
    assert content["command"] == f"oktopk bench {' '.join(arguments)} --out {folder}"
    assert {"cpu", "cores", "memory_gib", "kernel", "python", "torch", "gpu", "date"} <= set(content["machine"])
    assert [path.name for path in folder.iterdir()] == [f"{arguments[0]}.json"]  # nothing half written
    return content


def test_allreduce(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ranks", "2", "--sizes", "200k", "--densities", "0.01", "0.02", "--iterations", "3"]
    content = bench(tmp_path, "allreduce", *options, "--reducers", "topkA")
    rows = content["rows"]
    peers = ["dense-fp32", "dense-bf16", "ddp-fp16", "powersgd"]
    assert [(row["contender"], row["density"]) for row in rows] == [
        *((name, None) for name in peers),
        *((name, density) for density in (0.01, 0.02) for name in (*OURS, "topkA")),
    ]
    assert all(row["same_on_all_ranks"] and 0 < row["p10_ms"] <= row["median_ms"] <= row["p90_ms"] for row in rows)
    dense = rows[0]
    assert (dense["speedup"], dense["bytes_sent"], dense["bytes_by"]) == (1.0, 800_000, "ring formula")
    for row in rows[len(peers) :]:
        assert row["k"] == round(row["density"] * 200_000)
        assert row["bytes_by"] == "counted"
        reducer, value_bytes = row["contender"].partition("-")[0], 2 if row["contender"] == "oktopk-bf16" else 4
        steady = volume(reducer, 200_000, row["k"], 2, 0.5, value_bytes=value_bytes).bytes_sent
        if reducer == "topkA":
            assert row["bytes_sent"] == pytest.approx(steady, rel=0.05)  # 5.1 to 5.3 bytes a pair
        else:  # 6k(P-1)/P words, which are 3k/2 pairs, and in its first steps up to four histograms more
            assert 0.98 * steady <= row["bytes_sent"] <= 1.5 * row["k"] * (value_bytes + 1.3) + 5 * 2048 + 512
        most = 2.0 if reducer == "topkA" else 1.0 + row["k"] // 64 / row["k"]  # the union of two choices, or k and k/64
        assert 1.0 <= row["count_over_k_min"] <= row["count_over_k_max"] <= most
        assert tuple(row["stages_ms"]) == STAGES
    printed = capsys.readouterr()
    assert "powersgd" in printed.out
    assert "applied/k" in printed.out
    assert "P = 2, n = 200k" in printed.err


@pytest.mark.slow
def test_training(tmp_path: Path) -> None:
    content = bench(tmp_path, "training", "--tiny", "--steps", "2", "--bucket-cap-mb", "0.1")
    rows = content["rows"]
    names = ["no-communication", "ddp-dense", "ddp-fp16", "powersgd", *OURS]
    assert [(row["task"], row["contender"]) for row in rows] == [(t, c) for t in ("lstman4", "vgg16") for c in names]
    for row in rows:
        assert row["tiny"]
        assert row["steps_per_s"] > 0
        assert (row["against_dense"] == 1.0) == (row["contender"] == "ddp-dense")
        assert (row["of_no_communication"] == 1.0) == (row["contender"] == "no-communication")
        assert tuple(row["stages_ms"]) == (STAGES if row["contender"] in OURS else ())


def test_soak(tmp_path: Path) -> None:
    content = bench(tmp_path, "soak", "--sizes", "20k", "--steps", "60", "--wire", "bf16")
    (row,) = content["rows"]
    assert row["steps"] == 60
    assert row["drift_relative"] < 1e-6
    assert all(0 < row[f"rss_mib_at_{part}"] <= row["rss_mib_peak"] for part in (10, 50, 100))
    assert row["k"] == 200
    assert 1.0 <= row["count_over_k_min"] <= row["count_over_k_max"] <= 1.0 + 3 / 200  # k and k/64 more


@needs_links
def test_links(tmp_path: Path) -> None:
    content = bench(tmp_path, "links", "--ranks", "2", "--sizes", "20k", "--iterations", "2", "--rates", "100mbit")
    rows = content["rows"]
    assert content["skipped"] is None
    assert [row["contender"] for row in rows] == ["dense-fp32", "dense-bf16", "ddp-fp16", "powersgd", *OURS]
    assert all(row["link"] == "100mbit" and row["burst_bytes"] == 262144 for row in rows)
    assert all(50 < row["raw_mbit_per_s"] < 110 for row in rows)
    assert left_behind(os.getpid()) == []


def test_model(tmp_path: Path) -> None:
    how = ["--ranks", "2", "--sizes", "20k", "--iterations", "2", "--rates", "loopback", "--reducers", "gtopk"]
    rows = bench(tmp_path, "model", *how, "--densities", "0.01")["rows"]
    assert [row["contender"] for row in rows] == ["dense-fp32", "oktopk-fp32", "gtopk"]
    for row in rows:
        assert row["predicted_ms"] > 0
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["median_ms"] - 1.0)
        assert row["calibration"]["num_ranks"] == 2


@needs_links
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_links_go_away_with_whoever_made_them(tmp_path: Path, end: signal.Signals) -> None:
    command = [sys.executable, "-m", "oktopk", "bench", "links", "--ranks", "2", "--rates", "100mbit"]
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    child = subprocess.Popen(
        [*command, "--out", str(out)],
        cwd=ROOT,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(scratch)},  # a killed one leaves its temporary folder
    )
    patience = time.monotonic() + 60
    while len(left_behind(child.pid)) < 3 and time.monotonic() < patience:
        time.sleep(0.1)
    assert len(left_behind(child.pid)) == 3
    child.send_signal(end)
    _, said = child.communicate(timeout=60)
    if end == signal.SIGKILL:
        assert left_behind(child.pid)  # it could do nothing
        netns.remove_stale(netns.Tools.find())  # what the next run does first
    else:
        assert child.returncode == 130
        assert said.splitlines()[-1] == "oktopk: stopped; nothing was written"
    assert left_behind(child.pid) == []
    assert list(out.iterdir()) == []


def left_behind(owner: int) -> list[str]:
    listed = subprocess.run([netns.Tools.find().ip, "netns", "list"], capture_output=True, text=True, check=True)
    return [line for line in listed.stdout.splitlines() if line.startswith(f"oktopk-bench-{owner}-")]


def test_links_without_the_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setenv("OKTOPK_TC", str(tmp_path / "tc"))
    content = bench(tmp_path, "links")
    assert content["rows"] == []
    assert "OKTOPK_TC" in content["skipped"]
    assert f"left out: {content['skipped']}\n" in capsys.readouterr().out


def test_links_without_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    content = bench(tmp_path, "training", "--tiny", "--tasks", "vgg16", "--peers", "ddp-dense", "--steps", "1",
                    "--rates", "1gbit", "loopback")  # fmt: skip
    assert "need root" in content["skipped"]
    assert [row["link"] for row in content["rows"]] == ["loopback"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["WHAT", "allreduce", "quick"]),
        (["speed"], ["WHAT", "'speed'", "allreduce"]),
        (["allreduce", "--ranks", "1"], ["--ranks", "'1'", "at least 2"]),
        (["allreduce", "--ranks", "two"], ["--ranks", "'two'", "whole number"]),
        (["allreduce", "--sizes", "0"], ["--sizes", "'0'", "27.6M"]),
        (["allreduce", "--sizes", "1T"], ["--sizes", "'1T'", "27.6M"]),
        (["allreduce", "--densities", "1.5"], ["--densit", "'1.5'", "(0, 1]"]),
        (["allreduce", "--densities", "nan"], ["--densit", "'nan'", "(0, 1]"]),
        (["allreduce", "--peers", "nccl"], ["--peers", "'nccl'", "powersgd"]),
        (["allreduce", "--reducers", "sketch"], ["--reducers", "'sketch'", "gtopk"]),
        (["allreduce", "--kernels", "magic"], ["kernels", "'magic'", "torch"]),
        (["allreduce", "--colour", "red"], ["--colour", "--help"]),
        (["links", "--rates", "fast"], ["--rates", "'fast'", "1gbit"]),
        (["training", "--tasks", "chess"], ["--tasks", "'chess'", "lstman4"]),
        (["training", "--device", "tpu"], ["--device", "'tpu'", "cuda"]),
        (["training", "--bucket-cap-mb", "0"], ["--bucket-cap-mb", "'0'", "positive"]),
        (["soak", "--steps", "3"], ["--steps", "'3'", "at least 10"]),
        (["soak", "--out", "/dev/null/x"], ["--out", "/dev/null/x", "choose another"]),
    ],
)
def test_bad_input_is_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    assert main(["bench", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert all(word in said.err for word in ["oktopk: ", *words])
    assert list(tmp_path.iterdir()) == []


def test_a_failing_worker_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # a broken module in the way of every worker
    (tmp_path / "torch.py").write_text("raise ImportError('no torch today')\n")
    assert main(["bench", "soak", "--sizes", "20k", "--steps", "10", "--out", str(tmp_path / "out")]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("oktopk: worker ")
    assert said.endswith("no torch today")
    assert list((tmp_path / "out").iterdir()) == []


def test_gradients_are_those_of_the_tests() -> None:
    for n, rank, step in ((1000, 0, 0), (12345, 1, 7), (7, 2, 3)):
        assert torch.equal(Synthetic(n, rank).at(step), gradients.Synthetic(n, rank).at(step))
    assert not torch.equal(Synthetic(1000, 0, seed=1).at(0), Synthetic(1000, 0, seed=2).at(0))


def test_words() -> None:
    assert [size(text) for text in ("20000", "20k", "27.6M")] == [20000, 20000, 27_600_000]
    assert [bits_per_s(text) for text in ("100mbit", "2.5gbit")] == [10**8, 2_500_000_000]
    assert [netns.burst_bytes(text) for text in ("100mbit", "10gbit")] == [262144, 5_000_000]


@pytest.mark.parametrize("n", [10_000, 10_007])
def test_peers_do_what_they_are_named_for(gloo2: GlooWorld, n: int) -> None:
    for of_rank in gloo2.run(peer_errors, n):
        assert of_rank["dense-fp32"] < 1e-6
        assert of_rank["dense-bf16"] < 2e-2
        assert of_rank["ddp-fp16"] < 2e-3
        first, second, compressed, low_rank = of_rank["powersgd"]
        assert max(first, second) < 1e-6  # its dense steps
        assert compressed > 0.1  # noise has no low rank
        assert low_rank < 1e-3


def peer_errors(n: int) -> dict[str, Any]:
    """How far each lies from the true mean, as part of the largest element."""
    rank = torch.distributed.get_rank()
    bucket = bench_peers.DdpBucket(n)
    noise = [torch.randn(n, generator=torch.Generator().manual_seed(r)) for r in range(2)]

    def error(exchange: bench_peers.Exchange, gradients: list[torch.Tensor]) -> float:
        bucket.gradient.copy_(gradients[rank])
        exchange()
        mean = sum(gradients) / 2
        return float((bucket.gradient - mean).abs().max() / mean.abs().max())

    powersgd, num_bytes = bucket.powersgd()
    assert num_bytes < n
    errors = [error(powersgd, noise) for _ in range(3)]
    powersgd, _ = bucket.powersgd()  # without the error of the noise
    rows = 100
    outer = torch.outer(torch.linspace(1, 2, rows), torch.linspace(-1, 1, n // rows)).reshape(-1)
    outer = torch.cat([outer, torch.ones(n - outer.numel())])
    low_rank = [error(powersgd, [outer, 3 * outer]) for _ in range(3)][-1]
    return {
        "dense-fp32": error(bench_peers.dense_fp32(bucket.gradient)[0], noise),
        "dense-bf16": error(bench_peers.dense_bf16(bucket.gradient)[0], noise),
        "ddp-fp16": error(bucket.fp16()[0], noise),
        "powersgd": [*errors, low_rank],
    }


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("plots", ROOT / "benchmarks" / "plots.py")
    assert spec is not None
    assert spec.loader is not None
    plots = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plots)
    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "png")]) == 2
    rows: list[dict[str, Any]] = [
        {"bench": what, "contender": contender, "density": density, "ranks": ranks, "n": n,
         "rate_mbit_per_s": rate if what == "links" else None, "median_ms": n / rate, "p10_ms": n / rate,
         "p90_ms": 2 * n / rate}
        for what in ("allreduce", "links")
        for contender, density in (("dense-fp32", None), ("oktopk-fp32", 0.01), ("oktopk-fp32", 0.02), ("topkA", 0.01))
        for ranks in (2, 4)
        for n in (10**6, 10**7)
        for rate in (100.0, 1000.0)
    ]  # fmt: skip
    rows += [
        {"bench": "kernels", "device": "cpu", "n": 10**6, "wire": "fp32", "density": d, "bytes_per_pair": 6.0}
        for d in (0.01, 0.02)
    ]
    (tmp_path / "some.json").write_text(json.dumps({"rows": rows}))
    assert plots.main(["--results", str(tmp_path), "--out", str(tmp_path / "png")]) == 0
    made = {path.name: path.read_bytes()[:4] for path in (tmp_path / "png").iterdir()}
    assert made == dict.fromkeys(
        [f"time-against-{x}.png" for x in ("n", "ranks", "bandwidth")] + ["bytes-per-pair.png"], b"\x89PNG"
    )
