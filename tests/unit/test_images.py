"""The image side of the trainer: data on real files, models by their known sizes, batches by their laws."""

from __future__ import annotations

import gzip
import os
import pickle
import re
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from oktopk.workbench.train.config import ConfigError, load_config
from oktopk.workbench.train.data import image_folder
from oktopk.workbench.train.data.cifar import read_cifar10, write_binary
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated_images import PARAMETERS_FILE, SHAPES, generate, paint
from oktopk.workbench.train.data.idx import read_idx, read_mnist, write_idx
from oktopk.workbench.train.data.image_folder import ImageFolder, find_classes, middle_box, random_box, read_image
from oktopk.workbench.train.data.images import ImageArrays, Shift, chance, shifted
from oktopk.workbench.train.data.sampler import ShuffledBatches
from oktopk.workbench.train.models.alexnet import AlexNet
from oktopk.workbench.train.models.lenet import LeNet
from oktopk.workbench.train.models.resnet import ResNet50, SmallResNet
from oktopk.workbench.train.models.vgg import Vgg
from oktopk.workbench.train.task_settings import TASKS

LAW = settings(derandomize=True, deadline=None, max_examples=60)
CIFAR10 = Path(os.environ.get("OKTOPK_CIFAR10") or Path(__file__).resolve().parents[3] / "shared/data/cifar10")
needs_cifar10 = pytest.mark.skipif(not CIFAR10.is_dir(), reason=f"the real CIFAR-10 is not at {CIFAR10}")
SMALL: dict[str, int] = {"num_train": 23, "num_test": 11, "seed": 3}


def random_pixels(n: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), dtype=np.uint8)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def refused(path: Path, why: str, read: Callable[[], object]) -> None:
    with pytest.raises(DataError) as caught:
        read()
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert re.search(why, said), said
    assert "\n" not in said


# Models


@pytest.mark.parametrize(
    ("make", "count", "image"),
    [
        (lambda: Vgg(16), 14_724_042, (3, 32, 32)),
        (lambda: Vgg(19), 20_035_018, (3, 32, 32)),
        (lambda: SmallResNet(20), 269_722, (3, 32, 32)),
        (lambda: SmallResNet(56), 853_018, (3, 32, 32)),
        (lambda: SmallResNet(110), 1_727_962, (3, 32, 32)),
        (lambda: ResNet50(), 25_557_032, (3, 64, 64)),
        (lambda: AlexNet(), 61_100_840, (3, 224, 224)),
        (lambda: LeNet(), 61_706, (1, 28, 28)),
    ],
    ids=["vgg16", "vgg19", "resnet20", "resnet56", "resnet110", "resnet50", "alexnet", "lenet"],
)
def test_models_have_their_published_sizes(make: Callable[[], nn.Module], count: int, image: tuple[int, ...]) -> None:
    model = make()
    assert sum(parameter.numel() for parameter in model.parameters()) == count
    assert model.eval()(torch.zeros(2, *image)).shape == (2, 1000 if count > 2.1e7 else 10)


@pytest.mark.parametrize("size", [63, 64, 100])
def test_other_image_sizes_and_widths_work(size: int) -> None:
    for model in (AlexNet(7, channels=2), ResNet50(7, channels=3)):
        assert model(torch.randn(2, 3, size, size)).shape == (2, 7)


def test_a_shortcut_without_parameters_keeps_every_channel() -> None:
    with pytest.raises(ValueError, match=r"depth=21: must be 6n \+ 2"):
        SmallResNet(21)
    block = SmallResNet(20, channels=4).features[6]
    assert [p.shape for p in block.parameters() if p.dim() == 4] == [(8, 4, 3, 3), (8, 8, 3, 3)]
    nn.init.zeros_(block.body[4].weight)
    image = torch.rand(1, 4, 6, 6)
    out = block.eval()(image)
    assert torch.equal(out[:, 2:6], image[:, :, ::2, ::2])
    assert out[:, :2].eq(0).all()
    assert out[:, 6:].eq(0).all()


