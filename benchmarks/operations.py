"""Classes of single operations of models, measured by themselves: what scripts of that kind share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.reporting import circumstances, code_version, console, option_parser, write_report

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Argument:
    """A tensor among the arguments of a call."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Argument:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.requires_grad)

    def made(self, device: torch.device) -> torch.Tensor:
        """One like it."""
        made = torch.empty_strided(self.sizes, self.strides, dtype=self.dtype, device=device)
        if self.dtype.is_floating_point:
            made.normal_()
        else:
            made.fill_(True)
        return made.requires_grad_(self.has_gradient)


def measured_classes(
    description: str | None,
    models: Sequence[str],
    quick: Sequence[str],
    results: str,
    rows_of: Callable[[str, argparse.Namespace], Rows],
    table: Callable[[Rows], Any],
) -> None:
    """`rows_of` each model, written to `results` after each; all of them in a table at the end."""
    parser = option_parser(description, "tiny models, whose times mean nothing")
    parser.set_defaults(threads=1)
    parser.add_argument("--models", nargs="+", help=f"of benchmarks/peers/models.py (default: {' '.join(models)})")
    parser.add_argument("--device", default="cpu", help="where they run (default cpu)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: Rows = []
    for name in options.models or (quick if options.quick else models):
        rows += rows_of(name, options)
        report = {"circumstances": circumstances(options) | {"code": code_version()}, "rows": rows}
        write_report(options.output, results.format(torch.device(options.device).type), report, quietly=True)
    console.print(table(rows))
