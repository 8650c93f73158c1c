"""oktopk.optim on one rank: the same as torch where steps are dense; arguments, states, misuse, release."""

from __future__ import annotations

import gc
import inspect
import threading
import time
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from oktopk.metrics.step_stats import StepStats
from oktopk.optim import SGD, AdamW
from oktopk.optim.adamw import is_due
from tests.integration.update_oracle import furthest_of_adam, is_measured

WHOLE: dict[str, Any] = {"density": 1.0, "warmup_steps": 0, "min_sparse_numel": 0, "guard_every": 1}
SPARSE: dict[str, Any] = {"density": 0.25, "warmup_steps": 2, "min_sparse_numel": 0, "guard_every": 1}
SHAPES = {"weight": (6, 5), "bias": (6,), "scale": (), "other": (4, 3, 2)}
Optimizer = AdamW | SGD
Schedule = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SGD_OPTIONS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9},
    {"momentum": 0.9, "dampening": 0.3},
    {"dampening": 0.5},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    {"momentum": 0.8, "dampening": 0.5, "weight_decay": 0.1},
    {"weight_decay": 0.2},
    {"weight_decay": 0.2, "maximize": True},
    {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "maximize": True},
]
ADAMW_OPTIONS: list[dict[str, Any]] = [
    {},
    {"weight_decay": 0.0},
    {"betas": (0.9, 0.95), "weight_decay": 0.3},
    {"betas": (0.0, 0.9)},
    {"betas": (0.9, 0.5)},
    {"betas": (0.9, 0.81)},
    {"betas": (0.5, 0.0)},
    {"eps": 0.1},
    {"maximize": True, "weight_decay": 0.2},
]
CASES = [(SGD, torch.optim.SGD, options) for options in SGD_OPTIONS]
CASES += [(AdamW, torch.optim.AdamW, options) for options in ADAMW_OPTIONS]


def parameters(seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return {name: nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for name, shape in SHAPES.items()}


def gradient_of(name: str, step: int) -> Tensor:
    """Of several scales; `bias` stands still at first, and spikes come."""
    generator = torch.Generator().manual_seed(100 * step + list(SHAPES).index(name))
    gradient = torch.randn(SHAPES[name], generator=generator) * {"scale": 1e-3, "other": 30.0}.get(name, 1.0)
    return gradient * (0.0 if name == "bias" and step < 12 else 20.0 if step % 17 == 9 else 1.0)


def give(params: dict[str, nn.Parameter], step: int) -> None:
    for name, p in params.items():
        p.grad = gradient_of(name, step).to(p.dtype)


def train(optimizer: torch.optim.Optimizer, params: dict[str, nn.Parameter], steps: range | int) -> list[Tensor]:
    seen = []
    for step in range(steps) if isinstance(steps, int) else steps:
        give(params, step)
        optimizer.step()
        seen.append(flat(params))
    return seen


def flat(params: dict[str, nn.Parameter]) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in params.values()])


def assert_close(got: Tensor, want: Tensor) -> None:
    """To fp32 rounding of the largest of them, over some dozens of steps."""
    torch.testing.assert_close(got, want, rtol=2e-5, atol=3e-6 * max(1.0, float(want.abs().max())))


def same(left: Any, right: Any) -> bool:
    """Bit for bit, through dicts and lists."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


def model_and(make: type[AdamW] | type[SGD] = AdamW, **options: Any) -> tuple[nn.Module, Optimizer]:
    """Some layers with autograd, for what happens between backward and step."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 2))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator))
    return model, make(model.named_parameters(), lr=0.01, **(SPARSE | options))


def backward(model: nn.Module, step: int = 0) -> None:
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(step))
    model(x).square().mean().backward()


# --- dense: torch's optimizers


