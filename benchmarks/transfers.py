"""How fast tensors leave for the second memory and come back, and what that takes from what computes beside.

    python benchmarks/transfers.py                                  # a file in the temporary folder, about a minute
    python benchmarks/transfers.py --folder /scratch
    python benchmarks/transfers.py --device cuda                    # pinned memory of the host
    python benchmarks/transfers.py --quick --output folder

One core computes; the rest of the machine should be idle. Moves at a set rate are spread over the time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks.reporting import (
    bar,
    circumstances,
    code_version,
    console,
    new_table,
    option_parser,
    print_bars,
    write_report,
)
from rkgb.devices.registry import device_of
from rockmate.offload.file_tier import FileTier
from rockmate.offload.host_tier import HostTier
from rockmate.offload.tier import Tier

MIB = 1 << 20
SIZES_MIB = (1, 8, 64)
RATES = (0.25, 0.5, 1.0)  # GB/s, both ways together
MOST_SLOWER = 1.05  # of a computation beside 1 GB/s


@dataclass(frozen=True)
class Link:
    """Speeds of storages of one size, many on their way at once."""

    size_bytes: int
    out_gb_s: float
    back_gb_s: float
    processor_out_s_gb: float  # seconds of processors for each GB
    processor_back_s_gb: float


@dataclass(frozen=True)
class Beside:
    """What a computation of one core takes while bytes are moved at a rate, over what it takes alone."""

    asked_gb_s: float
    moved_gb_s: float
    slower: float


def tier_on(device: torch.device, folder: str) -> Tier:
    """The second memory of that device."""
    return FileTier(folder) if device_of(device).is_host else HostTier(device)


def measured_link(tier: Tier, device: torch.device, size_bytes: int, total_bytes: int, rounds: int) -> Link:
    """Medians of some rounds, the first of which is not counted: the file grows in it."""
    at, number = device_of(device), max(1, total_bytes // size_bytes)
    found: list[tuple[float, ...]] = []
    for _ in range(rounds + 1):
        storages = [
            torch.full((size_bytes,), 1, dtype=torch.uint8, device=device).untyped_storage() for _ in range(number)
        ]
        at.synchronize()
        times = [_now()]
        parcels = [tier.send(storage) for storage in storages]
        storages.clear()
        for parcel in parcels:
            parcel.wait_sent()
        at.synchronize()
        times.append(_now())
        back = []
        for place, parcel in enumerate(parcels):
            for ahead in parcels[place : place + 3]:
                ahead.recall()
            back.append(parcel.take())
        at.synchronize()
        times.append(_now())
        for parcel in parcels:
            parcel.drop()
        gb = number * size_bytes / 1e9
        (a, cpu_a), (b, cpu_b), (c, cpu_c) = times
        found.append((gb / (b - a), gb / (c - b), (cpu_b - cpu_a) / gb, (cpu_c - cpu_b) / gb))
    return Link(size_bytes, *(statistics.median(column) for column in zip(*found[1:], strict=True)))


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class MovedBeside:
    """Context in which storages of `size_bytes` go out and come back, `gb_s` in all, from a thread of its own."""

    def __init__(self, tier: Tier, device: torch.device, size_bytes: int, gb_s: float) -> None:
        self._tier, self._gb_s = tier, gb_s
        self._storages = [torch.ones(size_bytes, dtype=torch.uint8, device=device).untyped_storage() for _ in range(4)]
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._move)
        self.moved_bytes = 0

    def __enter__(self) -> MovedBeside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    def _move(self) -> None:
        started = time.perf_counter()
        while not self._ends.is_set():
            parcels = [self._tier.send(storage) for storage in self._storages]
            for parcel in parcels:
                parcel.wait_sent()
                parcel.recall()
            self._storages = [parcel.take() for parcel in parcels]
            for parcel in parcels:
                parcel.drop()
            self.moved_bytes += 2 * sum(storage.nbytes() for storage in self._storages)
            self._ends.wait(max(0.0, started + self.moved_bytes / (self._gb_s * 1e9) - time.perf_counter()))


def computation(device: torch.device, width: int) -> Callable[[], None]:
    """A product of matrices, on one core or on the device."""
    one, other = (torch.randn(width, width, device=device) for _ in range(2))
    at = device_of(device)

    def run() -> None:
        torch.mm(one, other)
        at.synchronize()

    return run


def measured_beside(tier: Tier, device: torch.device, rates: tuple[float, ...], runs: int, width: int) -> list[Beside]:
    """Interleaved: each round has the computation alone, and beside each rate."""
    compute = computation(device, width)
    compute()
    times: dict[float, list[float]] = {rate: [] for rate in (0.0, *rates)}
    moved: dict[float, list[float]] = {rate: [] for rate in rates}
    for _ in range(runs):
        for rate in times:
            beside: AbstractContextManager[Any] = MovedBeside(tier, device, 16 * MIB, rate) if rate else nullcontext()
            with beside as mover:
                started = time.perf_counter()
                for _ in range(5):
                    compute()
                taken_s = time.perf_counter() - started
                if mover is not None:
                    moved[rate].append(mover.moved_bytes / 1e9 / taken_s)
            times[rate].append(taken_s)
    alone = statistics.median(times[0.0])
    return [Beside(rate, statistics.median(moved[rate]), statistics.median(times[rate]) / alone) for rate in rates]


def bars_of(besides: list[Beside]) -> list[dict[str, Any]]:
    """What the engine promises to what computes."""
    return [
        bar(f"slower beside {beside.asked_gb_s:g} GB/s", beside.slower, MOST_SLOWER)
        for beside in besides
        if beside.asked_gb_s == RATES[-1]
    ]


def parse_options() -> argparse.Namespace:
    """Options of the command line."""
    parser = option_parser(__doc__, quick="little is moved, once")
    parser.set_defaults(threads=1)
    parser.add_argument("--folder", default=tempfile.gettempdir(), help="where the file is")
    parser.add_argument("--device", default="cpu")
    return parser.parse_args()


def main() -> None:
    """Run the script."""
    options = parse_options()
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    tier = tier_on(device, options.folder)
    total_bytes, rounds = (16 * MIB, 1) if options.quick else (512 * MIB, 5)
    sizes = SIZES_MIB[:2] if options.quick else SIZES_MIB
    links = [measured_link(tier, device, size * MIB, total_bytes, rounds) for size in sizes]
    besides = measured_beside(tier, device, RATES, *((1, 256) if options.quick else (9, 2048)))
    tier.close()
    links_table = new_table("Links")
    for heading in ("out GB/s", "back GB/s", "processors out s/GB", "back s/GB"):
        links_table.add_column(heading, justify="right")
    for link in links:
        numbers = (link.out_gb_s, link.back_gb_s, link.processor_out_s_gb, link.processor_back_s_gb)
        links_table.add_row(f"{link.size_bytes // MIB} MiB", *(f"{number:.2f}" for number in numbers))
    beside_table = new_table("A computation beside moves")
    for heading in ("moved GB/s", "its time"):
        beside_table.add_column(heading, justify="right")
    for beside in besides:
        beside_table.add_row(f"{beside.asked_gb_s:g} GB/s", f"{beside.moved_gb_s:.2f}", f"{beside.slower:.3f}")
    for table in (links_table, beside_table):
        console.print(table)
    bars = bars_of(besides)
    print_bars(bars)
    where = {"code": code_version(), "device": device_of(device).name}
    tables = {"links": [asdict(link) for link in links], "beside": [asdict(beside) for beside in besides]}
    content = {"circumstances": circumstances(options) | where, **tables, "bars": bars}
    write_report(options.output, f"transfers-{device.type}.json", content)


if __name__ == "__main__":
    main()
