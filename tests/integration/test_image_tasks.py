"""The image tasks as their users train them: two workers, real files."""

from __future__ import annotations

import csv
import json
import math
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oktopk.comm import SimulatedCommunicator, World
from oktopk.workbench.cli import main
from oktopk.workbench.train.config import load_config
from oktopk.workbench.train.data.generated_images import generate
from oktopk.workbench.train.tasks import build_workload
from oktopk.workbench.worlds.membership import Member, Place
from tests.worlds import ROOT, GlooWorld

CIFAR10 = Path(os.environ.get("OKTOPK_CIFAR10") or ROOT.parent / "shared" / "data" / "cifar10")
TINY = ["--channels", "4", "--batch-size", "8", "--corpus-train", "48", "--corpus-test", "21", "--quiet"]
TINY += ["--report", "False", "--warmup-steps", "3"]
FOLDER_TASKS = ("resnet50", "alexnet")
TASKS = ("vgg16", "vgg19", "resnet20", "resnet56", "resnet110", *FOLDER_TASKS, "lenet")


def train(arguments: list[str]) -> int:
    """As a worker that torchrun started; runs in a world's process."""
    rank, size = (str(value) for value in (torch.distributed.get_rank(), torch.distributed.get_world_size()))
    os.environ.update(RANK=rank, WORLD_SIZE=size, LOCAL_RANK=rank, LOCAL_WORLD_SIZE=size)
    return main(["train", *arguments])


@pytest.fixture(scope="module")
def workers() -> Iterator[GlooWorld]:
    """Of our own: a worker whose training fails ends its process."""
    world = GlooWorld(2)
    yield world
    world.close()