@pytest.mark.parametrize(("ours", "torchs", "options"), CASES, ids=lambda case: str(getattr(case, "__name__", case)))
def test_at_density_one_it_is_torchs(
    ours: type[AdamW] | type[SGD], torchs: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    mine, theirs = parameters(), parameters()
    optimizer = ours(mine.items(), lr=0.02, **options, **WHOLE)
    expected = train(torchs(theirs.values(), lr=0.02, **options), theirs, 40)
    for got, want in zip(train(optimizer, mine, 40), expected, strict=True):
        assert_close(got, want)
    optimizer.close()


GROUP_OPTIONS: dict[type, tuple[dict[str, Any], dict[str, Any]]] = {
    AdamW: ({"weight_decay": 0.3, "betas": (0.8, 0.99)}, {"lr": 0.05, "eps": 1e-3}),
    SGD: ({"weight_decay": 0.3, "momentum": 0.5}, {"lr": 0.05, "nesterov": True, "momentum": 0.9}),
}
SCHEDULES: dict[str, Schedule] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 5, gamma=0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 30),
    "warm-up": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10),
    "one cycle, of momentum too": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, [0.1, 0.05], total_steps=40),
    "to zero": lambda optimizer: lr_scheduler.LambdaLR(optimizer, [lambda step: float(step % 7 != 3), lambda _: 1.0]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("ours", "torchs"), [(AdamW, torch.optim.AdamW), (SGD, torch.optim.SGD)])
def test_groups_and_schedulers_act_as_in_torch_and_warn_of_nothing(
    ours: type[AdamW] | type[SGD], torchs: type[torch.optim.Optimizer], schedule: str
) -> None:
    def run(make: Callable[..., torch.optim.Optimizer], with_schedule: bool, **settings: Any) -> list[Tensor]:
        params = parameters()
        first, second = GROUP_OPTIONS[ours]
        groups = [
            {"params": [(name, params[name]) for name in ("weight", "other")], **first},
            {"params": [(name, params[name]) for name in ("bias", "scale")], **second},
        ]
        optimizer = make(groups, lr=0.02, **settings)
        scheduler = SCHEDULES[schedule](optimizer)
        seen = []
        for step in range(36):
            seen += train(optimizer, params, range(step, step + 1))
            if with_schedule:
                scheduler.step()
        if isinstance(optimizer, AdamW | SGD):
            optimizer.close()
        return seen

    expected = run(torchs, True)
    for got, want in zip(run(ours, True, **WHOLE), expected, strict=True):
        assert_close(got, want)
    assert not torch.allclose(run(torchs, False)[-1], expected[-1], rtol=1e-3), "nothing was scheduled"


def test_a_learning_rate_may_be_a_tensor() -> None:
    mine, theirs = parameters(), parameters()
    optimizer = AdamW(mine.items(), lr=torch.tensor(0.02), **WHOLE)
    plain = torch.optim.AdamW(theirs.values(), lr=0.02)
    for step in range(10):
        optimizer.param_groups[0]["lr"].fill_(0.02 / (step + 1))
        plain.param_groups[0]["lr"] = 0.02 / (step + 1)
        train(optimizer, mine, range(step, step + 1))
        train(plain, theirs, range(step, step + 1))
    assert_close(flat(mine), flat(theirs))
    optimizer.close()


def test_a_second_step_without_a_new_backward_takes_the_same_gradients_again() -> None:
    mine, theirs = parameters(), parameters()
    optimizer, plain = AdamW(mine.items(), lr=0.02, **WHOLE), torch.optim.AdamW(theirs.values(), lr=0.02)
    for each, params in ((optimizer, mine), (plain, theirs)):
        give(params, 3)
        for _ in range(4):
            each.step()
    assert_close(flat(mine), flat(theirs))
    optimizer.close()


def test_gradients_are_left_as_they_are() -> None:
    """As in torch: what the next backward adds to is this rank's own."""
    params = parameters()
    optimizer = AdamW(params.items(), **SPARSE)
    for step in range(5):
        give(params, step)
        before = [p.grad.clone() for p in params.values()]
        optimizer.step()
        assert all(torch.equal(p.grad, g) for p, g in zip(params.values(), before, strict=True))
    optimizer.close()


