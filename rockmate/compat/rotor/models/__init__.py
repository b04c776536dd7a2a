"""Models as Sequentials, made of the zoo's layers."""

from rockmate.compat.rotor.models import utils
from rockmate.compat.rotor.models.image import (
    densenet121,
    googlenet,
    mobilenet_v2,
    resnet18,
    resnet34,
    resnet50,
    resnet101,
    resnet152,
    vgg16,
)

__all__ = [
    "densenet121",
    "googlenet",
    "mobilenet_v2",
    "resnet18",
    "resnet34",
    "resnet50",
    "resnet101",
    "resnet152",
    "utils",
    "vgg16",
]
