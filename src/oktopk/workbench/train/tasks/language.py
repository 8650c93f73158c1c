"""lstm: the next word, on the Penn Treebank or anything laid out like it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from oktopk.workbench.train.config import TrainConfig
from oktopk.workbench.train.data.errors import DataError
from oktopk.workbench.train.data.generated_text import write_sentences
from oktopk.workbench.train.data.words import END, IGNORED, HeldOutColumns, TrainingColumns, Vocabulary, find_texts
from oktopk.workbench.train.models.language import LanguageModel, LanguageModelConfig, State
from oktopk.workbench.train.task_settings import LanguageSettings
from oktopk.workbench.train.tasks.base import Workload, data_folder
from oktopk.workbench.train.tasks.common import on_all, perplexity, ratio, seed_torch
from oktopk.workbench.worlds.membership import Member


@dataclass(frozen=True)
class WordBatch:
    """Words and the words that follow them, (steps, batch); `index` is the batch's place in its epoch."""

    words: Tensor
    targets: Tensor
    epoch: int
    index: int


class LanguageTask:
    """The callables of the workload. The state after a batch is where the next one of the same epoch begins."""

    def __init__(self, config: TrainConfig, member: Member) -> None:
        settings: LanguageSettings = config.task_settings
        folder = data_folder(
            config,
            member,
            lambda folder: write_sentences(
                folder, num_train=settings.corpus_train, num_held_out=settings.corpus_test, seed=config.seed
            ),
        )
        self._member = member
        self._seed = config.seed

        def read() -> tuple[int, TrainingColumns, HeldOutColumns]:
            train, held_out = find_texts(folder)
            vocabulary = Vocabulary.of(train, settings.vocabulary_size)
            tokens = vocabulary.encode(train)
            place, steps = member.place, settings.sequence_length
            columns = TrainingColumns(
                tokens, batch_size=config.batch_size, steps=steps, rank=place.rank, size=place.size
            )
            if columns.num_batches < config.nsteps_update:
                raise DataError(
                    f"{train}: {len(tokens)} words are too few for a step: {config.nsteps_update} x batch_size="
                    f"{config.batch_size} samples of sequence_length={steps} words on {place.size} workers; "
                    "use more text, or make one of these smaller"
                )
            judged = HeldOutColumns(
                vocabulary.encode(held_out),
                vocabulary.words.index(END),
                steps=steps,
                rank=place.rank,
                size=place.size,
            )
            return len(vocabulary.words), columns, judged

        num_words, self._train, self._held_out = on_all(member, read)
        self.num_batches = self._train.num_batches // config.nsteps_update * config.nsteps_update
        self._carried: State | None = None
        torch.manual_seed(config.seed)
        shape = LanguageModelConfig(
            num_words=num_words,
            hidden_size=settings.hidden_size,
            num_layers=settings.num_layers,
            dropout=settings.dropout,
        )
        self.model = LanguageModel(shape).to(member.device)

    def batches(self, epoch: int, first: int) -> Iterator[WordBatch]:
        """The same words in every epoch: their order is what is learned."""
        for index in range(first, self.num_batches):
            yield WordBatch(*self._train.batch(index), epoch, index)

    def loss(self, batch: WordBatch) -> Tensor:
        if batch.index == 0:
            self._carried = None
        seed_torch(self._seed, self._member.place.rank, batch.epoch, batch.index)
        device = self._member.device
        scores, (hidden, cell) = self.model(batch.words.to(device), self._carried)
        self._carried = None if batch.index == self.num_batches - 1 else (hidden.detach(), cell.detach())
        return nn.functional.cross_entropy(scores.flatten(0, 1), batch.targets.to(device).flatten())

    def validate(self) -> dict[str, float | None]:
        """Every held-out word once, shared out between the workers, with a state of its own."""
        device, state = self._member.device, None
        totals = torch.zeros(2, dtype=torch.float64, device=device)
        self.model.eval()
        with torch.no_grad():
            for words, targets in self._held_out.batches():
                scores, state = self.model(words.to(device), state)
                losses = nn.functional.cross_entropy(
                    scores.flatten(0, 1), targets.to(device).flatten(), ignore_index=IGNORED, reduction="sum"
                )
                totals += torch.stack([losses.double(), (targets != IGNORED).sum().double().to(device)])
        self.model.train()
        self._member.comm.all_reduce(totals)
        loss = ratio(float(totals[0]), float(totals[1]))
        return {"loss": loss, "perplexity": perplexity(loss)}

    def state(self) -> dict[str, Tensor]:
        return {} if self._carried is None else dict(zip(("hidden", "cell"), self._carried, strict=True))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        device = self._member.device
        self._carried = (state["hidden"].to(device), state["cell"].to(device)) if state else None


def build(config: TrainConfig, member: Member) -> Workload:
    task = LanguageTask(config, member)
    return Workload(
        model=task.model,
        num_batches=task.num_batches,
        batches=task.batches,
        loss=task.loss,
        validate=task.validate,
        metrics={"perplexity": "perplexity"},
        remarks=list,
        state=task.state,
        load_state=task.load_state,
    )
