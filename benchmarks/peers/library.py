"""What libraries offer at a single call: Hugging Face's checkpointing, and saved tensors on the CPU."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.peers.case import Built, Case, NotForThisModel, Peer
from benchmarks.peers.families import Family


def hugging_face(case: Case, eager_peak_bytes: int) -> Built:
    """`gradient_checkpointing_enable()` of the transformers library's models."""
    model = case.fresh_model()
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if enable is None:
        raise NotForThisModel("no model of the transformers library")
    enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return Built(model, model)


def on_cpu(case: Case, eager_peak_bytes: int) -> Built:
    """Tensors saved for the backward wait in the CPU's memory."""
    model = case.fresh_model()
    on_cuda = case.device.type == "cuda"

    def call(*arguments: Any, **keywords: Any) -> Any:
        with torch.autograd.graph.save_on_cpu(pin_memory=on_cuda):
            return model(*arguments, **keywords)

    return Built(model, call, note="" if on_cuda else "saves nothing on the CPU, where everything is already")


PEERS = (
    Peer("Hugging Face checkpointing", Family.HUGGING_FACE, hugging_face),
    Peer("save_on_cpu", Family.OFFLOAD, on_cpu),
)
