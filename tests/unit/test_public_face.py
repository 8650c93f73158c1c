"""What users see: signatures, docstrings, keywords, what an import brings, and the two ways to hook into DDP."""

from __future__ import annotations

import dataclasses
import gc
import inspect
import io
import json
import logging
import pydoc
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817

import oktopk
from oktopk.comm import Communicator, SimulatedCommunicator, World, simulate
from oktopk.settings import SettingsKeywords
from tests.integration.training import Net, flat_parameters, loss_of
from tests.worlds import ROOT, GlooWorld

FIELDS = {item.name: item for item in dataclasses.fields(oktopk.Settings)}
TAKES_SETTINGS: dict[str, Callable[..., Any]] = {
    "attach": oktopk.attach,
    "DistributedOptimizer": oktopk.DistributedOptimizer,
    "AllReducer": oktopk.AllReducer,
    "HookState": oktopk.HookState,
}
SPARSE: dict[str, Any] = {"warmup_steps": 2, "density": 0.1, "min_sparse_numel": 0, "guard_every": 1, "timeout_s": 30.0}
TINY_BUCKETS = 1200 / 2**20


def call(name: str, **keywords: Any) -> Any:
    """With as little as each needs; closed by whoever drops it."""
    if name == "attach":
        return oktopk.attach(DDP(Net()), **keywords)
    if name == "DistributedOptimizer":
        model = Net()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        return oktopk.DistributedOptimizer(inner, model.named_parameters(), **keywords).allreducer
    return TAKES_SETTINGS[name](**keywords)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as a Gloo world of one."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    gc.collect()
    dist.destroy_process_group()


# --- signatures and help


@pytest.mark.parametrize("name", TAKES_SETTINGS)
def test_the_signature_lists_every_setting_with_its_default(name: str) -> None:
    parameters = inspect.signature(TAKES_SETTINGS[name]).parameters
    types = get_type_hints(oktopk.Settings)
    for key, item in FIELDS.items():
        assert parameters[key].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[key].default == item.default
        assert parameters[key].annotation == types[key]
    assert not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()), "nothing hides in **keywords"
    assert parameters["settings"].default is None
    assert parameters["reducer"].default == "oktopk"


@pytest.mark.parametrize("name", TAKES_SETTINGS)
def test_help_explains_every_argument(name: str) -> None:
    shown = io.StringIO()
    pydoc.Helper(output=shown)(TAKES_SETTINGS[name])
    text = shown.getvalue()
    for parameter in inspect.signature(TAKES_SETTINGS[name]).parameters:
        assert f" {parameter}: " in text, parameter
    for key, item in FIELDS.items():
        assert item.metadata["help"] in text, key
    assert "**keywords" not in text
    assert "Raises:" in text


def test_the_keywords_for_type_checkers_are_the_fields_of_settings() -> None:
    assert get_type_hints(SettingsKeywords) == get_type_hints(oktopk.Settings)
    assert list(SettingsKeywords.__annotations__) == list(FIELDS)
    assert SettingsKeywords.__required_keys__ == frozenset()


def test_everything_public_is_there_and_has_a_docstring() -> None:
    assert sorted(oktopk.__all__) == list(oktopk.__all__)
    for name in oktopk.__all__:
        assert inspect.getdoc(getattr(oktopk, name)), name


CALLED_BY_USERS = ["AllReducer", "DistributedOptimizer", "HookState", "Settings", "attach", "detach", "hook"]


@pytest.mark.parametrize("name", CALLED_BY_USERS)
def test_there_is_an_example_for_what_users_call(name: str) -> None:
    text = inspect.getdoc(getattr(oktopk, name)) or ""
    assert "Example:" in text
    assert ">>> " in text.split("Example:")[1]


def methods_of(cls: type) -> dict[str, Callable[..., Any]]:
    return {name: method for name, method in vars(cls).items() if inspect.isfunction(method) and name[0] != "_"}


PUBLIC_METHODS = {
    f"{cls.__name__}.{name}": method
    for cls in (oktopk.AllReducer, oktopk.DistributedOptimizer, oktopk.HookState)
    for name, method in methods_of(cls).items()
}
FROM_TORCH = {"DistributedOptimizer.zero_grad", "DistributedOptimizer.add_param_group"}