def test_parameters_of_any_memory_layout() -> None:
    """Channels last, transposed: state and updates go by logical place."""

    def make() -> list[tuple[str, nn.Parameter]]:
        generator = torch.Generator().manual_seed(4)
        kernel = torch.randn(4, 3, 5, 5, generator=generator).to(memory_format=torch.channels_last)
        return [("kernel", nn.Parameter(kernel)), ("matrix", nn.Parameter(torch.randn(6, 4, generator=generator).T))]

    mine, theirs = make(), make()
    for ours, torchs, options in (
        (AdamW, torch.optim.AdamW, {"weight_decay": 0.1}),
        (SGD, torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
    ):
        optimizer, plain = ours(mine, lr=0.01, **options, **WHOLE), torchs(theirs, lr=0.01, **options)
        for step in range(8):
            generator = torch.Generator().manual_seed(step)
            for (_, p), (_, q) in zip(mine, theirs, strict=True):
                g = torch.randn(p.shape, generator=generator)
                p.grad, q.grad = torch.empty_like(p).copy_(g), g
            optimizer.step()
            plain.step()
        optimizer.close()
        for (_, p), (_, q) in zip(mine, theirs, strict=True):
            assert_close(p.detach(), q.detach())


def test_frozen_parameters_stay_and_those_unfrozen_later_are_refused() -> None:
    model, optimizer = model_and()
    optimizer.close()
    first: Any = next(model.parameters()).requires_grad_(False)
    before = first.detach().clone()
    optimizer = AdamW(model.named_parameters(), lr=0.1, **SPARSE)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    assert torch.equal(first, before)
    first.requires_grad_(True)
    optimizer.zero_grad()
    backward(model)
    with pytest.raises(RuntimeError, match="unfreeze parameters first, then make the optimizer"):
        optimizer.step()
    optimizer.close()


# --- the second moment


def test_measurements_are_regular_at_first_and_then_fewer_and_fewer() -> None:
    due = [step for step in range(10_000) if is_due(step)]
    assert due == [step for step in range(1, 10_000) if is_measured(step)]
    assert due[:32] == list(range(32, 1025, 32))
    gaps = [after - before for before, after in pairwise(due[32:])]
    assert min(gaps) >= 32
    assert gaps[-1] > 200
    assert not is_due(0)


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_a_stale_second_moment_moves_nothing_further_than_adam_ever_would(betas: tuple[float, float]) -> None:
    """Measured while the gradient was zero; then it is not, and nobody measures again for 16 steps."""
    furthest = furthest_of_adam(*betas)
    p = nn.Parameter(torch.zeros(8))
    optimizer = AdamW([("p", p)], lr=0.01, betas=betas, weight_decay=0.0, **(SPARSE | {"density": 0.5}))
    moves = []
    for step in range(12):
        p.grad = torch.full((8,), 0.0 if step < 4 else 1e3)
        before = p.detach().clone()
        optimizer.step()
        moves.append(float((p.detach() - before).abs().max()))
    assert moves[:4] == [0.0] * 4
    assert max(moves) > 0.01, "it moves"
    owed = optimizer.training_state_dict()["allreducer"]["feedback"]["residual"]["p"]
    assert float((p.detach().abs() + owed.abs()).max()) <= 8 * 0.01 * furthest * 1.001, "eight steps of the furthest"
    optimizer.close()


# --- arguments


def of_sgd(**options: Any) -> Optimizer:
    return SGD(parameters().items(), **options)


def of_adamw(**options: Any) -> Optimizer:
    return AdamW(parameters().items(), **options)


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (of_adamw, {"lr": -1}, r"lr=-1: must be a finite number, at least 0"),
        (of_adamw, {"lr": float("nan")}, r"lr=nan: must be a finite number"),
        (of_adamw, {"lr": float("inf")}, r"lr=inf: must be a finite number"),
        (of_adamw, {"lr": None}, r"lr=None: must be a finite number"),
        (of_adamw, {"lr": "fast"}, r"lr='fast': must be a finite number"),
        (of_adamw, {"betas": (1.0, 0.9)}, r"betas=\(1.0, 0.9\): must be two numbers in \[0, 1\)"),
        (of_adamw, {"betas": (0.9, -0.1)}, r"betas=\(0.9, -0.1\): must be two numbers"),
        (of_adamw, {"betas": (0.9,)}, r"betas=\(0.9,\): must be two numbers"),
        (of_adamw, {"betas": 0.9}, r"betas=0.9: must be two numbers"),
        (of_adamw, {"eps": -1e-8}, r"eps=-1e-08: must be a finite number, at least 0"),
        (of_adamw, {"weight_decay": -0.1}, r"weight_decay=-0.1: must be"),
        (of_adamw, {"maximize": 1}, r"maximize=1: must be True or False"),
        (of_adamw, {"momentum_correction": 0.9}, r"momentum_correction=0.9: updates hold their momentum already"),
        (of_adamw, {"norm_clip": 0}, r"norm_clip=0: must be a positive norm"),
        (of_adamw, {"bucket_cap_mb": 0}, r"bucket_cap_mb=0: must be positive"),
        (of_adamw, {"density": 1.5}, r"density=1.5: must be in \(0, 1\]"),
        (of_adamw, {"compresser": 3}, r"unknown setting compresser=3; known: density"),
        (of_adamw, {"amsgrad": True}, r"unknown setting amsgrad=True"),
        (of_adamw, {"reducer": "topk"}, r"unknown reducer 'topk'; known: dense"),
        (of_sgd, {"lr": -0.1}, r"lr=-0.1: must be a finite number"),
        (of_sgd, {"momentum": 1.0}, r"momentum=1.0: must be a number in \[0, 1\)"),
        (of_sgd, {"momentum": -0.5}, r"momentum=-0.5: must be a number in \[0, 1\)"),
        (of_sgd, {"dampening": 2}, r"dampening=2: must be a number in \[0, 1\)"),
        (of_sgd, {"nesterov": "yes"}, r"nesterov='yes': must be True or False"),
        (of_sgd, {"nesterov": True}, r"nesterov=True with momentum=0 and dampening=0: .* needs a momentum"),
        (of_sgd, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}, r"nesterov=True with .* and no dampening"),
        (of_sgd, {"momentum": 0.9, "momentum_correction": 0.9}, r"momentum_correction=0.9: .* set it to 0"),
    ],
)
def test_what_cannot_be_is_named(make: Callable[..., Optimizer], options: dict[str, Any], message: str) -> None:
    threads = num_threads()
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        make(**options)
    assert "\n" not in str(caught.value)
    assert num_threads() == threads


