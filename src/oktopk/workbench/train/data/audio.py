"""Audio files to the features a model reads."""

from __future__ import annotations

from pathlib import Path

import soundfile  # pyright: ignore[reportMissingTypeStubs]
import torch
from torch import Tensor

from oktopk.workbench.train.data.errors import DataError

SAMPLE_RATE = 16000
WINDOW = 320
"""Samples in a window: 20 ms."""
HOP = 160
"""Samples from one window to the next: 10 ms."""
NUM_BINS = WINDOW // 2 + 1

_GAIN_DB = 6.0
_NOISE_DB = (25.0, 45.0)
_SILENT_STD = 1e-5


def load_audio(path: Path) -> Tensor:
    """The samples of a wav, flac or sph file as float32, several channels mixed to one; DataError naming the file."""
    if not path.is_file():
        raise DataError(f"{path}: no such audio file; check the manifest or the folder it was read from")
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except (soundfile.SoundFileError, OSError, TypeError) as error:
        raise DataError(
            f"{path}: cannot be read as audio ({error}); replace it by a whole, uncompressed wav or sph, or a flac"
        ) from error
    if rate != SAMPLE_RATE:
        raise DataError(f"{path}: sample rate is {rate} Hz, must be {SAMPLE_RATE} Hz; resample it")
    wave = torch.from_numpy(samples).mean(dim=1)
    if len(wave) < WINDOW:
        raise DataError(f"{path}: has {len(wave)} samples, fewer than one window of {WINDOW}; remove it or replace it")
    if not bool(wave.isfinite().all()):
        raise DataError(f"{path}: holds NaN or Inf; remove it or replace it")
    return wave


def log_spectrogram(wave: Tensor) -> Tensor:
    """log(1 + magnitude), mean 0 and deviation 1 over the utterance, (NUM_BINS, frames); silence is all zeros.

    There are 1 + len(wave) // HOP frames.
    """
    window = torch.hamming_window(WINDOW, dtype=wave.dtype, device=wave.device)
    features = torch.stft(wave, WINDOW, HOP, window=window, return_complex=True).abs().log1p()
    return (features - features.mean()) / features.std().clamp_min(_SILENT_STD)


def augment(wave: Tensor, generator: torch.Generator) -> Tensor:
    """A new wave of the same length: up to 6 dB louder or softer, up to one hop earlier or later, with faint noise.

    The generator, on the wave's device, decides everything.
    """

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator, device=wave.device).item())

    gain = 10 ** (uniform(-_GAIN_DB, _GAIN_DB) / 20)
    shift = round(uniform(-HOP, HOP))
    noise = torch.randn(wave.shape, generator=generator, dtype=wave.dtype, device=wave.device)
    noise *= wave.square().mean().sqrt() * 10 ** (-uniform(*_NOISE_DB) / 20)
    moved = torch.zeros_like(wave)
    if shift >= 0:
        moved[shift:] = wave[: len(wave) - shift]
    else:
        moved[:shift] = wave[-shift:]
    return gain * (moved + noise)
