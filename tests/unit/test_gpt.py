"""GPT's model, data and workload, without processes."""

from __future__ import annotations

import importlib.util
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from oktopk.comm import simulate
from oktopk.comm.base import Communicator
from oktopk.workbench.console.words import UsageError
from oktopk.workbench.train.config import ConfigError, load_config, make_config
from oktopk.workbench.train.data import text_folder, text_tokens
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.sampler import RandomPlaces
from oktopk.workbench.train.data.text_folder import FolderText, read_text
from oktopk.workbench.train.data.text_tokens import ByteTokens, HeldOutWindows, PieceTokens, windows
from oktopk.workbench.train.models.gpt import Gpt, GptShape
from oktopk.workbench.train.tasks import build_workload, gpt
from oktopk.workbench.train.tasks.base import Workload
from oktopk.workbench.worlds.membership import Member, Place

SMALL = GptShape(num_tokens=11, hidden_size=8, num_layers=3, num_heads=2, sequence_length=6)
TINY = {
    "task": "gpt", "hidden_size": 8, "num_layers": 1, "num_heads": 2, "sequence_length": 16, "batch_size": 2,
    "corpus_train": 3, "corpus_test": 1,
}  # fmt: skip

needs_tokenizers = pytest.mark.skipif(
    importlib.util.find_spec("tokenizers") is None, reason="tokenizers is not installed: pip install 'oktopk[bert]'"
)


def build(folder: Path, comm: Communicator, **values: Any) -> Workload:
    member = Member(Place("nobody", comm.rank, comm.size, comm.rank, comm.size), comm, torch.device("cpu"))
    return build_workload(make_config({**TINY, "out_dir": str(folder / "out"), **values}), member)


def workloads(folder: Path, size: int, **values: Any) -> list[Workload]:
    """One for each of so many workers."""
    return simulate(size, lambda comm: build(folder, comm, **values))


def workload(folder: Path, **values: Any) -> Workload:
    return workloads(folder, 1, **values)[0]


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


def read(path: Path) -> FolderText:
    return read_text(path, without=[path / "runs"])


# --- the model


def num_parameters(shape: GptShape) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Gpt(shape).parameters())


def test_gpt2_has_exactly_its_parameters() -> None:
    """Embedding 38,597,376, positions 786,432, twelve layers of 7,079,424, the last norm 768."""
    assert num_parameters(GptShape()) == 124_337_664


@pytest.mark.parametrize(
    ("preset", "num_tokens", "expected"),
    [("gpt2-124m", 50257, 124_337_664), ("gpt", 256, 10_818_432), ("gpt-mini", 256, 443_008)],
)
def test_presets_have_the_parameters_they_say(preset: str, num_tokens: int, expected: int) -> None:
    settings = load_config(preset, {}).task_settings
    assert settings.tokens == ("bytes" if num_tokens == 256 else "wordpiece")
    assert num_tokens in (256, settings.vocabulary_size)
    shape = GptShape(
        num_tokens=num_tokens,
        hidden_size=settings.hidden_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        sequence_length=settings.sequence_length,
    )
    assert num_parameters(shape) == expected


def test_the_weight_of_embedding_and_scores_is_one_parameter() -> None:
    model = Gpt(SMALL)
    assert model.scores.weight is model.embedding.weight
    names = [name for name, _ in model.named_parameters()]
    assert names.count("embedding.weight") == 1
    assert "scores.weight" not in names
    assert not any(name.endswith("bias") for name in names)


def test_a_token_changes_no_score_before_it() -> None:
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    tokens = torch.randint(11, (2, 6))
    with torch.no_grad():
        before = model(tokens)
        for place in range(6):
            changed = tokens.clone()
            changed[:, place] = (changed[:, place] + 1) % 11
            after = model(changed)
            torch.testing.assert_close(after[:, :place], before[:, :place])
            for later in range(place, 6):
                assert not torch.allclose(after[:, later], before[:, later], atol=1e-7)


def test_places_matter() -> None:
    torch.manual_seed(0)
    model = Gpt(SMALL).eval()
    same = model(torch.full((1, 6), 3))
    assert not torch.allclose(same[0, 0], same[0, 1], atol=1e-7)


def test_new_weights_have_the_spread_of_gpt2() -> None:
    torch.manual_seed(0)
    model = Gpt(GptShape(num_tokens=256, hidden_size=64, num_layers=8, num_heads=4, sequence_length=64))
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        else:
            last = name.endswith(("attention.project.weight", "narrow.weight"))
            assert float(parameter.detach().std()) == pytest.approx(0.02 / 4 if last else 0.02, rel=0.1), name