@pytest.mark.parametrize(
    ("make", "options", "message"),
    [
        (AdamW, {"lr": -1.0}, "^lr=-1.0: must be"),
        (AdamW, {"betas": (2, 1)}, r"^betas=\(2, 1\): must be two numbers"),
        (SGD, {"momentum": 1.5}, "^momentum=1.5: must be"),
        (SGD, {"nesterov": True}, "^nesterov=True with momentum=0"),
    ],
)
def test_what_cannot_be_is_named_in_a_group_too(
    make: type[AdamW] | type[SGD], options: dict[str, Any], message: str
) -> None:
    named = list(parameters().items())
    with pytest.raises(ValueError, match=message):
        make([{"params": named[:1]}, {"params": named[1:], **options}])


def test_a_learning_rate_that_cannot_be_is_named_when_it_comes() -> None:
    params = parameters()
    optimizer = AdamW(params.items(), **SPARSE)
    train(optimizer, params, 3)
    before, optimizer.param_groups[0]["lr"] = flat(params), -1.0
    give(params, 3)
    with pytest.raises(ValueError, match=r"^lr=-1.0: must be"):
        optimizer.step()
    assert torch.equal(flat(params), before)
    optimizer.close()


def test_names_that_stand_twice_and_nothing_to_train_are_refused() -> None:
    first, second = parameters(0), parameters(1)
    same_names = [{"params": list(first.items())}, {"params": list(second.items())}]
    with pytest.raises(
        ValueError, match=r"named_parameters holds '\w+' twice: every parameter needs a name of its own"
    ):
        AdamW(same_names)
    with pytest.raises(ValueError, match="'weight' twice"):
        SGD([("weight", first["weight"]), ("weight", second["weight"])])
    with pytest.raises(ValueError, match="empty parameter list"):
        AdamW([])
    frozen = [(name, p.requires_grad_(False)) for name, p in first.items()]
    with pytest.raises(ValueError, match=r"^the optimizer has no parameter that requires a gradient$"):
        AdamW(frozen)


