"""What each task lets users set, and where its code is: light, so that a command line can be read without it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oktopk.workbench.console.words import UsageError


def setting(default: Any, help: str, least: float | None = None, choices: tuple[str, ...] = ()) -> Any:
    """A field of a task's settings; `least` and `choices` are checked when a config is made."""
    return field(default=default, metadata={"help": help, "least": least, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class SpeechSettings:
    conv_channels: int = setting(32, "channels of the two convolutions", 1)
    hidden_size: int = setting(800, "width of the hidden layers", 1)
    num_layers: int = setting(5, "hidden layers", 1)
    augment: bool = setting(False, "vary training samples")
    on_bad_audio: str = setting("fail", "unreadable audio: `fail`, or `skip` and count", choices=("fail", "skip"))
    corpus_train: int = setting(480, "training samples of the embedded data", 1)
    corpus_test: int = setting(64, "held-out samples of the embedded data", 1)


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    channels: int = setting(64, "channels of the first layer; the others are multiples of it", 1)
    augment: bool = setting(True, "vary training samples")
    corpus_train: int = setting(512, "training samples of the embedded data", 10)
    corpus_test: int = setting(128, "held-out samples of the embedded data", 10)


@dataclass(frozen=True, kw_only=True)
class SmallResNetSettings(ImageSettings):
    channels: int = setting(16, "channels of the first layer; the others are multiples of it", 1)


@dataclass(frozen=True, kw_only=True)
class ImageFolderSettings(ImageSettings):
    image_size: int = setting(224, "width and height of a sample", 64)


@dataclass(frozen=True, kw_only=True)
class LeNetSettings(ImageSettings):
    channels: int = setting(6, "channels of the first layer; the others are multiples of it", 1)
    augment: bool = setting(False, "vary training samples")


@dataclass(frozen=True, kw_only=True)
class LanguageSettings:
    hidden_size: int = setting(1500, "width of the hidden layers", 1)
    num_layers: int = setting(2, "hidden layers", 1)
    dropout: float = setting(0.65, "part of the activations that is dropped in training", 0.0)
    sequence_length: int = setting(35, "tokens in a sample", 2)
    vocabulary_size: int = setting(10000, "most tokens of a vocabulary that is made from the training text", 100)
    corpus_train: int = setting(5000, "training samples of the embedded data", 1)
    corpus_test: int = setting(500, "held-out samples of the embedded data", 1)

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)


@dataclass(frozen=True, kw_only=True)
class BertSettings:
    hidden_size: int = setting(768, "width of the hidden layers", 1)
    num_layers: int = setting(12, "hidden layers", 1)
    num_heads: int = setting(12, "attention heads", 1)
    dropout: float = setting(0.1, "part of the activations that is dropped in training", 0.0)
    sequence_length: int = setting(128, "tokens in a sample", 8)
    vocabulary: str = setting("", "a WordPiece vocabulary, one piece a line; empty: trained on the text")
    vocabulary_size: int = setting(8000, "most tokens of a vocabulary that is made from the training text", 100)
    corpus_train: int = setting(400, "training documents of the embedded data", 4)
    corpus_test: int = setting(40, "held-out documents of the embedded data", 2)

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)
        _check_heads(self.hidden_size, self.num_heads)


@dataclass(frozen=True, kw_only=True)
class GptSettings:
    hidden_size: int = setting(384, "width of the hidden layers", 1)
    num_layers: int = setting(6, "hidden layers", 1)
    num_heads: int = setting(6, "attention heads", 1)
    dropout: float = setting(0.0, "part of the activations that is dropped in training", 0.0)
    sequence_length: int = setting(256, "tokens in a sample", 2)
    tokens: str = setting("bytes", "what a text is cut into: bytes or wordpiece", choices=("bytes", "wordpiece"))
    vocabulary_size: int = setting(8000, "most tokens of a vocabulary that is made from the training text", 100)
    compute_dtype: str = setting(
        "fp32", "fp32, or bf16: what a model computes in under autocast; weights stay fp32", choices=("fp32", "bf16")
    )
    batches_per_epoch: int = setting(0, "batches of each worker in an epoch; 0: as many as the text has tokens for", 0)
    corpus_train: int = setting(2000, "training documents of the embedded data", 1)
    corpus_test: int = setting(100, "held-out documents of the embedded data", 1)

    def __post_init__(self) -> None:
        _check_dropout(self.dropout)
        _check_heads(self.hidden_size, self.num_heads)


def _check_dropout(dropout: float) -> None:
    if not dropout < 1.0:
        raise UsageError(f"dropout={dropout!r}: must be below 1, or nothing is left to learn from")


def _check_heads(hidden_size: int, num_heads: int) -> None:
    if num_heads > 0 and hidden_size % num_heads:
        raise UsageError(f"hidden_size={hidden_size}: must be a multiple of num_heads={num_heads}; change one of them")


@dataclass(frozen=True)
class TaskInfo:
    """`module` has `build(config, member) -> Workload`; `dataset` is its name on the old command line."""

    module: str
    settings: type
    dataset: str


_IMAGES = "oktopk.workbench.train.tasks.images"
TASKS: Mapping[str, TaskInfo] = {
    "lstman4": TaskInfo("oktopk.workbench.train.tasks.speech", SpeechSettings, "an4"),
    "vgg16": TaskInfo(_IMAGES, ImageSettings, "cifar10"),
    "vgg19": TaskInfo(_IMAGES, ImageSettings, "cifar10"),
    "resnet20": TaskInfo(_IMAGES, SmallResNetSettings, "cifar10"),
    "resnet56": TaskInfo(_IMAGES, SmallResNetSettings, "cifar10"),
    "resnet110": TaskInfo(_IMAGES, SmallResNetSettings, "cifar10"),
    "resnet50": TaskInfo(_IMAGES, ImageFolderSettings, "imagenet"),
    "alexnet": TaskInfo(_IMAGES, ImageFolderSettings, "imagenet"),
    "lenet": TaskInfo(_IMAGES, LeNetSettings, "mnist"),
    "lstm": TaskInfo("oktopk.workbench.train.tasks.language", LanguageSettings, "ptb"),
    "bert-base": TaskInfo("oktopk.workbench.train.tasks.bert", BertSettings, "wikipedia"),
    "gpt": TaskInfo("oktopk.workbench.train.tasks.gpt", GptSettings, "text"),
}
