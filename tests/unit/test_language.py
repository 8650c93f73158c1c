"""The language model's data, model and workload, without processes."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.comm import SimulatedCommunicator, World
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.config import make_config
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated_text import write_sentences
from oktopk.workbench.train.data.words import (
    END,
    IGNORED,
    UNKNOWN,
    HeldOutColumns,
    TrainingColumns,
    Vocabulary,
    find_texts,
)
from oktopk.workbench.train.models.language import LanguageModel, LanguageModelConfig
from oktopk.workbench.train.tasks import build_workload
from oktopk.workbench.train.tasks.base import Workload
from oktopk.workbench.train.tasks.common import perplexity
from oktopk.workbench.worlds.membership import Member, Place

TINY = {"task": "lstm", "hidden_size": 8, "batch_size": 2, "sequence_length": 5, "corpus_train": 60, "corpus_test": 9}


def workload(folder: Path, **values: Any) -> Workload:
    member = Member(Place("nobody", 0, 1, 0, 1), SimulatedCommunicator(World(1), 0), torch.device("cpu"))
    return build_workload(make_config({**TINY, "out_dir": str(folder), **values}), member)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "train.txt").write_text("b a c\nb <unk> a\n\nb c d\n")
    return tmp_path / "train.txt"


# --- words


def test_words_are_numbered_by_frequency_then_by_alphabet(text: Path) -> None:
    assert Vocabulary.of(text, 100).words == (END, "b", "a", "c", UNKNOWN, "d")


def test_rare_words_make_room_but_the_two_marks_stay(text: Path) -> None:
    vocabulary = Vocabulary.of(text, 4)
    assert vocabulary.words == (END, "b", "a", UNKNOWN)
    assert [vocabulary.words[i] for i in vocabulary.encode(text)] == (
        f"b a {UNKNOWN} {END} b {UNKNOWN} a {END} b {UNKNOWN} {UNKNOWN} {END}".split()
    )


def test_words_that_training_never_saw_are_unknown(text: Path, tmp_path: Path) -> None:
    (tmp_path / "valid.txt").write_text("b new a\n")
    vocabulary = Vocabulary.of(text, 100)
    assert [vocabulary.words[i] for i in vocabulary.encode(tmp_path / "valid.txt")] == ["b", UNKNOWN, "a", END]


@pytest.mark.parametrize("prefix", ["", "ptb."])
def test_both_layouts_are_found(prefix: str, tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"{prefix}{name}.txt").write_text("a\n")
    assert [path.name for path in find_texts(tmp_path)] == [f"{prefix}train.txt", f"{prefix}valid.txt"]
    (tmp_path / f"{prefix}valid.txt").unlink()
    assert find_texts(tmp_path)[1].name == f"{prefix}test.txt"


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder"):
        find_texts(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no train\.txt"):
        find_texts(tmp_path)
    (tmp_path / "a.train.txt").write_text("")
    with pytest.raises(DataError, match=r"has no valid\.txt or test\.txt"):
        find_texts(tmp_path)
    with pytest.raises(DataError, match=r"a\.train\.txt: has no words"):
        Vocabulary.of(tmp_path / "a.train.txt", 100)
    (tmp_path / "b.train.txt").write_bytes(b"caf\xe9\n")
    with pytest.raises(DataError, match=r"has a\.train\.txt and b\.train\.txt; leave one"):
        find_texts(tmp_path)
    with pytest.raises(DataError, match=r"b\.train\.txt: is not UTF-8 text"):
        Vocabulary.of(tmp_path / "b.train.txt", 100)


# --- columns


@pytest.mark.parametrize(
    ("n", "batch_size", "steps", "size"), [(100, 2, 5, 2), (97, 3, 4, 2), (50, 1, 7, 3), (8, 2, 2, 1)]
)
def test_training_columns_are_contiguous_and_nobody_shares_them(n: int, batch_size: int, steps: int, size: int) -> None:
    rows = n // (batch_size * size)
    seen: list[int] = []
    for rank in range(size):
        columns = TrainingColumns(torch.arange(n), batch_size=batch_size, steps=steps, rank=rank, size=size)
        assert columns.num_batches == (rows - 1) // steps
        inputs = torch.cat([columns.batch(i)[0] for i in range(columns.num_batches)])
        targets = torch.cat([columns.batch(i)[1] for i in range(columns.num_batches)])
        assert inputs.shape == (columns.num_batches * steps, batch_size)
        assert torch.equal(targets, inputs + 1)
        assert bool((inputs[1:] == inputs[:-1] + 1).all())
        seen += inputs.flatten().tolist()
    assert len(seen) == len(set(seen))


def test_a_text_that_is_too_short_has_no_batch() -> None:
    assert TrainingColumns(torch.arange(3), batch_size=4, steps=2, rank=0, size=1).num_batches == 0


@pytest.mark.parametrize("size", [1, 2, 5, 20])
@pytest.mark.parametrize("n", [1, 7, 16, 333])
def test_every_held_out_word_is_judged_once_after_the_one_before_it(n: int, size: int) -> None:
    seen: list[int] = []
    for rank in range(size):
        for inputs, targets in HeldOutColumns(torch.arange(1, n + 1), 0, steps=5, rank=rank, size=size).batches():
            real = targets != IGNORED
            assert torch.equal(inputs[real], targets[real] - 1)  # the first of all comes after number 0, the end
            seen += targets[real].tolist()
    assert sorted(seen) == list(range(1, n + 1))


# --- the model


def test_lstm_has_exactly_its_parameters() -> None:
    """Embedding 15,000,000, two layers of 18,012,000, scores 15,010,000."""
    with torch.device("meta"):
        model = LanguageModel(LanguageModelConfig())
    assert sum(p.numel() for p in model.parameters()) == 66_034_000


def test_a_carried_state_makes_one_sequence_of_two() -> None:
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(num_words=11, hidden_size=6)).eval()
    words = torch.randint(11, (8, 3))
    whole, _ = model(words)
    first, state = model(words[:5])
    second, _ = model(words[5:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)


def test_perplexity_is_never_nan() -> None:
    assert perplexity(math.log(5.0)) == pytest.approx(5.0)
    assert perplexity(None) is None
    assert perplexity(math.nan) is None
    assert perplexity(math.inf) is None


# --- the workload


def losses_of(task: Workload, epoch: int, first: int) -> list[float]:
    return [float(task.loss(batch).detach()) for batch in task.batches(epoch, first)]


def test_batches_are_the_same_whenever_asked_and_begin_where_asked(tmp_path: Path) -> None:
    task = workload(tmp_path)
    all_batches = list(task.batches(0, 0))
    assert len(all_batches) == task.num_batches > 6
    again = list(task.batches(3, 4))
    assert [batch.index for batch in again] == list(range(4, task.num_batches))
    for one, other in zip(all_batches[4:], again, strict=True):
        assert torch.equal(one.words, other.words)
        assert torch.equal(one.targets, other.targets)


def test_the_state_is_carried_saved_and_dropped_between_epochs(tmp_path: Path) -> None:
    task = workload(tmp_path, dropout=0.5)
    assert task.state() == {}
    losses = losses_of(task, 0, 0)
    assert task.state() == {}
    assert losses == losses_of(task, 0, 0)
    assert losses != losses_of(task, 1, 0)  # dropout is another

    other = workload(tmp_path, dropout=0.5)
    for batch in list(task.batches(0, 0))[:4]:
        task.loss(batch)
    saved = {key: value.clone() for key, value in task.state().items()}
    assert not any(value.requires_grad for value in task.state().values())
    task.validate()
    assert all(torch.equal(task.state()[key], value) for key, value in saved.items())
    other.load_state(saved)
    assert losses_of(other, 0, 4) == losses[4:]
    other.load_state({})
    assert losses_of(other, 0, 4) != losses[4:]


def test_whole_steps_only(tmp_path: Path) -> None:
    whole = workload(tmp_path).num_batches
    assert workload(tmp_path, nsteps_update=3).num_batches == whole // 3 * 3
    with pytest.raises(DataError, match="words are too few for a step: 1000 x batch_size=2"):
        workload(tmp_path, nsteps_update=1000)


def test_perplexity_of_a_new_model_is_about_the_number_of_words(tmp_path: Path) -> None:
    task = workload(tmp_path)
    found = task.validate()
    num_words = task.model.decoder.out_features
    assert 0.5 * num_words < found["perplexity"] < 2.0 * num_words
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    assert task.model.training


@pytest.mark.parametrize("dropout", [1.0, 2.0, math.nan])
def test_a_dropout_that_leaves_nothing_is_refused(dropout: float) -> None:
    with pytest.raises(UsageError, match="dropout="):
        make_config({"task": "lstm", "dropout": dropout})


# --- generated text


def test_generated_text_is_the_same_for_a_seed_and_held_out_text_differs(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_sentences(tmp_path / name, num_train=200, num_held_out=50, seed=seed)
    read = {name: (tmp_path / name / "train.txt").read_text() for name in "abc"}
    assert read["a"] == read["b"] != read["c"]
    lines = read["a"].splitlines()
    assert len(lines) == 200
    assert UNKNOWN in read["a"]
    held_out = (tmp_path / "a" / "valid.txt").read_text().splitlines()
    assert len(held_out) == 50
    assert len(set(held_out) & set(lines)) < 10


def test_generated_text_of_other_parameters_is_not_taken_for_these(tmp_path: Path) -> None:
    write_sentences(tmp_path, num_train=20, num_held_out=5, seed=1)
    before = (tmp_path / "train.txt").stat().st_mtime_ns
    write_sentences(tmp_path, num_train=20, num_held_out=5, seed=1)
    assert (tmp_path / "train.txt").stat().st_mtime_ns == before
    with pytest.raises(DataError, match="holds text made with"):
        write_sentences(tmp_path, num_train=21, num_held_out=5, seed=1)
    (tmp_path / "corpus.json").write_text("{")
    with pytest.raises(DataError, match="is damaged"):
        write_sentences(tmp_path, num_train=20, num_held_out=5, seed=1)
    with pytest.raises(ValueError, match="seed=-1: must be"):
        write_sentences(tmp_path / "x", num_train=20, num_held_out=5, seed=-1)


def test_what_was_the_object_is_the_next_subject(tmp_path: Path) -> None:
    """So that there is something to remember from sentence to sentence."""
    write_sentences(tmp_path, num_train=400, num_held_out=5, seed=1)
    lines = [line.split() for line in (tmp_path / "train.txt").read_text().splitlines()]
    told = sum(bool(set(one) & set(other) - {"a", "the", "every", "some", "many"}) for one, other in pairwise(lines))
    assert told > 0.8 * len(lines)
