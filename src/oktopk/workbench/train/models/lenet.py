"""LeNet-5, with rectifiers and max pooling."""

from __future__ import annotations

from torch import Tensor, nn


class LeNet(nn.Module):
    """Two convolutions and three linear layers for 28 x 28 grey images.

    With 6 channels and 10 classes, 61,706 parameters.
    """

    def __init__(self, num_classes: int = 10, channels: int = 6) -> None:
        super().__init__()
        second, third, fourth = (multiple * channels // 6 for multiple in (16, 120, 84))
        self.features = nn.Sequential(
            nn.Conv2d(1, channels, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Conv2d(channels, second, 5),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classify = nn.Sequential(
            nn.Linear(second * 5 * 5, third),
            nn.ReLU(inplace=True),
            nn.Linear(third, fourth),
            nn.ReLU(inplace=True),
            nn.Linear(fourth, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.classify(self.features(images).flatten(1))