@pytest.mark.parametrize("task", [name for name, info in TASKS.items() if info.module.endswith(".images")])
def test_every_task_has_a_preset_with_its_published_channels(task: str) -> None:
    config = load_config(task, {})
    assert config.task == task
    assert (config.norm_clip, config.lr_schedule, config.density) == (0.0, "steps", 0.02)
    assert config.task_settings.channels == {"lenet": 6}.get(task, 16 if re.search("20|56|110", task) else 64)


def test_settings_that_a_task_has_not_are_refused() -> None:
    with pytest.raises(ConfigError, match="image_size=64; it belongs to resnet50, alexnet"):
        load_config("vgg16", {"image_size": 64})
    with pytest.raises(ConfigError, match="image_size=32: must be at least 64"):
        load_config("alexnet", {"image_size": 32})


# Batches


@LAW
@given(
    num_samples=st.integers(1, 200), batch_size=st.integers(1, 17), size=st.integers(1, 7), epoch=st.integers(0, 99),
    seed=st.integers(0, 2**32),
)  # fmt: skip
def test_every_sample_as_often_as_the_others_or_once_more(
    num_samples: int, batch_size: int, size: int, epoch: int, seed: int
) -> None:
    ranks = [
        ShuffledBatches(num_samples=num_samples, batch_size=batch_size, rank=rank, size=size, seed=seed)
        for rank in range(size)
    ]
    dealt = [sampler.batches(epoch) for sampler in ranks]
    assert {len(batches) for batches in dealt} == {sampler.num_batches for sampler in ranks}
    assert {len(batch) for batches in dealt for batch in batches} == {batch_size}
    counts = Counter(index for batches in dealt for batch in batches for index in batch)
    assert counts.keys() == set(range(num_samples))
    assert max(counts.values()) - min(counts.values()) <= 1
    assert sum(counts.values()) < num_samples + batch_size * size
    assert dealt == [sampler.batches(epoch) for sampler in ranks]


