"""VGG for 32 x 32 images."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

_MULTIPLES = (1, 2, 4, 8, 8)
_CONVOLUTIONS: Mapping[int, tuple[int, ...]] = {16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""By depth: how many there are before each of the five poolings."""


class Vgg(nn.Module):
    """Convolutions with batch norm, halved five times to one pixel, then one linear layer.

    The defaults are VGG16 for CIFAR-10, 14,724,042 parameters. `channels` are those of the first layer.
    """

    def __init__(self, depth: int = 16, num_classes: int = 10, channels: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 3
        for multiple, num_convolutions in zip(_MULTIPLES, _CONVOLUTIONS[depth], strict=True):
            for _ in range(num_convolutions):
                width = multiple * channels
                layers += [
                    nn.Conv2d(before, width, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                ]
                before = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(before, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))
