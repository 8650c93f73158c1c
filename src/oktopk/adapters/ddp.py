"""DistributedDataParallel: a communication hook that hands every bucket to an AllReducer."""

import gc
import weakref
from collections.abc import Collection, Iterable
from functools import partial
from typing import Any, Unpack, cast

import torch
from torch import Tensor
from torch.distributed import GradBucket, ProcessGroup  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from oktopk.adapters.grouped import check_norm_clip, remove_all
from oktopk.adapters.grouping import clip_
from oktopk.adapters.reduction_thread import ReductionThread, mark, weakly
from oktopk.allreducer import AllReducer
from oktopk.bucket import Bucket, Layout
from oktopk.comm.torchdist import TorchDistCommunicator, is_initialized
from oktopk.metrics.trainer_lists import MetricLists
from oktopk.reduce.description import ReducerFactory
from oktopk.registry import describe
from oktopk.settings import Settings, SettingsKeywords, lists_settings, settings_from

TensorFuture = torch.futures.Future[Tensor]


class HookState:
    """The state of `oktopk.hook`, for DDP and for frameworks that take a pair of state and hook.

    It may be made before there is a process group: the communicator is made when the first bucket comes.

    Attributes:
        settings: What the AllReducer is made with.

    Example:
        >>> ddp_model.register_comm_hook(oktopk.HookState(density=0.01), oktopk.hook)
    """

    @lists_settings
    def __init__(
        self,
        reducer: str | ReducerFactory = "oktopk",
        *,
        named_parameters: Iterable[tuple[str, Parameter]] = (),
        process_group: ProcessGroup | None = None,
        trainer: MetricLists | None = None,
        norm_clip: float | None = None,
        dense_vectors: bool = False,
        find_unused_parameters: bool = False,
        settings: Settings | None = None,
        **keywords: Unpack[SettingsKeywords],
    ) -> None:
        """Make the state; not a collective call.

        Args:
            reducer: A name from the registry, or a function that makes a Reducer from ReducerSettings.
            named_parameters: Names for messages and saved states; without them parameters are numbered in the order in
                which DDP brings them.
            process_group: That of the DDP model; None: the default one.
            trainer: Its lists `sparsities`, `compression_ratios` and `communication_sizes` are filled.
            norm_clip: Scale this rank's gradient to at most this norm before it is compressed. Reductions then start
                when backward has ended.
            dense_vectors: Never compress parameters of one dimension: biases and norm layers.
            find_unused_parameters: As DDP has it: some parameters may get no gradient. Needs `named_parameters`.
            settings: All settings in one object; or give them as keywords, which override it:
            **keywords: See Settings.

        Raises:
            ValueError: An unknown reducer or setting, a value that cannot be, or no names for
                `find_unused_parameters`.
        """
        check_norm_clip(norm_clip)
        if isinstance(reducer, str):
            describe(reducer)  # an unknown name is refused here, not in the first backward
        self.settings = settings_from(settings, keywords)
        self._reducer = reducer
        self._process_group = process_group
        self._trainer = trainer
        self._norm_clip = norm_clip
        self._dense_vectors = dense_vectors
        named = list(named_parameters)
        if find_unused_parameters and not named:
            raise ValueError("find_unused_parameters=True needs named_parameters: pass model.named_parameters()")
        self._names = {id(parameter): name for name, parameter in named}
        self._may_be_unused = find_unused_parameters
        self._touched: set[str] = set()
        self._end_watching = self._watch_gradients(named if find_unused_parameters else [])
        self._allreducer: AllReducer | None = None
        self._thread: ReductionThread | None = None
        self._layouts: dict[tuple[int, ...], list[_Part]] = {}
        self._gathered: list[_Handed] = []
        self._held: list[_Handed] = []
        self._looked_for_scaler = False
        """In this step: looking through all objects takes a tenth of a second."""

    @property
    def allreducer(self) -> AllReducer:
        """The AllReducer; making it is a collective call, so all ranks ask for it at the same time."""
        if self._allreducer is None:
            self._allreducer = AllReducer(
                self._reducer,
                comm=lambda timeout_s: TorchDistCommunicator(timeout_s, self._process_group),
                trainer=self._trainer,
                settings=self.settings,
            )
            self._thread = ReductionThread()
            self._allreducer.on_load(weakly(self._thread, ReductionThread.settle), weakly(self, HookState._forget_step))
        return self._allreducer

    def submit(self, grad_bucket: GradBucket) -> TensorFuture:
        """Hand a bucket in; the future has the mean."""
        handed = _Handed(grad_bucket.buffer(), self._buckets(grad_bucket), grad_bucket.is_last())
        if handed.is_last:
            self._looked_for_scaler = False
        self.allreducer.busy = True
        self._gathered.append(handed)
        if handed.is_last and self._norm_clip is not None:
            clip_([each.buffer for each in self._gathered], self._norm_clip)
        if handed.is_last or self._norm_clip is None:  # clipping needs all gradients
            ready, self._gathered = self._gathered, []
            for each in ready:
                self._start(each)
        return handed.future.then(handed.result)

    def close(self) -> None:
        """End the background thread and release the communicator; nothing can be reduced afterwards."""
        self._end_watching()
        if self._thread is not None and self._allreducer is not None:
            self._thread.close()
            self._allreducer.close()

    def _start(self, handed: "_Handed") -> None:
        allreducer, thread = self.allreducer, self._thread
        assert thread is not None
        hold_back = self.settings.nonfinite == "skip"  # until the last bucket, nobody knows whether the step counts
        buckets: list[Bucket] = []

        def fill() -> list[Bucket]:
            buckets.extend(part.take_out(handed.buffer) for part in handed.parts)
            return buckets

        def job() -> None:
            self._held.append(handed)
            for part, bucket in zip(handed.parts, buckets or fill(), strict=True):
                allreducer.reduce(bucket)
                part.put_in(handed.buffer, bucket)
            if handed.is_last:
                allreducer.end_step()
            if handed.is_last or not hold_back:
                self._release(zero=hold_back and allreducer.last_step_skipped)

        def give_up(error: BaseException) -> None:
            self._held.append(handed)
            for each in self._held:
                each.fail(error)
            self._held.clear()

        def prepare() -> None:
            for bucket in fill():
                allreducer.prepare(bucket)

        device = handed.buffer.device
        thread.submit(job, device, input_ready=mark(device), prepare=prepare, on_error=give_up)

    def _release(self, zero: bool) -> None:
        for each in self._held:
            each.future.set_result(each.buffer.zero_() if zero else each.buffer)
        self._held.clear()

    def _forget_step(self) -> None:
        self._gathered.clear()
        self._touched.clear()
        if self._thread is not None:
            self._thread.forget_failure()

    # --- from DDP's words to ours

    def _buckets(self, grad_bucket: GradBucket) -> "list[_Part]":
        buffer, parameters = grad_bucket.buffer(), grad_bucket.parameters()
        key = tuple(map(id, parameters))
        if key not in self._layouts:
            self._refuse_what_cannot_be(buffer, parameters)
            self._layouts[key] = self._describe(parameters)
        parts = self._layouts[key]
        if not self._may_be_unused:
            return parts
        names = {slot.name for part in parts for slot in part.layout.slots}
        missing = frozenset(names - self._touched)  # DDP does not apply what nobody took part in
        self._touched -= names
        return [part.missing_some(missing) for part in parts]

    def _describe(self, parameters: list[Tensor]) -> "list[_Part]":
        for parameter in parameters:
            self._names.setdefault(id(parameter), f"parameter_{len(self._names)}")
        whole = Layout.of((self._names[id(p)], p.numel()) for p in parameters)
        vectors = [self._dense_vectors and p.dim() <= 1 for p in parameters]
        if len(set(vectors)) == 1:
            return [_Part(whole, None, dense=vectors[0])]
        parts: list[_Part] = []
        for dense in (False, True):
            slots = [slot for slot, is_vector in zip(whole.slots, vectors, strict=True) if is_vector is dense]
            spans = [(slot.offset, slot.offset + slot.numel) for slot in slots]
            parts.append(_Part(Layout.of((slot.name, slot.numel) for slot in slots), spans, dense=dense))
        return parts

    def _refuse_what_cannot_be(self, buffer: Tensor, parameters: list[Tensor]) -> None:
        if buffer.layout != torch.strided:
            names = [self._names.get(id(parameter), "a parameter") for parameter in parameters]
            raise ValueError(
                f"{', '.join(names)} has a gradient of {buffer.layout}: only dense ones can be reduced; "
                "make the embedding with sparse=False"
            )
        if not self._looked_for_scaler and any(_is_scaling(each) for each in gc.get_objects()):
            raise ValueError(
                "a torch.amp.GradScaler is in use: values that are owed would keep the scale they were made with, and "
                "the scaler would not see an overflow; train in bf16, which needs no scaling"
            )
        self._looked_for_scaler = True

    def _watch_gradients(self, named: list[tuple[str, Parameter]]) -> "weakref.finalize[..., Any]":
        """Note which parameters take part in a backward; to call what is returned is to end that."""
        trained = [(name, parameter) for name, parameter in named if parameter.requires_grad]
        me: weakref.ref[HookState] = weakref.ref(self)
        hooks = [cast("RemovableHandle", p.register_hook(partial(_touch, me, name))) for name, p in trained]
        end = weakref.finalize(self, remove_all, hooks)
        end.atexit = False
        return end


