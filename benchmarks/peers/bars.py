"""What we hold ourselves to against eager training, and what was reached."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.peers.families import Family
from benchmarks.peers.monet import PUBLISHED

ANY = "any"  # a plan exists, fits and is exact, whatever it takes
ANY_THAT_EXISTS = "any that exists"  # the same, or it is proven that no plan fits

# Time of our step at most, as a multiple of eager's, with a measured peak of at most that share of eager's.
BARS: dict[str, dict[float, float | str]] = {
    "gpt2": {0.7: 1.03, 0.5: 1.08, 0.4: 1.12, 0.3: 1.18, 0.2: 1.30},
    "hf-gpt2": {0.7: 1.03, 0.5: 1.08, 0.4: 1.12, 0.3: 1.20, 0.2: 1.32},
    "hf-llama": {0.7: 1.05, 0.5: 1.12, 0.4: 1.18, 0.3: 1.28, 0.2: ANY},
    "mixer": {0.7: 1.03, 0.5: 1.08, 0.4: 1.12, 0.3: 1.20, 0.2: 1.32},
    "resnet50": {0.7: 1.06, 0.5: 1.15, 0.4: 1.25, 0.3: ANY},
    "unet": {0.7: 1.05, 0.5: 1.15, 0.4: ANY},
    "vgg16": {0.7: ANY_THAT_EXISTS, 0.6: ANY_THAT_EXISTS, 0.5: ANY_THAT_EXISTS},
}
THIRD = round(1 / 3, 4)  # of eager's peak: on a GPU we are to be faster there than what MONeT published
MOST_GAP = 0.03  # of a plan's time, to the bound that is proven
MOST_OFF = 0.05  # the measured ratio from the predicted one


def bars_of(name: str, results: Sequence[Mapping[str, Any]], *, on_gpu: bool = False) -> list[dict[str, Any]]:
    """The bars of a model with what was reached; `results` are those of its file."""
    ours = {result["share"]: result for result in results if result["family"] == Family.OURS}
    limits = dict(BARS.get(name, {}))
    if on_gpu and name in PUBLISHED:
        limits[THIRD] = PUBLISHED[name].ratios[-1][1]
    bars = [time_bar(share, limit, ours.get(share)) for share, limit in limits.items()]
    for share, result in sorted(ours.items(), reverse=True):
        if result["gap"] is not None:
            bars.append(made(f"gap at {share:.2f}", result["gap"], MOST_GAP))
        if result["predicted_ratio"] and result["time_ratio"]:
            off = abs(result["time_ratio"] / result["predicted_ratio"] - 1)
            bars.append(made(f"measured from predicted time at {share:.2f}", off, MOST_OFF))
    return bars


def time_bar(share: float, limit: float | str, result: Mapping[str, Any] | None) -> dict[str, Any]:
    """The bar of a share: with the time reached, or with why there is none."""
    label = f"time at {share:.2f}"
    if result is None:
        return {"label": label, "reached": None, "limit": limit, "met": False, "reason": "was not run"}
    ratio = result["time_ratio"]
    if ratio is None or result["status"] != "exact" or not result["random_equal"]:
        proven = result["proven_bytes"]
        is_proven = proven is not None and proven > result["budget_bytes"]
        met = limit == ANY_THAT_EXISTS and is_proven
        reason = "none exists, as is proven" if is_proven else result["reason"] or "is not exact"
        return {"label": label, "reached": None, "limit": limit, "met": met, "reason": reason}
    met = isinstance(limit, str) or ratio <= limit
    return {"label": label, "reached": round(ratio, 3), "limit": limit, "met": met, "reason": ""}


def made(label: str, reached: float, limit: float) -> dict[str, Any]:
    """A bar that was reached."""
    return {"label": label, "reached": round(reached, 4), "limit": limit, "met": reached <= limit, "reason": ""}