@pytest.mark.parametrize("name", sorted(PUBLIC_METHODS))
def test_public_methods_have_docstrings(name: str) -> None:
    if name not in FROM_TORCH:
        assert PUBLIC_METHODS[name].__doc__, name


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("attach", ["Args:", "Returns:", "Raises:", "Example:"]),
        ("detach", ["Raises:", "Example:"]),
        ("AllReducer.reduce", ["Returns:", "Raises:"]),
        ("AllReducer.state_dict", ["Raises:"]),
        ("AllReducer.load_state_dict", ["Raises:"]),
        ("AllReducer.add_listener", ["Returns:"]),
        ("AllReducer.watch", ["Returns:"]),
        ("AllReducer.__init__", ["Args:", "Raises:"]),
        ("HookState.__init__", ["Args:", "Raises:"]),
        ("DistributedOptimizer.__init__", ["Args:", "Raises:"]),
        ("DistributedOptimizer.step", ["Args:", "Returns:", "Raises:"]),
        ("DistributedOptimizer.synchronize", ["Raises:"]),
        ("DistributedOptimizer.state_dict", ["Raises:"]),
        ("DistributedOptimizer.training_state_dict", ["Returns:", "Raises:"]),
        ("DistributedOptimizer.load_training_state_dict", ["Raises:"]),
        ("AllReducer", ["Attributes:"]),
        ("DistributedOptimizer", ["Attributes:"]),
        ("HookState", ["Attributes:"]),
        ("StepStats", ["Attributes:"]),
        ("Bucket", ["Attributes:"]),
        ("Layout", ["Attributes:"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_docstrings_say_what_goes_in_and_comes_out(name: str, parts: list[str]) -> None:
    found: Any = oktopk
    for step in name.split("."):
        found = getattr(found, step)
    for part in parts:
        assert part in (inspect.getdoc(found) or ""), part


# --- keywords


@pytest.mark.parametrize("name", TAKES_SETTINGS)
@pytest.mark.usefixtures("alone")
def test_an_unknown_keyword_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ValueError, match="densty") as caught:
        call(name, densty=0.1)
    for key in FIELDS:
        assert key in str(caught.value)


@pytest.mark.parametrize("name", TAKES_SETTINGS)
@pytest.mark.usefixtures("alone")
def test_a_settings_object_works_and_keywords_override_it(name: str) -> None:
    settings = oktopk.Settings(density=0.25, warmup_steps=3, timeout_s=20.0)
    made = call(name, settings=settings, warmup_steps=7)
    assert made.settings == dataclasses.replace(settings, warmup_steps=7)
    assert settings.warmup_steps == 3
    assert call(name, settings=settings).settings == settings
    assert call(name).settings == oktopk.Settings()


@pytest.mark.parametrize("name", TAKES_SETTINGS)
@pytest.mark.usefixtures("alone")
def test_what_cannot_be_is_refused_everywhere(name: str) -> None:
    for wrong in ({"density": 0.0}, {"tau": 0}, {"kernels": "cuda"}, {"nonfinite": "ignore"}):
        (key,) = wrong
        with pytest.raises(ValueError, match=key):
            call(name, **wrong)
    with pytest.raises(ValueError, match=r"oktopk\.Settings"):
        call(name, settings={"density": 0.1})


@pytest.mark.parametrize("norm_clip", [0.0, -1.0, float("nan")])
@pytest.mark.parametrize("name", ["attach", "DistributedOptimizer", "HookState"])
@pytest.mark.usefixtures("alone")
def test_a_norm_that_cannot_be_is_refused(name: str, norm_clip: float) -> None:
    with pytest.raises(ValueError, match="norm_clip"):
        call(name, norm_clip=norm_clip)


def pyright_says(tmp_path: Path, code: str) -> list[tuple[int, str]]:
    """Line and rule of every complaint; strict, as the project itself is checked."""
    (tmp_path / "user.py").write_text(textwrap.dedent(code))
    config = {"venvPath": str(ROOT), "venv": ".venv", "pythonVersion": "3.11", "typeCheckingMode": "standard"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(config | {"extraPaths": [str(ROOT / "src")]}))
    pyright = Path(sys.executable).parent / "pyright"
    done = subprocess.run(
        [str(pyright), "--outputjson", "--project", str(tmp_path)], capture_output=True, text=True, timeout=150
    )
    complaints = json.loads(done.stdout)["generalDiagnostics"]
    return sorted((each["range"]["start"]["line"] + 1, each.get("rule", "")) for each in complaints)


def test_a_type_checker_knows_the_settings(tmp_path: Path) -> None:
    code = """\
        import torch
        from torch.nn.parallel import DistributedDataParallel
        import oktopk

        def use(ddp: DistributedDataParallel, inner: torch.optim.Optimizer, model: torch.nn.Module) -> None:
            oktopk.attach(ddp, density=0.01, kernels="numba", norm_clip=1.0, dense_vectors=True)
            oktopk.attach(ddp, "gtopk", density=lambda step: 0.1, settings=oktopk.Settings(tau=3))
            oktopk.DistributedOptimizer(inner, model.named_parameters(), momentum_correction=0.9)
            oktopk.AllReducer("oktopk", nonfinite="skip").add_listener(print).remove()
            ddp.register_comm_hook(oktopk.HookState(wire_dtype="bf16"), oktopk.hook)
            oktopk.attach(ddp, densty=0.01)
            oktopk.attach(ddp, density="much")
            oktopk.DistributedOptimizer(inner, model.named_parameters(), warmup=3)
            oktopk.DistributedOptimizer(inner, model.named_parameters(), warmup_steps=3.5)
            oktopk.AllReducer("oktopk", nonfinite="ignore")
            oktopk.HookState(kernels="cuda")
            oktopk.HookState(tua=3)
            oktopk.Settings(density=None)
        """
    complaints = pyright_says(tmp_path, code)
    assert [line for line, _ in complaints] == list(range(11, 19)), complaints
    assert {rule for _, rule in complaints} == {"reportCallIssue", "reportArgumentType"}


# --- imports


HEAVY = [
    "matplotlib",
    "rich",
    "numba",
    "llvmlite",
    "jiwer",
    "soundfile",
    "tensorboard",
    "transformers",
    "mpi4py",
    "triton.language",
    "oktopk.workbench",
]


def test_an_import_brings_nothing_heavy() -> None:
    code = f"import sys, oktopk; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "[]"


# --- the pair of state and hook


def test_the_hook_has_a_plain_name() -> None:
    """Frameworks look hooks up by it."""
    assert oktopk.hook.__qualname__ == "hook"
    assert oktopk.hook.__module__.startswith("oktopk.")


def test_a_hook_state_needs_no_process_group() -> None:
    assert not dist.is_initialized()
    state = oktopk.HookState(density=0.05)
    assert state.settings.density == 0.05


def as_a_pair(ddp: DDP, settings: dict[str, Any]) -> None:
    ddp.register_comm_hook(oktopk.HookState(**settings), oktopk.hook)


def as_a_named_pair(ddp: DDP, settings: dict[str, Any]) -> None:
    """With a generator, as users have it, that can be read once."""
    state = oktopk.HookState(
        named_parameters=ddp.module.named_parameters(), find_unused_parameters=True, process_group=None, **settings
    )
    ddp.register_comm_hook(state, oktopk.hook)


def attached(ddp: DDP, settings: dict[str, Any]) -> None:
    oktopk.attach(ddp, **settings)


def plain(ddp: DDP, settings: dict[str, Any]) -> None:
    del ddp, settings


WAYS = {"pair": as_a_pair, "named pair": as_a_named_pair, "attach": attached, "plain": plain}


def trained(way: str, settings: dict[str, Any], ddp_options: dict[str, Any]) -> Tensor:
    model = DDP(Net(), **ddp_options)
    WAYS[way](model, settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(8):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return flat_parameters(model)


def test_the_pair_trains_with_the_bits_of_attach(gloo2: GlooWorld) -> None:
    options = {"bucket_cap_mb": TINY_BUCKETS}
    ours = gloo2.run(trained, "attach", SPARSE, options)
    assert torch.equal(ours[0], ours[1])
    assert torch.equal(gloo2.run(trained, "pair", SPARSE, options)[0], ours[0])
    assert not torch.equal(gloo2.run(trained, "plain", {}, options)[0], ours[0])


def test_names_may_come_from_a_generator(gloo2: GlooWorld) -> None:
    """Every parameter takes part: with none watched, all would count as unused and nothing would be learnt."""
    options = {"bucket_cap_mb": TINY_BUCKETS, "find_unused_parameters": True}
    ours = gloo2.run(trained, "attach", SPARSE, options)[0]
    assert not torch.equal(ours, flat_parameters(Net()))
    assert torch.equal(gloo2.run(trained, "named pair", SPARSE, options)[0], ours)


def test_unused_parameters_need_names() -> None:
    with pytest.raises(ValueError, match="named_parameters"):
        oktopk.HookState(find_unused_parameters=True)


def made_before_the_group(store: str, rank: int) -> Tensor:
    dist.destroy_process_group()
    state = oktopk.HookState(**SPARSE)
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    model = DDP(Net())
    model.register_comm_hook(state, oktopk.hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, dist.get_rank(), step).backward()
        optimizer.step()
    return flat_parameters(model)


def made_by_rank(store: str) -> Tensor:
    return made_before_the_group(store, dist.get_rank())


def test_a_state_made_before_the_process_group_trains(tmp_path: Path) -> None:
    world = GlooWorld(2)  # of its own: its process group is replaced
    try:
        first, second = world.run(made_by_rank, str(tmp_path / "second"))
    finally:
        world.close()
    assert torch.equal(first, second)
    assert not torch.equal(first, flat_parameters(Net()))


# --- detach and attach again


def gradients(model: DDP, step: int) -> Tensor:
    model.zero_grad()
    loss_of(model, dist.get_rank(), step).backward()
    return torch.cat([p.grad.reshape(-1).clone() for p in model.parameters() if p.grad is not None])


def attach_detach_attach() -> dict[str, bool]:
    options = {"bucket_cap_mb": TINY_BUCKETS}
    reference, model = DDP(Net(), **options), DDP(Net(), **options)
    settings = SPARSE | {"warmup_steps": 0}
    first = oktopk.attach(model, **settings)
    found = {}
    for step in range(3):
        expected, sparse = gradients(reference, step), gradients(model, step)
    found["sparse while attached"] = not torch.equal(expected, sparse)
    try:
        oktopk.attach(model, **settings)
    except ValueError as error:
        found["twice is refused"] = "detach" in str(error)
    found["still attached"] = not torch.equal(gradients(reference, 3), gradients(model, 3))
    oktopk.detach(model)
    found["plain once detached"] = all(torch.equal(gradients(reference, s), gradients(model, s)) for s in range(4, 7))
    second = oktopk.attach(model, "topkA", **settings)
    found["another one"] = second is not first and second.step == 0
    again = gradients(model, 7)
    found["sparse again"] = bool((again == 0).sum() > again.numel() // 2)
    found["counts"] = second.step == 1
    oktopk.detach(model)
    found["plain again"] = torch.equal(gradients(reference, 8), gradients(model, 8))
    return found


def test_attach_detach_attach(gloo2: GlooWorld) -> None:
    for found in gloo2.run(attach_detach_attach):
        assert len(found) == 8
        assert all(found.values()), found


@pytest.mark.usefixtures("alone")
def test_a_model_with_another_hook_is_refused() -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    groups = len(dist.distributed_c10d._world.pg_map)
    for hook, state in ((allreduce_hook, None), (oktopk.hook, oktopk.HookState())):
        model = DDP(Net())
        model.register_comm_hook(state, hook)
        with pytest.raises(ValueError, match="hook"):
            oktopk.attach(model)
        with pytest.raises(ValueError, match="nothing is attached"):
            oktopk.detach(model)
        gc.collect()
        assert len(dist.distributed_c10d._world.pg_map) == groups


def test_only_a_ddp_model_can_be_attached() -> None:
    with pytest.raises(ValueError, match="DistributedDataParallel"):
        oktopk.attach(Net())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="nothing is attached"):
        oktopk.detach(Net())  # pyright: ignore[reportArgumentType]


# --- clipping and vectors, under both adapters


def clipped_by_both(norm_clip: float, extra: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """A model of one bucket; the order of its parameters is the same under both."""
    rank = dist.get_rank()
    hooked = DDP(Net())
    oktopk.attach(hooked, norm_clip=norm_clip, **(SPARSE | extra))
    wrapped = Net()
    inner = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    wrapper = oktopk.DistributedOptimizer(inner, wrapped.named_parameters(), norm_clip=norm_clip, **(SPARSE | extra))
    optimizer = torch.optim.SGD(hooked.parameters(), lr=0.5)
    for step in range(10):
        for model, each in ((hooked, optimizer), (wrapped, wrapper)):
            each.zero_grad()
            loss_of(model, rank, step).backward()
            each.step()
    oktopk.detach(hooked)
    wrapper.close()
    return flat_parameters(hooked), flat_parameters(wrapped)


@pytest.mark.parametrize("extra", [{}, {"momentum_correction": 0.9}], ids=["plain", "momentum"])
def test_clipping_has_the_same_bits_under_both_adapters(extra: dict[str, Any], gloo2: GlooWorld) -> None:
    results = gloo2.run(clipped_by_both, 0.1, extra)
    for hooked, wrapped in results:
        assert torch.equal(hooked, wrapped)
        assert torch.equal(hooked, results[0][0])
    assert not torch.equal(gloo2.run(clipped_by_both, 1e6, extra)[0][0], results[0][0]), "nothing was clipped"


def clipped_norms(ddp_options: dict[str, Any]) -> list[float]:
    """Of the dense mean over two ranks, each clipped before: at most the limit."""
    model = DDP(Net(), **ddp_options)
    oktopk.attach(model, "dense", norm_clip=0.05)
    norms = [float(gradients(model, step).norm()) for step in range(4)]
    oktopk.detach(model)
    return norms


@pytest.mark.parametrize("ddp_options", [{}, {"bucket_cap_mb": TINY_BUCKETS}, {"gradient_as_bucket_view": True}])
def test_clipping_is_over_all_buckets(ddp_options: dict[str, Any], gloo2: GlooWorld) -> None:
    for norms in gloo2.run(clipped_norms, ddp_options):
        assert all(0.01 < norm <= 0.05 * (1 + 1e-6) for norm in norms)


def vectors_under_attach(ddp_options: dict[str, Any]) -> tuple[list[bool], list[float], list[oktopk.StepStats]]:
    """For every step: whether the vectors got the plain mean bit for bit, and how full the matrices are."""
    reference, model = DDP(Net(), **ddp_options), DDP(Net(), **ddp_options)
    allreducer = oktopk.attach(model, dense_vectors=True, **(SPARSE | {"warmup_steps": 0}))
    told: list[oktopk.StepStats] = []
    allreducer.add_listener(told.append)
    exact, filled = [], []
    for step in range(6):
        gradients(reference, step)
        gradients(model, step)
        pairs = list(zip(reference.parameters(), model.parameters(), strict=True))
        exact.append(all(torch.equal(r.grad, m.grad) for r, m in pairs if r.dim() == 1))
        matrices = torch.cat([m.grad.reshape(-1) for _, m in pairs if m.dim() > 1])
        filled.append(float((matrices != 0).float().mean()))
    oktopk.detach(model)
    return exact, filled, told


@pytest.mark.parametrize("ddp_options", [{}, {"bucket_cap_mb": TINY_BUCKETS}], ids=["one bucket", "many"])
def test_dense_vectors_get_the_plain_mean_in_sparse_steps(ddp_options: dict[str, Any], gloo2: GlooWorld) -> None:
    """guard_every=1 checks the law in every step."""
    for exact, filled, told in gloo2.run(vectors_under_attach, ddp_options):
        assert exact == [True] * 6
        assert all(0.0 < part < 0.5 for part in filled)
        assert {stats.phase for stats in told} == {"dense", "sparse"}
        assert all("bias" in stats.bucket for stats in told if stats.phase == "dense")


# --- listeners


def test_handles_of_listeners_and_watchers_remove_them() -> None:
    allreducer = oktopk.AllReducer("oktopk", comm=SimulatedCommunicator(World(1), 0), warmup_steps=0)
    layout = oktopk.Layout.of([("weight", 8)])
    told: list[int] = []
    seen: list[int] = []
    again: list[int] = []
    listening = allreducer.add_listener(lambda stats: told.append(stats.step))
    watching = allreducer.watch(lambda step, bucket: seen.append(step + 0 * bucket.numel))
    also = allreducer.add_listener(lambda stats: again.append(stats.step))
    for step in range(4):
        allreducer.reduce(oktopk.Bucket(torch.ones(8), layout))
        allreducer.end_step()
        if step == 0:
            watching.remove()
        if step == 1:
            listening.remove()
            listening.remove()
    assert (told, seen, again) == ([0, 1], [0], [0, 1, 2, 3])
    also.remove()


def test_a_listener_may_remove_itself() -> None:
    allreducer = oktopk.AllReducer("oktopk", comm=SimulatedCommunicator(World(1), 0), warmup_steps=0)
    layout = oktopk.Layout.of([("weight", 8)])
    told: list[str] = []

    def once(stats: oktopk.StepStats) -> None:
        told.append(f"once {stats.step}")
        handle.remove()

    def once_too(step: int, bucket: oktopk.Bucket) -> None:
        del bucket
        told.append(f"watched {step}")
        watching.remove()

    handle = allreducer.add_listener(once)
    watching = allreducer.watch(once_too)
    allreducer.watch(lambda step, _: told.append(f"watching {step}"))
    with allreducer.add_listener(lambda stats: told.append(f"always {stats.step}")):
        for _ in range(2):
            allreducer.reduce(oktopk.Bucket(torch.ones(8), layout))
            allreducer.end_step()
    assert told == ["watched 0", "watching 0", "once 0", "always 0", "watching 1", "always 1"]


def test_the_wrappers_handle_removes_too() -> None:
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    comm = SimulatedCommunicator(World(1), 0)
    optimizer = oktopk.DistributedOptimizer(inner, model.named_parameters(), comm=comm, **SPARSE)
    told: list[int] = []
    handle = optimizer.add_listener(lambda stats: told.append(stats.step))
    for step in range(3):
        loss_of(model, 0, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            handle.remove()
    optimizer.close()
    assert told == [0, 1]


# --- the warning about momentum


@pytest.mark.parametrize(
    ("momentum", "reducer", "correction", "warned"),
    [
        (0.9, "oktopk", 0.0, 1),
        (0.9, "gtopk", 0.0, 1),
        (0.9, "dense", 0.0, 0),
        (0.9, "none", 0.0, 0),
        (0.9, "oktopk", 0.9, 0),
        (0.0, "oktopk", 0.0, 0),
    ],
)
def test_momentum_behind_a_sparse_reducer_is_warned_of_once(
    momentum: float, reducer: str, correction: float, warned: int, caplog: pytest.LogCaptureFixture
) -> None:
    def run(comm: Communicator) -> None:
        model = Net()
        optimizer = oktopk.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum),
            model.named_parameters(),
            reducer,
            comm=comm,
            momentum_correction=correction,
        )
        for step in range(3):
            loss_of(model, comm.rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer.close()

    with caplog.at_level(logging.WARNING, logger="oktopk"):
        simulate(2, run)
    found = [record.getMessage() for record in caplog.records if "momentum" in record.getMessage()]
    assert len(found) == warned
    assert all("momentum_correction=0.9" in message for message in found)


def warnings_of(
    make: Callable[..., torch.optim.Optimizer], caplog: pytest.LogCaptureFixture, reducer: str = "oktopk"
) -> list[str]:
    model = nn.Linear(4, 2)
    comm = SimulatedCommunicator(World(1), 0)
    with caplog.at_level(logging.WARNING, logger="oktopk"):
        inner = make(model.parameters())
        oktopk.DistributedOptimizer(inner, model.named_parameters(), reducer, comm=comm).close()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad])
def test_optimizers_without_momentum_are_not_warned_of(
    make: Callable[..., torch.optim.Optimizer], caplog: pytest.LogCaptureFixture
) -> None:
    assert warnings_of(make, caplog) == []


@pytest.mark.parametrize(
    ("make", "better"),
    [(torch.optim.AdamW, "oktopk.optim.AdamW"), (torch.optim.Adam, "oktopk.optim.AdamW"), (torch.optim.NAdam, "Local")],
)
def test_adam_behind_a_sparse_reducer_is_warned_of_and_behind_a_dense_one_not(
    make: Callable[..., torch.optim.Optimizer], better: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = warnings_of(make, caplog)
    assert message.startswith(f"{make.__name__} behind a sparse reducer trains worse than dense: use ")
    assert better in message
    caplog.clear()
    assert warnings_of(make, caplog, "dense") == []


def test_a_hook_state_refuses_an_unknown_reducer_at_once() -> None:
    with pytest.raises(ValueError, match="unknown reducer 'nonsense'"):
        oktopk.HookState("nonsense")


@pytest.mark.parametrize(
    "damage",
    [{"step": "x"}, {"num_skipped_steps": None}, {"feedback": 3}, {"reducers": None}],
    ids=lambda d: next(iter(d)),
)
def test_a_damaged_state_changes_nothing(damage: dict[str, Any]) -> None:
    def rank(comm: Any) -> None:
        allreducer = oktopk.AllReducer("topkA", comm=comm, warmup_steps=0, min_sparse_numel=0, density=0.5)
        bucket = oktopk.Bucket(torch.tensor([4.0, 1.0]), oktopk.Layout.of([("a", 2)]))
        allreducer.reduce(bucket)
        allreducer.end_step()
        before = allreducer.state_dict()
        other = {**before, "feedback": {"residual": {"a": torch.tensor([9.0, 9.0])}}, **damage}
        with pytest.raises(ValueError, match=next(iter(damage))):
            allreducer.load_state_dict(other)
        after = allreducer.state_dict()
        assert after["step"] == before["step"] == 1
        assert after["feedback"]["residual"]["a"].tolist() == [0.0, 1.0]

    simulate(1, rank)