class _Part:
    """Some parameters of a DDP bucket; `spans` are their places in its buffer, None: all of it."""

    def __init__(
        self,
        layout: Layout,
        spans: list[tuple[int, int]] | None,
        dense: bool,
        missing: frozenset[str] = frozenset(),
    ) -> None:
        self.layout = layout
        self._spans = spans
        self._dense = dense
        self._missing = missing

    def missing_some(self, missing: frozenset[str]) -> "_Part":
        return _Part(self.layout, self._spans, self._dense, missing)

    def take_out(self, buffer: Tensor) -> Bucket:
        """The buffer itself, or a copy of some of it."""
        flat = buffer if self._spans is None else torch.cat([buffer[start:stop] for start, stop in self._spans])
        return Bucket(flat, self.layout, self._missing, self._dense)

    def put_in(self, buffer: Tensor, bucket: Bucket) -> None:
        """The means, where they were taken out."""
        if self._spans is not None:
            for slot, (start, stop) in zip(self.layout.slots, self._spans, strict=True):
                buffer[start:stop] = slot.part(bucket.flat)


class _Handed:
    """A bucket that DDP handed over, and what it waits for."""

    def __init__(self, buffer: Tensor, parts: list[_Part], is_last: bool) -> None:
        self.buffer = buffer
        self.parts = parts
        self.is_last = is_last
        self.future = _future_of(buffer)
        self._error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """The error stays out of the future: an exception in it reaches DDP garbled, or not at all on a GPU."""
        if not self.future.done():
            self._error = error
            self.future.set_result(self.buffer)

    def result(self, done: TensorFuture) -> Tensor:
        if self._error is not None:
            raise RuntimeError(f"{type(self._error).__name__}: {self._error}") from self._error
        return done.value()