def test_complex_parameters_are_refused() -> None:
    """Updates travel as real numbers: the imaginary part would be lost."""
    with pytest.raises(ValueError, match=r"^'wave' is of torch.complex64: only real parameters can be trained$"):
        AdamW([("wave", nn.Parameter(torch.zeros(3, dtype=torch.complex64)))])


def test_a_model_its_named_parameters_and_loose_ones_do_the_same() -> None:
    seen = []
    for give_params in (
        lambda model: model,
        lambda model: model.named_parameters(),
        lambda model: model.parameters(),
        lambda model: [{"params": list(model.named_parameters())}],
        lambda model: [{"params": list(model.parameters())}],
    ):
        model, unused = model_and()
        unused.close()
        optimizer = AdamW(give_params(model), lr=0.01, **SPARSE)
        for step in range(6):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
        optimizer.close()
        seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert all(torch.equal(each, seen[0]) for each in seen)


def test_groups_cannot_be_added_later() -> None:
    _, optimizer = model_and()
    with pytest.raises(ValueError, match=r"^add_param_group\(\) after construction: pass all param groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    assert len(optimizer.param_groups) == 1
    optimizer.close()


@pytest.mark.parametrize("make", [AdamW, SGD])
def test_the_settings_stand_in_the_signature_and_the_help(make: type) -> None:
    assert {"lr", "weight_decay", "norm_clip", "overlap", "density", "timeout_s"} <= {
        *inspect.signature(make).parameters
    }
    assert "guard_every:" in (make.__init__.__doc__ or "")


# --- misuse is noticed


def test_a_second_backward_without_local_says_what_to_do() -> None:
    model, optimizer = model_and()
    backward(model, 0)
    with pytest.raises(
        RuntimeError, match=r"^a second backward\(\) reached '.*' before step\(\): set `local = True` for"
    ):
        backward(model, 1)
    optimizer.close()


@pytest.mark.parametrize("change", ["clip", "replace", "drop"])
def test_gradients_changed_between_backward_and_step_are_noticed(change: str) -> None:
    model, optimizer = model_and()
    backward(model)
    before = [p.detach().clone() for p in model.parameters()]
    for p in model.parameters():
        if change == "clip":
            p.grad.mul_(0.5)
        elif change == "replace":
            p.grad = p.grad.mul(0.5).add_(1.0).mul_(2.0)
        else:
            p.grad = None
    with pytest.raises(
        RuntimeError, match=r"was changed while it was being reduced: set norm_clip, or overlap=False to change"
    ):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    optimizer.close()


def test_without_overlap_gradients_and_learning_rate_may_be_changed_before_the_step() -> None:
    def run(overlap: bool) -> list[Tensor]:
        model, optimizer = model_and(overlap=overlap)
        for step in range(6):
            optimizer.zero_grad()
            if overlap:
                optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
                for p in model.parameters():
                    p.register_hook(lambda g: g * 1.0)
            backward(model, step)
            if not overlap:
                optimizer.param_groups[0]["lr"] = 0.01 * (step + 1)
            optimizer.step()
        optimizer.close()
        return [p.detach() for p in model.parameters()]

    assert all(map(torch.equal, run(True), run(False)))


def test_a_learning_rate_changed_between_backward_and_step_is_noticed() -> None:
    """Updates were made with the old one already, on some ranks. Nothing is lost: change it back, then step."""
    (model, optimizer), (model2, undisturbed) = model_and(), model_and()
    for step in range(5):
        for each, its in ((model, optimizer), (model2, undisturbed)):
            its.zero_grad()
            backward(each, step)
        optimizer.param_groups[0]["lr"] = 0.02
        with pytest.raises(
            RuntimeError, match=r"^lr was changed from 0.01 to 0.02 after backward\(\) had begun"
        ) as told:
            optimizer.step()
        assert "change it before backward(), or set overlap=False" in str(told.value)
        optimizer.param_groups[0]["lr"] = 0.01
        optimizer.step()
        undisturbed.step()
    assert all(map(torch.equal, model.parameters(), model2.parameters()))
    optimizer.close()
    undisturbed.close()


def test_zero_grad_in_the_middle_is_refused() -> None:
    model, optimizer = model_and()
    backward(model)
    with pytest.raises(RuntimeError, match=r"^zero_grad\(\) while gradients are being reduced: call step\(\) first"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    optimizer.close()


def test_without_overlap_zero_grad_drops_gradients() -> None:
    """Nothing was handed in: as if that backward had not been."""
    (model, optimizer), (model2, undisturbed) = model_and(overlap=False), model_and(overlap=False)
    for step in range(5):
        backward(model, 50 + step)
        optimizer.zero_grad()
        optimizer.training_state_dict()
        for each, its in ((model, optimizer), (model2, undisturbed)):
            backward(each, step)
            its.step()
            its.zero_grad()
    assert all(map(torch.equal, model.parameters(), model2.parameters()))
    optimizer.close()
    undisturbed.close()


def test_a_step_without_gradients_does_nothing() -> None:
    params = parameters()
    optimizer = AdamW(params.items(), weight_decay=0.5, **SPARSE)
    told: list[StepStats] = []
    optimizer.add_listener(told.append)
    train(optimizer, params, 5)
    before, state = flat(params), optimizer.training_state_dict()
    optimizer.zero_grad()
    for _ in range(3):
        optimizer.step()
    assert torch.equal(flat(params), before)
    assert same(optimizer.state_dict(), state["optimizer"])
    assert same(optimizer.training_state_dict()["allreducer"]["feedback"], state["allreducer"]["feedback"])
    assert all(set(stats.unused) == set(SHAPES) for stats in told[5:])
    optimizer.close()


def test_a_closure_is_called_once() -> None:
    model, optimizer = model_and()
    calls = []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        loss = model(torch.ones(3, 5)).square().mean()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(optimizer.step(closure).detach()) > 0
    assert calls == [True]
    optimizer.close()


def test_grad_scalers_and_sparse_gradients_are_refused() -> None:
    model, optimizer = model_and()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(3, 5)).square().mean()).backward()
    with pytest.raises(RuntimeError, match=r"^GradScaler does not work with AdamW: train in bf16"):
        scaler.step(optimizer)
    optimizer.close()
    embedding = nn.Embedding(10, 4, sparse=True)
    optimizer = AdamW(embedding.named_parameters())
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match=r"'weight' has a gradient of torch.sparse_coo"):
        optimizer.step()
    optimizer.close()


