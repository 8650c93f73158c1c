"""ONE background thread that runs reductions in the order they were handed in, while backward goes on."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch


def mark(device: torch.device) -> Any:
    """What was queued on the device so far, as an event to wait for; None where there is nothing to wait for."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def weakly(owner: Any, method: Callable[..., None]) -> Callable[..., None]:
    """`method` of `owner`, for as long as it lives: a hook on a parameter must not keep the optimizer alive."""
    reference = weakref.ref(owner)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            method(alive, *arguments)

    return call


class Ticket:
    """A job that was handed in."""

    def __init__(
        self,
        job: Callable[[], None],
        device: torch.device,
        input_ready: Any,
        prepare: Callable[[], None] | None,
        on_error: Callable[[BaseException], None] | None,
    ) -> None:
        self._job = job
        self._device = device
        self._input_ready = input_ready
        self._prepare = prepare
        self._on_error = on_error
        self._done = threading.Event()
        self._error: BaseException | None = None
        self._output_ready: Any = None

    def wait(self) -> None:
        """Until the job is done; raises what it raised. CUDA work queued afterwards comes behind the job's."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        if self._output_ready is not None:
            self._output_ready.wait(torch.cuda.current_stream(self._device))

    def await_end(self) -> None:
        """Until the job is done or has failed."""
        self._done.wait()

    def prepare(self) -> None:
        """What a GPU can begin with, while others are still exchanged; on a CPU it would only keep them waiting.

        Once; what goes wrong comes out of `run`.
        """
        prepare, self._prepare = self._prepare, None
        if prepare is None or self._device.type != "cuda":
            return
        try:
            self._on_own_stream(prepare)
        except BaseException as error:
            self._error = error

    def run(self) -> None:
        """On the bucket's device, on a stream of this thread's own."""
        if self._error is not None:
            raise self._error
        if self._device.type == "cuda":
            self._on_own_stream(self._job)
        else:
            self._job()
        self._done.set()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self._done.set()
        if self._on_error is not None:
            self._on_error(error)

    def _on_own_stream(self, call: Callable[[], None]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(_own_stream(self._device)):
            if self._input_ready is not None:
                self._input_ready.wait()
            call()
            self._output_ready = mark(self._device)


class _Failure:
    """What went wrong first. Its traceback holds on to the model, so the thread itself only refers to it weakly."""

    error: BaseException | None = None


class ReductionThread:
    """After a job has failed, every later one fails with the same error: its peers are no longer in step.

    The thread ends when this is stopped or collected.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._failure = _Failure()
        self._thread = threading.Thread(
            target=_serve, args=(self._jobs, weakref.ref(self._failure)), name="oktopk-reductions", daemon=True
        )
        self._thread.start()
        self._end = weakref.finalize(self, self._jobs.put, None)
        self._end.atexit = False
        _alive.add(self)

    def submit(
        self,
        job: Callable[[], None],
        device: torch.device,
        *,
        input_ready: Any = None,
        prepare: Callable[[], None] | None = None,
        on_error: Callable[[BaseException], None] | None = None,
    ) -> Ticket:
        """Hand in a job.

        Args:
            job: What to do.
            device: Where its bucket is.
            input_ready: `mark(device)`, taken by whoever made the input.
            prepare: Comes before the job and may come before the jobs of others.
            on_error: Is told of an error, on the thread.
        """
        if not self._thread.is_alive():
            raise RuntimeError("reductions were closed: nothing can be reduced any more")
        ticket = Ticket(job, device, input_ready, prepare, on_error)
        self._jobs.put(ticket)
        return ticket

    @property
    def failed(self) -> bool:
        return self._failure.error is not None

    def settle(self) -> None:
        """Wait until all that was handed in is over, whatever became of it."""
        if self._thread.is_alive():
            self.submit(lambda: None, torch.device("cpu")).await_end()

    def forget_failure(self) -> None:
        """Jobs that are handed in from now on are done again. Call it when all ranks start anew and this is settled."""
        self._failure.error = None

    def close(self) -> None:
        """Finish what was handed in, then end the thread. Harmless when repeated."""
        self.end(None)

    def end(self, patience_s: float | None) -> None:
        """As `close`, waiting no longer than that."""
        self._end()
        self._thread.join(patience_s)


_alive: weakref.WeakSet[ReductionThread] = weakref.WeakSet()
_EXIT_PATIENCE_S = 5.0


@atexit.register
def _end_all() -> None:
    """End the threads before the interpreter goes: one that is stopped in the middle of C++ code aborts the process."""
    for thread in list(_alive):
        thread.end(_EXIT_PATIENCE_S)


def _serve(jobs: queue.SimpleQueue[Ticket | None], failure_of_owner: weakref.ref[_Failure]) -> None:
    """The thread holds no job while it waits for one, so that it keeps no model alive."""
    ahead: list[Ticket | None] = []
    while (ticket := ahead.pop() if ahead else jobs.get()) is not None:
        failure = failure_of_owner() or _Failure()
        try:
            if failure.error is not None:
                raise failure.error
            ticket.prepare()
            ahead = _one_ahead(jobs)
            ticket.run()
        except BaseException as error:
            failure.error = error
            ticket.fail(error)
        ticket = failure = None


def _one_ahead(jobs: queue.SimpleQueue[Ticket | None]) -> list[Ticket | None]:
    """The next job, prepared, if it was handed in already. No more than one, so that memory stays bounded."""
    try:
        following = jobs.get_nowait()
    except queue.Empty:
        return []
    if following is not None:
        following.prepare()
    return [following]


_streams = threading.local()


def _own_stream(device: torch.device) -> Any:
    """This thread's stream on that device."""
    key = str(device)
    if not hasattr(_streams, key):
        setattr(_streams, key, torch.cuda.Stream(device, priority=-1))  # ahead of what can wait
    return getattr(_streams, key)
