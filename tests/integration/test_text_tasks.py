"""The language model, BERT and GPT as their users run them: real processes, real files."""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.workbench.cli import main
from tests.worlds import ROOT

WIKI = ROOT.parent / "shared" / "data" / "wiki"
LSTM = [
    "lstm", "--hidden-size", "16", "--batch-size", "2", "--sequence-length", "8", "--corpus-train", "120",
    "--corpus-test", "12", "--lr", "1",
]  # fmt: skip
BERT = [
    "bert-mini", "--hidden-size", "16", "--num-layers", "1", "--num-heads", "2", "--sequence-length", "32",
    "--batch-size", "2", "--vocabulary-size", "300", "--corpus-train", "12", "--corpus-test", "3",
]  # fmt: skip
GPT = [
    "gpt-mini", "--hidden-size", "16", "--num-heads", "2", "--sequence-length", "32", "--batch-size", "2",
    "--corpus-train", "12", "--corpus-test", "3",
]  # fmt: skip
SHORT = ["--warmup-steps", "3", "--min-sparse-numel", "64", "--report", "False", "--quiet"]

needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed: pip install 'oktopk[bert]'"
)
needs_wiki = pytest.mark.skipif(not WIKI.is_dir(), reason=f"the real text is not at {WIKI}")


def launch(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Two workers."""
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oktopk", "train", *arguments, "--workers", "2"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)


def train_here(*arguments: str) -> int:
    """One worker, in this process."""
    return main(["train", *arguments, "--workers", "1"])


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def last_epoch(run: Path) -> dict[str, str]:
    with (run / "epochs.csv").open() as file:
        return list(csv.DictReader(file))[-1]


def check_6_steps(run: Path) -> None:
    steps = steps_of(run)
    assert [step["phase"] for step in steps] == ["dense"] * 3 + ["sparse"] * 3
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert steps[-1]["bytes_sent"] < steps[0]["bytes_sent"]


def states_of(run: Path, rank: int) -> dict[str, Any]:
    folder = run / "checkpoints" / json.loads((run / "checkpoints" / "latest.json").read_text())["checkpoint"]
    shared = torch.load(folder / "shared.pt", weights_only=True)
    own = torch.load(folder / f"rank_{rank}.pt", weights_only=True)
    return {
        **shared["model"],
        **{f"residual {key}": value for key, value in own["allreducer"]["feedback"]["residual"].items()},
        **{f"carried {key}": value for key, value in own["workload"].items()},
    }


def check_equal(straight: Path, pieces: Path, size: int, wanted: str) -> None:
    for rank in range(size):
        one, other = states_of(straight, rank), states_of(pieces, rank)
        assert one.keys() == other.keys()
        assert any(key.startswith(wanted) for key in one)
        for key, value in one.items():
            assert torch.equal(value, other[key]), key
    assert [step["loss"] for step in steps_of(straight)] == [step["loss"] for step in steps_of(pieces)]


# --- whole runs


@pytest.mark.slow
def test_lstm_on_two_workers_and_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    arguments = [*LSTM, *SHORT, "--dropout", "0.3"]
    done = launch([*arguments, "--max-steps", "6"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 in all: 3 dense, 3 sparse from step 3" in done.stdout
    run = tmp_path / "runs" / "lstm"
    check_6_steps(run)
    row = last_epoch(run)
    assert float(row["perplexity"]) == pytest.approx(math.exp(float(row["val_loss"])))

    done = launch([*arguments, "--max-steps", "10", "--resume"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step 6" in done.stdout
    straight = tmp_path / "runs" / "straight"
    done = launch([*arguments, "--max-steps", "10", "--name", straight.name], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal(straight, run, 2, "carried hidden")
    assert [(step["step"], step["epoch"]) for step in steps_of(run)] == [(step, 0) for step in range(10)]


@pytest.mark.slow
@needs_transformers
def test_bert_on_two_workers(tmp_path: Path) -> None:
    done = launch([*BERT, *SHORT, "--max-steps", "6", "--nsteps-update", "2"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "bert-mini"
    check_6_steps(run)
    row = last_epoch(run)
    assert 0 <= float(row["mlm_accuracy"]) <= 1
    assert 0 <= float(row["nsp_accuracy"]) <= 1
    assert float(row["perplexity"]) > 1
    assert len((run / "vocabulary.txt").read_text().splitlines()) <= 300
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_gpt_on_two_workers_and_resumed_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    # cosine knows the last step; a dense step of so few parameters in int8 is less than agreeing on a threshold
    arguments = [*GPT, *SHORT, "--dropout", "0.1", "--lr-schedule", "divide", "--dense-dtype", "fp32"]
    done = launch([*arguments, "--max-steps", "6"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 in all: 3 dense, 3 sparse from step 3" in done.stdout
    assert "bits per byte" in done.stdout
    run = tmp_path / "runs" / "gpt-mini"
    check_6_steps(run)
    row = last_epoch(run)
    assert float(row["perplexity"]) == pytest.approx(math.exp(float(row["val_loss"])))
    assert float(row["bits_per_byte"]) == pytest.approx(float(row["val_loss"]) / math.log(2))

    done = launch([*arguments, "--max-steps", "10", "--resume"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step 6" in done.stdout
    straight = tmp_path / "runs" / "straight"
    done = launch([*arguments, "--max-steps", "10", "--name", straight.name], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    check_equal(straight, run, 2, "residual")
    assert [(step["step"], step["epoch"]) for step in steps_of(run)] == [(step, 0) for step in range(10)]


def test_gpt_learns(tmp_path: Path) -> None:
    code = train_here(
        *GPT, "--out-dir", str(tmp_path), "--hidden-size", "32", "--batch-size", "8", "--corpus-train", "50",
        "--lr", "0.01", "--epochs", "3", "--warmup-steps", "30", "--report", "False", "--quiet",
    )  # fmt: skip
    assert code == 0
    with (tmp_path / "gpt-mini" / "epochs.csv").open() as file:
        found = [float(row["bits_per_byte"]) for row in csv.DictReader(file)]
    assert found[-1] < 2.6 < found[0] < 8


def test_gpt_on_source_files_in_bf16(tmp_path: Path) -> None:
    code = train_here(
        *GPT, *SHORT, "--data-dir", str(ROOT / "src" / "oktopk" / "reduce"), "--out-dir", str(tmp_path), "--lr", "0.01",
        "--lr-warmup-epochs", "0", "--batch-size", "16", "--max-steps", "12", "--compute-dtype", "bf16",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(tmp_path / "gpt-mini")
    assert steps[-1]["loss"] < 5 < steps[0]["loss"] < 6  # the logarithm of 256 is 5.5
    assert 1 < float(last_epoch(tmp_path / "gpt-mini")["bits_per_byte"]) < 8


def test_lstm_learns(tmp_path: Path) -> None:
    code = train_here(
        "lstm", "--out-dir", str(tmp_path), "--hidden-size", "48", "--dropout", "0", "--corpus-train", "1500",
        "--batch-size", "8", "--sequence-length", "20", "--epochs", "4", "--warmup-steps", "10", "--report", "False",
        "--quiet",
    )  # fmt: skip
    assert code == 0
    with (tmp_path / "lstm" / "epochs.csv").open() as file:
        found = [float(row["perplexity"]) for row in csv.DictReader(file)]
    assert found[-1] < 35 < found[0]


@pytest.mark.slow
@needs_transformers
@pytest.mark.parametrize(
    "task", [BERT, [*GPT, "--tokens", "wordpiece", "--vocabulary-size", "300"]], ids=["bert", "gpt"]
)
def test_pieces_resumed_are_the_same_and_keep_their_vocabulary(task: list[str], tmp_path: Path) -> None:
    base = [*task, *SHORT, "--out-dir", str(tmp_path), "--lr-schedule", "divide"]  # the others know the last step
    assert train_here(*base, "--name", "straight", "--max-steps", "7") == 0
    assert train_here(*base, "--name", "pieces", "--max-steps", "4") == 0
    vocabularies = [tmp_path / name / "vocabulary.txt" for name in ("straight", "pieces")]
    assert vocabularies[0].read_text() == vocabularies[1].read_text()
    before = vocabularies[1].stat().st_mtime_ns
    assert train_here(*base, "--name", "pieces", "--max-steps", "7", "--resume") == 0
    assert vocabularies[1].stat().st_mtime_ns == before
    check_equal(tmp_path / "straight", tmp_path / "pieces", 1, "residual")


# --- real text


@needs_wiki
def test_lstm_on_real_text(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "wiki.train.txt").symlink_to(WIKI / "wikitext2.valid.txt")
    lines = (WIKI / "wikitext2.test.txt").read_text().splitlines(keepends=True)
    (data / "wiki.valid.txt").write_text("".join(lines[:60]))
    code = train_here(
        "lstm", "--data-dir", str(data), "--out-dir", str(tmp_path), "--hidden-size", "32", "--vocabulary-size", "2000",
        "--max-steps", "6", *SHORT, "--lr", "5",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(tmp_path / "lstm")
    assert steps[-1]["loss"] < steps[0]["loss"] < 7.7  # the logarithm of 2000 is 7.6
    assert 1 < float(last_epoch(tmp_path / "lstm")["perplexity"]) < 3000


@needs_transformers
@needs_wiki
def test_bert_on_real_text(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    lines = (WIKI / "enwiki_articles.txt").read_text().splitlines(keepends=True)
    (data / "articles.txt").write_text("".join(lines[:4000]))
    code = train_here(
        *BERT, *SHORT, "--data-dir", str(data), "--out-dir", str(tmp_path), "--vocabulary-size", "1000",
        "--sequence-length", "64", "--batch-size", "16", "--max-steps", "6", "--lr-warmup-epochs", "0", "--lr", "0.01",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(tmp_path / "bert-mini")
    assert steps[-1]["loss"] < steps[0]["loss"]
    pieces = (tmp_path / "bert-mini" / "vocabulary.txt").read_text().splitlines()
    assert len(pieces) == 1000
    assert {"the", "##ing", "anarchism"} <= set(pieces)


@needs_wiki
def test_gpt_on_real_text(tmp_path: Path) -> None:
    text = tmp_path / "articles.txt"
    lines = (WIKI / "enwiki_articles.txt").read_text().splitlines(keepends=True)
    text.write_text("".join(lines[:1000]))
    code = train_here(
        *GPT, *SHORT, "--data-dir", str(text), "--out-dir", str(tmp_path), "--batch-size", "16", "--max-steps", "12",
        "--lr-warmup-epochs", "0", "--lr", "0.01",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(tmp_path / "gpt-mini")
    assert steps[-1]["loss"] < 5 < steps[0]["loss"] < 6
    assert 1 < float(last_epoch(tmp_path / "gpt-mini")["bits_per_byte"]) < 8


# --- when things go wrong


def make_bad(folder: Path, kind: str) -> Path:
    folder.mkdir()
    if kind == "nowhere":
        return folder / "nowhere"
    texts = {"empty": "\n \n", "short": "One two three.\nFour.\n\nFive.\n\n", "binary": "\ud800"}
    for name in ("train", "valid"):
        (folder / f"{name}.txt").write_text(texts[kind], errors="surrogatepass")
    return folder


BAD = [
    ("lstm", "nowhere", "no such folder; leave data_dir out to train on generated text"),
    ("lstm", "empty", "train.txt: has no words; it must have one sentence a line"),
    ("lstm", "short", "words are too few for a step: 1 x batch_size=2 samples of sequence_length=8 words"),
    ("lstm", "binary", "train.txt: is not UTF-8 text"),
    ("gpt", "nowhere", "no such folder or file; leave data_dir out to train on generated text"),
    ("gpt", "empty", "3 training tokens are too few for a sample of sequence_length=32 and the token after it"),
    ("gpt", "short", "training tokens are too few for a sample of sequence_length=32 and the token after it"),
    ("gpt", "binary", "train.txt: is not UTF-8 text without NUL; convert it"),
    ("bert", "nowhere", "no such folder or file; leave data_dir out to train on generated text"),
    ("bert", "empty", "train.txt: has no sentence, and a random next sentence comes from another one"),
    ("bert", "short", "sentence pairs are too few for a step of"),
    ("bert", "binary", "train.txt: is not UTF-8 text"),
]


@pytest.mark.parametrize(("task", "kind", "message"), BAD)
def test_bad_data_is_one_line(
    task: str, kind: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if task == "bert":
        pytest.importorskip("transformers", reason="transformers is not installed: pip install 'oktopk[bert]'")
    data = make_bad(tmp_path / "data", kind)
    arguments = [
        *{"lstm": LSTM, "gpt": GPT, "bert": [*BERT, "--batch-size", "8"]}[task],
        *SHORT,
        "--data-dir",
        str(data),
    ]
    assert train_here(*arguments, "--out-dir", str(tmp_path / "out")) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line]
    assert len(lines) == 1
    assert lines[0].startswith("oktopk: worker 0: ")
    assert message in lines[0]
    assert not list((tmp_path / "out").glob("*/metrics.jsonl"))


@pytest.mark.slow
def test_bad_data_is_one_line_on_every_worker(tmp_path: Path) -> None:
    done = launch([*LSTM, *SHORT, "--data-dir", str(make_bad(tmp_path / "data", "short"))], tmp_path)
    assert done.returncode == 2
    lines = sorted(line for line in done.stderr.splitlines() if line.startswith("oktopk: "))
    assert [line.split(":")[1].strip() for line in lines] == ["worker 0", "worker 1"]
    assert all("words are too few for a step" in line for line in lines)
    assert "Traceback" not in done.stderr


@needs_transformers
def test_a_vocabulary_that_is_none_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [*BERT, *SHORT, "--out-dir", str(tmp_path), "--vocabulary", str(tmp_path / "no.txt")]
    assert train_here(*arguments) == 2
    assert "no.txt: cannot be read (No such file or directory)" in capsys.readouterr().err
