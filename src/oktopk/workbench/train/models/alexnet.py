"""AlexNet in one column."""

from __future__ import annotations

from torch import Tensor, nn

_POOLED = 6


class AlexNet(nn.Module):
    """Five convolutions, pooled to 6 x 6 from images of any size above 62, then three linear layers with dropout.

    With 64 channels and 1000 classes, 61,100,840 parameters.
    """

    def __init__(self, num_classes: int = 1000, channels: int = 64) -> None:
        super().__init__()
        first, second, third, last, linear = (multiple * channels for multiple in (1, 3, 6, 4, 64))
        self.features = nn.Sequential(
            nn.Conv2d(3, first, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(first, second, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(second, third, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(third, last, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(last, last, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.AdaptiveAvgPool2d(_POOLED),
        )
        self.classify = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(last * _POOLED**2, linear),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(linear, linear),
            nn.ReLU(inplace=True),
            nn.Linear(linear, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))
