"""Models of timm train exactly at 0.6 of their eager peak, where timm and the torchvision that it needs import."""

import pytest
import torch

from rockmate import BudgetTooSmall, Rockmate, verify
from tests.module.steps import peak_of_step

# torchvision raises a RuntimeError where it was built for another PyTorch.
timm = pytest.importorskip("timm", reason="timm, or its torchvision", exc_type=(ImportError, RuntimeError))

SMALL = {"num_classes": 8, "drop_rate": 0.1}
PATCHES = {"img_size": 64, "patch_size": 8, "embed_dim": 48, "depth": 4, "num_heads": 4}
MODELS = {
    "resnet18": {"drop_path_rate": 0.1},
    "resnetv2_50": {"layers": (1, 1, 1, 1), "channels": (32, 64, 96, 128), "stem_chs": 16},
    "vit_tiny_patch16_224": {**PATCHES, "attn_drop_rate": 0.1, "proj_drop_rate": 0.1, "drop_path_rate": 0.1},
    "deit_tiny_patch16_224": {**PATCHES, "drop_path_rate": 0.1},
    "convnext_atto": {"depths": (1, 1, 2, 1), "dims": (16, 24, 32, 48), "drop_path_rate": 0.1},
    "efficientnet_b0": {"drop_path_rate": 0.1},
    "mobilenetv3_small_050": {},
    "swin_tiny_patch4_window7_224": {
        "img_size": 64,
        "patch_size": 4,
        "window_size": 4,
        "embed_dim": 24,
        "depths": (1, 2),
        "num_heads": (2, 4),
        "drop_path_rate": 0.1,
    },
    "regnety_002": {},
    "densenet121": {"growth_rate": 8, "block_config": (2, 2, 2, 2)},
    "beit_base_patch16_224": {**PATCHES, "attn_drop_rate": 0.1, "drop_path_rate": 0.1},
}
QUICK = ("resnet18", "vit_tiny_patch16_224", "convnext_atto", "mobilenetv3_small_050")


def criterion(output):
    return torch.nn.functional.cross_entropy(output, torch.arange(len(output)) % SMALL["num_classes"])


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in QUICK else [pytest.mark.slow]) for n in MODELS])
def test_a_model_of_timm_trains_exactly_at_three_fifths_of_its_peak(name):
    torch.manual_seed(0)
    model = timm.create_model(name, **SMALL, **MODELS[name]).train()
    images = torch.randn(8, 3, 64, 64)
    try:
        planned = Rockmate(model, images, 0.6, loss=criterion, time_limit=5)
    except BudgetTooSmall as error:  # the gradients of a model made for large images may be most of its step
        planned = Rockmate(model, images, error.smallest_budget_bytes, loss=criterion, time_limit=5)
    result = verify(planned, images, loss=criterion, steps=2)
    assert result.exact, result
    assert peak_of_step(planned, (images,), criterion) <= planned.plan.budget_bytes
