"""`--reducer auto`: ask the cost model before the first step, and again when there is something to measure."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from oktopk.allreducer import AllReducer
from oktopk.comm.base import Communicator
from oktopk.workbench.plan.advise import DEFAULT_REDUCERS, DENSITIES, Answer, Question, advise, duration
from oktopk.workbench.plan.calibrate import averages, calibrate
from oktopk.workbench.plan.model import Compute
from oktopk.workbench.recording.stages import LOOP_STAGES
from oktopk.workbench.train.config import ConfigError, TrainConfig
from oktopk.workbench.worlds.membership import Member

AUTO = "auto"
_SPARSE_STEPS = 20
"""Before sparse steps are held against the dense ones of the warm-up."""
_FEWEST = 5


@dataclass
class Auto:
    """What was decided, and what was measured since. All workers decide alike: from averages over all of them.

    `question` is None in a run that was resumed: it goes on with what was decided.
    """

    reducer: str
    density: float
    compresses: bool
    answer: list[str]
    question: Question | None = None
    rechecks: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    _dense: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])
    _sparse: list[Mapping[str, float]] = field(default_factory=list[Mapping[str, float]])

    @staticmethod
    def decide(config: TrainConfig, member: Member, bucket_sizes: Sequence[int]) -> Auto:
        """Some seconds of measuring; `density` is the most that may be sent."""
        found = calibrate(member.comm, member.device, max(bucket_sizes), config.kernels)
        answer = advise(
            Question(
                bucket_sizes=bucket_sizes,
                num_ranks=member.place.size,
                link=found.link,
                machine=found.machine,
                reducers=DEFAULT_REDUCERS,
                densities=sorted({config.density, *(d for d in DENSITIES if d < config.density)}),
                compute=Compute(shared=member.device.type == "cpu", hidden=config.norm_clip == 0.0),
            )
        )
        best = answer.best
        return Auto(best.reducer, best.density, answer.compresses, answer.lines(), answer.question)

    @staticmethod
    def of_run(folder: Path) -> Auto:
        """What a run that is resumed had decided."""
        try:
            saved = json.loads((folder / "run.json").read_text())["auto"]
            return Auto(saved["reducer"], saved["density"], True, saved["answer"], rechecks=saved["rechecks"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                f"reducer='auto': {folder / 'run.json'} does not say what this run had decided ({error}); "
                "resume it with the reducer it was trained with"
            ) from error

    def history(self) -> list[str]:
        """What was decided so far, in words."""
        return [*self.answer, *(f"step {each['step']}: {each['answer']}" for each in self.rechecks)]

    def as_dict(self) -> dict[str, Any]:
        return {
            "reducer": self.reducer, "density": self.density, "answer": self.answer, "rechecks": self.rechecks,
        }  # fmt: skip

    def after_step(self, record: Mapping[str, Any], allreducer: AllReducer, comm: Communicator) -> str | None:
        """To be called between two steps; what was decided anew, in words, where the time for it has come."""
        if self.question is None:
            return None
        if not record["skipped"]:
            reducing = sum(sum(bucket["seconds"].values()) for bucket in record["buckets"])
            seen = {**record["seconds"], "reduce": reducing}
            (self._dense if record["phase"] == "dense" else self._sparse).append(seen)
        if self._dense and record["step"] + 1 == allreducer.settings.warmup_steps:
            return self._note(record["step"], self._after_warmup(self.question, allreducer, comm, record["step"] + 1))
        just_seen = record["phase"] == "sparse" and not record["skipped"] and len(self._sparse) == _SPARSE_STEPS
        if just_seen and len(self._dense) >= _FEWEST:
            return self._note(record["step"], self._after_sparse_steps(allreducer, comm))
        return None

    def _after_warmup(self, question: Question, allreducer: AllReducer, comm: Communicator, step: int) -> str:
        forward, backward, reducing = _medians(self._dense, ("forward", "backward", "reduce"), comm)
        answer = self._corrected(question, Compute(forward, backward), reducing)
        allreducer.compress_from(step if answer.compresses else None)
        changed = "" if answer.compresses == self.compresses else " (changed)"
        self.compresses = answer.compresses
        measured = f"after {len(self._dense)} dense steps, with {duration(reducing)} measured for an allreduce"
        return f"{measured}{changed}: {answer.lines()[0]}"

    def _corrected(self, question: Question, compute: Compute, reducing: float) -> Answer:
        known = replace(compute, shared=question.compute.shared, hidden=question.compute.hidden)
        mine = replace(question, compute=known, reducers=(self.reducer,), densities=(self.density,))
        predicted = advise(mine).dense.allreduce_s
        return advise(replace(mine, dense_factor=reducing / predicted if predicted else 1.0))

    def _after_sparse_steps(self, allreducer: AllReducer, comm: Communicator) -> str:
        stages = LOOP_STAGES
        dense, sparse = (sum(_medians(seen, stages, comm)) for seen in (self._dense, self._sparse))
        measured = f"measured: a dense step {duration(dense)}, a sparse one {duration(sparse)}"
        if sparse > dense:
            allreducer.compress_from(None)
            return f"{measured}: staying dense from here on"
        return f"{measured}: going on with {self.reducer}"

    def _note(self, step: int, answer: str) -> str:
        self.rechecks.append({"step": step, "answer": answer})
        return answer


def _medians(seen: Sequence[Mapping[str, float]], keys: Sequence[str], comm: Communicator) -> list[float]:
    """Of the later half, averaged over all workers."""
    later = seen[len(seen) // 2 :]
    return averages(comm, [statistics.median(each[key] for each in later) for key in keys])
