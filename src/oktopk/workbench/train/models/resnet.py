"""Residual networks: those of He et al. for 32 x 32 images, and ResNet-50."""

from __future__ import annotations

from torch import Tensor, nn


class SmallResNet(nn.Module):
    """6n + 2 layers for 32 x 32 images: 3 stages of n blocks, shortcuts without parameters.

    With 16 channels and 10 classes, ResNet-20 has 269,722 parameters, ResNet-56 853,018, ResNet-110 1,727,962.
    """

    def __init__(self, depth: int = 20, num_classes: int = 10, channels: int = 16) -> None:
        super().__init__()
        blocks, left = divmod(depth - 2, 6)
        if left or blocks < 1:
            raise ValueError(f"depth={depth!r}: must be 6n + 2, such as 20, 56 or 110")
        layers: list[nn.Module] = [_conv(3, channels, 3), nn.BatchNorm2d(channels), nn.ReLU(inplace=True)]
        before = channels
        for stage in range(3):
            width = channels * 2**stage
            for block in range(blocks):
                layers.append(_Block(before, width, stride=2 if stage and block == 0 else 1))
                before = width
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.classify = nn.Linear(before, num_classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))


class ResNet50(nn.Module):
    """Bottleneck blocks in stages of 3, 4, 6 and 3, halving in their 3 x 3 convolution.

    With 64 channels and 1000 classes, 25,557,032 parameters.
    """

    def __init__(self, num_classes: int = 1000, channels: int = 64) -> None:
        super().__init__()
        layers: list[nn.Module] = [
            _conv(3, channels, 7, stride=2),
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2, padding=1),
        ]
        before = channels
        for stage, blocks in enumerate((3, 4, 6, 3)):
            inner = channels * 2**stage
            for block in range(blocks):
                layers.append(_Bottleneck(before, inner, stride=2 if stage and block == 0 else 1))
                before = inner * _Bottleneck.expansion
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.classify = nn.Linear(before, num_classes)
        _initialise(self)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))


class _Block(nn.Module):
    """Two 3 x 3 convolutions; where the shape changes, the shortcut drops pixels and adds channels of zeros."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self._stride, self._new_channels = stride, width - before
        self.body = nn.Sequential(
            _conv(before, width, 3, stride=stride),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            _conv(width, width, 3),
            nn.BatchNorm2d(width),
        )

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x[:, :, :: self._stride, :: self._stride]
        first = self._new_channels // 2
        shortcut = nn.functional.pad(shortcut, (0, 0, 0, 0, first, self._new_channels - first))
        return nn.functional.relu(self.body(x) + shortcut)


class _Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions; where the shape changes, the shortcut is a 1 x 1 convolution."""

    expansion = 4

    def __init__(self, before: int, inner: int, stride: int) -> None:
        super().__init__()
        width = inner * self.expansion
        self.body = nn.Sequential(
            _conv(before, inner, 1),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            _conv(inner, inner, 3, stride=stride),
            nn.BatchNorm2d(inner),
            nn.ReLU(inplace=True),
            _conv(inner, width, 1),
            nn.BatchNorm2d(width),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != width:
            self.shortcut = nn.Sequential(_conv(before, width, 1, stride=stride), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def _conv(before: int, after: int, size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(before, after, size, stride=stride, padding=size // 2, bias=False)


def _initialise(model: nn.Module) -> None:
    """As in the paper: normal weights that keep the variance through rectifiers."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
