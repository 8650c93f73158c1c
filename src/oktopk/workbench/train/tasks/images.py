"""Which class an image is of: VGG, ResNets, AlexNet, LeNet, on CIFAR-10, MNIST, ImageNet or what is laid out alike."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from oktopk.comm.base import Communicator
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.data import cifar, idx
from oktopk.workbench.train.data.generated_images import Layout, generate
from oktopk.workbench.train.data.image_folder import ImageFolder
from oktopk.workbench.train.data.images import ImageArrays, LabelledImages, Labels, Pixels, Shift, Split
from oktopk.workbench.train.data.sampler import ShuffledBatches, shard
from oktopk.workbench.train.models.alexnet import AlexNet
from oktopk.workbench.train.models.lenet import LeNet
from oktopk.workbench.train.models.resnet import ResNet50, SmallResNet
from oktopk.workbench.train.models.vgg import Vgg
from oktopk.workbench.train.task_settings import ImageFolderSettings, ImageSettings
from oktopk.workbench.train.tasks.base import Workload, data_folder
from oktopk.workbench.train.tasks.common import on_all
from oktopk.workbench.worlds.membership import Member

_MAX_DECODERS = 8


@dataclass(frozen=True)
class DataSet:
    """How a data set is laid out, read and normalised: `mean` and `deviation` of each channel, of 1."""

    layout: Layout
    read: Callable[[Path, Split, TrainConfig, Member], LabelledImages]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    counts_top5: bool = False


@dataclass(frozen=True)
class ImageBatch:
    """Pixels as bytes, (batch, channels, height, width), and the class of each image."""

    pixels: Tensor
    classes: Tensor


def _in_memory(
    read: Callable[[Path, Split], tuple[Pixels, Labels]], num_classes: int, shift: Shift
) -> Callable[[Path, Split, TrainConfig, Member], LabelledImages]:
    def read_all(folder: Path, split: Split, config: TrainConfig, member: Member) -> LabelledImages:
        del member
        settings: ImageSettings = config.task_settings
        pixels, labels = read(folder, split)
        return ImageArrays(pixels, labels, num_classes, shift if settings.augment else None, config.seed)

    return read_all


def _read_imagenet(folder: Path, split: Split, config: TrainConfig, member: Member) -> LabelledImages:
    settings: ImageFolderSettings = config.task_settings
    cores = len(os.sched_getaffinity(0)) // member.place.local_size
    return ImageFolder(
        folder,
        split,
        size=settings.image_size,
        augment=settings.augment,
        seed=config.seed,
        threads=min(_MAX_DECODERS, max(1, cores)),
    )


_CIFAR10 = DataSet(
    "cifar10",
    _in_memory(cifar.read_cifar10, cifar.NUM_CLASSES, Shift(pad=4, flip=True)),
    (0.4914, 0.4822, 0.4465),
    (0.2470, 0.2435, 0.2616),
)
_MNIST = DataSet(
    "mnist",
    _in_memory(idx.read_mnist, idx.NUM_CLASSES, Shift(pad=2, flip=False)),  # a mirrored digit is none
    (0.1307,),
    (0.3081,),
)
_IMAGENET = DataSet("imagenet", _read_imagenet, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225), counts_top5=True)

_TASKS: Mapping[str, tuple[DataSet, Callable[[int, int], nn.Module]]] = {
    "vgg16": (_CIFAR10, lambda classes, channels: Vgg(16, classes, channels)),
    "vgg19": (_CIFAR10, lambda classes, channels: Vgg(19, classes, channels)),
    "resnet20": (_CIFAR10, lambda classes, channels: SmallResNet(20, classes, channels)),
    "resnet56": (_CIFAR10, lambda classes, channels: SmallResNet(56, classes, channels)),
    "resnet110": (_CIFAR10, lambda classes, channels: SmallResNet(110, classes, channels)),
    "resnet50": (_IMAGENET, ResNet50),
    "alexnet": (_IMAGENET, AlexNet),
    "lenet": (_MNIST, LeNet),
}
"""What each task is trained on, and its model for so many classes and channels."""


class ImageTask:
    """The callables of the workload."""

    def __init__(self, config: TrainConfig, member: Member) -> None:
        settings: ImageSettings = config.task_settings
        self.data, make_model = _TASKS[config.task]
        folder = data_folder(config, member, lambda folder: _generate(folder, self.data.layout, settings, config.seed))
        self._train = on_all(member, lambda: self.data.read(folder, "train", config, member))
        self._held_out = on_all(member, lambda: self.data.read(folder, "test", config, member))
        self._device = member.device
        self._comm: Communicator = member.comm
        self._batch_size = config.batch_size
        self.sampler = ShuffledBatches(
            num_samples=len(self._train),
            batch_size=config.batch_size,
            rank=member.place.rank,
            size=member.place.size,
            seed=config.seed,
        )
        torch.manual_seed(config.seed)
        self.model = make_model(self._train.num_classes, settings.channels).to(member.device)
        self._mean, self._deviation = (
            torch.tensor(values, device=member.device).mul(255.0)[:, None, None]
            for values in (self.data.mean, self.data.deviation)
        )

    def batches(self, epoch: int, first: int) -> Iterator[ImageBatch]:
        """Each is made ready while the one before it is used."""
        with ThreadPoolExecutor(1, thread_name_prefix="batches") as ahead:
            coming: deque[Future[ImageBatch]] = deque()
            for indices in self.sampler.batches(epoch)[first:]:
                coming.append(ahead.submit(_batch, self._train, indices, epoch))
                if len(coming) > 1:
                    yield coming.popleft().result()
            for last in coming:
                yield last.result()

    def loss(self, batch: ImageBatch) -> Tensor:
        return nn.functional.cross_entropy(self._scores(batch), batch.classes.to(self._device))

    def validate(self) -> dict[str, float | None]:
        """Every held-out image once, shared out between the workers."""
        self.model.eval()
        totals = torch.zeros(4, dtype=torch.float64, device=self._device)
        mine = list(shard(len(self._held_out), self._comm.rank, self._comm.size))
        with torch.no_grad():
            for start in range(0, len(mine), self._batch_size):
                totals += self._judge(_batch(self._held_out, mine[start : start + self._batch_size], None))
        self.model.train()
        self._comm.all_reduce(totals)
        loss, right, among_five, count = (float(value) for value in totals.cpu())
        found: dict[str, float | None] = {"loss": loss / count, "accuracy": right / count}
        return found | {"top5": among_five / count} if self.data.counts_top5 else found

    def _judge(self, batch: ImageBatch) -> Tensor:
        """The sum of the losses, how many are right, how many are among the five likeliest, and how many there are."""
        classes = batch.classes.to(self._device)
        scores = self._scores(batch)
        hits = scores.topk(min(5, scores.shape[1])).indices == classes[:, None]
        loss = nn.functional.cross_entropy(scores.double(), classes, reduction="sum")
        return torch.stack([loss, hits[:, 0].sum(), hits.sum(), torch.tensor(len(classes), device=self._device)])

    def _scores(self, batch: ImageBatch) -> Tensor:
        return self.model((batch.pixels.to(self._device).float() - self._mean) / self._deviation)


def build(config: TrainConfig, member: Member) -> Workload:
    task = ImageTask(config, member)
    top5 = {"top5": "top-5 accuracy"} if task.data.counts_top5 else {}
    return Workload(
        model=task.model,
        num_batches=task.sampler.num_batches,
        batches=task.batches,
        loss=task.loss,
        metrics={"accuracy": "accuracy", **top5},
        validate=task.validate,
        remarks=list,
    )


def _batch(images: LabelledImages, indices: list[int], epoch: int | None) -> ImageBatch:
    pixels, labels = images.batch(indices, epoch)
    return ImageBatch(torch.from_numpy(pixels), torch.from_numpy(labels))


def _generate(folder: Path, layout: Layout, settings: ImageSettings, seed: int) -> None:
    generate(folder, layout, num_train=settings.corpus_train, num_test=settings.corpus_test, seed=seed)