def test_dropout_is_in_training_only() -> None:
    torch.manual_seed(0)
    shape = GptShape(num_tokens=11, hidden_size=8, num_layers=1, num_heads=2, sequence_length=6, dropout=0.5)
    model, tokens = Gpt(shape), torch.randint(11, (2, 6))
    assert not torch.equal(model(tokens), model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


# --- a folder of text


def test_all_text_files_are_joined_in_order_and_a_twentieth_is_held_out(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "b.py": "b" * 40, "a.md": "a" * 20 + "\n", "sub/deep/x.txt": "x" * 30, "sub/a": "y" * 5, "empty.txt": "",
            ".hidden/a.txt": "never", "sub/.a.txt": "never", "runs/run/log.txt": "never",
            "latin.txt": b"caf\xe9", "zero.bin": b"a\0b",
        },
    )  # fmt: skip
    found = read(tmp_path)
    whole = "a" * 20 + "\n\n" + "b" * 40 + "\n" + "y" * 5 + "\n" + "x" * 30
    assert (found.train + found.held_out).decode() == whole
    assert len(whole) == 100 - 1
    assert found.held_out == b"x" * 4
    assert found.left_out == ("latin.txt", "zero.bin")


def test_a_character_is_never_torn(tmp_path: Path) -> None:
    write(tmp_path, {"a.txt": "€" * 100})
    found = read(tmp_path)
    assert len(found.held_out) == 15  # 300 bytes of three each: 15 are a twentieth, and whole characters
    write(tmp_path, {"a.txt": "€" * 101})
    found = read(tmp_path)
    assert (len(found.train), len(found.held_out)) == (288, 15)
    write(tmp_path, {"a.txt": "€" * 107})
    found = read(tmp_path)
    assert found.train.decode() + found.held_out.decode() == "€" * 107
    assert len(found.held_out) == 15  # of 16, one is the end of a character


def test_too_large_files_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_folder, "MAX_FILE_BYTES", 50)
    write(tmp_path, {"a.txt": "a" * 50, "b.txt": "b" * 51})
    found = read(tmp_path)
    assert found.train + found.held_out == b"a" * 50
    assert found.left_out == ("b.txt",)


def test_no_more_is_held_out_than_validation_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_folder, "MAX_HELD_OUT_BYTES", 7)
    write(tmp_path, {"a.txt": "a" * 200})
    assert read(tmp_path) == FolderText(b"a" * 193, b"a" * 7)


def test_earlier_runs_are_no_text(tmp_path: Path) -> None:
    run = {"run.json": "{}", "metrics.jsonl": "{}", "logs/rank_0.log": "said " * 9}
    write(tmp_path, {"a.txt": "a" * 40, **{f"old/gpt/{name}": content for name, content in run.items()}})
    write(tmp_path, {"notes/run.json": "b"})  # alone it is no run
    found = read(tmp_path)
    assert found.train + found.held_out == b"a" * 40 + b"\nb"
    assert len(read(tmp_path / "old" / "gpt").train) > 0  # asked for by name


def test_a_file_is_enough_whatever_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_folder, "MAX_FILE_BYTES", 3)
    write(tmp_path, {"a.txt": "a" * 40, "b.txt": "b", "empty.txt": "", "zero.txt": b"\0"})
    assert read(tmp_path / "a.txt") == FolderText(b"a" * 38, b"aa")
    with pytest.raises(DataError, match=r"empty\.txt: is empty; put text into it"):
        read(tmp_path / "empty.txt")
    with pytest.raises(DataError, match=r"zero\.txt: is not UTF-8 text without NUL; convert it"):
        read(tmp_path / "zero.txt")
    with pytest.raises(DataError, match=r"b\.txt: has 1 bytes of text, too few to hold some out; put more"):
        read(tmp_path / "b.txt")


def test_train_and_valid_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_folder, "MAX_FILE_BYTES", 3)
    write(tmp_path, {"train.txt": "learn this", "valid.txt": "that", "test.txt": "never", "other.py": "never"})
    assert read(tmp_path) == FolderText(b"learn this", b"that")


