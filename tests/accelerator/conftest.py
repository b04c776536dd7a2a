"""The test accelerator for tests: built once, and none where it cannot be built."""

import gc
from collections.abc import Iterator

import pytest
import torch

from rkgb.devices.registry import device_of
from tests.accelerator.build import NoCompiler
from tests.accelerator.device import device as accelerator_device
from tests.conftest import required_features
from tests.where import CPU, Place


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The first of its devices."""
    try:
        return accelerator_device()
    except NoCompiler as error:
        if "accelerator" in required_features():
            raise
        pytest.skip(f"{error} (ROCKMATE_REQUIRE=accelerator makes this a failure)")


@pytest.fixture(scope="module", autouse=True)
def there(device: torch.device, request: pytest.FixtureRequest) -> Iterator[None]:
    """Tests that are shared with the CPU make what they use on the device; none of it is left there afterwards."""
    Place.now = device
    yield
    Place.now = CPU
    for test in request.session.items:
        if isinstance(test, pytest.Function) and test.path == request.path and test.funcargs:
            test.funcargs.clear()  # of the last one they would be there a little longer
    device_of(device).await_backwards()
    gc.collect()
    assert torch.accelerator.memory.memory_allocated(device) == 0


@pytest.fixture
def extension(device: torch.device) -> Iterator[object]:
    """What can be set of it; afterwards all is as it was, and its memory is empty."""
    made = torch.get_device_module(device).extension
    yield made
    made.set_copy_rate(0.0)
    made.set_operation_us(0.0)
    made.fail_allocation(0)
    made.never_merge(False)
    made.limit(0, 16 << 30)
    made.synchronize(0)
    torch.accelerator.memory.empty_cache()