def test_after_close_nothing_hangs() -> None:
    model, optimizer = model_and()
    optimizer.close()
    optimizer.close()
    backward(model)
    with pytest.raises(RuntimeError, match="reductions were closed"):
        optimizer.step()


# --- states


def stepped(make: type[AdamW] | type[SGD] = AdamW, params: Any = None, **options: Any) -> Optimizer:
    params = parameters() if params is None else params
    optimizer = make(params.items(), **(SPARSE | options))
    for _ in range(5):
        for p in params.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
    optimizer.zero_grad()
    return optimizer


def with_names(params: dict[str, nn.Parameter], rename: dict[str, str]) -> dict[str, nn.Parameter]:
    return {rename.get(name, name): p for name, p in params.items()}


def of_torch() -> dict[str, Any]:
    params = parameters()
    optimizer = torch.optim.AdamW(params.items())
    train(optimizer, params, 2)
    return {"optimizer": optimizer.state_dict(), "allreducer": stepped().training_state_dict()["allreducer"]}


def of_torch_alike() -> dict[str, Any]:
    state = of_torch()
    state["optimizer"]["param_groups"][0]["sparse_beta1"] = 0.5
    return state


def without(state: dict[str, Any], *path: Any) -> dict[str, Any]:
    *parents, last = path
    part = state
    for key in parents:
        part = part[key]
    del part[last]
    return state