@lists_settings
def attach(
    ddp_model: DistributedDataParallel,
    reducer: str | ReducerFactory = "oktopk",
    *,
    trainer: MetricLists | None = None,
    norm_clip: float | None = None,
    dense_vectors: bool = False,
    settings: Settings | None = None,
    **keywords: Unpack[SettingsKeywords],
) -> AllReducer:
    """Let `ddp_model` exchange its gradients through an AllReducer.

    Call once on every rank, after DDP was built and before the first backward. `oktopk.detach(ddp_model)` undoes it.

    An error during a reduction comes out of `backward()`, as a RuntimeError that quotes it. With nonfinite="skip" a
    skipped step leaves gradients of zero: leave out `optimizer.step()` where `allreducer.last_step_skipped`, or
    momentum and decay still move the parameters. Save `allreducer.state_dict()` after `optimizer.step()`, together with
    the parameters. For SGD with momentum, set `momentum_correction` and give the optimizer none.

    Args:
        ddp_model: The model; ranks are those of its process group.
        reducer: A name from the registry, or a function that makes a Reducer from ReducerSettings.
        trainer: Its lists `sparsities`, `compression_ratios` and `communication_sizes` are filled.
        norm_clip: Scale this rank's gradient to at most this norm before it is compressed. Reductions then start when
            backward has ended.
        dense_vectors: Never compress parameters of one dimension: biases and norm layers. Costs a copy of the bucket.
        settings: All settings in one object; or give them as keywords, which override it:
        **keywords: See Settings.

    Returns:
        The AllReducer: its `state_dict` holds what is owed, its listeners see every reduction.

    Raises:
        ValueError: No DDP model, one that has a hook already, an unknown setting, or a value that cannot be. Also, from
            the first backward, where a torch.amp.GradScaler is in use in this process.

    Example:
        >>> model = DistributedDataParallel(model)
        >>> allreducer = oktopk.attach(model, density=0.01)
    """
    if not isinstance(ddp_model, DistributedDataParallel):
        raise ValueError(
            f"attach() needs a DistributedDataParallel model, got {type(ddp_model).__name__}; "
            "without DDP use oktopk.DistributedOptimizer"
        )
    _check_switch(ddp_model, "attach() needs its place")
    module, process_group = cast("torch.nn.Module", ddp_model.module), cast("ProcessGroup", ddp_model.process_group)
    state = HookState(
        reducer,
        named_parameters=list(module.named_parameters()),
        process_group=process_group,
        trainer=trainer,
        norm_clip=norm_clip,
        dense_vectors=dense_vectors,
        find_unused_parameters=bool(ddp_model.find_unused_parameters),
        settings=settings,
        **keywords,
    )
    allreducer = state.allreducer
    _set_switch(ddp_model, state, "attach() needs its place")
    return allreducer


