"""The test accelerator itself: it computes as the CPU does, and its memory, streams and random numbers are a GPU's."""

import copy
import gc
import time

import pytest
import torch
import torch.nn.functional as F
from torch import nn

pytestmark = pytest.mark.ci  # it is to be built first

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def memory(device, extension):
    """Its statistics, from an empty cache on."""
    gc.collect()  # what tests before this one left in cycles holds blocks, and segments with them
    torch.accelerator.memory.empty_cache()
    torch.accelerator.memory.reset_peak_memory_stats()
    return torch.accelerator.memory


def reserved(memory):
    return memory.memory_stats()["reserved_bytes.all.current"]


def bytes_on(device, size_bytes):
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


# ---- memory ----------------------------------------------------------------------------------------------


def test_blocks_are_of_512_bytes_in_segments_of_2_mib(device, memory):
    before, before_reserved = memory.memory_allocated(), reserved(memory)
    one, other = bytes_on(device, 100), bytes_on(device, 513)
    assert memory.memory_allocated() - before == 3 * 512
    assert reserved(memory) - before_reserved == 2 * MIB
    assert other.data_ptr() - one.data_ptr() == 512


def test_large_blocks_share_20_mib_and_the_largest_have_segments_of_their_own(device, memory):
    before = reserved(memory)
    middle = bytes_on(device, 3 * MIB)
    assert reserved(memory) - before == 20 * MIB
    more = bytes_on(device, 9 * MIB)  # beside it
    assert reserved(memory) - before == 20 * MIB
    own = bytes_on(device, 11 * MIB)
    assert reserved(memory) - before == 32 * MIB  # a multiple of 2
    del middle, more, own


def test_what_is_freed_is_used_again_and_the_best_fit_is_taken(device, memory):
    wide, _between, narrow = (bytes_on(device, size) for size in (64 * KIB, KIB, 32 * KIB))
    _rest = bytes_on(device, KIB)
    places = narrow.data_ptr(), wide.data_ptr()
    del wide, narrow
    assert bytes_on(device, 20 * KIB).data_ptr() == places[0]
    assert bytes_on(device, 40 * KIB).data_ptr() == places[1]


def test_neighbours_are_merged_unless_told_otherwise(device, memory, extension):
    for merges in (True, False):
        extension.never_merge(not merges)
        parts = [bytes_on(device, 8 * MIB) for _ in range(2)]
        place = parts[0].data_ptr()
        del parts
        assert (bytes_on(device, 9 * MIB).data_ptr() == place) == merges
        extension.never_merge(False)


def test_its_statistics_and_history_tell_what_happened(device, memory, extension):
    before = memory.memory_allocated()
    extension.record_history(0, True)
    kept = bytes_on(device, 1000)
    del kept
    told = [(event["action"], event["size"]) for event in extension.history(0)]
    extension.record_history(0, False)
    assert told == [("segment_alloc", 2 * MIB), ("alloc", 1000), ("free_requested", 1000), ("free_completed", 1000)]
    assert memory.memory_allocated() == before
    assert memory.max_memory_allocated() - before == 1024
    assert extension.history(0) == []


def test_it_is_out_of_memory_at_its_limit_and_gives_back_its_cache_first(device, memory, extension):
    held = memory.memory_reserved()
    extension.limit(0, held + 40 * MIB)
    first = bytes_on(device, 30 * MIB)
    with pytest.raises(torch.OutOfMemoryError, match="Test accelerator out of memory"):
        bytes_on(device, 12 * MIB)
    del first
    assert bytes_on(device, 38 * MIB).nbytes == 38 * MIB  # what was cached went


def test_an_allocation_fails_on_demand(device, extension):
    extension.fail_allocation(2)
    kept = bytes_on(device, 10)
    with pytest.raises(torch.OutOfMemoryError):
        bytes_on(device, 10)
    assert bytes_on(device, 10).nbytes == kept.nbytes


def test_what_is_freed_is_overwritten(device):
    one = torch.zeros(1000, dtype=torch.uint8, device=device)
    place = one.data_ptr()
    del one
    again = bytes_on(device, 1000)
    assert again.data_ptr() == place
    assert again.cpu().ne(0).all()


# ---- computing -------------------------------------------------------------------------------------------