SGD_OF = {"momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("mine", "saved", "message"),
    [
        (stepped, lambda: stepped(SGD, **SGD_OF).training_state_dict(), "no 'betas': they are of another optimizer"),
        (
            lambda: stepped(SGD, **SGD_OF),
            lambda: stepped().training_state_dict(),
            "no 'momentum': they are of another optimizer",
        ),
        (stepped, of_torch, "no 'sparse_beta1': they are of another optimizer"),
        (stepped, of_torch_alike, "no 'sparse_steps': it is of another optimizer"),
        (
            stepped,
            lambda: stepped(params=with_names(parameters(), {"bias": "shift"})).training_state_dict(),
            "has 'shift' where 'bias' is expected: it is of another model",
        ),
        (
            lambda: stepped(params=parameters(dtype=torch.bfloat16)),
            lambda: stepped().training_state_dict(),
            "no 'rounding': it is of another optimizer or dtype",
        ),
        (
            stepped,
            lambda: stepped(params={k: v for k, v in parameters().items() if k != "bias"}).training_state_dict(),
            r"have \[3\] parameters, mine have \[4\]: it is of another model",
        ),
        (
            lambda: stepped(params={k: v for k, v in parameters().items() if k != "other"}),
            lambda: stepped().training_state_dict(),
            r"have \[4\] parameters, mine have \[3\]",
        ),
        (
            lambda: stepped(params=parameters() | {"weight": nn.Parameter(torch.zeros(6, 5))}),
            lambda: without(stepped().training_state_dict(), "optimizer", "state", 0),
            "nothing for 'weight': it is of another model",
        ),
        (
            stepped,
            lambda: stepped().state_dict(),
            "has optimizer=None: it is not that of training_state_dict",
        ),
        (stepped, lambda: without(stepped().training_state_dict(), "optimizer", "param_groups"), "no 'param_groups'"),
        (stepped, lambda: stepped(reducer="topkA").training_state_dict(), "reducer='topkA', .* has 'oktopk'"),
        (
            stepped,
            lambda: without(stepped().training_state_dict(), "allreducer", "feedback"),
            "feedback=None: it is damaged",
        ),
    ],
    ids=[
        "sgd into adamw", "adamw into sgd", "torch's", "torch's with options", "another name", "fp32 into bf16",
        "fewer", "more", "one missing", "not the whole", "no groups", "another reducer", "damaged",
    ],
)  # fmt: skip
def test_a_state_of_something_else_is_refused_and_changes_nothing(
    mine: Callable[[], Optimizer], saved: Callable[[], dict[str, Any]], message: str
) -> None:
    optimizer, state = mine(), saved()
    before = optimizer.training_state_dict()
    with pytest.raises(ValueError, match=message) as caught:
        optimizer.load_training_state_dict(state)
    assert "\n" not in str(caught.value)
    assert same(optimizer.training_state_dict(), before)
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.close()


def test_a_state_of_other_shapes_is_refused_and_changes_nothing() -> None:
    other = parameters()
    other["weight"] = nn.Parameter(torch.zeros(6, 7))
    optimizer = AdamW(other.items(), **SPARSE)
    before = optimizer.training_state_dict()
    for make in (AdamW, SGD):  # SGD keeps nothing of a parameter's size but what is owed
        state = stepped(make).training_state_dict()
        mine = optimizer if make is AdamW else SGD(other.items(), **SPARSE)
        with pytest.raises(
            ValueError, match="of 'weight' has 30 elements, the parameter has 42: it is of another model"
        ):
            mine.load_training_state_dict(state)
        if mine is not optimizer:
            mine.close()
    assert same(optimizer.training_state_dict(), before)
    optimizer.close()


