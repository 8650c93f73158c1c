"""ONE background thread that runs reductions in the order they were handed in, while backward goes on."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch


class Ticket:
    """A job that was handed in."""

    def __init__(
        self,
        job: Callable[[], None],
        on_error: Callable[[BaseException], None] | None,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._job = job
        self._prepare = prepare
        self._on_error = on_error
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._device = torch.cuda.current_device() if _cuda_in_use() else None
        self._input_ready: Any = _cuda_event()
        self._output_ready: Any = None

    def wait(self) -> None:
        """Until the job is done; raises what it raised. CUDA work queued afterwards comes behind the job's."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._output_ready is not None:
            self._output_ready.wait()

    def prepare(self) -> None:
        """What a GPU can begin with, while others are still exchanged; on a CPU it would only keep them waiting.

        Once; what goes wrong comes out of `run`.
        """
        prepare, self._prepare = self._prepare, None
        if prepare is None or self._device is None:
            return
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(_own_stream(self._device)):
                self._input_ready.wait()
                prepare()
        except BaseException as error:
            self._error = error

    def run(self) -> None:
        """On the submitter's device, on a stream of this thread's own."""
        if self._error is not None:
            raise self._error
        if self._device is None:
            self._job()
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(_own_stream(self._device)):
                self._input_ready.wait()
                self._job()
                self._output_ready = _cuda_event()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()
        if self._on_error is not None:
            self._on_error(error)


class ReductionWorker:
    """After a job has failed, every later one fails with the same error: its peers are no longer in step."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="oktopk-reductions", daemon=True)
        self._thread.start()

    def submit(
        self,
        job: Callable[[], None],
        on_error: Callable[[BaseException], None] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> Ticket:
        """`prepare`, if there is one, comes before the job and may come before the jobs of others."""
        if not self._thread.is_alive():
            raise RuntimeError("reductions were stopped: nothing can be reduced any more")
        ticket = Ticket(job, on_error, prepare)
        self._jobs.put(ticket)
        return ticket

    def stop(self) -> None:
        """Finish what was handed in, then end the thread. Harmless when repeated."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        failure: BaseException | None = None
        ahead: list[Ticket | None] = []
        while (ticket := ahead.pop() if ahead else self._jobs.get()) is not None:
            try:
                if failure is not None:
                    raise failure
                ticket.prepare()
                ahead = self._one_ahead()
                ticket.run()
            except BaseException as error:
                failure = error
                ticket.fail(error)

    def _one_ahead(self) -> list[Ticket | None]:
        """The next job, prepared, if it was handed in already. No more than one, so that memory stays bounded."""
        try:
            following = self._jobs.get_nowait()
        except queue.Empty:
            return []
        if following is not None:
            following.prepare()
        return [following]


def _cuda_event() -> Any:
    """A mark on the current stream; None where CUDA is not in use."""
    return torch.cuda.current_stream().record_event() if _cuda_in_use() else None


def _cuda_in_use() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_initialized()


_streams = threading.local()


def _own_stream(device: int) -> Any:
    """This thread's stream on that device."""
    key = f"device{device}"
    if not hasattr(_streams, key):
        setattr(_streams, key, torch.cuda.Stream(device, priority=-1))  # ahead of what can wait
    return getattr(_streams, key)
