"""VGG16 for 32 x 32 images."""

from __future__ import annotations

from torch import Tensor, nn

_WIDTHS = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))


class Vgg16(nn.Module):
    """Thirteen convolutions with batch norm, halved five times to one pixel, then one linear layer: 14.7M parameters.

    `shrink` divides every width, for quick checks.
    """

    def __init__(self, num_classes: int = 10, shrink: int = 1) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for widths in _WIDTHS:
            for width in widths:
                layers += [
                    nn.Conv2d(channels, width // shrink, 3, padding=1, bias=False),
                    nn.BatchNorm2d(width // shrink),
                    nn.ReLU(inplace=True),
                ]
                channels = width // shrink
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.classify = nn.Linear(channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))
