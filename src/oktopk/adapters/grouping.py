"""Parameters that are reduced together, and their gradients on the way in and out."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import Parameter

from oktopk.bucket import Bucket, Slot


@dataclass
class Pack:
    """Parameters that are reduced together, and the flat tensor that they travel in."""

    slots: tuple[Slot, ...]
    parameters: tuple[Parameter, ...]
    flat: Tensor
    dense: bool = False
    ready: set[str] = field(default_factory=set[str])
    versions: list[int | None] = field(default_factory=list[int | None])

    def mark_versions(self) -> None:
        """Remember the gradients as they are handed in, so that later changes are noticed."""
        self.versions = [_version(p) for p in self.parameters]

    def fill(self) -> Bucket:
        """Copy the gradients in; a parameter without one is said to be missing."""
        missing = {slot.name for slot, p in zip(self.slots, self.parameters, strict=True) if p.grad is None}
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            if parameter.grad is None:
                continue
            if parameter.grad.layout != torch.strided:
                raise ValueError(
                    f"{slot.name!r} has a gradient of {parameter.grad.layout}: only dense ones can be reduced"
                )
            slot.part(self.flat).copy_(parameter.grad.reshape(-1))
        return Bucket(self.flat, self.slots, frozenset(missing), self.dense)

    def hand_back(self, unused: frozenset[str]) -> None:
        """Copy the means out; a parameter that no rank has a gradient for keeps none."""
        for slot, parameter, version in zip(self.slots, self.parameters, self.versions, strict=True):
            if _version(parameter) != version:
                raise RuntimeError(
                    f"the gradient of {slot.name!r} was changed while it was being reduced: call synchronize() "
                    "before you clip or scale gradients, then step()"
                )
        for slot, parameter in zip(self.slots, self.parameters, strict=True):
            if slot.name in unused:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = slot.part(self.flat).clone().view_as(parameter)
            else:
                parameter.grad.copy_(slot.part(self.flat).view_as(parameter))


def make_packs(named: list[tuple[str, Parameter]], cap_mb: float, dense_vectors: bool = False) -> list[Pack]:
    """Last parameters first, as backward produces them; a pack holds one dtype on one device, up to the cap.

    `dense_vectors`: parameters of one dimension, which are biases and norm layers, go last, in packs that stay dense.
    """
    vectors = [(name, p) for name, p in named if dense_vectors and p.dim() <= 1]
    others = [(name, p) for name, p in named if not (dense_vectors and p.dim() <= 1)]
    return [*_packs(others, cap_mb, dense=False), *_packs(vectors, cap_mb, dense=True)]


def _packs(named: list[tuple[str, Parameter]], cap_mb: float, dense: bool) -> list[Pack]:
    groups: list[list[tuple[str, Parameter]]] = []
    room = 0.0
    for name, parameter in reversed(named):
        size_mb = parameter.numel() * parameter.element_size() / 2**20
        like_before = bool(groups) and _kind(groups[-1][-1][1]) == _kind(parameter)
        if not like_before or size_mb > room:
            groups.append([])
            room = cap_mb
        groups[-1].append((name, parameter))
        room -= size_mb
    return [
        Pack(
            slots=Bucket.layout([(name, p.numel()) for name, p in group]),
            parameters=tuple(p for _, p in group),
            flat=torch.zeros(sum(p.numel() for _, p in group), dtype=group[0][1].dtype, device=group[0][1].device),
            dense=dense,
        )
        for group in groups
    ]


def _version(parameter: Parameter) -> int | None:
    return None if parameter.grad is None else parameter.grad._version


def _kind(parameter: Parameter) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device