def test_what_cannot_be_used_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"data_dir='.*nowhere': no such folder or file; leave data_dir out"):
        read(tmp_path / "nowhere")
    with pytest.raises(
        DataError,
        match="has 0 bytes of text, too few to hold some out; put more text files into it; 0 files were left out",
    ):
        read(tmp_path)
    write(tmp_path, {"logo.png": b"\x89PNG\0", "a.txt": "a" * 19})
    with pytest.raises(
        DataError,
        match="has 19 bytes of text, too few to hold some out; put more text files into it; 1 files were left out",
    ):
        read(tmp_path)
    with pytest.raises(DataError, match="data_dir='/dev/zero': no such folder or file"):
        read(Path("/dev/zero"))
    write(tmp_path, {"train.txt": b"\xff\xfe", "valid.txt": ""})
    with pytest.raises(DataError, match=r"train\.txt: is not UTF-8 text"):
        read(tmp_path)
    write(tmp_path, {"train.txt": "text"})
    with pytest.raises(DataError, match=r"valid\.txt: is empty"):
        read(tmp_path)

    def refuse(path: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(DataError, match=r"train\.txt: cannot be read \(Permission denied\)"):
        read(tmp_path)


# --- tokens and windows


def test_bytes_are_their_own_numbers() -> None:
    assert ByteTokens().encode("a\né".encode()).tolist() == [97, 10, 0xC3, 0xA9]


@needs_tokenizers
def test_pieces_have_one_token_more_between_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    from oktopk.workbench.train.data.wordpiece import SEP, SPECIAL, Pieces

    pieces = Pieces((*SPECIAL, "ship", "##s", "the"))
    tokens = PieceTokens(pieces, 8, pieces.number(SEP))
    found = tokens.encode(b"The ships\n\n  the whale\nship")
    words = [pieces.pieces[number] for number in found.tolist()]
    assert words == ["the", "ship", "##s", SEP, SEP, "the", "[UNK]", SEP, "ship"]
    monkeypatch.setattr(text_tokens, "_LINES_AT_ONCE", 3)
    assert torch.equal(tokens.encode(b"The ships\n\n  the whale\nship"), found)


def test_targets_are_the_tokens_that_follow() -> None:
    tokens, targets = windows(torch.arange(100, dtype=torch.uint8), [0, 40, 94], 5)
    assert tokens.tolist() == [[0, 1, 2, 3, 4], [40, 41, 42, 43, 44], [94, 95, 96, 97, 98]]
    assert torch.equal(targets, tokens + 1)
    assert tokens.dtype == targets.dtype == torch.int64


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 4, 5, 33])
def test_every_held_out_token_is_judged_once_after_the_one_before_it(n: int, size: int) -> None:
    seen: list[int] = []
    for rank in range(size):
        held_out = HeldOutWindows(torch.arange(1, n + 1), 0, length=4, rank=rank, size=size)
        for tokens, targets in held_out.batches(3):
            assert tokens.shape[0] <= 3
            assert tokens.shape[1] <= 4
            assert torch.equal(tokens, targets - 1)  # the first of all comes after number 0, the end of a line
            seen += targets.flatten().tolist()
    assert sorted(seen) == list(range(1, n + 1))


def places(seed: int = 1, rank: int = 0, num_places: int = 50) -> RandomPlaces:
    return RandomPlaces(num_places=num_places, batch_size=8, rank=rank, size=4, seed=seed)


def test_random_places_depend_on_seed_epoch_rank_and_index_alone() -> None:
    one = places()
    later = one.batch(2, 3)  # whatever was asked before
    one.batch(0, 0)
    assert one.batch(2, 3) == places().batch(2, 3) == later
    drawn = [
        places(seed, rank, 10**9).batch(epoch, index)
        for seed in range(2)
        for rank in range(4)
        for epoch in range(3)
        for index in range(3)
    ]
    assert len({place for batch in drawn for place in batch}) == 8 * len(drawn)


def test_random_places_are_all_of_them() -> None:
    assert {place for index in range(100) for place in places(num_places=7).batch(0, index)} == set(range(7))


