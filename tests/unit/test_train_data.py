"""The data side of the trainer: audio, manifests, batches and the embedded corpus, on real files."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from oktopk.workbench.train.data import manifest
from oktopk.workbench.train.data.an4_like import PARAMETERS_FILE, generate, make_speakers, sentences, speak
from oktopk.workbench.train.data.audio import HOP, NUM_BINS, SAMPLE_RATE, WINDOW, augment, load_audio, log_spectrogram
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.manifest import (
    TRAIN_MANIFEST,
    VAL_MANIFEST,
    Utterance,
    find_utterances,
    read_manifest,
    scan,
    write_manifests,
)
from oktopk.workbench.train.data.sampler import BucketedBatches, shard

LAW = settings(derandomize=True, deadline=None, max_examples=60)
AN4 = Path(__file__).resolve().parents[3] / "shared/data/an4"
needs_an4 = pytest.mark.skipif(not AN4.is_dir(), reason=f"the real AN4 is not at {AN4}")
SMALL: dict[str, int] = {"num_train": 24, "num_test": 6, "seed": 3}
FORMATS = {"wav": "WAV", "flac": "FLAC", "sph": "NIST"}


def tone(num_samples: int = SAMPLE_RATE // 2) -> np.ndarray:
    return 0.3 * np.sin(2 * np.pi * 440 / SAMPLE_RATE * np.arange(num_samples))


def write_audio(path: Path, samples: np.ndarray | None = None, rate: int = SAMPLE_RATE) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = tone() if samples is None else samples
    soundfile.write(path, samples, rate, subtype="PCM_16", format=FORMATS[path.suffix[1:]])
    return path


def make_layout(folder: Path, *names: str, splits: tuple[str, ...] = ("train", "test")) -> Path:
    for split in splits:
        (folder / split / "an4/txt").mkdir(parents=True)
        for name in names:
            audio = write_audio(folder / split / "an4/wav" / name)
            (folder / split / "an4/txt" / f"{audio.stem}.txt").write_text("YES\n")
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora") / "small"
    generate(folder, **SMALL)
    return folder


# Audio


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_is_read_as_float_samples(tmp_path: Path, suffix: str) -> None:
    wave = load_audio(write_audio(tmp_path / f"a.{suffix}"))
    assert wave.dtype == torch.float32
    assert wave.shape == (SAMPLE_RATE // 2,)
    np.testing.assert_allclose(wave.numpy(), tone(), atol=1e-4)


def test_channels_are_mixed(tmp_path: Path) -> None:
    stereo = np.stack([tone(), -0.5 * tone()], axis=1)
    wave = load_audio(write_audio(tmp_path / "a.wav", stereo))
    np.testing.assert_allclose(wave.numpy(), 0.25 * tone(), atol=1e-4)


@pytest.mark.parametrize("suffix", FORMATS)
def test_audio_that_is_no_use_is_named(tmp_path: Path, suffix: str) -> None:
    missing, corrupt, slow, short, folder, empty = (
        tmp_path / f"{name}.{suffix}" for name in ("missing", "corrupt", "slow", "short", "folder", "empty")
    )
    corrupt.write_bytes(bytes(range(256)) * 8)
    empty.touch()
    folder.mkdir()
    write_audio(slow, rate=8000)
    write_audio(short, tone(WINDOW - 1))
    for path, why in (
        (missing, "no such audio file"),
        (folder, "no such audio file"),
        (corrupt, "cannot be read"),
        (empty, "cannot be read"),
        (slow, "8000 Hz, must be 16000 Hz"),
        (short, "319 samples"),
    ):
        with pytest.raises(DataError, match=f"^{re.escape(str(path))}: .*{why}"):
            load_audio(path)


def test_a_cut_off_flac_is_no_audio(tmp_path: Path) -> None:
    path = write_audio(tmp_path / "a.flac", np.random.default_rng(0).uniform(-0.5, 0.5, SAMPLE_RATE))
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(DataError, match=r"a\.flac: cannot be read"):
        load_audio(path)


def test_nonfinite_samples_are_no_audio(tmp_path: Path) -> None:
    path = tmp_path / "a.wav"
    soundfile.write(path, np.full(SAMPLE_RATE, np.nan), SAMPLE_RATE, subtype="FLOAT")
    with pytest.raises(DataError, match="NaN or Inf"):
        load_audio(path)


@pytest.mark.parametrize("num_samples", [WINDOW, WINDOW + 1, 5 * HOP - 1, 5 * HOP, 16000])
def test_spectrogram_is_normalised(num_samples: int) -> None:
    features = log_spectrogram(torch.randn(num_samples, generator=torch.Generator().manual_seed(0)))
    assert features.shape == (NUM_BINS, 1 + num_samples // HOP)
    assert features.dtype == torch.float32
    assert abs(features.mean().item()) < 1e-4
    assert abs(features.std().item() - 1) < 1e-4


def test_spectrogram_shows_a_tone_in_its_bin() -> None:
    features = log_spectrogram(torch.from_numpy(tone()).float())
    assert features[:, 1:-1].argmax(dim=0).unique().tolist() == [round(440 * WINDOW / SAMPLE_RATE)]


@pytest.mark.parametrize("level", [0.0, 1.0, 1e-9])
def test_spectrogram_of_silence_is_finite(level: float) -> None:
    assert log_spectrogram(torch.full((SAMPLE_RATE,), level)).isfinite().all()
    assert log_spectrogram(torch.zeros(WINDOW)).eq(0).all()


@LAW
@given(seed=st.integers(0, 2**32), num_samples=st.integers(WINDOW, 4000))
def test_augmenting_is_the_generators_doing(seed: int, num_samples: int) -> None:
    wave = torch.from_numpy(tone(num_samples)).float()
    before = wave.clone()
    torch_state = torch.get_rng_state()
    first, again = (augment(wave, torch.Generator().manual_seed(seed)) for _ in range(2))
    assert torch.equal(first, again)
    assert torch.equal(wave, before)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert first.shape == wave.shape
    assert first.dtype == wave.dtype
    loudness = (first[HOP:-HOP].std() / wave.std()).item() if num_samples > 4 * HOP else 1.0
    assert 0.4 < loudness < 2.5


def test_augmenting_varies_and_leaves_silence_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    wave = torch.from_numpy(tone()).float()
    assert not torch.equal(augment(wave, generator), augment(wave, generator))
    assert augment(torch.zeros(WINDOW), generator).eq(0).all()


# Manifests


def test_scan_is_sorted_by_id_whatever_the_format(tmp_path: Path) -> None:
    make_layout(tmp_path, "c.wav", "a.sph", "b.flac")
    (tmp_path / "train/an4/wav/._a.wav").touch()
    (tmp_path / "train/an4/wav/readme.md").touch()
    found = scan(tmp_path, "train")
    assert [item.audio.name for item in found] == ["a.sph", "b.flac", "c.wav"]
    assert [item.text.name for item in found] == ["a.txt", "b.txt", "c.txt"]


def test_scan_names_what_has_no_partner(tmp_path: Path) -> None:
    make_layout(tmp_path, *(f"u{number}.wav" for number in range(7)))
    for number in range(5):
        (tmp_path / f"train/an4/txt/u{number}.txt").unlink()
    (tmp_path / "test/an4/wav/u6.wav").unlink()
    with pytest.raises(DataError, match=r"u0, u1, u2, \.\.\. \(5 in all\) without a text"):
        scan(tmp_path, "train")
    with pytest.raises(DataError, match=r"u6 \(1 in all\) without audio"):
        scan(tmp_path, "test")


def test_scan_refuses_two_files_for_one_id(tmp_path: Path) -> None:
    make_layout(tmp_path, "a.wav")
    write_audio(tmp_path / "train/an4/wav/a.flac")
    with pytest.raises(DataError, match=r"both a\.flac and a\.wav"):
        scan(tmp_path, "train")


def test_scan_says_what_it_looked_for(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=re.escape(str(tmp_path / "test/an4/wav"))):
        scan(tmp_path, "test")
    make_layout(tmp_path)
    (tmp_path / "train/an4/wav").mkdir()
    with pytest.raises(DataError, match="holds no audio"):
        scan(tmp_path, "train")


@pytest.mark.parametrize("name", ["data", "data, with comma", 'a "quoted" näme'])
def test_manifests_survive_a_move(tmp_path: Path, name: str) -> None:
    folder = make_layout(tmp_path / name, "a.wav", "b.flac")
    assert write_manifests(folder) == (folder / TRAIN_MANIFEST, folder / VAL_MANIFEST)
    assert read_manifest(folder / TRAIN_MANIFEST) == scan(folder, "train")
    assert read_manifest(folder / VAL_MANIFEST) == scan(folder, "test")
    moved = tmp_path / "elsewhere" / "deeper"
    shutil.move(folder, moved)
    assert find_utterances(moved, "train") == scan(moved, "train")
    assert find_utterances(moved, "test") == scan(moved, "test")
    assert (moved / TRAIN_MANIFEST).read_text().splitlines()[0] == "train/an4/wav/a.wav,train/an4/txt/a.txt"


def test_manifests_in_another_folder_point_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_layout(tmp_path / "data", "a.wav")
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "deep/er")
    monkeypatch.chdir(tmp_path)
    for out in (tmp_path / "new/folder", Path("relative"), Path("link")):
        train, val = write_manifests(Path("data"), out)
        assert (train.parent, val.parent) == (out, out)
        for path, split in ((train, "train"), (val, "test")):
            (item,) = read_manifest(path)
            assert item.audio.samefile(tmp_path / "data" / split / "an4/wav/a.wav")
            assert item.text.samefile(tmp_path / "data" / split / "an4/txt/a.txt")
            assert path.read_text().startswith("../")


def test_absolute_paths_are_read_as_they_are(tmp_path: Path) -> None:
    (item,) = scan(make_layout(tmp_path / "data", "a.wav"), "train")
    path = tmp_path / "other.csv"
    path.write_text(f"\ufeff{item.audio},{item.text}\r\n\r\n", encoding="utf-8")
    assert read_manifest(path) == [Utterance(item.audio, item.text)]


def test_manifests_are_whole_or_not_there(tmp_path: Path) -> None:
    folder = make_layout(tmp_path / "data", "a.wav")
    a_file = tmp_path / "file"
    a_file.touch()
    for out in (a_file, a_file / "below"):
        with pytest.raises(DataError, match=f"{re.escape(str(out / TRAIN_MANIFEST))}: cannot be written"):
            write_manifests(folder, out)
    (tmp_path / "out" / TRAIN_MANIFEST).mkdir(parents=True)
    with pytest.raises(DataError, match="cannot be written"):
        write_manifests(folder, tmp_path / "out")
    assert [path.name for path in (tmp_path / "out").iterdir()] == [TRAIN_MANIFEST]
    (folder / "test/an4/txt/a.txt").unlink()
    with pytest.raises(DataError, match="without a text"):
        write_manifests(folder)
    assert not (folder / TRAIN_MANIFEST).exists()


def test_a_failing_write_leaves_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_layout(tmp_path, "a.wav")
    train, _ = write_manifests(folder)
    before = contents(folder)

    def full(*_: Any) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(manifest.os.path, "relpath", full)
    with pytest.raises(DataError, match=f"{re.escape(str(train))}: cannot be written .No space left"):
        write_manifests(folder)
    assert contents(folder) == before


@pytest.mark.parametrize("line", ["only one", "a,b,c", ",b", "a,", "a, ", '"a,b'])
def test_a_malformed_line_is_numbered(tmp_path: Path, line: str) -> None:
    make_layout(tmp_path, "a.wav")
    path, _ = write_manifests(tmp_path)
    path.write_text(f"{path.read_text()}{line}\n")
    expected = "cannot be read as a manifest" if '"' in line else "line 2: expected 'audio path,text path'"
    with pytest.raises(DataError, match=f"{re.escape(str(path))}.*{expected}"):
        read_manifest(path)


def test_missing_files_are_named_and_counted(tmp_path: Path) -> None:
    make_layout(tmp_path, *(f"u{number}.wav" for number in range(6)))
    path, _ = write_manifests(tmp_path)
    shutil.rmtree(tmp_path / "train/an4/wav")
    with pytest.raises(DataError, match=r"u0\.wav, .*u1\.wav, .*u2\.wav, \.\.\. \(6 in all\)") as caught:
        read_manifest(path)
    assert "u3.wav" not in str(caught.value)
    assert f"`oktopk manifest {tmp_path}`" in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"\n\n", b"\xff\xfe\x00a,b\n", None])
def test_a_manifest_without_lines_is_no_manifest(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "a.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=f"{re.escape(str(path))}: (lists no utterance|cannot be read)"):
        read_manifest(path)


def test_the_manifest_comes_before_the_layout(tmp_path: Path) -> None:
    make_layout(tmp_path, "a.wav", "b.wav")
    assert len(find_utterances(tmp_path, "train")) == 2
    train, val = write_manifests(tmp_path)
    for path in (train, val):
        path.write_text(path.read_text().splitlines()[1])
    assert [item.audio.stem for item in find_utterances(tmp_path, "train")] == ["b"]
    assert [item.audio.stem for item in find_utterances(tmp_path, "test")] == ["b"]
    train.unlink()
    assert len(find_utterances(tmp_path, "train")) == 2


def test_no_data_folder_says_how_to_get_one(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere"
    with pytest.raises(DataError, match=re.escape(f"`oktopk data an4-like {folder}`")):
        find_utterances(folder, "train")


@needs_an4
def test_the_real_an4(tmp_path: Path) -> None:
    train, val = write_manifests(AN4, tmp_path)
    for path, split, count in ((train, "train", 948), (val, "test", 130)):
        found, listed = scan(AN4, split), read_manifest(path)
        assert len(found) == len(listed) == count
        assert [item.audio.resolve() for item in listed] == [item.audio.resolve() for item in found]
    absolute = tmp_path / "absolute.csv"
    absolute.write_text("".join(f"{item.audio},{item.text}\n" for item in scan(AN4, "test")))
    assert read_manifest(absolute) == scan(AN4, "test")
    features = log_spectrogram(load_audio(found[0].audio))
    assert features.isfinite().all()


# Batches

durations_s = st.lists(st.floats(0.0, 20.0), min_size=1, max_size=80)
at_most_6 = st.integers(1, 6)


def all_ranks(durations: list[float], batch_size: int, size: int, seed: int, epoch: int) -> list[list[list[int]]]:
    """One list of batches per rank."""
    return [
        BucketedBatches(durations=durations, batch_size=batch_size, rank=rank, size=size, seed=seed).batches(epoch)
        for rank in range(size)
    ]


@LAW
@given(durations=durations_s, batch_size=at_most_6, size=at_most_6, seed=st.integers(0, 99), epoch=st.integers(0, 99))
def test_every_epoch_is_full_and_complete(
    durations: list[float], batch_size: int, size: int, seed: int, epoch: int
) -> None:
    ranks = all_ranks(durations, batch_size, size, seed, epoch)
    num_batches = -(-len(durations) // (batch_size * size))
    assert [len(batches) for batches in ranks] == [num_batches] * size
    assert {len(batch) for batches in ranks for batch in batches} == {batch_size}
    counts = Counter(index for batches in ranks for batch in batches for index in batch)
    assert counts.keys() == set(range(len(durations)))
    assert max(counts.values()) - min(counts.values()) <= 1
    sampler = BucketedBatches(durations=durations, batch_size=batch_size, rank=0, size=size, seed=seed)
    assert sampler.num_batches == num_batches


@LAW
@given(durations=durations_s, batch_size=at_most_6, size=at_most_6, seed=st.integers(0, 99), epoch=st.integers(0, 99))
def test_what_all_ranks_read_together_is_of_similar_duration(
    durations: list[float], batch_size: int, size: int, seed: int, epoch: int
) -> None:
    ranks = all_ranks(durations, batch_size, size, seed, epoch)
    groups = [[durations[index] for batch in together for index in batch] for together in zip(*ranks, strict=True)]
    for one, other in combinations(groups, 2):
        assert any(0.95 * max(shorter) <= 1.05 * min(longer) + 1e-9 for shorter, longer in ((one, other), (other, one)))


@LAW
@given(seed=st.integers(0, 2**63), epoch=st.integers(0, 2**31))
def test_an_epoch_depends_on_seed_and_epoch_alone(seed: int, epoch: int) -> None:
    durations = [1.0 + number / 40 for number in range(40)]
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    first = all_ranks(durations, 4, 2, seed, epoch)
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())
    random.random(), np.random.random(), torch.rand(1)
    assert first == all_ranks(durations, 4, 2, seed, epoch)
    assert first != all_ranks(durations, 4, 2, seed, epoch + 1)
    assert first != all_ranks(durations, 4, 2, seed + 1, epoch)


def test_batches_differ_between_epochs_not_only_in_order() -> None:
    durations = np.random.default_rng(0).uniform(1, 6, 200).tolist()
    sampler = BucketedBatches(durations=durations, batch_size=8, rank=0, size=2, seed=0)
    first, second = ({frozenset(batch) for batch in sampler.batches(epoch)} for epoch in (0, 1))
    assert len(first & second) < len(first) / 2
    means = [np.mean([durations[index] for index in batch]) for batch in sampler.batches(0)]
    assert means != sorted(means)
    assert all(type(index) is int for index in sampler.batches(0)[0])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("durations", bad) for bad in ([], [1.0, float("nan")], [-1.0], [float("inf")])),
        *(("batch_size", 0), ("batch_size", -1), ("size", 0), ("size", -2), ("rank", -1), ("rank", 2), ("seed", -1)),
    ],
)
def test_a_bad_setting_is_named(key: str, value: Any) -> None:
    good: dict[str, Any] = {"durations": [1.0], "batch_size": 1, "rank": 0, "size": 2, "seed": 0}
    with pytest.raises(ValueError, match=key):
        BucketedBatches(**{**good, key: value})


def test_a_bad_epoch_or_shard_is_named() -> None:
    with pytest.raises(ValueError, match="epoch=-1"):
        BucketedBatches(durations=[1.0], batch_size=1, rank=0, size=1, seed=0).batches(-1)
    for n, rank, size, key in ((-1, 0, 1, "n=-1"), (1, 1, 1, "rank=1"), (1, -1, 1, "rank=-1"), (1, 0, 0, "size=0")):
        with pytest.raises(ValueError, match=key):
            shard(n, rank, size)


@LAW
@given(n=st.integers(0, 200), size=st.integers(1, 12))
def test_shards_are_a_partition(n: int, size: int) -> None:
    shards = [shard(n, rank, size) for rank in range(size)]
    assert sorted(index for part in shards for index in part) == list(range(n))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


# The embedded corpus


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, corpus: Path) -> None:
    random_state = np.random.get_state()[1].tolist()
    generate(tmp_path, **SMALL)
    assert np.random.get_state()[1].tolist() == random_state
    assert contents(tmp_path) == contents(corpus)
    generate(tmp_path / "other", **{**SMALL, "seed": 4})
    wavs = {key: value for key, value in contents(tmp_path / "other").items() if key.endswith(".wav")}
    assert not set(wavs.values()) & set(contents(corpus).values())


def test_the_corpus_has_an4s_layout(corpus: Path) -> None:
    for split, count in (("train", SMALL["num_train"]), ("test", SMALL["num_test"])):
        found = find_utterances(corpus, split)
        assert found == scan(corpus, split)
        assert len(found) == count
        for item in found:
            info = soundfile.info(item.audio)
            assert (info.samplerate, info.channels, info.subtype) == (SAMPLE_RATE, 1, "PCM_16")
            wave = load_audio(item.audio)
            assert 0.49 < wave.abs().max().item() <= 0.5
            assert log_spectrogram(wave).isfinite().all()
    assert (corpus / TRAIN_MANIFEST).is_file()
    assert (corpus / VAL_MANIFEST).is_file()


def test_the_default_corpus_is_what_it_says(tmp_path: Path) -> None:
    generate(tmp_path / "default")
    texts: dict[str, list[str]] = {}
    for split, count in (("train", 480), ("test", 64)):
        found = find_utterances(tmp_path / "default", split)
        lengths_s = [soundfile.info(item.audio).duration for item in found]
        assert len(found) == count
        assert min(lengths_s) >= 0.6
        assert max(lengths_s) < 2.7
        assert 1.1 < np.mean(lengths_s) < 1.5
        texts[split] = [item.text.read_text() for item in found]
        assert all(re.fullmatch(r"[A-Z']+( [A-Z']+)*\n", text) for text in texts[split])
    assert len(set(texts["train"])) > 400
    assert set("".join(texts["train"])) >= set("ABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    assert not {text for text in texts["test"] if " " in text} & set(texts["train"])


def test_generating_again_does_nothing(tmp_path: Path, corpus: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(corpus, copy)
    before = {path: path.stat().st_mtime_ns for path in copy.rglob("*")}
    generate(copy, **SMALL)
    assert {path: path.stat().st_mtime_ns for path in copy.rglob("*")} == before


@pytest.mark.parametrize("what", ["foreign", "incomplete", "other", "garbled", "file"])
def test_a_folder_with_something_else_is_left_alone(tmp_path: Path, corpus: Path, what: str) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(corpus, folder)
    marker = folder / PARAMETERS_FILE
    if what == "incomplete":
        marker.unlink()
    elif what == "other":
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "seed": 77}))
    elif what == "garbled":
        marker.write_text("{")
    else:
        shutil.rmtree(folder)
        if what == "file":
            folder.touch()
        else:
            folder.mkdir()
            (folder / "thesis.tex").touch()
    before = contents(tmp_path)
    with pytest.raises(DataError, match=f"{re.escape(str(folder))}.*name a(nother)? folder"):
        generate(folder, **SMALL)
    assert contents(tmp_path) == before


def test_a_corpus_that_cannot_be_written_is_the_folders_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="cannot be written"):
        generate(tmp_path / "file" / "below", **SMALL)


@pytest.mark.parametrize(("key", "value"), [("num_train", 0), ("num_test", 0), ("seed", -1)])
def test_a_bad_parameter_is_named(tmp_path: Path, key: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{key}={value}"):
        generate(tmp_path, **{**SMALL, key: value})
    assert not any(tmp_path.iterdir())


def test_every_character_can_be_spoken_and_a_repeated_one_dips() -> None:
    generator = np.random.default_rng(0)
    for speaker in make_speakers(generator, 3):
        letters = sorted(speaker.loops.keys() - {" "})
        assert "".join(letters) == "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
        for letter in letters:
            double = speak(letter * 2, speaker, generator)
            level = np.sqrt(np.convolve(np.square(double), np.ones(80) / 80, mode="same"))
            loud = np.flatnonzero(level > 0.5 * level.max())
            middle = level[(loud[0] + loud[-1]) // 2 - 320 : (loud[0] + loud[-1]) // 2 + 320]
            assert middle.min() < 0.2 * level.max(), letter


def test_characters_sound_alike_only_to_themselves() -> None:
    """A letter of an unheard speaker is nearest to the same letter of one of the others."""
    generator = np.random.default_rng(1)

    def heard(letter: str, speaker: Any) -> np.ndarray:
        spectrum = np.abs(np.fft.rfft(speak(letter, speaker, generator)))
        bands = np.log(np.square(spectrum[: len(spectrum) // 48 * 48]).reshape(48, -1).mean(axis=1))
        return bands - bands.mean()

    train, test = make_speakers(generator, 8), make_speakers(generator, 3)
    letters = sorted(train[0].loops.keys() - {" "})
    templates = [(letter, heard(letter, speaker)) for letter in letters for speaker in train]
    right = 0
    for letter in letters:
        for speaker in test:
            sound = heard(letter, speaker)
            right += letter == min(templates, key=lambda item: float(np.square(item[1] - sound).sum()))[0]
    assert right >= 0.8 * len(letters) * len(test)


def test_sentences_are_new_to_those_who_know_others() -> None:
    known = sentences(np.random.default_rng(0), 300)
    fresh = sentences(np.random.default_rng(0), 100, known)
    assert not {text for text in fresh if " " in text} & set(known)
    assert all(len(text) <= 35 for text in known)
