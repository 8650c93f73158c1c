"""Speech to characters: convolutions over the spectrogram, LSTMs over time, a look ahead, one score for each label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

_TIME_KERNEL, _TIME_STRIDE, _TIME_PADDING = 11, 2, 5
_BIN_KERNELS, _BIN_PADDINGS = (41, 21), (20, 10)


@dataclass(frozen=True, kw_only=True)
class DeepSpeechConfig:
    """The defaults are `lstman4`: 27,569,568 parameters."""

    num_bins: int = 161
    num_labels: int = 29
    conv_channels: int = 32
    hidden_size: int = 800
    num_layers: int = 5
    lookahead: int = 20
    """Frames after the current one that its score may depend on."""


class DeepSpeech(nn.Module):
    """`forward(spectrograms, lengths)` -> log-probabilities (frames, batch, labels), and the frames of each utterance.

    Utterances are padded with zeros. Frames beyond an utterance's length are zeroed again after every convolution and
    left out of the norms between the LSTMs, so in evaluation padding changes nothing; in training the two norms of the
    convolutions count it in their statistics.
    """

    def __init__(self, config: DeepSpeechConfig) -> None:
        super().__init__()
        channels, hidden = config.conv_channels, config.hidden_size
        first, second = _BIN_KERNELS
        self.conv1 = nn.Conv2d(1, channels, (first, _TIME_KERNEL), (2, _TIME_STRIDE), (_BIN_PADDINGS[0], _TIME_PADDING))
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, (second, _TIME_KERNEL), (2, 1), (_BIN_PADDINGS[1], _TIME_PADDING))
        self.norm2 = nn.BatchNorm2d(channels)
        bins = _halved(_halved(config.num_bins))
        sizes = [bins * channels] + [hidden] * (config.num_layers - 1)
        self.lstms = nn.ModuleList(nn.LSTM(size, hidden) for size in sizes)
        self.norms = nn.ModuleList(FrameNorm(hidden) for _ in sizes[1:])
        self.lookahead = Lookahead(hidden, config.lookahead)
        self.output_norm = FrameNorm(hidden)
        self.output = nn.Linear(hidden, config.num_labels, bias=False)

    def forward(self, spectrograms: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """`spectrograms`: (batch, bins, frames); `lengths`: frames of each, on the CPU."""
        frames = output_frames(lengths)
        x = spectrograms.unsqueeze(1)
        for conv, norm in ((self.conv1, self.norm1), (self.conv2, self.norm2)):
            x = nn.functional.hardtanh(norm(conv(x)), 0.0, 20.0)
            x = x * frame_mask(frames, x.shape[3], x.device).to(x.dtype)[:, None, None, :]
        batch, channels, bins, steps = x.shape
        x = x.reshape(batch, channels * bins, steps).permute(2, 0, 1)  # time, batch, features
        mask = frame_mask(frames, steps, x.device).t()
        for index, lstm in enumerate(self.lstms):
            x = x if index == 0 else self.norms[index - 1](x, mask)
            x, _ = lstm(x)
        x = nn.functional.hardtanh(self.lookahead(x * mask.to(x.dtype).unsqueeze(2)), 0.0, 20.0)
        return self.output(self.output_norm(x, mask)).log_softmax(2), frames


class FrameNorm(nn.BatchNorm1d):
    """Batch norm over the real frames of all utterances; padding is neither counted nor normalised."""

    def forward(self, input: Tensor, mask: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = torch.zeros_like(input)
        out[mask] = super().forward(input[mask])
        return out


class Lookahead(nn.Module):
    """Each feature's weighted sum over its current and the next `context` frames."""

    def __init__(self, num_features: int, context: int) -> None:
        super().__init__()
        self._context = context
        self._num_features = num_features
        self.weight = nn.Parameter(torch.empty(num_features, 1, context + 1))
        nn.init.uniform_(self.weight, -1.0 / (context + 1) ** 0.5, 1.0 / (context + 1) ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        future = nn.functional.pad(x.permute(1, 2, 0), (0, self._context))
        return nn.functional.conv1d(future, self.weight, groups=self._num_features).permute(2, 0, 1)


def output_frames(lengths: Tensor) -> Tensor:
    """How many frames the convolutions make of that many."""
    return torch.div(lengths + 2 * _TIME_PADDING - _TIME_KERNEL, _TIME_STRIDE, rounding_mode="floor") + 1


def frame_mask(frames: Tensor, steps: int, device: torch.device) -> Tensor:
    """(batch, steps): true where a frame belongs to its utterance."""
    return torch.arange(steps, device=device)[None, :] < frames.to(device)[:, None]


def _halved(bins: int) -> int:
    return (bins - 1) // 2 + 1
