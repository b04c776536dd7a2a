"""Kinds of devices on which memory can be measured, random streams be given back, and steps be timed."""

from __future__ import annotations

import torch

from rkgb.devices.registry import device_of, refusal_text
from rkgb.errors import ModelError, SampleError
from rkgb.ir.sample import Sample

_ADVICE = (
    "a plan could keep no budget there. Move the model and its inputs to such a device, or train the model as it is."
)


def refuse_devices(module: torch.nn.Module, sample: Sample) -> None:
    """Raise `ModelError` or `SampleError` for what is on a device of another kind; "meta" is for others to refuse."""
    for what, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if _is_elsewhere(tensor):
                raise ModelError(f"{what} {name!r} of {type(module).__name__} is on {_refused(tensor.device)}")
    for index, tensor in enumerate(sample.tensors):
        if _is_elsewhere(tensor):
            what = f"tensor {index} of the sample of {type(module).__name__}"
            raise SampleError(f"{what} is on {_refused(tensor.device)}")


def _is_elsewhere(tensor: torch.Tensor) -> bool:
    return not (device_of(tensor.device).is_supported or tensor.is_meta)


def _refused(device: torch.device) -> str:
    return f"{device}. {refusal_text(device)}: {_ADVICE}"


def refuse_without_data(module: torch.nn.Module, sample: Sample) -> None:
    """Raise `ModelError` or `SampleError` for tensors on the meta device.

    They are not loaded yet, or were taken away between calls by hooks of a library.
    """
    for what, named in (("parameter", module.named_parameters()), ("buffer", module.named_buffers())):
        for name, tensor in named:
            if tensor.is_meta:
                raise ModelError(
                    f"{what} {name!r} of {type(module).__name__} is on the meta device, without data: there is nothing "
                    "to plan with. Load the weights first; a module whose weights a library offloads between calls (as "
                    "cpu_offload and device_map do) is for inference, and cannot be planned."
                )
    for index, tensor in enumerate(sample.tensors):
        if tensor.is_meta:
            raise SampleError(
                f"tensor {index} of the sample of {type(module).__name__} is on the meta device, without data. Give "
                "the tensors of one training step, on the device where it will run."
            )
