"""Modules whose trace would be wrong for other data than the sample, and data that shows it.

`HIDDEN[name]()` builds a scenario. What reads the data is always the submodule `inner`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tests.graph.programs import Program, linear, rows


@dataclass
class Scenario:
    """A module, its sample, and arguments of the same shapes on which eager training takes another way."""

    module: nn.Module
    sample: tuple[Any, ...]
    other: tuple[Any, ...]


def outer(function: Callable[..., Any], **parts: nn.Module | Tensor) -> nn.Module:
    """A module around `inner`, which runs `function` and has a linear layer `layer`."""
    return Program(lambda m, *inputs: m.inner(*inputs) * 2, inner=Program(function, layer=linear(), **parts))


def reading(function: Callable[..., Any], other: Tensor | None = None, **parts: Any) -> Callable[[], Scenario]:
    """On positive rows; on `other` (or negative rows) the module goes another way."""
    return lambda: Scenario(outer(function, **parts), (rows().abs(),), (-rows().abs() if other is None else other,))


def masked(function: Callable[..., Any], sample: Tensor, other: Tensor, **parts: Any) -> Callable[[], Scenario]:
    """A second argument whose values decide: constant ones hide the decision from every permutation of them."""
    return lambda: Scenario(outer(function, **parts), (rows(), sample.clone()), (rows(), other.clone()))


FULL, PADDED = torch.ones(3, dtype=torch.bool), torch.tensor([True, False, True])
LENGTHS, OTHER_LENGTHS = torch.tensor([1, 1, 1]), torch.tensor([2, 0, 1])
HUGE = torch.full((3, 4), 1000.0)
NAN = torch.full((3, 4), float("nan"))


def if_tensor(m, x):
    if x.max() > 100:
        return m.layer(x)
    return m.layer(x).relu()


def while_tensor(m, x):
    y = m.layer(x)
    while x.sum() > 500:
        x, y = x / 10, y * 2
    return y


def clipped(m, x):
    """As gradient clipping by norm is written: a branch that normal data never take."""
    norm = x.norm()
    return m.layer(x / norm) if norm.item() > 100 else m.layer(x)


def assertion(m, x):
    if torch.isnan(x).any():
        return m.layer(torch.zeros_like(x))
    return m.layer(x)


def equal_rows(m, x):
    return m.layer(x) if torch.equal(x[0], x[1]) else m.layer(x).tanh()


def close_rows(m, x):
    return m.layer(x) if torch.allclose(x, x.abs()) else m.layer(x).tanh()


def skipped_mask(m, x, mask):
    return m.layer(x) if mask.all() else m.layer(x) * mask[:, None]


def skipped_integer_mask(m, x, mask):
    return m.layer(x) if bool((mask == 1).all()) else m.layer(x) * mask[:, None]


def skipped_by_numpy(m, x, mask):
    return m.layer(x) if mask.numpy().all() else m.layer(x) * mask[:, None]


def skipped_by_array(m, x, mask):
    return m.layer(x) if np.asarray(mask).all() else m.layer(x) * mask[:, None]


def split_by_list(m, x, lengths):
    return torch.stack([part.sum(0) for part in m.layer(x).split(lengths.tolist())])


def repeated(m, x, lengths):
    return m.layer(x).repeat_interleave(lengths, dim=0).exp().sum(0)


def packed(m, x, lengths):
    packed = nn.utils.rnn.pack_padded_sequence(m.layer(x)[None], lengths[:1], batch_first=True)
    return packed.data.exp().sum(0)


def by_storage(m, x, mask):
    return m.layer(x) if all(mask.untyped_storage().tolist()) else m.layer(x) * mask[:, None]


def by_text(m, x, mask):
    return m.layer(x) * mask[:, None] if "False" in str(mask) else m.layer(x)


def by_dlpack(m, x, mask):
    return m.layer(x) if np.from_dlpack(mask.long()).all() else m.layer(x) * mask[:, None]


def by_len(m, x):
    return m.layer(x) * len((x > 0).nonzero())


def by_unique(m, x, mask):
    return m.layer(x) * mask.unique().numel()


def in_a_thread(m, x):
    """Modes of PyTorch belong to one thread."""
    results = []
    thread = threading.Thread(target=lambda: results.append(m.layer(x) if x.min() > 0 else m.layer(x).tanh()))
    thread.start()
    thread.join()
    return results[0]


def written_by_numpy(m, x):
    y = m.layer(x)
    y.detach().numpy()[:, 0] = 0
    return y.sin()


# PyTorch itself reads numbers out of tensors that stand where it wants numbers. All sizes below are equal in the
# sample, so that no permutation of them shows it.
def sized(function: Callable[..., Any], sample: int = 1, other: int = 2, **parts: Any) -> Callable[[], Scenario]:
    """The second argument holds one number three times."""
    return masked(function, torch.full((3,), sample), torch.full((3,), other), **parts)


def of_two_tensors(m, x, sizes):
    return m.layer(x) * torch.tensor([sizes[0], sizes[1], 3, 4])


IMPLICIT: dict[str, Callable[[], Scenario]] = {
    "contains": sized(lambda m, x, sizes: m.layer(x) if 2 not in sizes else m.layer(x).tanh()),
    "range_of_a_tensor": sized(lambda m, x, sizes: sum(m.layer(x) ** k for k in range(1, sizes[0] + 1))),
    "index_of_a_list": sized(lambda m, x, sizes: [x, m.layer(x), m.layer(x).tanh()][sizes[0]]),
    "slice_by_a_tensor": sized(lambda m, x, sizes: m.layer(x)[: sizes[0]].sum(0)),
    "arange_to_a_tensor": sized(lambda m, x, sizes: m.layer(x) + torch.arange(sizes.max()).sum()),
    "zeros_of_a_tensor": sized(lambda m, x, sizes: m.layer(x) + torch.ones(int(sizes[0]), 4).sum()),
    "full_of_a_tensor": sized(lambda m, x, sizes: m.layer(x) * torch.full((4,), sizes[0])),
    "linspace_to_a_tensor": sized(lambda m, x, sizes: m.layer(x) * torch.linspace(0, sizes[0], 4)),
    "tensor_of_tensors": sized(of_two_tensors),
    "tensor_of_a_tensor": sized(lambda m, x, sizes: m.layer(x) * torch.as_tensor([sizes[0]])),
    "number_by_keyword": sized(lambda m, x, sizes: torch.add(x, m.layer(x), alpha=sizes[0])),
    "number_by_position": sized(lambda m, x, sizes: torch.nn.functional.elu(m.layer(x), sizes[0])),
    "roll_by_a_tensor": sized(lambda m, x, sizes: m.layer(x).roll(sizes[0], dims=1)),
    "repeat_by_a_tensor": sized(lambda m, x, sizes: m.layer(x).repeat(sizes[0], 1).sum(0)),
    "narrow_by_a_tensor": sized(lambda m, x, sizes: m.layer(x).narrow(1, sizes[0], 1)),
    "topk_by_a_tensor": sized(lambda m, x, sizes: m.layer(x).topk(sizes[0])[0].sum(-1)),
    "tensor_split_by_a_tensor": sized(lambda m, x, sizes: m.layer(x).tensor_split(sizes[:1])[0].sum(0)),
    "select_by_a_tensor": sized(lambda m, x, sizes: m.layer(x)[:, sizes[0]]),
    "one_hot_without_classes": sized(
        lambda m, x, sizes: m.layer(x) + torch.nn.functional.one_hot(sizes).shape[-1], sample=1, other=3
    ),
    "where_with_one_argument": sized(
        lambda m, x, sizes: m.layer(x) * len(torch.where(sizes > 1)[0]), sample=2, other=1
    ),
    "bincount": sized(lambda m, x, sizes: m.layer(x) * torch.bincount(sizes).numel()),
    "format_of_a_number": sized(lambda m, x, sizes: m.layer(x) * int(f"{sizes[0]}")),
    "percent_of_a_number": sized(lambda m, x, sizes: m.layer(x) * int("%d" % sizes[0])),  # noqa: UP031
    "data_of_a_number": sized(lambda m, x, sizes: m.layer(x) * sizes.data[0].item()),
    "detached_number": sized(lambda m, x, sizes: m.layer(x) * sizes.detach().sum().cpu().item()),
    "copied_number": sized(lambda m, x, sizes: m.layer(x) * copy.deepcopy(sizes)[0].item()),
    "number_through_a_buffer": sized(
        lambda m, x, sizes: (m.n.copy_(sizes), m.layer(x) * m.n[0].item())[1], n=torch.ones(3)
    ),
}


HIDDEN: dict[str, Callable[[], Scenario]] = {
    "if_tensor": reading(if_tensor, HUGE),
    "if_bool": reading(lambda m, x: m.layer(x) if bool(x.max() < 100) else x, HUGE),
    "if_not": reading(lambda m, x: m.layer(x) if not x.max() > 100 else x, HUGE),
    "while_tensor": reading(while_tensor, HUGE),
    "item_in_a_branch": reading(clipped, HUGE),
    "nan_check": reading(assertion, NAN),
    "equal": reading(equal_rows, torch.ones(3, 4)),
    "allclose": reading(close_rows),
    "item_times": reading(lambda m, x: m.layer(x) * x.sum().item()),
    "float_times": reading(lambda m, x: m.layer(x) * float(x.mean())),
    "sign_of_a_float": reading(lambda m, x: m.layer(x) * (1 if float(x.max()) < 100 else 2), HUGE),
    "int_in_a_slice": reading(lambda m, x: m.layer(x)[:, : min(4, 2 + int(x.max() > 100))].sum(0), HUGE),
    "argmax_as_an_index": reading(lambda m, x: m.layer(x)[int(x.sum(1).argmax())], torch.eye(3, 4)),
    "format": reading(lambda m, x: m.layer(x) if f"{x.max() > 100}" == "False" else x, HUGE),
    "numpy": reading(lambda m, x: m.layer(x) + torch.from_numpy(np.sign(x.detach().numpy() - 100)), HUGE),
    "list": reading(lambda m, x: m.layer(x) + max(0.0, max(map(max, x.tolist())) - 100), HUGE),
    "mask_all": masked(skipped_mask, FULL, PADDED),
    "integer_mask_all": masked(skipped_integer_mask, FULL.long(), PADDED.long()),
    "mask_through_numpy": masked(skipped_by_numpy, FULL, PADDED),
    "mask_as_an_array": masked(skipped_by_array, FULL, PADDED),
    "mask_through_its_storage": masked(by_storage, FULL, PADDED),
    "mask_through_text": masked(by_text, FULL, PADDED),
    "mask_through_dlpack": masked(by_dlpack, FULL, PADDED),
    "lengths_as_a_list": masked(split_by_list, LENGTHS, OTHER_LENGTHS),
    "lengths_repeat": masked(repeated, LENGTHS, OTHER_LENGTHS),
    "lengths_pack": masked(packed, LENGTHS, LENGTHS + 1),
    "mask_as_an_index": masked(lambda m, x, mask: m.layer(x)[mask].exp().sum(0), FULL, PADDED),
    "masked_select": masked(lambda m, x, mask: m.layer(x).masked_select(mask[:, None]).sum(), FULL, PADDED),
    "number_of_unique": masked(by_unique, FULL.long(), PADDED.long()),
    "number_of_nonzero": reading(by_len),
    "in_a_thread": reading(in_a_thread),
    "written_by_numpy": reading(written_by_numpy),
    **IMPLICIT,
}
