"""Build the test accelerator, and give PyTorch a device of its name.

    from tests.accelerator.build import accelerator
    device = accelerator()  # torch.device("testacc"), or skips the test with a reason

A process that has it has it for good. `torch.testacc` is the device's module.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import torch

NAME = "testacc"
SOURCES = Path(__file__).with_name("src")
BUILDS = Path(__file__).parents[2] / "build" / "test-accelerator"  # by what they are made of


class NoCompiler(RuntimeError):
    """The accelerator cannot be built here; the message says why."""


@functools.cache
def accelerator() -> torch.device:
    """The device, built where it is not built yet. Raises `NoCompiler`."""
    extension = _extension()
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, _module(extension))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    return torch.device(NAME, 0)


def _extension() -> Any:
    if sys.platform != "linux":
        raise NoCompiler("the test accelerator is built on Linux alone")
    missing = [tool for tool in ("g++", "ninja") if shutil.which(tool) is None]
    if missing:
        raise NoCompiler(f"the test accelerator needs {' and '.join(missing)} to be built")
    from torch.utils import cpp_extension

    sources = sorted(SOURCES.glob("*.cpp"))
    made_of = hashlib.sha256(f"{torch.__version__} {sys.version}".encode())
    for path in sorted(SOURCES.iterdir()):
        made_of.update(path.read_bytes())
    folder = BUILDS / made_of.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    return cpp_extension.load(
        name="test_accelerator",
        sources=[str(path) for path in sources],
        extra_cflags=["-O1", "-std=c++20"],
        build_directory=str(folder),
    )


def _module(extension: Any) -> types.ModuleType:
    """What PyTorch and its users find as `torch.testacc`."""
    module: Any = types.ModuleType(f"torch.{NAME}")
    generators = tuple(extension.default_generator(index) for index in range(extension.device_count()))

    def index_of(device: Any = None) -> int:
        if device is None:
            return int(extension.current_device())
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return int(extension.current_device()) if index is None else index

    def manual_seed_all(seed: int) -> None:
        for generator in generators:
            generator.manual_seed(seed)

    module.default_generators = generators
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module._initialized = True  # by which checkpoints know that there are random numbers to be drawn again
    module.device = lambda device: torch.accelerator.device_index(index_of(device))
    module.init = lambda: None
    module._is_in_bad_fork = lambda: False
    module.device_count = extension.device_count
    module.mem_get_info = extension.mem_get_info
    module._lazy_init = lambda: None  # PyTorch 2.9 takes a device without it for one that was never used
    module.current_device = extension.current_device
    module.set_device = lambda device: extension.exchange_device(index_of(device))
    module.synchronize = lambda device=None: extension.synchronize(index_of(device))
    module.manual_seed_all = manual_seed_all
    module.manual_seed = lambda seed: generators[extension.current_device()].manual_seed(seed)
    module.get_rng_state = lambda device=None: generators[index_of(device)].get_state()
    module.set_rng_state = lambda state, device=None: generators[index_of(device)].set_state(state)
    module.Event = functools.partial(torch.Event, NAME)
    module.Stream = lambda device=None, priority=0: torch.Stream(
        torch.device(NAME, index_of(device)), priority=priority
    )
    module.current_stream = lambda device=None: torch.accelerator.current_stream(torch.device(NAME, index_of(device)))
    module.stream = lambda stream: contextlib.nullcontext() if stream is None else stream
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    module.extension = extension
    return module  # type: ignore[no-any-return]


if __name__ == "__main__":
    accelerator()