class Network(nn.Module):
    """Convolutions, normalisations, attention, an embedding. No dropout: as on GPUs, it is another operation there."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.words = nn.Embedding(11, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
        self.head = nn.Linear(8, 5)

    def forward(self, images, words):
        hidden = F.max_pool2d(F.relu(self.norm(self.convolution(images))), 2).flatten(2).transpose(1, 2)
        hidden = torch.cat([hidden, self.words(words)], 1)
        return F.cross_entropy(
            self.head(self.encoder(hidden)).flatten(0, 1), words.new_zeros(hidden.shape[:2]).flatten()
        )


def test_it_computes_what_the_cpu_does(device):
    torch.manual_seed(0)
    on_cpu = Network()
    on_device = copy.deepcopy(on_cpu).to(device)
    images, words = torch.randn(2, 3, 8, 8), torch.randint(11, (2, 5))
    losses = []
    for model, at in ((on_cpu, "cpu"), (on_device, device)):
        torch.manual_seed(3)  # of both kinds
        loss = model(images.to(at), words.to(at))
        loss.backward()
        losses.append(loss.detach().cpu())
    # Kernels of the CPU are chosen by strides and by what requires gradients, which the device has otherwise.
    near = {"rtol": 1e-4, "atol": 1e-6}
    torch.testing.assert_close(*losses, **near)
    for mine, theirs in zip(on_device.parameters(), on_cpu.parameters(), strict=True):
        assert mine.grad.device == device
        torch.testing.assert_close(mine.grad.cpu(), theirs.grad, **near)
    for mine, theirs in zip(on_device.buffers(), on_cpu.buffers(), strict=True):
        torch.testing.assert_close(mine.cpu(), theirs, **near)


def test_views_share_memory_and_writes_show(device):
    whole = torch.arange(24, device=device).view(2, 3, 4)
    part = whole.transpose(0, 2)[1:, :, 0]
    part.add_(100)
    expected = torch.arange(24).view(2, 3, 4)
    expected.transpose(0, 2)[1:, :, 0].add_(100)
    assert part.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    assert torch.equal(whole.cpu(), expected)


def test_optimizers_run_there(device):
    found = []
    for at in ("cpu", device):
        torch.manual_seed(0)
        model = nn.Linear(4, 3).to(at)
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 4, device=at)).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        found.append(model.weight.detach().cpu())
    assert torch.equal(*found)


def test_autocast_casts_as_on_a_gpu(device):
    layer, norm = nn.Linear(4, 4, device=device), nn.LayerNorm(4, device=device)
    with torch.autocast(device.type, torch.bfloat16):
        hidden = layer(torch.ones(2, 4, device=device))
        assert hidden.dtype is torch.bfloat16
        assert hidden.softmax(-1).dtype is torch.float32
        assert norm(hidden).dtype is torch.float32


# ---- random numbers --------------------------------------------------------------------------------------


def test_its_random_numbers_are_its_own(device):
    torch.manual_seed(7)
    of_cpu = torch.get_rng_state()
    state = torch.get_device_module(device).get_rng_state()
    one = torch.rand(5, device=device), torch.nn.functional.dropout(torch.ones(20, device=device), 0.5)
    assert torch.equal(torch.get_rng_state(), of_cpu)
    torch.get_device_module(device).set_rng_state(state)
    other = torch.rand(5, device=device), torch.nn.functional.dropout(torch.ones(20, device=device), 0.5)
    assert all(torch.equal(mine.cpu(), theirs.cpu()) for mine, theirs in zip(one, other, strict=True))


def test_generators_of_users_are_taken(device):
    generator = torch.Generator(device).manual_seed(5)
    one = torch.rand(4, device=device, generator=generator)
    again = torch.rand(4, device=device, generator=torch.Generator(device).manual_seed(5))
    assert generator.device.type == device.type
    assert torch.equal(one.cpu(), again.cpu())


# ---- streams ---------------------------------------------------------------------------------------------

SLOW = 100 * MIB  # bytes a second, of copies
SIZE = 5 * MIB  # so that one takes 50 ms


@pytest.fixture
def slow_copies(extension):
    extension.set_copy_rate(SLOW)


def pinned(device):
    return torch.ones(SIZE, dtype=torch.uint8).pin_memory()


@pytest.mark.usefixtures("slow_copies")
def test_a_copy_that_nobody_waits_for_is_read_too_early(device):
    source, target = pinned(device), torch.zeros(SIZE, dtype=torch.uint8, device=device)
    side = torch.Stream(device)
    with side:
        target.copy_(source, non_blocking=True)
    assert int(target[-1]) == 0
    torch.accelerator.current_stream().wait_stream(side)
    assert int(target[-1]) == 1


@pytest.mark.usefixtures("slow_copies")
def test_a_copy_to_the_host_is_there_once_its_stream_is_done(device):
    target = torch.zeros(SIZE, dtype=torch.uint8).pin_memory()
    source = torch.ones(SIZE, dtype=torch.uint8, device=device)
    side = torch.Stream(device)
    with side:
        target.copy_(source, non_blocking=True)
        event = torch.Event(device)
        event.record()
    assert not event.query()
    assert int(target[-1]) == 0
    event.synchronize()
    assert int(target[-1]) == 1


@pytest.mark.usefixtures("slow_copies")
@pytest.mark.parametrize("recorded", [False, True])
def test_a_block_that_another_stream_reads_is_reused_unless_that_is_recorded(device, recorded):
    source, target = (
        torch.ones(SIZE, dtype=torch.uint8, device=device),
        torch.zeros(SIZE, dtype=torch.uint8).pin_memory(),
    )
    place = source.data_ptr()
    side = torch.Stream(device)
    with side:
        target.copy_(source, non_blocking=True)
    if recorded:
        source.record_stream(side)
    del source
    other = torch.full((SIZE,), 2, dtype=torch.uint8, device=device)
    assert (other.data_ptr() == place) != recorded
    side.synchronize()
    assert int(target[0]) == (1 if recorded else 2)


def test_events_tell_the_time_between_them(device, extension):
    extension.set_copy_rate(SLOW)
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    start.record()
    torch.empty(SIZE, dtype=torch.uint8, device=device).copy_(pinned(device), non_blocking=True)
    end.record()
    end.synchronize()
    assert 40 < start.elapsed_time(end) < 5000


def test_memory_that_is_not_pinned_is_copied_at_once(device, extension):
    extension.set_copy_rate(SLOW)
    started = time.perf_counter()
    target = torch.empty(SIZE, dtype=torch.uint8, device=device)
    target.copy_(torch.ones(SIZE, dtype=torch.uint8), non_blocking=True)
    assert time.perf_counter() - started > 0.04
    assert int(target[-1]) == 1
    assert not torch.ones(3).is_pinned()
    assert torch.ones(3).pin_memory().is_pinned()
