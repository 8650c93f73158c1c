"""The trainer as its users run it: real processes, real files."""

from __future__ import annotations

import csv
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import soundfile
import torch

from oktopk.comm import SimulatedCommunicator, World
from oktopk.workbench.cli import main
from oktopk.workbench.train.config import make_config
from oktopk.workbench.train.data.an4_like import generate
from oktopk.workbench.train.legacy import main as legacy_main
from oktopk.workbench.train.models.deepspeech import DeepSpeech, DeepSpeechConfig
from oktopk.workbench.train.tasks import build_workload
from oktopk.workbench.worlds.membership import Member, Place, find_place, first_host
from tests.worlds import ROOT

BIN = Path(sys.executable).parent
AN4 = ROOT.parent / "shared" / "data" / "an4"
TINY = [
    "--conv-channels", "2", "--hidden-size", "16", "--num-layers", "2", "--batch-size", "2", "--quiet",
    "--report", "False",
]  # fmt: skip


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpus") / "an4"
    generate(folder, num_train=32, num_test=6, seed=3)
    return folder


def launch(arguments: list[str], folder: Path, before: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command = [*before, sys.executable, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=350)


def mpirun(size: int) -> tuple[str, ...]:
    return (str(BIN / "mpirun"), "--allow-run-as-root", "--oversubscribe", "-np", str(size))


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def train_here(*arguments: str) -> int:
    """One worker, in this process."""
    return main(["train", "lstman4", *TINY, "--workers", "1", *arguments])


# --- whole runs


@pytest.mark.slow
def test_140_steps_turn_sparse_at_128_exactly(corpus: Path, tmp_path: Path) -> None:
    arguments = ["-m", "oktopk", "train", "lstman4", *TINY, "--workers", "2", "--data-dir", str(corpus)]
    done = launch([*arguments, "--max-steps", "140", "--validate-every", "100", "--guard-every", "7"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "140 in all: 128 dense, 12 sparse from step 128" in done.stdout
    assert "nan" not in done.stdout.lower()
    run = tmp_path / "runs" / "lstman4"
    steps = steps_of(run)
    assert [step["step"] for step in steps] == list(range(140))
    assert [step["phase"] for step in steps] == ["dense"] * 128 + ["sparse"] * 12
    for step in steps:
        for bucket in step["buckets"]:
            if step["phase"] == "dense":
                assert (bucket["sparsity"], bucket["compression_ratio"]) == (0.0, 1.0)
                assert bucket["communication_size"] == 4 * bucket["n"]
            else:
                assert bucket["sparsity"] == 1 - bucket["global_count"] / bucket["n"]
                assert bucket["communication_size"] == 8 * bucket["global_count"]
    assert steps[-1]["bytes_sent"] < steps[0]["bytes_sent"]
    with (run / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"])
    assert rows[0]["wer"] == "n/a"
    assert float(rows[-1]["wer"]) > 0
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
    assert {path.name for path in run.iterdir()} == {
        "config.json", "run.json", "metrics.jsonl", "epochs.csv", "ranks.csv", "tensorboard", "logs", "checkpoints",
    }  # fmt: skip
    assert {path.name for path in (run / "logs").iterdir()} == {"rank_0.log", "rank_1.log"}
    assert any(path.name.startswith("events") for path in (run / "tensorboard").iterdir())


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_demo_learns_on_its_embedded_corpus(tmp_path: Path) -> None:
    """What `make train` runs."""
    done = launch(["-m", "oktopk", "train", "demo"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "demo"
    assert sum(step["phase"] == "sparse" for step in steps_of(run)) >= 150
    with (run / "epochs.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[-1]["loss"]) < 0.1 * float(rows[0]["loss"])
    assert float(rows[-1]["wer"]) < 0.25
    for said in ("WER", "CER", "sparsity, sparse", "compression ratio, sparse", "of dense", str(run.name), "backward"):
        assert said in done.stdout


@pytest.mark.slow
def test_28_steps_under_mpirun_say_that_nothing_will_be_sparse(corpus: Path, tmp_path: Path) -> None:
    arguments = ["-m", "oktopk", "train", "lstman4", *TINY, "--data-dir", str(corpus), "--max-steps", "28"]
    done = launch(arguments, tmp_path, mpirun(2))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "28 dense, 0 sparse" in done.stdout
    assert (
        "WARNING: no step will be sparse: warmup_steps=128 takes up all 28 steps; set warmup_steps below 28"
        in done.stdout
    )
    assert "nan" not in (done.stdout + done.stderr).lower()
    steps = steps_of(tmp_path / "runs" / "lstman4")
    assert [step["sparsity"] for step in steps] == [0.0] * 28
    assert "nan" not in (tmp_path / "runs" / "lstman4" / "metrics.jsonl").read_text().lower()


OLD = (
    "--dnn lstman4 --dataset an4 --data_dir ./audio_data --nworkers {n} --max_epochs 1 --batch_size 8 --lr 0.01 "
    "--compression True --compressor oktopk"
)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2])
def test_the_old_command_line_verbatim_at_full_size(size: int, tmp_path: Path) -> None:
    generate(tmp_path / "audio_data", num_train=8, num_test=2, seed=1)
    shutil.copy(ROOT / "main_trainer.py", tmp_path)
    done = launch(["main_trainer.py", *OLD.format(n=size).split()], tmp_path, mpirun(2) if size == 2 else ())
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"27,569,568 parameters, {size} worker" in done.stdout
    assert len(steps_of(tmp_path / "runs" / f"lstman4-n{size}-bs8-oktopk")) == 1


def test_nworkers_that_contradicts_mpirun_names_both_numbers(tmp_path: Path) -> None:
    done = launch([str(ROOT / "main_trainer.py"), *OLD.format(n=3).split()], tmp_path, mpirun(2))
    assert done.returncode != 0
    assert done.stderr.count("nworkers=3: but mpirun started 2 processes; make them agree") == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_real_an4_for_one_epoch(tmp_path: Path) -> None:
    if not AN4.is_dir():
        pytest.skip(f"the real AN4 is not at {AN4}")
    assert main(["manifest", str(AN4), "--out", str(tmp_path / "lists")]) == 0
    assert len((tmp_path / "lists" / "an4_train_manifest.csv").read_text().splitlines()) == 948
    assert len((tmp_path / "lists" / "an4_val_manifest.csv").read_text().splitlines()) == 130
    code = train_here(
        "--data-dir", str(tmp_path / "lists"), "--out-dir", str(tmp_path), "--epochs", "1", "--batch-size", "32",
        "--warmup-steps", "10", "--lr", "0.003", "--norm-clip", "20",
    )  # fmt: skip
    assert code == 0
    steps = steps_of(tmp_path / "lstman4")
    assert len(steps) == 30
    assert steps[-1]["phase"] == "sparse"
    assert steps[-1]["loss"] < steps[0]["loss"]


def test_accumulation_and_augmentation(corpus: Path, tmp_path: Path) -> None:
    """Two batches a step; other sounds in every epoch, the same whenever it is run."""
    arguments = ["--data-dir", str(corpus), "--out-dir", str(tmp_path), "--nsteps-update", "2", "--max-steps", "9"]
    for further in (["--name", "a", "--augment"], ["--name", "b", "--augment"], ["--name", "c"]):
        assert train_here(*arguments, "--warmup-steps", "4", *further) == 0
    a, b, c = (steps_of(tmp_path / name) for name in "abc")
    assert [step["epoch"] for step in a] == [0] * 8 + [1]
    assert a[0]["samples"] == 4
    assert [step["loss"] for step in a] == [step["loss"] for step in b]
    assert [step["loss"] for step in a] != [step["loss"] for step in c]


# --- checkpoints


def final_state(run: Path, rank: int) -> dict[str, Any]:
    folder = run / "checkpoints" / json.loads((run / "checkpoints" / "latest.json").read_text())["checkpoint"]
    shared = torch.load(folder / "shared.pt", weights_only=True)
    own = torch.load(folder / f"rank_{rank}.pt", weights_only=True)
    return {
        **{f"model.{k}": v for k, v in shared["model"].items()},
        **{f"residual.{k}": v for k, v in own["allreducer"]["feedback"]["residual"].items()},
        **{f"buffer.{k}": v for k, v in own["buffers"].items()},
        "rng": own["rng"],
    }


@pytest.mark.slow
def test_10_steps_resumed_for_10_more_equal_20_straight(corpus: Path, tmp_path: Path) -> None:
    """Two workers, across the border from dense to sparse, stopped in the middle of an epoch."""
    base = [
        "-m",
        "oktopk",
        "train",
        "lstman4",
        *TINY,
        "--workers",
        "2",
        "--data-dir",
        str(corpus),
        "--warmup-steps",
        "8",
    ]
    for name, *further in (
        ("straight", "--max-steps", "20"),
        ("pieces", "--max-steps", "10"),
        ("pieces", "--max-steps", "20", "--resume"),
    ):
        done = launch([*base, "--name", name, *further], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "resumed at step 10" in done.stdout
    for rank in range(2):
        straight, pieces = (final_state(tmp_path / "runs" / name, rank) for name in ("straight", "pieces"))
        assert straight.keys() == pieces.keys()
        assert any(key.startswith("residual.") for key in straight)
        for key, value in straight.items():
            assert torch.equal(value, pieces[key]), key
    losses = [[step["loss"] for step in steps_of(tmp_path / "runs" / name)] for name in ("straight", "pieces")]
    assert losses[0] == losses[1]


@pytest.fixture
def saved(corpus: Path, tmp_path: Path) -> list[str]:
    """Arguments of a run that was saved at step 4."""
    arguments = ["--data-dir", str(corpus), "--out-dir", str(tmp_path), "--name", "r", "--warmup-steps", "2"]
    assert train_here(*arguments, "--max-steps", "4") == 0
    return arguments


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("oktopk: ")]
    assert len(lines) == 1, text
    return lines[0]


def test_resuming_another_model_is_refused(saved: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert train_here(*saved, "--max-steps", "6", "--resume", "--hidden-size", "24") == 2
    assert "was saved from another model" in one_line(capsys.readouterr().err)


def test_resuming_with_another_number_of_workers_is_refused(saved: list[str], tmp_path: Path) -> None:
    arguments = ["-m", "oktopk", "train", "lstman4", *TINY, "--workers", "2", *saved, "--max-steps", "6", "--resume"]
    done = launch(arguments, tmp_path)
    assert done.returncode != 0
    assert "was saved by 1 workers, this run has 2" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("keep", [0, 100, 5000])
def test_a_truncated_checkpoint_is_refused(
    keep: int, saved: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "r" / "checkpoints" / "step_00000004" / "shared.pt"
    file.write_bytes(file.read_bytes()[:keep])
    assert train_here(*saved, "--max-steps", "6", "--resume") == 2
    assert "cannot be read, it is damaged or no checkpoint" in one_line(capsys.readouterr().err)


def test_resume_without_a_checkpoint_and_beyond_the_end_are_refused(
    saved: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_here(*saved, "--max-steps", "4", "--resume") == 2
    assert "is at step 4, and this run ends at step 4" in one_line(capsys.readouterr().err)
    assert train_here(*saved, "--name", "other", "--resume") == 2
    assert "holds no checkpoint to resume from" in one_line(capsys.readouterr().err)


def test_pretrain_takes_the_weights_and_nothing_else(saved: list[str], tmp_path: Path) -> None:
    weights = str(tmp_path / "r" / "checkpoints" / "step_00000004")
    assert train_here(*saved, "--name", "fine", "--pretrain", weights, "--max-steps", "1", "--lr", "1e-30") == 0
    before, after = final_state(tmp_path / "r", 0), final_state(tmp_path / "fine", 0)
    assert torch.equal(before["model.output.weight"], after["model.output.weight"])
    assert [step["step"] for step in steps_of(tmp_path / "fine")] == [0]


def test_a_second_run_of_a_name_gets_a_folder_of_its_own(saved: list[str], tmp_path: Path) -> None:
    before = (tmp_path / "r" / "metrics.jsonl").read_bytes()
    assert train_here(*saved, "--max-steps", "1") == 0
    assert (tmp_path / "r" / "metrics.jsonl").read_bytes() == before
    assert len(steps_of(tmp_path / "r-2")) == 1


# --- when things go wrong


@pytest.mark.slow
def test_nan_stops_all_workers_in_the_same_step_and_keeps_the_checkpoint(corpus: Path, tmp_path: Path) -> None:
    base = ["-m", "oktopk", "train", "lstman4", *TINY, "--workers", "2", "--data-dir", str(corpus), "--name", "bad"]
    assert launch([*base, "--max-steps", "8"], tmp_path).returncode == 0
    done = launch([*base, "--max-steps", "40", "--resume", "--lr", "1e30", "--norm-clip", "0"], tmp_path)
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if line.startswith("oktopk: worker")]
    assert sorted(line.split(":")[1].strip() for line in lines) == ["worker 0", "worker 1"]
    assert len({line.split("training stopped at ")[1].split(";")[0] for line in lines}) == 1
    assert "learning rate 1e+30" in lines[0] or "learning rate 9." in lines[0]
    assert "on rank" in lines[0]
    assert "the last good checkpoint is" in lines[0]
    assert "step_00000008" in lines[0]
    assert "lower the learning rate" in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data-dir", "/nowhere/at/all"], "oktopk data an4-like"),
        (["--reducer", "topk"], "unknown reducer 'topk'; known: dense"),
        (["--compressor", "topk"], "unknown reducer 'topk'; known: dense"),
        (["--density", "2"], "density=2.0: must be in (0, 1]"),
        (["--task", "poetry"], "task='poetry': unknown; known: lstman4"),
        (["--name", "a/b"], "name='a/b': must be a plain folder name"),
        (["--epochs", "0"], "epochs=0: must be at least 1"),
        (["--pretrain", "/nowhere/x.pt"], "/nowhere/x.pt: does not exist"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing_behind(
    arguments: list[str], message: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = train_here("--data-dir", str(corpus), "--out-dir", str(tmp_path / "out"), "--max-steps", "1", *arguments)
    assert code == 2
    assert message in one_line(capsys.readouterr().err)
    assert not list((tmp_path / "out").glob("*/metrics.jsonl"))


def test_workers_that_contradict_the_launcher_name_both_numbers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert main(["train", "demo", "--workers", "3"]) == 2
    assert "workers=3: but mpirun started 2; leave --workers out" in one_line(capsys.readouterr().err)


def test_unknown_presets_and_damaged_toml_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "nothing"]) == 2
    assert "preset='nothing': no such preset or TOML file; presets: alexnet, bert-base," in capsys.readouterr().err
    (tmp_path / "x.toml").write_text("a = = 1")
    assert main(["train", str(tmp_path / "x.toml")]) == 2
    assert "is not valid TOML" in capsys.readouterr().err
    (tmp_path / "y.toml").write_text('lr = "fast"\n')
    assert main(["train", str(tmp_path / "y.toml")]) == 2
    assert "lr='fast': must be of type float, is str" in capsys.readouterr().err


def test_old_flags_that_make_no_sense_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert legacy_main(["--dnn", "vgg11"]) == 2
    assert "dnn='vgg11': unknown; known: lstman4" in capsys.readouterr().err
    assert legacy_main(["--dnn", "lstman4", "--dataset", "imagenet"]) == 2
    assert "dataset='imagenet': lstman4 is trained on 'an4'" in capsys.readouterr().err


@pytest.mark.parametrize("policy", ["fail", "skip"])
def test_unreadable_audio(policy: str, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = tmp_path / "data"
    shutil.copytree(corpus, broken)
    victim = sorted((broken / "train" / "an4" / "wav").iterdir())[0]
    victim.write_bytes(b"this is no audio")
    arguments = ["--data-dir", str(broken), "--out-dir", str(tmp_path), "--max-steps", "2", "--on-bad-audio", policy]
    code = train_here(*arguments)
    if policy == "fail":
        assert code == 2
        assert victim.name in one_line(capsys.readouterr().err)
    else:
        assert code == 0
        assert (
            f"1 unreadable training files are left out, the first: {victim.name}"
            in (tmp_path / "lstman4" / "logs" / "rank_0.log").read_text()
        )


# --- parts


def test_lstman4_has_exactly_its_parameters() -> None:
    assert sum(p.numel() for p in DeepSpeech(DeepSpeechConfig()).parameters()) == 27_569_568


def test_padding_does_not_matter_in_evaluation() -> None:
    torch.manual_seed(0)
    model = DeepSpeech(DeepSpeechConfig(conv_channels=2, hidden_size=8, num_layers=2))
    model(torch.randn(4, 161, 80), torch.full((4,), 80))  # statistics that are not those of a new norm
    model.eval()
    short, long = torch.randn(161, 61), torch.randn(161, 90)
    together = torch.zeros(2, 161, 90)
    together[0], together[1, :, :61] = long, short
    out, frames = model(together, torch.tensor([90, 61]))
    alone, _ = model(short[None], torch.tensor([61]))
    assert frames.tolist() == [45, 31]
    torch.testing.assert_close(out[:31, 1], alone[:, 0])


def member() -> Member:
    return Member(Place("nobody", 0, 1, 0, 1), SimulatedCommunicator(World(1), 0), torch.device("cpu"))


def test_utterances_that_cannot_be_aligned_are_left_out_and_named(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(corpus, folder)
    texts = sorted((folder / "train" / "an4" / "txt").iterdir())
    texts[0].write_text("\n")
    texts[1].write_text("A" * 400)
    config = make_config(
        {"data_dir": str(folder), "conv_channels": 2, "hidden_size": 8, "num_layers": 1, "batch_size": 4}
    )
    workload = build_workload(config, member())
    losses = [workload.loss(batch) for batch in workload.batches(0, 0)]
    assert all(bool(torch.isfinite(loss)) for loss in losses)
    assert any("2 training utterances" in remark for remark in workload.remarks())
    for text in texts:
        text.write_text("\n")
    workload = build_workload(config, member())
    loss = workload.loss(next(workload.batches(0, 0)))
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert all(float(p.grad.abs().sum()) == 0.0 for p in workload.model.parameters())


def test_wav_flac_and_sph_are_read(corpus: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    shutil.copytree(corpus, folder)
    for csv_file in folder.glob("*.csv"):
        csv_file.unlink()
    for path, kind in zip(sorted((folder / "train" / "an4" / "wav").iterdir()), ("FLAC", "NIST"), strict=False):
        samples, rate = soundfile.read(path)
        path.unlink()
        soundfile.write(path.with_suffix(".flac" if kind == "FLAC" else ".sph"), samples, rate, format=kind)
    config = make_config({"data_dir": str(folder), "conv_channels": 2, "hidden_size": 8, "num_layers": 1})
    assert build_workload(config, member()).num_batches == 4


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}, Place("torchrun", 3, 4, 1, 2)),
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"},
            Place("mpirun", 1, 2, 0, 2),
        ),
        (
            {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "4"},
            Place("srun", 5, 8, 1, 4),
        ),
        ({"PMI_RANK": "2", "PMI_SIZE": "4", "PALS_LOCAL_RANKID": "0"}, Place("mpiexec", 2, 4, 0, 4)),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Place("nobody", 0, 1, 0, 1)),  # a batch script, not srun
    ],
    ids=lambda value: value.starter if isinstance(value, Place) else "",
)
def test_who_started_us(environment: dict[str, str], expected: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert find_place() == expected


@pytest.mark.parametrize(
    ("nodes", "expected"), [("gpu[003-006,009]", "gpu003"), ("a,b", "a"), ("node7", "node7"), ("x[1,5]", "x1")]
)
def test_the_first_of_slurms_nodes(nodes: str, expected: str) -> None:
    assert first_host(nodes) == expected


def test_a_ramp_dense_vectors_and_adamw(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    how = ["--optimizer", "adamw", "--lr", "0.001", "--dense-vectors", "--density-ramp-steps", "4"]
    steps = ["--warmup-steps", "2", "--max-steps", "8", "--min-sparse-numel", "0", "--density", "0.01"]
    assert train_here("--data-dir", str(corpus), *how, *steps) == 0
    ramp = []
    for step in steps_of(tmp_path / "runs" / "lstman4"):
        matrices, vectors = step["buckets"]
        assert vectors["phase"] == "dense"
        assert matrices["phase"] == ("dense" if step["step"] < 2 else "sparse")
        assert step["bytes_sent"] == matrices["bytes_sent"] + vectors["bytes_sent"]
        if step["step"] >= 2:
            ramp.append(matrices["k"] / matrices["n"])
    assert ramp[0] > ramp[1] > ramp[2] > ramp[3] == ramp[4] == ramp[5]
    assert ramp[0] < 0.25
    assert ramp[3] == pytest.approx(0.01, rel=0.1)