def detach(ddp_model: DistributedDataParallel) -> None:
    """Let `ddp_model` average its gradients itself again, and release what `attach` made. What is owed is dropped.

    Raises:
        ValueError: Nothing is attached.

    Example:
        >>> oktopk.detach(ddp_model)
        >>> allreducer = oktopk.attach(ddp_model, density=0.001)
    """
    switch = _switch_of(ddp_model)
    if switch is None or not isinstance(switch.state, HookState):
        raise ValueError("detach(): nothing is attached to this model")
    state, switch.state = switch.state, None
    state.close()


def ddp_models_of(wanted: Collection[int]) -> list[DistributedDataParallel]:
    """The DDP models that have one of these parameters, given by their ids. Looks at all objects that there are."""
    if not is_initialized():
        return []
    models = [each for each in gc.get_objects() if DistributedDataParallel in type(each).__mro__]
    return [model for model in models if any(id(p) in wanted for p in model.parameters())]


class QuietModels:
    """The DDP models of some parameters, kept from exchanging anything: an optimizer does it for them.

    DDP may be built after the optimizer: the models are looked for at once, and again at the first gradient.
    """

    def __init__(self, parameters: Iterable[Parameter], num_ranks: int) -> None:
        self._wanted = {id(parameter) for parameter in parameters}
        self._num_ranks = num_ranks
        self._models: list[weakref.ref[DistributedDataParallel]] = []
        self._is_complete = False
        self._look()

    def __bool__(self) -> bool:
        """Whether there are any."""
        return any(each() is not None for each in self._models)

    def is_accumulating(self) -> bool:
        """Whether a model is under `no_sync()`. Asked at a gradient, when the models are there."""
        if not self._is_complete:
            self._look()
            self._is_complete = True
        models = (each() for each in self._models)
        return any(model is not None and not model.require_backward_grad_sync for model in models)

    def remove(self) -> None:
        """The models average their gradients themselves again."""
        for each in self._models:
            model = each()
            switch = None if model is None else _switch_of(model)
            if switch is not None and switch.state is self:
                switch.state = None
        self._models.clear()

    def submit(self, grad_bucket: GradBucket) -> TensorFuture:
        """The bucket as it is."""
        future = _future_of(grad_bucket.buffer())
        future.set_result(grad_bucket.buffer())
        return future

    def _look(self) -> None:
        known = {id(each()) for each in self._models}
        for found in ddp_models_of(self._wanted):
            if id(found) not in known:
                self._keep_quiet(found)

    def _keep_quiet(self, model: DistributedDataParallel) -> None:
        process_group = cast("ProcessGroup", model.process_group)
        if process_group.size() != self._num_ranks:
            raise ValueError(
                f"the DDP model has a process group of {process_group.size()} ranks, the optimizer has "
                f"{self._num_ranks}: give both the same, the optimizer through comm="
            )
        strangers = [name for name, p in model.named_parameters() if p.requires_grad and id(p) not in self._wanted]
        if strangers:
            raise ValueError(
                f"the DDP model has {strangers[0]!r} and {len(strangers) - 1} more parameters that the optimizer has "
                "not: with DDP's own exchange off they would differ between ranks; give the optimizer all of them"
            )
        _set_switch(model, self, "an oktopk optimizer exchanges the updates of its parameters")
        self._models.append(weakref.ref(model))


