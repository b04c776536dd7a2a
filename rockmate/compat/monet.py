"""MONeT's module: a model with a plan that was found before, kept as a file."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

import torch

from rockmate import module
from rockmate.errors import PlanFileMismatch
from rockmate.plan_files import PlanFile, load

_TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d, ]*)\]")


class MONeTWrapper(module.Rockmate):
    """`model` under the plan of `solution_file`: `rockmate.Rockmate(model, sample, plan=solution_file)`.

    Unlike MONeT's, it answers for the model: the keys of its state dict, its modes and its parameters are the model's,
    inputs stay as they are, and calls of another shape are planned as they come.

    Args:
        model: a module like the one that the plan was made for.
        solution_file: a plan file, as `rockmate.Rockmate.save_plan` and ``rockmate plan -o`` write it, or a `PlanFile`.
        input_shape: of the one input of the model, the batch first. It is filled with random numbers, of the type that
            the plan tells: the model is traced on them, and no gradient is kept.

    Raises:
        PlanFileMismatch: the plan is for several inputs, for another shape, or for another model.
        PlanFileError: the file is no plan, or damaged.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        solution_file: PlanFile | str | os.PathLike[str],
        input_shape: Sequence[int],
    ) -> None:
        plan_file = solution_file if isinstance(solution_file, PlanFile) else load(solution_file)
        super().__init__(model, _sample_for(model, plan_file, tuple(input_shape)), plan=plan_file)


def _sample_for(model: torch.nn.Module, plan_file: PlanFile, shape: tuple[int, ...]) -> torch.Tensor:
    inputs = [leaf.value.text for leaf in plan_file.graph.leaves if leaf.kind == "input"]
    if len(inputs) != 1:
        raise PlanFileMismatch(
            f"the plan is for calls with {len(inputs)} tensors, and one input_shape tells of one. Use "
            "rockmate.Rockmate(model, sample, plan=...) with a sample of yours."
        )
    found = _TENSOR.match(inputs[0])
    planned = tuple(int(size) for size in found["shape"].split(",") if size.strip()) if found else ()
    dtype = getattr(torch, found["dtype"], None) if found else None
    if planned != shape or not isinstance(dtype, torch.dtype):
        raise PlanFileMismatch(f"the plan is for an input {inputs[0]}, and input_shape is {list(shape)}.")
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    generator = torch.Generator("cpu").manual_seed(0)  # the caller's random numbers are left alone
    if dtype.is_floating_point or dtype.is_complex:
        sample = torch.randn(shape, generator=generator, dtype=dtype, device="cpu")
    else:
        sample = torch.zeros(shape, dtype=dtype, device="cpu")  # an index that is always there
    return sample.to(device).requires_grad_("grad" in inputs[0].split())