def arguments_of(task: str, folder: Path, *further: str) -> list[str]:
    size = ["--image-size", "64"] if task in FOLDER_TASKS else []
    return [task, *TINY, *size, "--out-dir", str(folder), *further]


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def epochs_of(run: Path) -> list[dict[str, str]]:
    with (run / "epochs.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("task", TASKS)
def test_three_dense_and_three_sparse_steps(task: str, workers: GlooWorld, tmp_path: Path) -> None:
    assert workers.run(train, arguments_of(task, tmp_path, "--max-steps", "6", "--guard-every", "1")) == [0, 0]
    steps = steps_of(tmp_path / task)
    assert [step["phase"] for step in steps] == ["dense"] * 3 + ["sparse"] * 3
    assert [step["epoch"] for step in steps] == [0] * 3 + [1] * 3
    assert all(math.isfinite(step["loss"]) for step in steps)
    assert steps[-1]["bytes_sent"] < steps[0]["bytes_sent"] / 2
    for row in epochs_of(tmp_path / task):
        assert math.isfinite(float(row["val_loss"]))
        right = 21 * float(row["accuracy"])
        assert right == pytest.approx(round(right))
        if task in FOLDER_TASKS:
            assert float(row["accuracy"]) <= float(row["top5"]) <= 1.0
        else:
            assert "top5" not in row


def test_lenet_learns_the_generated_shapes(workers: GlooWorld, tmp_path: Path) -> None:
    arguments = ["lenet", "--corpus-train", "256", "--batch-size", "8", "--epochs", "9", "--warmup-steps", "40"]
    arguments += ["--validate-every", "9", "--checkpoint-every", "0", "--out-dir", str(tmp_path), "--quiet"]
    assert workers.run(train, [*arguments, "--report", "False"]) == [0, 0]
    run = tmp_path / "lenet"
    assert json.loads((run / "run.json").read_text())["num_parameters"] == 61_706
    assert sum(step["phase"] == "sparse" for step in steps_of(run)) == 9 * 16 - 40
    assert float(epochs_of(run)[-1]["accuracy"]) > 0.6


def final_state(run: Path, rank: int) -> dict[str, Any]:
    folder = run / "checkpoints" / json.loads((run / "checkpoints" / "latest.json").read_text())["checkpoint"]
    shared = torch.load(folder / "shared.pt", weights_only=True)
    own = torch.load(folder / f"rank_{rank}.pt", weights_only=True)
    return {**shared["model"], **own["allreducer"]["feedback"]["residual"], **own["buffers"], "rng": own["rng"]}


@pytest.mark.parametrize("task", ["vgg16", "alexnet"])
def test_4_steps_resumed_for_4_more_equal_8_straight(task: str, workers: GlooWorld, tmp_path: Path) -> None:
    """Augmented, with batch norm or dropout, across the border from dense to sparse, stopped within an epoch."""
    data = tmp_path / "data"
    generate(data, "imagenet" if task in FOLDER_TASKS else "cifar10", num_train=40, num_test=10, seed=1)
    for further in (
        ["--name", "straight", "--max-steps", "8"],
        ["--name", "pieces", "--max-steps", "4"],
        ["--name", "pieces", "--max-steps", "8", "--resume"],
    ):
        assert workers.run(train, arguments_of(task, tmp_path, "--data-dir", str(data), *further)) == [0, 0]
    for rank in range(2):
        straight, pieces = (final_state(tmp_path / name, rank) for name in ("straight", "pieces"))
        assert straight.keys() == pieces.keys()
        for key, value in straight.items():
            assert torch.equal(value, pieces[key]), key
    losses = [[step["loss"] for step in steps_of(tmp_path / name)] for name in ("straight", "pieces")]
    assert losses[0] == losses[1]


def test_the_real_cifar10_for_a_few_steps(workers: GlooWorld, tmp_path: Path) -> None:
    if not CIFAR10.is_dir():
        pytest.skip(f"the real CIFAR-10 is not at {CIFAR10}; OKTOPK_CIFAR10 can name it")
    further = ["--data-dir", str(CIFAR10), "--max-steps", "24", "--lr-warmup-epochs", "0", "--lr", "0.02"]
    assert workers.run(
        train, arguments_of("vgg16", tmp_path, *further, "--batch-size", "32", "--warmup-steps", "8")
    ) == [0, 0]
    losses = [step["loss"] for step in steps_of(tmp_path / "vgg16")]
    assert np.mean(losses[-5:]) < np.mean(losses[:5])
    assert not (tmp_path / "vgg16" / "data").exists()


# --- the workload


def workload_of(task: str, data: Path, rank: int = 0, size: int = 1, **values: Any) -> Any:
    config = load_config(task, {"data_dir": str(data), "channels": 2, "batch_size": 4, **values})
    comm = SimulatedCommunicator(World(1), 0)
    return build_workload(config, Member(Place("nobody", rank, size, rank, size), comm, torch.device("cpu")))


@pytest.fixture(scope="module")
def cifar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images") / "cifar"
    generate(folder, "cifar10", num_train=30, num_test=13, seed=2)
    return folder


def test_batches_are_the_same_whenever_asked_and_from_wherever(cifar: Path) -> None:
    first = workload_of("resnet20", cifar, rank=1, size=3)
    again = workload_of("resnet20", cifar, rank=1, size=3)
    assert first.num_batches == 3
    whole = list(first.batches(2, 0))
    for batch, same in zip(whole[1:], again.batches(2, 1), strict=True):
        assert torch.equal(batch.pixels, same.pixels)
        assert torch.equal(batch.classes, same.classes)
    assert list(first.batches(2, 3)) == []
    other = [batch.classes.tolist() for batch in first.batches(3, 0)]
    assert other != [batch.classes.tolist() for batch in whole]


def test_an_epoch_that_is_given_up_leaves_no_thread(cifar: Path) -> None:
    before = threading.active_count()
    batches = workload_of("resnet20", cifar).batches(0, 0)
    next(batches)
    assert threading.active_count() == before + 1
    batches.close()
    assert threading.active_count() == before


def test_validation_judges_every_image_once(cifar: Path) -> None:
    """By hand, on a model that was trained a little so that classes differ."""
    workload = workload_of("resnet20", cifar)
    optimizer = torch.optim.SGD(workload.model.parameters(), lr=0.05)
    for batch in workload.batches(0, 0):
        optimizer.zero_grad()
        workload.loss(batch).backward()
        optimizer.step()
    found = workload.validate()
    assert workload.model.training
    records = np.frombuffer((cifar / "test_batch.bin").read_bytes(), dtype=np.uint8).reshape(13, 3073)
    pixels = torch.tensor(records[:, 1:].reshape(13, 3, 32, 32)) / 255.0
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    with torch.no_grad():
        scores = workload.model.eval()((pixels - mean[:, None, None]) / deviation[:, None, None])
    classes = torch.tensor(records[:, 0]).long()
    assert found["loss"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, classes)), rel=1e-4)
    assert found["accuracy"] == pytest.approx(float((scores.argmax(1) == classes).double().mean()))
    assert found.keys() == {"loss", *workload.metrics}


def test_bad_image_data_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for task, said in (("vgg16", "holds no CIFAR-10"), ("lenet", "holds neither"), ("alexnet", "cannot be listed")):
        assert main(["train", *arguments_of(task, tmp_path, "--data-dir", str(tmp_path), "--workers", "1")]) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        assert said in lines[0]
        assert "leave data_dir empty for embedded data" in lines[0]