@pytest.mark.parametrize(
    ("values", "words"), [({"num_places": 0}, "num_places=0"), ({"seed": -1}, "seed=-1"), ({"rank": 4}, "rank=4")]
)
def test_places_that_cannot_be_are_refused(values: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        places(**values)


# --- the workload


def tokens_of(task: Workload, epoch: int, first: int = 0) -> list[Any]:
    return [batch.tokens.tolist() for batch in task.batches(epoch, first)]


def test_batches_are_the_same_whenever_asked_and_begin_where_asked(tmp_path: Path) -> None:
    task = workload(tmp_path)
    found = tokens_of(task, 1)
    assert len(found) == task.num_batches > 6
    assert tokens_of(workload(tmp_path), 1, 4) == found[4:]
    assert [batch.index for batch in task.batches(1, 4)] == list(range(4, task.num_batches))
    assert tokens_of(task, 0) != found
    text = (tmp_path / "out" / "run" / "data" / "train.txt").read_bytes()
    for batch in task.batches(0, 0):
        for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
            assert bytes([*tokens, targets[-1]]) in text
            assert targets[:-1] == tokens[1:]


def test_workers_have_different_batches_and_the_same_number(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a.txt": "".join(f"{number} " for number in range(2000))})
    for size in (1, 3):
        tasks = workloads(tmp_path, size, data_dir=str(data))
        num_tokens = len(read(data).train)
        assert {task.num_batches for task in tasks} == {num_tokens // (2 * 16 * size)}
        drawn = [str(batch) for task in tasks for batch in tokens_of(task, 0)]
        assert len(drawn) == len(set(drawn))
        start = [p.detach() for p in tasks[0].model.parameters()]
        assert all(torch.equal(p, q) for task in tasks for p, q in zip(start, task.model.parameters(), strict=True))


def test_an_epoch_has_at_least_a_step_and_as_many_batches_as_asked(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"train.txt": "0123456789abcdefg", "valid.txt": "0"})  # one window
    assert workload(tmp_path, data_dir=str(data)).num_batches == 1
    task = workload(tmp_path, data_dir=str(data), nsteps_update=3)
    assert task.num_batches == len(list(task.batches(0, 0))) == 3
    assert workload(tmp_path, data_dir=str(data), batches_per_epoch=7).num_batches == 7
    write(data, {"train.txt": "0123456789abcdef"})
    with pytest.raises(DataError, match="16 training tokens are too few for a sample of sequence_length=16"):
        workload(tmp_path, data_dir=str(data))


def test_dropout_is_the_same_whenever_a_batch_is_asked_for(tmp_path: Path) -> None:
    task = workload(tmp_path, dropout=0.5)
    first, second = list(task.batches(0, 0))[:2]
    loss = task.loss(second)
    task.loss(first)
    assert float(task.loss(second).detach()) == float(loss.detach())
    loss.backward()
    assert [name for name, p in task.model.named_parameters() if p.grad is None] == []


def test_figures_are_those_of_the_whole_text_whatever_the_number_of_workers(tmp_path: Path) -> None:
    def found(comm: Communicator) -> dict[str, float | None]:
        task = build(tmp_path, comm)
        with torch.no_grad():
            task.model.embedding.weight.mul_(20.0)  # else all tokens are alike
        figures = task.validate()
        assert task.model.training
        return figures

    alone = simulate(1, found)[0]
    three = simulate(3, found)
    assert three[0] == three[1] == three[2]
    assert three[0] == pytest.approx(alone)
    assert set(alone) == {"loss", "perplexity", "bits_per_byte"}
    assert alone["loss"] > 6
    assert alone["perplexity"] == pytest.approx(math.exp(alone["loss"]))
    assert alone["bits_per_byte"] == pytest.approx(alone["loss"] / math.log(2))


def test_a_model_that_knows_nothing_needs_8_bits_for_a_byte(tmp_path: Path) -> None:
    task = workload(tmp_path)
    with torch.no_grad():
        task.model.embedding.weight.zero_()
    found = task.validate()
    assert found["bits_per_byte"] == pytest.approx(8.0)
    assert found["perplexity"] == pytest.approx(256.0)


@needs_tokenizers
def test_bits_per_byte_of_pieces_count_the_bytes_of_the_text(tmp_path: Path) -> None:
    from oktopk.workbench.train.data.wordpiece import Pieces

    (task,) = workloads(tmp_path, 1, tokens="wordpiece", vocabulary_size=200)
    with torch.no_grad():
        task.model.embedding.weight.zero_()
    found = task.validate()
    run = tmp_path / "out" / "run"
    pieces = Pieces.read(run / "vocabulary.txt")
    text = (run / "data" / "valid.txt").read_text()
    lines = text.split("\n")
    num_tokens = sum(len(line) for line in pieces.encode(lines)) + len(lines) - 1
    assert task.model.embedding.num_embeddings == 200
    assert found["loss"] == pytest.approx(math.log(200))
    assert found["bits_per_byte"] == pytest.approx(num_tokens * math.log2(200) / len(text.encode()))


@needs_tokenizers
def test_the_model_has_the_asked_size_where_the_text_has_fewer_pieces(tmp_path: Path) -> None:
    tasks = workloads(tmp_path, 2, tokens="wordpiece", vocabulary_size=5000)
    assert len((tmp_path / "out" / "run" / "vocabulary.txt").read_text().splitlines()) < 5000
    assert [task.model.embedding.num_embeddings for task in tasks] == [5000, 5000]
    assert tokens_of(tasks[0], 0) != tokens_of(tasks[1], 0)


@needs_tokenizers
def test_a_vocabulary_is_found_from_some_lines_of_a_large_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = write(tmp_path / "data", {"train.txt": "common words\nother things\n" * 40, "valid.txt": "words"})
    monkeypatch.setattr(gpt, "_VOCABULARY_BYTES", 600)  # less than the text has, more than half of it
    (task,) = workloads(tmp_path, 1, tokens="wordpiece", vocabulary_size=100, data_dir=str(data))
    pieces = (tmp_path / "out" / "run" / "vocabulary.txt").read_text().splitlines()
    assert "words" in pieces
    assert "things" not in pieces
    assert task.num_batches > 1


def test_files_that_are_no_text_are_remarked_by_the_first_worker(tmp_path: Path) -> None:
    data = write(tmp_path / "data", {"a.txt": "some text " * 50, "b/logo.png": b"\x89PNG\0"})
    said = [task.remarks() for task in workloads(tmp_path, 2, data_dir=str(data))]
    why = "a text file is UTF-8 without NUL and has at most 64 MiB"
    assert said == [[f"files left out: 1, the first b/logo.png; {why}"], []]


def test_bf16_is_computed_in_and_nothing_is_kept_in_it(tmp_path: Path) -> None:
    full, half = (workload(tmp_path, hidden_size=32, compute_dtype=dtype) for dtype in ("fp32", "bf16"))
    seen: list[torch.dtype] = []
    half.model.blocks[0].widen.register_forward_hook(lambda _module, _given, made: seen.append(made.dtype))
    batch = next(full.batches(0, 0))
    losses = [task.loss(batch) for task in (full, half)]
    assert seen == [torch.bfloat16]
    assert losses[0].dtype == losses[1].dtype == torch.float32
    assert not torch.equal(losses[0], losses[1])
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-2, atol=0.0)
    for loss in losses:
        loss.backward()
    for p, q in zip(full.model.parameters(), half.model.parameters(), strict=True):
        assert p.dtype == q.dtype == torch.float32
        assert p.grad is not None
        assert q.grad is not None
        assert q.grad.dtype == torch.float32
        assert float((p.grad - q.grad).norm()) < 0.1 * float(p.grad.norm())
    assert half.validate()["loss"] == pytest.approx(full.validate()["loss"], rel=1e-2)
    assert seen[-1] == torch.bfloat16


def test_workers_that_find_different_text_stop_together(tmp_path: Path) -> None:
    folders = [write(tmp_path / f"data{rank}", {"a.txt": f"some text {rank} " * 50}) for rank in range(2)]

    def refused(comm: Communicator) -> str:
        with pytest.raises(DataError) as caught:
            build(tmp_path, comm, data_dir=str(folders[comm.rank]))
        return str(caught.value)

    assert all("the workers found different files there" in message for message in simulate(2, refused))


def test_bad_settings_are_named() -> None:
    with pytest.raises(UsageError, match="hidden_size=10: must be a multiple of num_heads=4"):
        make_config({"task": "gpt", "hidden_size": 10, "num_heads": 4})
    with pytest.raises(UsageError, match=r"dropout=1\.0: must be below 1"):
        make_config({"task": "gpt", "dropout": 1.0})
    with pytest.raises(ConfigError, match="tokens='words': must be one of bytes, wordpiece"):
        make_config({"task": "gpt", "tokens": "words"})
    with pytest.raises(ConfigError, match="compute_dtype='fp16': must be one of fp32, bf16"):
        make_config({"task": "gpt", "compute_dtype": "fp16"})


def test_tokenizers_are_needed_for_pieces_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("data.wordpiece", "tasks.vocabulary"):
        monkeypatch.delitem(sys.modules, f"oktopk.workbench.train.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # as if it were not installed
    assert workload(tmp_path).num_batches > 1
    with pytest.raises(ConfigError, match=r"needs 'tokenizers', which is not installed; .*'oktopk\[bert\]'"):
        workload(tmp_path, tokens="wordpiece")