def test_a_state_comes_in_torchs_form_and_is_a_copy() -> None:
    params = parameters()
    optimizer = AdamW(params.items(), **SPARSE)
    train(optimizer, params, 4)
    state = optimizer.state_dict()
    assert state.keys() == {"state", "param_groups"}
    assert list(state["state"]) == [0, 1, 2, 3]
    assert state["param_groups"][0]["params"] == [0, 1, 2, 3]
    assert state["param_groups"][0]["param_names"] == list(SHAPES)
    for at, shape in enumerate(SHAPES.values()):
        assert state["state"][at]["exp_avg_sq"].numel() == torch.Size(shape).numel()
        assert state["state"][at]["step"] == 4
    assert optimizer.training_state_dict().keys() == {"optimizer", "allreducer"}
    for at in state["state"]:
        state["state"][at]["exp_avg_sq"].fill_(7.0)
    assert not same(optimizer.state_dict(), state)
    optimizer.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_no_state_is_given_between_backward_and_step(overlap: bool) -> None:
    model, optimizer = model_and(overlap=overlap)
    backward(model)
    with pytest.raises(RuntimeError, match=r"^state_dict\(\) between backward\(\) and step\(\): call it after step"):
        optimizer.state_dict()
    with pytest.raises(RuntimeError, match=r"^state_dict\(\) between backward\(\) and step\(\)"):
        optimizer.training_state_dict()
    optimizer.step()
    assert optimizer.training_state_dict()["allreducer"]["step"] == 1
    optimizer.close()


def test_a_state_loaded_between_backward_and_step_is_not_disturbed_by_it() -> None:
    model, optimizer = model_and()
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()
    state = optimizer.training_state_dict()
    backward(model, 9)
    optimizer.load_training_state_dict(state)
    optimizer.zero_grad()
    assert same(optimizer.training_state_dict(), state)
    optimizer.close()


def test_the_state_of_parameters_without_names_continues() -> None:
    def run(stop: int | None) -> Tensor:
        params = parameters()
        optimizer = SGD(params.values(), lr=0.02, momentum=0.9, weight_decay=0.1, **SPARSE)
        for step in range(9):
            if step == stop:
                state = optimizer.training_state_dict()
                optimizer.close()
                optimizer = SGD(params.values(), lr=7.0, **SPARSE)
                optimizer.load_training_state_dict(state)
            train(optimizer, params, range(step, step + 1))
        optimizer.close()
        return flat(params)

    assert torch.equal(run(5), run(None))


# --- release


def num_threads() -> int:
    return sum(thread.name == "oktopk-reductions" for thread in threading.enumerate())


@pytest.mark.parametrize("when", ["fresh", "stepped", "midway", "scheduled"])
def test_nothing_is_left_of_a_dropped_optimizer(when: str) -> None:
    def one() -> tuple[weakref.ref[Optimizer], nn.Module]:
        model, optimizer = model_and()
        scheduler = lr_scheduler.StepLR(optimizer, 1) if when == "scheduled" else None
        for step in range(0 if when == "fresh" else 4):
            optimizer.zero_grad()
            backward(model, step)
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        if when == "midway":
            optimizer.zero_grad()
            backward(model, 9)
        return weakref.ref(optimizer), model

    gc.collect()
    threads = num_threads()
    reference, model = one()
    patience = time.monotonic() + 10.0
    gc.collect()
    while num_threads() > threads and time.monotonic() < patience:
        time.sleep(0.01)
        gc.collect()  # what was being reduced was still held
    assert reference() is None
    assert num_threads() == threads
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
    model.zero_grad()
    backward(model)  # nobody minds
    backward(model)


def test_close_ends_the_thread_and_takes_the_hooks_along() -> None:
    gc.collect()
    threads = num_threads()
    model, optimizer = model_and()
    assert num_threads() == threads + 1
    optimizer.close()
    assert num_threads() == threads
    backward(model, 0)
    backward(model, 1)
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())
