"""What BERT is pretrained on, and its model's size."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'oktopk[bert]'")
pytest.importorskip("transformers", reason="transformers is not installed: pip install 'oktopk[bert]'")

from oktopk.comm import SimulatedCommunicator, World
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.config import ConfigError, make_config
from oktopk.workbench.train.data.documents import find_documents, read_documents
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated_text import write_documents
from oktopk.workbench.train.data.pairs import IGNORED, SentencePairs, Special
from oktopk.workbench.train.data.wordpiece import SPECIAL, Pieces
from oktopk.workbench.train.models.bert import BertShape, make_bert, scores
from oktopk.workbench.train.tasks import build_workload
from oktopk.workbench.train.tasks.base import Workload
from oktopk.workbench.worlds.membership import Member, Place

NUMBERS = Special(pad=0, unknown=1, cls=2, sep=3, mask=4)
TINY = {
    "task": "bert-base", "hidden_size": 8, "num_layers": 1, "num_heads": 2, "sequence_length": 32, "batch_size": 4,
    "vocabulary_size": 300, "corpus_train": 12, "corpus_test": 3,
}  # fmt: skip


def workload(folder: Path, rank: int = 0, size: int = 1, **values: Any) -> Workload:
    comm = SimulatedCommunicator(World(1), 0)
    member = Member(Place("nobody", rank, size, rank, size), comm, torch.device("cpu"))
    return build_workload(make_config({**TINY, "out_dir": str(folder), **values}), member)


def made_up(num_documents: int = 6, num_sentences: int = 9, sequence_length: int = 24, seed: int = 1) -> SentencePairs:
    """Every piece says which document and sentence it is from."""
    documents = [
        [[100 + 100 * document + sentence] * (3 + sentence % 3) for sentence in range(num_sentences)]
        for document in range(num_documents)
    ]
    return SentencePairs(documents, special=NUMBERS, num_pieces=1000, sequence_length=sequence_length, seed=seed)


# --- documents


def test_empty_lines_part_documents(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("\n\nOne.\n Two. \n\n  \nThree.\n")
    assert read_documents(tmp_path / "x.txt") == [["One.", "Two."], ["Three."]]


def test_a_tenth_is_held_out_where_there_is_no_valid(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("\n".join(f"Document {i}.\n" for i in range(40)))
    train, held_out = find_documents(tmp_path)
    assert (len(train), len(held_out)) == (36, 4)
    assert sorted(d[0] for d in train + held_out) == sorted(f"Document {i}." for i in range(40))
    (tmp_path / "valid.txt").write_text("A.\n\nB.\n")
    assert [len(part) for part in find_documents(tmp_path)] == [40, 2]


def test_any_text_files_and_a_single_one_will_do(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name}1.\n\n{name}2.\n")
    train, held_out = find_documents(tmp_path)
    assert sorted(train + held_out) == [["a1."], ["a2."], ["b1."], ["b2."]]
    with pytest.raises(DataError, match=r"a\.txt: has 2 documents, too few to hold some out"):
        find_documents(tmp_path / "a.txt")


def test_what_cannot_be_used_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such folder or file"):
        find_documents(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"has no train\.txt nor another"):
        find_documents(tmp_path)
    (tmp_path / "train.txt").write_text(" \n\n")
    with pytest.raises(DataError, match=r"train\.txt: has no sentence"):
        find_documents(tmp_path)
    (tmp_path / "train.txt").write_text("A.\n\nB.\n")
    (tmp_path / "valid.txt").write_text("A.\nB.\n")
    with pytest.raises(DataError, match=r"valid\.txt: has 1 document, and a random next sentence"):
        find_documents(tmp_path)


# --- pieces


def sentences(tmp_path: Path) -> list[str]:
    write_documents(tmp_path / "text", num_train=40, num_held_out=2, seed=1)
    text = "Crème brûlée, naïve façade: ångström, Ελλάδα, Москва! x-y_z 0123456789."
    return [*(tmp_path / "text" / "train.txt").read_text().split("\n"), *[text] * 3]


def test_a_trained_vocabulary_is_the_same_whenever_it_is_trained(tmp_path: Path) -> None:
    """The trainer alone numbers the characters inside of words in another order each time."""
    text = sentences(tmp_path)
    vocabularies = {Pieces.train(text, 250).pieces for _ in range(6)}
    assert len(vocabularies) == 1
    (pieces,) = vocabularies
    assert pieces[:5] == SPECIAL
    assert len(pieces) == len(set(pieces)) == 250


def test_a_vocabulary_read_from_a_file_is_the_one_that_was_trained(tmp_path: Path) -> None:
    text = sentences(tmp_path)
    trained = Pieces.train(text, 250)
    (tmp_path / "v.txt").write_text("\n".join(trained.pieces))
    read = Pieces.read(tmp_path / "v.txt")
    assert read == trained
    assert read.encode(text) == trained.encode(text)
    (encoded,) = read.encode(["The SHIP follows ☃."])
    words = [read.pieces[number] for number in encoded]
    assert words[0] == "the"
    assert "".join(words[1:-2]).replace("##", "") == "shipfollows"
    assert words[-2:] == ["[UNK]", "."]


def test_a_cased_vocabulary_keeps_case(tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("\n".join([*SPECIAL, "Ship", "ship"]))
    assert Pieces.read(tmp_path / "v.txt").encode(["Ship ship SHIP"]) == [[5, 6, 1]]
    (tmp_path / "v.txt").write_text("\n".join([*SPECIAL, "ship"]))
    assert Pieces.read(tmp_path / "v.txt").encode(["Ship ship SHIP"]) == [[5, 5, 5]]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["a", "b"], r"lacks \[PAD\]"),
        ([*SPECIAL, "a", "a"], "has 'a' twice"),
        (list(SPECIAL), "no pieces but the special ones"),
    ],
)
def test_what_is_no_vocabulary_is_refused(lines: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "v.txt").write_text("\n".join(lines))
    with pytest.raises(DataError, match=message):
        Pieces.read(tmp_path / "v.txt")
    with pytest.raises(DataError, match=r"no\.txt: cannot be read"):
        Pieces.read(tmp_path / "no.txt")


# --- pairs


def original(pair: Any) -> np.ndarray:
    return np.where(pair.labels == IGNORED, pair.pieces, pair.labels)


def test_a_pair_is_two_segments_in_a_row_or_of_two_documents() -> None:
    pairs = made_up()
    outcomes = []
    for epoch in range(20):
        for index in range(len(pairs)):
            pair = pairs.pair(index, epoch)
            pieces = original(pair)
            assert len(pieces) == len(pair.segments) == len(pair.labels) <= 24
            assert pieces[0] == NUMBERS.cls
            ends = np.flatnonzero(pieces == NUMBERS.sep)
            assert len(ends) == 2
            assert ends[1] == len(pieces) - 1
            assert np.array_equal(pair.segments, (np.arange(len(pieces)) > ends[0]).astype(int))
            one, other = pieces[1 : ends[0]], pieces[ends[0] + 1 : -1]
            if pair.random_next:
                assert one[0] // 100 != other[0] // 100
            else:
                assert other[0] == one[-1] + 1
            outcomes.append(pair.random_next)
    assert 0.4 < np.mean(outcomes) < 0.6


def test_every_sentence_is_in_a_segment() -> None:
    pairs = made_up()
    pieces = {int(p) for i in range(len(pairs)) for e in range(8) for p in original(pairs.pair(i, e))}
    assert pieces - {2, 3} == {100 + 100 * document + sentence for document in range(6) for sentence in range(9)}


def test_masking_is_15_percent_and_80_10_10() -> None:
    pairs = made_up(num_documents=8, num_sentences=60, sequence_length=128)
    masked = hidden = kept = places = 0
    for index in range(len(pairs)):
        for epoch in range(30):
            pair = pairs.pair(index, epoch)
            chosen = pair.labels != IGNORED
            assert not chosen[pair.pieces == NUMBERS.sep].any()
            assert not chosen[0]
            assert chosen.sum() == max(1, round(0.15 * (len(pair.pieces) - 3)))
            places += len(pair.pieces) - 3
            masked += int(chosen.sum())
            hidden += int((pair.pieces[chosen] == NUMBERS.mask).sum())
            kept += int((pair.pieces[chosen] == pair.labels[chosen]).sum())
            others = pair.pieces[chosen][pair.pieces[chosen] != NUMBERS.mask]
            assert (others >= 5).all()
    assert masked / places == pytest.approx(0.15, abs=0.005)
    assert hidden / masked == pytest.approx(0.8, abs=0.02)
    assert kept / masked == pytest.approx(0.1, abs=0.02)


def test_seed_epoch_and_index_decide_everything() -> None:
    def all_of(pairs: SentencePairs, epoch: int | None, order: range) -> list[bytes]:
        found = {index: pairs.pair(index, epoch) for index in order}
        return [found[index].pieces.tobytes() + found[index].labels.tobytes() for index in range(len(pairs))]

    pairs = made_up()
    forward, backward = range(len(pairs)), range(len(pairs) - 1, -1, -1)
    assert all_of(pairs, 3, forward) == all_of(pairs, 3, backward) == all_of(made_up(), 3, forward)
    assert all_of(pairs, 3, forward) != all_of(pairs, 4, forward)
    assert all_of(pairs, 3, forward) != all_of(made_up(seed=2), 3, forward)
    assert all_of(pairs, None, forward) == all_of(pairs, None, backward) != all_of(pairs, 0, forward)


def test_batches_are_padded_to_what_they_need() -> None:
    pairs = made_up(sequence_length=27)
    batch = pairs.batch([0, 1, 2], 0)
    longest = max(len(pairs.pair(index, 0).pieces) for index in range(3))
    assert batch.pieces.shape == (3, min(27, -(-longest // 8) * 8))
    for row in range(3):
        pair = pairs.pair(row, 0)
        n = len(pair.pieces)
        assert batch.attended[row].tolist() == [1] * n + [0] * (batch.pieces.shape[1] - n)
        assert batch.pieces[row, :n].tolist() == pair.pieces.tolist()
        assert set(batch.pieces[row, n:].tolist()) <= {NUMBERS.pad}
        assert set(batch.labels[row, n:].tolist()) <= {IGNORED}
        assert bool(batch.random_next[row]) == pair.random_next


@pytest.mark.parametrize("documents", [[], [[[7, 8]], [[9]]], [[[7], [8], [9]]], [[[7], [8]], [[]]]])
def test_text_without_a_pair_is_refused(documents: Any) -> None:
    with pytest.raises(DataError, match="no two documents of which one has two sentences"):
        SentencePairs(documents, special=NUMBERS, num_pieces=10, sequence_length=16, seed=1)


# --- the model and the workload


def test_bert_base_has_exactly_its_parameters() -> None:
    with torch.device("meta"):
        model = make_bert(BertShape())
    assert sum(p.numel() for p in model.parameters()) == 110_106_428


def test_scores_are_those_of_the_whole_model_at_the_wanted_places() -> None:
    torch.manual_seed(0)
    shape = BertShape(num_pieces=50, hidden_size=8, num_layers=2, num_heads=2)
    model = make_bert(shape).eval()
    pieces, segments = torch.randint(5, 50, (3, 12)), torch.zeros(3, 12, dtype=torch.int64)
    attended, wanted = torch.ones(3, 12, dtype=torch.int64), torch.rand(3, 12) < 0.3
    attended[1, 7:] = 0
    with torch.no_grad():
        of_pieces, of_next = scores(model, pieces, segments, attended, wanted)
        whole = model(input_ids=pieces, token_type_ids=segments, attention_mask=attended)
    torch.testing.assert_close(of_pieces, whole.prediction_logits[wanted])
    torch.testing.assert_close(of_next, whole.seq_relationship_logits)


def test_every_parameter_learns_and_the_loss_is_the_same_whenever_asked(tmp_path: Path) -> None:
    task = workload(tmp_path)
    batches = list(task.batches(0, 0))
    assert len(batches) == task.num_batches
    loss = task.loss(batches[1])
    assert float(loss.detach()) == float(task.loss(next(task.batches(0, 1))).detach())
    assert float(loss.detach()) != float(task.loss(next(task.batches(1, 1))).detach())
    loss.backward()
    assert [name for name, p in task.model.named_parameters() if p.grad is None] == []
    found = task.validate()
    assert found == task.validate()
    assert set(found) == {"loss", *task.metrics}
    assert 0 <= found["mlm_accuracy"] <= 1
    assert 0 <= found["nsp_accuracy"] <= 1
    assert 100 < found["perplexity"] < 1000
    assert task.model.training


def test_workers_have_different_batches_and_the_same_number(tmp_path: Path) -> None:
    alone = workload(tmp_path)  # makes the data and the vocabulary
    pair = [
        workload(
            tmp_path,
            rank,
            2,
            vocabulary=str(tmp_path / "run" / "vocabulary.txt"),
            data_dir=str(tmp_path / "run" / "data"),
        )
        for rank in range(2)
    ]
    assert pair[0].num_batches == pair[1].num_batches == -(-alone.num_batches // 2)
    for one, other in zip(pair[0].batches(0, 0), pair[1].batches(0, 0), strict=True):
        assert one.pairs.pieces.tolist() != other.pairs.pieces.tolist()


def test_bad_settings_and_too_little_text_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="sentence pairs are too few for a step of 4000: 1000 x batch_size=4"):
        workload(tmp_path, nsteps_update=1000)
    with pytest.raises(UsageError, match="hidden_size=10: must be a multiple of num_heads=4"):
        make_config({"task": "bert-base", "hidden_size": 10, "num_heads": 4})
    with pytest.raises(UsageError, match=r"dropout=1\.0: must be below 1"):
        make_config({"task": "bert-base", "dropout": 1.0})


@pytest.mark.parametrize("package", ["transformers", "tokenizers"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tuple(f"oktopk.workbench.train.{name}" for name in ("tasks.bert", "models.bert", "data.wordpiece"))
    for name in [name for name in sys.modules if name in ours or name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)

    class Absent(MetaPathFinder):
        def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
            del path, target
            if fullname == package:
                raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)

    monkeypatch.setattr(sys, "meta_path", [Absent(), *sys.meta_path])
    with pytest.raises(ConfigError, match=f"needs '{package}', which is not installed; .*'oktopk\\[bert\\]'"):
        workload(tmp_path)
