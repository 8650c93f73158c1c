"""What a reader must know before believing a run's figures, in sentences."""

from __future__ import annotations

from itertools import pairwise

from oktopk.workbench.report.run import LOCAL, Run


def ending(run: Run) -> str | None:
    """Why this run is not a finished one; None for a finished one."""
    status, reason = run.facts.text("status"), run.facts.text("reason")
    planned = run.facts.whole("num_steps")
    last = run.steps[-1].step if run.steps else None
    of = f" of {planned}" if planned else ""
    reached = "no step was logged" if last is None else f"the last step logged is {last}{of} (steps count from 0)"
    if not run.facts:
        return f"There is no run.json, so whether this run finished is not known: {reached}."
    if status == "failed":
        return f"This run did not finish: {reached}. Reason: {reason or 'not known'}"
    if status == "running":
        return f"This run did not finish, or is still running: {reached}. Reason: not known, nobody could say more."
    if status != "finished":
        return f"run.json does not say how this run ended: {reached}."
    if planned and (last is None or last + 1 < planned):
        return f"This run says that it finished, but {reached}."
    return None


def remarks(run: Run) -> list[str]:
    """What else is unusual, the most important first; `ending` is not among them."""
    said = list(run.problems)
    if not run.steps:
        return [*said, "No step was logged, so there is nothing to draw."]
    if len(run.steps) == 1:
        said.append("Only one step was logged: figures show single points.")
    missing = sum(later.step - earlier.step - 1 for earlier, later in pairwise(run.steps)) + run.steps[0].step
    if missing:
        said.append(f"{missing} of the steps up to {run.steps[-1].step} are not in metrics.jsonl.")
    skipped = sum(step.skipped for step in run.steps)
    if skipped:
        said.append(f"{skipped} of {len(run.steps)} steps were skipped by all workers; they have no loss.")
    if run.config.get("resume") is True:
        said.append("This run was continued from a checkpoint; the times of its parts are added up.")
    if run.workers == 1:
        said.append("One worker: it has nobody to send to, so all bytes and bounds are 0.")
    if run.workers is None:
        said.append("The number of workers is not known, so there are no bounds and no dense ring to compare with.")
    local = len(run.taken(LOCAL))
    if local:
        said.append(f"{local} of {len(run.steps)} steps were local: nothing was exchanged after them.")
    if not run.taken("sparse"):
        said.append("No step was sparse: nothing was chosen, and there are no thresholds.")
    if not run.epochs:
        said.append("No epoch was finished: there is no validation.")
    if not run.has_time:
        said.append("This run was written before steps had a time: times are sums of the training loop's stages.")
    sparse = [bucket for step in run.taken("sparse") for bucket in step.buckets]
    if sparse and not any("encode" in bucket.seconds for bucket in sparse):
        said.append("This run was written before encoding was timed: its time is part of `combine`.")
    return said
