"""lstman4: speech to characters by CTC, on AN4 or anything laid out like it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import soundfile
import torch
from torch import Tensor, nn

from oktopk.comm.base import Communicator
from oktopk.sparse_vector import ints
from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.data.an4_like import generate
from oktopk.workbench.train.data.audio import SAMPLE_RATE, augment, load_audio, log_spectrogram
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.manifest import Utterance, find_utterances
from oktopk.workbench.train.data.sampler import BucketedBatches, shard
from oktopk.workbench.train.decode import BLANK, LABELS, character_errors, encode_text, greedy, word_errors
from oktopk.workbench.train.models.deepspeech import DeepSpeech, DeepSpeechConfig
from oktopk.workbench.train.task_settings import SpeechSettings
from oktopk.workbench.train.tasks.base import Workload, data_folder
from oktopk.workbench.train.tasks.common import ratio
from oktopk.workbench.worlds.membership import Member

_CACHE_BYTES = 2**30


@dataclass(frozen=True)
class SpeechBatch:
    """Padded spectrograms (batch, bins, frames) with their lengths, and the labels of each utterance."""

    spectrograms: Tensor
    lengths: Tensor
    labels: list[list[int]]
    names: list[str]


class Speech:
    """Utterances as spectrograms and labels; what cannot be read or aligned is left out and remembered by name."""

    def __init__(self, utterances: list[Utterance], settings: SpeechSettings, seed: int) -> None:
        self._skip_bad = settings.on_bad_audio == "skip"
        self._augment = settings.augment
        self._seed = seed
        self.unreadable: dict[str, str] = {}
        self.unalignable: set[str] = set()
        self._cache: dict[int, Tensor] = {}
        self._cached_bytes = 0
        self.utterances: list[Utterance] = []
        self.durations: list[float] = []
        for utterance in utterances:
            duration = self._duration(utterance.audio)
            if duration is not None:
                self.utterances.append(utterance)
                self.durations.append(duration)
        if not self.utterances:
            raise DataError("none of the audio files can be read")
        self.texts = [" ".join(u.text.read_text().upper().split()) for u in self.utterances]

    def batch(self, indices: list[int], epoch: int | None = None) -> SpeechBatch | None:
        """`epoch` varies the augmentation; None: as recorded. None for a batch of which nothing could be read."""
        found = [(i, features) for i in indices if (features := self._features(i, epoch)) is not None]
        if not found:
            return None
        lengths = torch.tensor([features.shape[1] for _, features in found])
        padded = torch.zeros(len(found), found[0][1].shape[0], int(lengths.max().item()))
        for row, (_, features) in enumerate(found):
            padded[row, :, : features.shape[1]] = features
        labels = [encode_text(self.texts[i]) for i, _ in found]
        return SpeechBatch(padded, lengths, labels, [self.utterances[i].audio.name for i, _ in found])

    def _features(self, index: int, epoch: int | None) -> Tensor | None:
        if index in self._cache:
            return self._cache[index]
        try:
            wave = load_audio(self.utterances[index].audio)
        except DataError as error:
            self._bad(self.utterances[index].audio, str(error))
            return None
        if self._augment and epoch is not None:
            generator = torch.Generator().manual_seed((self._seed * 1_000_003 + epoch) * 1_000_003 + index)
            return log_spectrogram(augment(wave, generator))
        features = log_spectrogram(wave)
        if not self._augment and self._cached_bytes < _CACHE_BYTES:
            self._cache[index] = features
            self._cached_bytes += features.numel() * features.element_size()
        return features

    def _duration(self, path: Path) -> float | None:
        try:
            info = soundfile.info(str(path))
        except (RuntimeError, OSError) as error:
            self._bad(path, f"{path}: cannot be read as audio ({error})")
            return None
        return info.frames / SAMPLE_RATE

    def _bad(self, path: Path, reason: str) -> None:
        if not self._skip_bad:
            raise DataError(f"{reason}; set on_bad_audio=skip to leave such files out")
        self.unreadable[path.name] = reason


class SpeechTask:
    """The callables of the workload."""

    def __init__(self, config: TrainConfig, member: Member) -> None:
        settings: SpeechSettings = config.task_settings
        folder = data_folder(config, member, lambda folder: _generate(folder, settings, config.seed))
        self._train = Speech(find_utterances(folder, "train"), settings, config.seed)
        self._held_out = Speech(find_utterances(folder, "test"), settings, config.seed)
        self._device = member.device
        self._comm: Communicator = member.comm
        self._batch_size = config.batch_size
        self.sampler = BucketedBatches(
            durations=self._train.durations,
            batch_size=config.batch_size,
            rank=member.place.rank,
            size=member.place.size,
            seed=config.seed,
        )
        torch.manual_seed(config.seed)
        shape = DeepSpeechConfig(
            num_labels=len(LABELS),
            conv_channels=settings.conv_channels,
            hidden_size=settings.hidden_size,
            num_layers=settings.num_layers,
        )
        self.model = DeepSpeech(shape).to(member.device)

    def batches(self, epoch: int, first: int) -> Iterator[SpeechBatch | None]:
        for indices in self.sampler.batches(epoch)[first:]:
            yield self._train.batch(indices, epoch)

    def loss(self, batch: SpeechBatch | None) -> Tensor:
        if batch is None:
            return self._nothing()
        losses = self._losses(batch, self._train)
        return losses.mean() if losses.numel() else self._nothing()

    def validate(self) -> dict[str, float | None]:
        """Every held-out utterance once, shared out between the workers."""
        self.model.eval()
        totals = torch.zeros(6, dtype=torch.float64)
        mine = list(shard(len(self._held_out.utterances), self._comm.rank, self._comm.size))
        with torch.no_grad():
            for start in range(0, len(mine), self._batch_size):
                batch = self._held_out.batch(mine[start : start + self._batch_size])
                if batch is not None:
                    totals += self._judge(batch)
        self.model.train()
        totals = totals.to(self._device)
        self._comm.all_reduce(totals)
        loss, count, word_edits, words, character_edits, characters = (float(value) for value in totals.cpu())
        return {
            "loss": ratio(loss, count),
            "wer": ratio(word_edits, words),
            "cer": ratio(character_edits, characters),
        }

    def remarks(self) -> list[str]:
        said: list[str] = []
        for data, which in ((self._train, "training"), (self._held_out, "held-out")):
            if data.unreadable:
                name, reason = next(iter(data.unreadable.items()))
                said.append(
                    f"{len(data.unreadable)} unreadable {which} files are left out, the first: {name} ({reason})"
                )
            if data.unalignable:
                example = min(data.unalignable)
                said.append(
                    f"{len(data.unalignable)} {which} utterances on this worker are too short for their transcript or "
                    f"have none, and are left out of the loss; one of them: {example}"
                )
        return said

    def _judge(self, batch: SpeechBatch) -> Tensor:
        log_probabilities, frames = self.model(batch.spectrograms.to(self._device), batch.lengths)
        losses = self._ctc(log_probabilities, frames, batch, self._held_out)
        words, characters = [0, 0], [0, 0]
        for labels, hypothesis in zip(batch.labels, greedy(log_probabilities, frames), strict=True):
            reference = "".join(LABELS[label] for label in labels)
            if not reference:
                continue
            for sums, errors in (
                (words, word_errors(reference, hypothesis)),
                (characters, character_errors(reference, hypothesis)),
            ):
                sums[0] += errors.edits
                sums[1] += errors.length
        return torch.tensor([float(losses.sum()), losses.numel(), *words, *characters], dtype=torch.float64)

    def _losses(self, batch: SpeechBatch, data: Speech) -> Tensor:
        log_probabilities, frames = self.model(batch.spectrograms.to(self._device), batch.lengths)
        return self._ctc(log_probabilities, frames, batch, data)

    def _ctc(self, log_probabilities: Tensor, frames: Tensor, batch: SpeechBatch, data: Speech) -> Tensor:
        """One loss for each utterance that can be aligned: at least a frame for each label and between equal ones."""
        usable = [
            row
            for row, (labels, count) in enumerate(zip(batch.labels, ints(frames), strict=True))
            if labels and len(labels) + _repeats(labels) <= count
        ]
        data.unalignable |= {name for row, name in enumerate(batch.names) if row not in usable}
        if not usable:
            return log_probabilities.new_zeros(0)
        targets = [torch.tensor(batch.labels[row]) for row in usable]
        return nn.functional.ctc_loss(
            log_probabilities[:, usable],
            torch.cat(targets),
            frames[usable],
            torch.tensor([target.numel() for target in targets]),
            blank=BLANK,
            reduction="none",
        )

    def _nothing(self) -> Tensor:
        """A loss of zero that still has gradients (of zero)."""
        return torch.stack([p.sum() for p in self.model.parameters()]).sum() * 0.0


def build(config: TrainConfig, member: Member) -> Workload:
    task = SpeechTask(config, member)
    return Workload(
        model=task.model,
        num_batches=task.sampler.num_batches,
        batches=task.batches,
        loss=task.loss,
        metrics={"wer": "WER", "cer": "CER"},
        validate=task.validate,
        remarks=task.remarks,
    )


def _generate(folder: Path, settings: SpeechSettings, seed: int) -> None:
    generate(folder, num_train=settings.corpus_train, num_test=settings.corpus_test, seed=seed)


def _repeats(labels: list[int]) -> int:
    return sum(1 for left, right in pairwise(labels) if left == right)
