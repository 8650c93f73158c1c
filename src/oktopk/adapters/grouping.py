"""Parameters that are reduced together, and their gradients on the way in and out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from oktopk.bucket import Bucket, Layout

Named = list[tuple[str, Parameter]]


@dataclass
class Group:
    """Parameters that are reduced together, and the flat tensor that their gradients travel in.

    Attributes:
        ready: Parameters whose gradient of this step is there.
        input_ready: On a GPU, when they all are.
    """

    layout: Layout
    parameters: tuple[Parameter, ...]
    flat: Tensor
    dense: bool = False
    ready: set[int] = field(default_factory=set[int])
    input_ready: Any = None

    def __post_init__(self) -> None:
        self.views = self.views_of(self.flat)
        """Each parameter's part of `flat`, in its shape."""
        self._versions: list[int | None] = []

    def views_of(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor of this layout, in its shape."""
        pairs = zip(self.layout.slots, self.parameters, strict=True)
        return [slot.part(flat).view(parameter.shape) for slot, parameter in pairs]

    def values(self) -> Tensor:
        """The parameters themselves, in a new flat tensor like `flat`."""
        flat = torch.empty_like(self.flat)
        _copy(self.views_of(flat), self.parameters)
        return flat

    def set_values(self, flat: Tensor) -> None:
        """Overwrite the parameters."""
        _copy(self.parameters, self.views_of(flat))

    @property
    def is_full(self) -> bool:
        return len(self.ready) == len(self.parameters)

    def mark_versions(self) -> None:
        """Remember the gradients as they are handed in, so that later changes are noticed."""
        self._versions = [_version(p) for p in self.parameters]

    def check_versions(self, instead: str) -> None:
        """RuntimeError for a gradient that was changed since `mark_versions`, which says what to do instead."""
        for slot, parameter, version in zip(self.layout.slots, self.parameters, self._versions, strict=True):
            if _version(parameter) != version:
                raise RuntimeError(f"the gradient of {slot.name!r} was changed while it was being reduced: {instead}")

    def fill(self) -> Bucket:
        """Copy the gradients in; a parameter without one is said to be missing."""
        gradients = [p.grad for p in self.parameters]
        missing = frozenset(
            slot.name for slot, gradient in zip(self.layout.slots, gradients, strict=True) if gradient is None
        )
        for slot, gradient in zip(self.layout.slots, gradients, strict=True):
            if gradient is not None and gradient.layout != torch.strided:
                raise ValueError(f"{slot.name!r} has a gradient of {gradient.layout}: only dense ones can be reduced")
        _copy(self.views, gradients)
        return Bucket(self.flat, self.layout, missing, self.dense)

    def hand_back(self, unused: frozenset[str]) -> None:
        """Copy the means out; a parameter that no rank has a gradient for keeps none."""
        for slot, parameter, view in zip(self.layout.slots, self.parameters, self.views, strict=True):
            if slot.name in unused:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(view)
        _copy([p.grad for p in self.parameters], self.views)


def make_groups(
    named: Named,
    cap_mb: float,
    dense_vectors: bool = False,
    apart: Callable[[Parameter], object] = lambda _: None,
    dtype: torch.dtype | None = None,
) -> list[Group]:
    """Last parameters first, as backward produces them; a group holds one dtype on one device, up to the cap.

    Args:
        named: The parameters.
        cap_mb: The largest group, in MiB.
        dense_vectors: Parameters of one dimension (biases, norm layers) go last, in groups that stay dense.
        apart: Parameters for which this differs never share a group.
        dtype: What the groups' values travel in; None: the parameters' own.
    """
    vectors = [(name, p) for name, p in named if dense_vectors and p.dim() <= 1]
    others = [(name, p) for name, p in named if not (dense_vectors and p.dim() <= 1)]
    members = [(each, False) for each in _members(others, cap_mb, apart)]
    members += [(each, True) for each in _members(vectors, cap_mb, apart)]
    return [_group(each, dense, dtype) for each, dense in members]


def clip_(gradients: Sequence[Tensor], limit: float) -> None:
    """Scale this rank's gradients to a joint norm of at most `limit`.

    A norm that is not finite scales nothing: the reduction then names the parameter at fault.
    """
    if not gradients:
        return
    squares = [g.double().square().sum().to(gradients[0].device) for g in gradients]
    norm = float(torch.stack(squares).sum().sqrt())  # one wait for a GPU
    if limit < norm < math.inf:
        for gradient in gradients:
            gradient.mul_(limit / norm)


def _members(named: Named, cap_mb: float, apart: Callable[[Parameter], object]) -> list[Named]:
    """Groups fill up side by side, one for each kind, and stand in the order in which they become full."""
    full: list[Named] = []
    filling: dict[object, tuple[Named, float]] = {}
    for name, parameter in reversed(named):
        kind = parameter.dtype, parameter.device, apart(parameter)
        size_mb = parameter.numel() * parameter.element_size() / 2**20
        members, room = filling.pop(kind, ([], cap_mb))
        if members and size_mb > room:
            full.append(members)
            members, room = [], cap_mb
        members.append((name, parameter))
        filling[kind] = members, room - size_mb
    return [*full, *(members for members, _ in filling.values())]


def _group(members: Named, dense: bool, dtype: torch.dtype | None) -> Group:
    layout = Layout.of((name, p.numel()) for name, p in members)
    like = members[0][1]
    flat = torch.zeros(layout.numel, dtype=dtype or like.dtype, device=like.device)
    return Group(layout, tuple(p for _, p in members), flat, dense)


def _copy(targets: Sequence[Tensor | None], sources: Sequence[Tensor | None]) -> None:
    """All in one call: torch's own overhead for each parameter is larger than many a parameter."""
    pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t is not None and s is not None]
    if pairs:
        with torch.no_grad():
            torch._foreach_copy_([t for t, _ in pairs], [s for _, s in pairs])  # pyright: ignore[reportPrivateImportUsage, reportPrivateUsage]


def _version(parameter: Parameter) -> int | None:
    return None if parameter.grad is None else parameter.grad._version
