"""What `training` trains: real models on made-up batches, which cost what real ones cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oktopk.workbench.train.models.deepspeech import DeepSpeech, DeepSpeechConfig
from oktopk.workbench.train.models.vgg import Vgg

_AUDIO_S, _TINY_AUDIO_S = 2.5, 0.5
_FRAMES_PER_S = 100
_LABELS_PER_S = 8
_BLANK = 0


@dataclass(frozen=True)
class BenchTask:
    """`loss(model)` is that of one batch, always the same."""

    model: nn.Module
    loss: Callable[[nn.Module], Tensor]
    batch_size: int


def make_task(name: str, rank: int, device: torch.device, tiny: bool) -> BenchTask:
    """The model starts equal on every rank; the batch is the rank's own."""
    torch.manual_seed(0)
    make = {"lstman4": _lstman4, "vgg16": _vgg16}[name]
    return make(torch.Generator().manual_seed(1 + rank), device, tiny)


def _lstman4(generator: torch.Generator, device: torch.device, tiny: bool) -> BenchTask:
    batch = 2 if tiny else 8
    config = DeepSpeechConfig(conv_channels=4, hidden_size=32, num_layers=2) if tiny else DeepSpeechConfig()
    seconds = _TINY_AUDIO_S if tiny else _AUDIO_S
    frames = 1 + round(_FRAMES_PER_S * seconds)
    num_labels = round(_LABELS_PER_S * seconds)
    spectrograms = torch.randn(batch, config.num_bins, frames, generator=generator).to(device)
    lengths = torch.full((batch,), frames)
    labels = torch.randint(1, config.num_labels, (batch * num_labels,), generator=generator)
    label_lengths = torch.full((batch,), num_labels)

    def loss(model: nn.Module) -> Tensor:
        log_probabilities, counts = model(spectrograms, lengths)
        return nn.functional.ctc_loss(log_probabilities, labels, counts, label_lengths, blank=_BLANK)

    return BenchTask(DeepSpeech(config).to(device), loss, batch)


def _vgg16(generator: torch.Generator, device: torch.device, tiny: bool) -> BenchTask:
    batch = 4 if tiny else 16
    images = torch.randn(batch, 3, 32, 32, generator=generator).to(device)
    classes = torch.randint(0, 10, (batch,), generator=generator).to(device)

    def loss(model: nn.Module) -> Tensor:
        return nn.functional.cross_entropy(model(images), classes)

    return BenchTask(Vgg(16, channels=4 if tiny else 64).to(device), loss, batch)