def _future_of(buffer: Tensor) -> TensorFuture:
    """A future that a buffer will be set into."""
    return torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else [])


class _Switch:
    """DDP keeps its hook for good: this lets it be changed."""

    def __init__(self, state: HookState | QuietModels, process_group: ProcessGroup) -> None:
        self.state: HookState | QuietModels | None = state
        self.process_group = process_group


def _set_switch(model: DistributedDataParallel, state: HookState | QuietModels, why: str) -> None:
    """ValueError where the model has a hook already."""
    _check_switch(model, why)
    switch = _switch_of(model)
    if switch is None:
        process_group = cast("ProcessGroup", model.process_group)
        model.register_comm_hook(_Switch(state, process_group), _switched_hook)
    else:
        switch.state = state


def _check_switch(model: DistributedDataParallel, why: str) -> None:
    switch = _switch_of(model)
    if switch is None and model._comm_hooks:  # pyright: ignore[reportPrivateUsage]
        raise ValueError(f"this DDP model has a communication hook already, and DDP takes only one: {why}")
    if switch is not None and isinstance(switch.state, HookState):
        raise ValueError(f"attach() was called on this model before: call oktopk.detach(ddp_model) first; {why}")
    if switch is not None and switch.state is not None:
        raise ValueError(f"an oktopk optimizer exchanges this model's updates: call its close() first; {why}")


def _switch_of(ddp_model: DistributedDataParallel) -> _Switch | None:
    registered = cast("list[tuple[Any, Any]]", getattr(ddp_model, "_comm_hooks", []))
    return next((state for _, state in registered if isinstance(state, _Switch)), None)


# DDP reads these annotations at run time, which is why they are not postponed in this file.
def hook(state: HookState, bucket: GradBucket) -> TensorFuture:
    """DDP's communication hook, for a `HookState`.

    Returns:
        A future of the bucket's mean over all ranks.

    Example:
        >>> ddp_model.register_comm_hook(oktopk.HookState(density=0.01), oktopk.hook)
    """
    return state.submit(bucket)


def _switched_hook(switch: _Switch, bucket: GradBucket) -> TensorFuture:
    return allreduce_hook(switch.process_group, bucket) if switch.state is None else switch.state.submit(bucket)


def _touch(state: "weakref.ref[HookState]", name: str, gradient: Tensor) -> None:
    """Called by autograd for every parameter that takes part in a backward."""
    del gradient
    alive = state()
    if alive is not None:
        alive._touched.add(name)  # pyright: ignore[reportPrivateUsage]


def _is_scaling(candidate: object) -> bool:
    scaler = type(candidate)
    return issubclass(scaler, torch.amp.GradScaler) and getattr(candidate, "_scale", None) is not None