def test_epochs_and_seeds_shuffle_differently() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        return ShuffledBatches(num_samples=50, batch_size=5, rank=0, size=1, seed=seed).batches(epoch)

    assert len({str(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"num_samples": 0}, "num_samples=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"rank": 2}, "rank=2"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_batches_that_make_no_sense_are_refused(changed: dict[str, int], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        ShuffledBatches(**{"num_samples": 9, "batch_size": 2, "rank": 0, "size": 2, "seed": 1, **changed})


# Augmentation


@LAW
@given(seed=st.integers(0, 2**32), epoch=st.integers(0, 200), indices=st.lists(st.integers(0, 5), min_size=1))
def test_an_image_varies_by_seed_epoch_and_index_alone(seed: int, epoch: int, indices: list[int]) -> None:
    pixels, labels = random_pixels(6, 3, 8, 8), np.arange(6)
    data = ImageArrays(pixels, labels, 6, Shift(pad=2, flip=True), seed)
    batch, classes = data.batch(indices, epoch)
    assert classes.tolist() == indices
    assert batch.shape == (len(indices), 3, 8, 8)
    for image, index in zip(batch, indices, strict=True):
        assert np.array_equal(image, data.batch([index], epoch)[0][0])
    assert np.array_equal(data.batch(indices, None)[0], pixels[indices])


@LAW
@given(seed=st.integers(0, 10**6), pad=st.integers(0, 4), flip=st.booleans())
def test_a_shifted_image_is_a_window_of_the_padded_one(seed: int, pad: int, flip: bool) -> None:
    image = random_pixels(2, 6, 5, seed=seed)
    moved = shifted(image, Shift(pad, flip), np.random.default_rng(seed))
    padded = np.pad(image, ((0, 0), (pad, pad), (pad, pad)))
    windows = [padded[:, y : y + 6, x : x + 5] for y in range(2 * pad + 1) for x in range(2 * pad + 1)]
    if flip:
        windows += [window[:, :, ::-1] for window in windows]
    assert any(np.array_equal(moved, window) for window in windows)


@LAW
@given(width=st.integers(1, 600), height=st.integers(1, 600), seed=st.integers(0, 10**6))
def test_boxes_lie_inside(width: int, height: int, seed: int) -> None:
    for box in (random_box(width, height, chance(seed, 0, 0)), middle_box(width, height)):
        left, top, right, bottom = box
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height


# CIFAR-10


def write_batches(folder: Path, *, binary: bool, n: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """Returns the images of all training files."""
    folder.mkdir(parents=True, exist_ok=True)
    pixels, labels = random_pixels(6 * n, 3, 32, 32), np.arange(6 * n) % 10
    for part, name in enumerate([*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]):
        some = slice(part * n, (part + 1) * n)
        if binary:
            write_binary(folder / f"{name}.bin", pixels[some], labels[some])
        else:
            batch = {b"data": pixels[some].reshape(n, 3072), b"labels": labels[some].tolist()}
            (folder / name).write_bytes(pickle.dumps(batch, protocol=4))
    return pixels[: 5 * n], labels[: 5 * n]


@pytest.mark.parametrize("below", ["", "cifar-10-batches-py", "cifar-10-batches-bin"])
@pytest.mark.parametrize("binary", [True, False])
def test_both_versions_are_read_wherever_the_archive_put_them(tmp_path: Path, binary: bool, below: str) -> None:
    expected = write_batches(tmp_path / below, binary=binary)
    for found, wanted in zip(read_cifar10(tmp_path, "train"), expected, strict=True):
        assert np.array_equal(found, wanted)
    assert len(read_cifar10(tmp_path, "test")[1]) == 4


@needs_cifar10
def test_the_real_cifar10_is_what_it_is_known_to_be() -> None:
    pixels, labels = read_cifar10(CIFAR10, "train")
    assert pixels.shape[1:] == (3, 32, 32)
    assert len(pixels) == len(labels) >= 3000
    assert labels[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    np.testing.assert_allclose(pixels.mean(axis=(0, 2, 3)) / 255, (0.4914, 0.4822, 0.4465), atol=0.01)
    with (CIFAR10 / "cifar-10-batches-py" / "test_batch").open("rb") as file:
        trusted = pickle.load(file, encoding="bytes")
    pixels, labels = read_cifar10(CIFAR10, "test")
    assert np.array_equal(pixels.reshape(len(pixels), -1), trusted[b"data"])
    assert labels.tolist() == trusted[b"labels"]


class Runs:
    """Pickles as a call."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self._call


@pytest.mark.parametrize("protocol", range(5))
def test_a_malicious_pickle_does_not_run(tmp_path: Path, protocol: int) -> None:
    write_batches(tmp_path, binary=False)
    sign, victim = tmp_path / "ran", tmp_path / "data_batch_3"
    attacks = [Runs(os.system, f"touch {sign}"), Runs(eval, f"open({str(sign)!r}, 'w')"), Runs(getattr, "", "join")]
    for attack in attacks:
        for content in (attack, {b"data": attack, b"labels": [0]}, [attack]):
            victim.write_bytes(pickle.dumps(content, protocol=protocol))
            refused(
                victim,
                r"wants to run \w+\.\w+, which no batch .* do not trust it",
                lambda: read_cifar10(tmp_path, "train"),
            )
    assert not sign.exists()
    assert pickle.loads(pickle.dumps(attacks[0], protocol=protocol)) == 0, "without our guard it would have run"
    assert sign.exists()


def test_not_even_numpy_runs(tmp_path: Path) -> None:
    """A huge array that numpy would allocate, and a state that only numpy should see."""
    write_batches(tmp_path, binary=False)
    victim = tmp_path / "test_batch"
    for content in (Runs(np.ndarray, (2**40,)), Runs(np.dtype, "O"), np.zeros((1, 3072), dtype=np.float64)):
        victim.write_bytes(pickle.dumps({b"data": content, b"labels": [0]}, protocol=4))
        refused(victim, "must be a dict with `data`, n x 3072 bytes", lambda: read_cifar10(tmp_path, "test"))


def images(n: int, columns: int = 3072) -> np.ndarray:
    return np.zeros((n, columns), dtype=np.uint8)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "is no pickled batch"),
        (b"\x80\x02no pickle at all", "is no pickled batch"),
        (pickle.dumps({b"data": images(2), b"labels": [1, 2]}, protocol=4)[:-4000], "is no pickled batch"),
        (pickle.dumps([1, 2, 3]), "must be a dict"),
        (pickle.dumps({b"data": images(2), b"labels": [1]}, protocol=4), "has 2 images and 1 labels"),
        (pickle.dumps({b"data": images(2, 3071), b"labels": [1, 2]}, protocol=4), "n x 3072 bytes"),
        (pickle.dumps({b"data": images(2), b"labels": [1, "2"]}, protocol=4), "n integers"),
        (pickle.dumps({b"data": images(2), b"labels": [1, 10]}, protocol=4), "image 1 is of class 10"),
        (pickle.dumps({b"data": images(0), b"labels": []}, protocol=4), "holds no image"),
    ],
)
def test_damaged_python_batches_are_named(tmp_path: Path, content: bytes, why: str) -> None:
    write_batches(tmp_path, binary=False)
    (tmp_path / "data_batch_2").write_bytes(content)
    refused(tmp_path / "data_batch_2", f"{why}.* again", lambda: read_cifar10(tmp_path, "train"))


@LAW
@given(place=st.integers(0, 10**6), byte=st.integers(0, 255))
def test_any_flipped_byte_is_an_image_or_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, place: int, byte: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    write_batches(folder, binary=False, n=1)
    victim = folder / "test_batch"
    content = bytearray(victim.read_bytes())
    frame = [*range(400), *range(len(content) - 60, len(content))]  # the rest is pixels
    content[frame[place % len(frame)]] = byte
    victim.write_bytes(content)
    try:
        pixels, labels = read_cifar10(folder, "test")
    except DataError:
        return
    assert pixels.shape == (len(labels), 3, 32, 32)


def test_damaged_or_missing_binary_batches_are_named(tmp_path: Path) -> None:
    refused(
        tmp_path,
        "holds no CIFAR-10: looked for data_batch_1 .* leave data_dir empty",
        lambda: read_cifar10(tmp_path, "train"),
    )
    write_batches(tmp_path, binary=True)
    victim = tmp_path / "data_batch_4.bin"
    whole = victim.read_bytes()
    for content, why in (
        (whole[:-1], "so it is cut off"),
        (b"\x0a" + whole[1:], "image 0 is of class 10"),
        (b"", "no image"),
    ):
        victim.write_bytes(content)
        refused(victim, why, lambda: read_cifar10(tmp_path, "train"))
    victim.unlink()
    refused(victim, "No such file", lambda: read_cifar10(tmp_path, "train"))


# idx files


def write_mnist(folder: Path, n: int = 6, size: int = 28) -> None:
    for split in ("train", "t10k"):
        write_idx(folder / f"{split}-images-idx3-ubyte", random_pixels(n, size, size))
        write_idx(folder / f"{split}-labels-idx1-ubyte", np.arange(n, dtype=np.uint8) % 10)


def test_idx_files_are_read_plain_and_compressed(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    plain = read_mnist(tmp_path, "train")
    assert plain[0].shape == (6, 1, 28, 28)
    assert np.array_equal(plain[0][:, 0], random_pixels(6, 28, 28))
    for path in tmp_path.iterdir():
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    packed = read_mnist(tmp_path, "train")
    assert all(np.array_equal(a, b) for a, b in zip(plain, packed, strict=True))


@pytest.mark.parametrize("packed", [False, True])
def test_damaged_idx_files_are_named(tmp_path: Path, packed: bool) -> None:
    path = tmp_path / ("a.gz" if packed else "a")
    write_idx(path, random_pixels(3, 4))
    whole = path.read_bytes()
    wrap = gzip.compress if packed else bytes
    for content, why in (
        (wrap(b""), "begins with 0x, an idx file of this kind with 0x00000802"),
        (wrap(b"\0\0\x08\x01" + whole[4:]), "begins with 0x00000801"),
        (wrap(whole[:9]), "ends within its header"),
        (wrap(whole[:-1]), "promises 12 bytes, there are 11"),
        (wrap(whole + b"\0"), "promises 12 bytes, there are more"),
        (wrap(struct.pack(">HBB2I", 0, 8, 2, 2**31, 2**31)), "at most 2147483648 are read"),
        *([(b"no gzip", "cannot be read"), (wrap(whole)[:-9], "cannot be read")] if packed else []),
    ):
        path.write_bytes(content)
        refused(path, why, lambda: read_idx(path, 2))


def test_idx_files_that_do_not_fit_are_named(tmp_path: Path) -> None:
    refused(tmp_path, "holds neither train-images-idx3-ubyte nor", lambda: read_mnist(tmp_path, "train"))
    pictures, labels = tmp_path / "train-images-idx3-ubyte", tmp_path / "train-labels-idx1-ubyte"
    write_mnist(tmp_path, size=27)
    refused(pictures, "are 27 x 27, must be 28 x 28", lambda: read_mnist(tmp_path, "train"))
    write_mnist(tmp_path)
    write_idx(labels, np.zeros(5, dtype=np.uint8))
    refused(pictures, "has 6 images, train-labels-idx1-ubyte 5 labels", lambda: read_mnist(tmp_path, "train"))
    write_idx(labels, np.full(6, 10, dtype=np.uint8))
    refused(labels, "image 0 is of class 10", lambda: read_mnist(tmp_path, "train"))


# Folders of images


def write_folder(folder: Path, names: tuple[str, ...] = ("bird", "ant")) -> Path:
    for split in ("train", "val"):
        for number, name in enumerate(names):
            (folder / split / name).mkdir(parents=True)
            colour = (250, 10, 10) if number else (10, 10, 250)
            Image.new("RGB", (90 + number, 70), colour).save(folder / split / name / "b.jpg")
            Image.new("RGB", (64, 64 + number), colour).save(folder / split / name / "a.PNG")
    (folder / "train" / names[0] / "notes.txt").touch()
    (folder / "train" / names[0] / "._a.png").touch()
    (folder / "train" / ".cache").mkdir()
    return folder


def test_folders_are_classes_by_sorted_name(tmp_path: Path) -> None:
    write_folder(tmp_path)
    assert find_classes(tmp_path) == ["ant", "bird"]
    data = ImageFolder(tmp_path, "train", size=64, augment=True, seed=5, threads=2)
    assert (len(data), data.num_classes) == (4, 2)
    for epoch in (None, 0, 1):
        pixels, labels = data.batch([3, 0, 1, 2], epoch)
        assert pixels.shape == (4, 3, 64, 64)
        assert labels.tolist() == [1, 0, 0, 1]
        assert (pixels[:, 0].mean(axis=(1, 2)) > 128).tolist() == [label == 0 for label in labels]
    assert np.array_equal(data.batch([2], 1)[0][0], data.batch([3, 0, 1, 2], 1)[0][3])


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "LA", "CMYK", "1"])
def test_any_mode_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("a.jpg" if mode == "CMYK" else "a.png")
    image = Image.fromarray(random_pixels(1, 9, 9, 3)[0]).convert("RGB").convert(mode)
    image.save(path, **({"transparency": bytes([0, 128])} if mode == "P" else {}))
    assert read_image(path).mode == "RGB"
    assert read_image(path).size == (9, 9)


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (40, 1), (2, 3)])
def test_tiny_images_are_scaled_up(tmp_path: Path, shape: tuple[int, int]) -> None:
    write_folder(tmp_path)
    Image.new("RGB", shape).save(tmp_path / "train" / "ant" / "a.PNG")
    data = ImageFolder(tmp_path, "train", size=64, augment=True)
    assert all(data.batch([0], epoch)[0].shape == (1, 3, 64, 64) for epoch in (None, 0, 1, 2))


def test_damaged_images_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_folder(tmp_path) / "train" / "ant"
    data = ImageFolder(tmp_path, "train", size=64)
    victim = folder / "b.jpg"
    Image.fromarray(random_pixels(1, 80, 80, 3)[0]).save(victim)
    whole = victim.read_bytes()
    Image.new("RGB", (8, 8)).save(tmp_path / "a.gif")
    for content in (b"", b"no image", whole[:-2000], whole[:100], (tmp_path / "a.gif").read_bytes()):
        victim.write_bytes(content)
        refused(victim, "cannot be read as JPEG or PNG .* replace it or remove it", lambda: data.batch([0, 1], 0))
    victim.write_bytes(whole)
    monkeypatch.setattr(image_folder, "MAX_PIXELS", 80 * 80 - 1)
    refused(victim, "has 80 x 80 pixels, more than 6399; scale it down", lambda: data.batch([1], 0))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 10)
    refused(victim, "cannot be read as JPEG or PNG", lambda: data.batch([1], 0))


def test_folders_that_do_not_agree_are_named(tmp_path: Path) -> None:
    refused(tmp_path / "train", r"cannot be listed .* expected train/CLASS/\*\.jpg", lambda: find_classes(tmp_path))
    write_folder(tmp_path)
    (tmp_path / "val" / "cow").mkdir()
    refused(tmp_path / "train", "lacks the class 'cow', which val has", lambda: find_classes(tmp_path))
    (tmp_path / "train" / "cow").mkdir()
    refused(tmp_path / "train" / "cow", "holds no image", lambda: ImageFolder(tmp_path, "train", size=64))
    for name in ("cow", "dog"):
        (tmp_path / "train" / name).mkdir(exist_ok=True)
    (tmp_path / "val" / "cow").rmdir()
    refused(tmp_path / "val", "lacks the class 'cow' and 1 more, which train has", lambda: find_classes(tmp_path))


# Generated images


@pytest.mark.parametrize("layout", ["cifar10", "mnist", "imagenet"])
def test_generating_twice_gives_the_same_bytes(tmp_path: Path, layout: Any) -> None:
    for name in ("a", "b"):
        generate(tmp_path / name, layout, **SMALL)
    first = contents(tmp_path / "a")
    assert first == contents(tmp_path / "b")
    generate(tmp_path / "a", layout, **SMALL)
    assert contents(tmp_path / "a") == first
    generate(tmp_path / "c", layout, **{**SMALL, "seed": 4})
    assert contents(tmp_path / "c") != first
    refused(
        tmp_path / "a",
        "holds a data set made with .* remove it",
        lambda: generate(tmp_path / "a", layout, **{**SMALL, "seed": 4}),
    )
    (tmp_path / "a" / PARAMETERS_FILE).unlink()
    refused(
        tmp_path / "a", "is not empty and holds no whole data set", lambda: generate(tmp_path / "a", layout, **SMALL)
    )
    with pytest.raises(ValueError, match="num_test=9: must be a whole number, at least 10"):
        generate(tmp_path / "d", layout, **{**SMALL, "num_test": 9})


def test_generated_data_has_the_layout_of_the_real(tmp_path: Path) -> None:
    for layout in ("cifar10", "mnist", "imagenet"):
        generate(tmp_path / layout, layout, **SMALL)
    for split, count in (("train", 23), ("test", 11)):
        for read, folder in ((read_cifar10, "cifar10"), (read_mnist, "mnist")):
            _, labels = read(tmp_path / folder, split)
            assert labels.tolist() == [number % 10 for number in range(count)]
        assert len(ImageFolder(tmp_path / "imagenet", split, size=64)) == count
    assert find_classes(tmp_path / "imagenet") == sorted(SHAPES)


@pytest.mark.parametrize("colour", [True, False])
def test_classes_can_be_told_apart_and_mirrors_keep_them(colour: bool) -> None:
    """By the nearest of the mean images: crude, and right for most."""
    generator = np.random.default_rng(0)
    samples = np.stack(
        [[paint(label, 28, generator, colour).astype(float) for _ in range(30)] for label in range(len(SHAPES))]
    )
    means = samples[:, :20].mean(axis=1)
    held_out = samples[:, 20:]
    for images in (held_out, held_out[..., ::-1]):
        distances = ((images[:, :, None] - means) ** 2).mean(axis=(3, 4, 5))
        right = distances.argmin(axis=2) == np.arange(len(SHAPES))[:, None]
        assert right.mean() > 0.6
