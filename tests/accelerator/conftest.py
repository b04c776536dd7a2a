"""The test accelerator for tests: built once, and none where it cannot be built."""

from collections.abc import Iterator

import pytest
import torch

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
def there(device: torch.device) -> Iterator[None]:
    """Tests that are shared with the CPU make what they use on the device."""
    Place.now = device
    yield
    Place.now = CPU


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
