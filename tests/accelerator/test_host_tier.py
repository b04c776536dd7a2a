"""Tensors of an accelerator in memory of its host and back, beside what is computed: every wait has its reason."""

import copy
import gc
import inspect

import pytest
import torch

from benchmarks.move_everything import MoveEverything
from rockmate import zoo
from rockmate.errors import OffloadError
from rockmate.offload import host_tier
from rockmate.offload.host_tier import HostTier
from rockmate.offload.speed import measured_links
from rockmate.offload.tier import Traffic
from tests.module.moving import moving
from tests.module.steps import assert_same_training, train

pytestmark = pytest.mark.ci

KIB, MIB = 1 << 10, 1 << 20
SIZE = 64 * KIB
SLOW = 4e6  # bytes a second: a copy of that size takes 16 ms


@pytest.fixture
def tier(device, extension):
    made = HostTier(device)
    yield made
    made.close()


def on_host(value, size_bytes=SIZE):
    return torch.full((size_bytes,), value, dtype=torch.uint8, pin_memory=True)


def bytes_on(device, size_bytes=SIZE):
    return torch.empty(size_bytes, dtype=torch.uint8, device=device)


def kept_busy(device):
    """The current stream is, for some copies."""
    other, source = bytes_on(device), on_host(0)
    for _ in range(3):
        other.copy_(source, non_blocking=True)


def others_coming_back(tier, device):
    """Some that are brought back first: what is recalled next comes some copies later."""
    others = [tier.send(bytes_on(device).untyped_storage()) for _ in range(3)]
    for other in others:
        other.wait_sent()
    torch.accelerator.synchronize()
    for other in others:
        other.recall()
    return others


def tensor_in(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def is_all(tensor, value):
    """Once all that its stream was told before is done."""
    return bool((tensor.cpu() == value).all())


def test_all_sizes_come_back_as_they_were(tier, device):
    for size_bytes in (0, 1, 511, 4096, 4097, MIB, 32 * MIB, 40 * MIB + 3):
        given = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8)
        parcel = tier.send(given.to(device).untyped_storage())
        parcel.wait_sent()
        assert torch.equal(tensor_in(parcel.take()).cpu(), given)
        parcel.drop()
    assert tier.held_bytes == 0
    assert tier.most_held_bytes == 40 * MIB + 4 * KIB


def test_bytes_are_let_go_of_when_it_was_waited_for_and_held_from_the_recall_on(tier, device, extension):
    memory = torch.accelerator.memory
    memory.reset_peak_memory_stats()
    before_bytes = memory.memory_allocated()
    parcels = []
    for _ in range(10):
        parcels.append(tier.send(bytes_on(device, MIB).untyped_storage()))
        parcels[-1].wait_sent()
    assert memory.max_memory_allocated() == before_bytes + MIB
    for parcel in parcels[:3]:
        parcel.recall()
    while parcels:
        parcels.pop(0).take()
    assert memory.max_memory_allocated() == before_bytes + 3 * MIB


def test_nothing_waits_on_the_host(tier, device, extension):
    given = on_host(7).to(device)
    extension.set_copy_rate(SLOW)
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    parcel.recall()
    taken = tensor_in(parcel.take())
    assert not parcel._returned.query()
    assert is_all(taken, 7)


def test_links_are_measured_as_slow_as_they_are(tier, device, extension):
    extension.set_copy_rate(1e9)
    memory = measured_links(tier, device)
    for link in (memory.out, memory.back):
        assert link.bytes_per_ms <= 1.05e6  # the copies of the device take their time: never faster, but for a clock
    assert tier.held_bytes == 0


def test_what_each_direction_moves_is_counted_with_its_own_time(tier, device, extension):
    given = [on_host(7).to(device) for _ in range(3)]
    torch.accelerator.synchronize()
    extension.set_copy_rate(SLOW)
    kept_busy(device)  # a transfer waits for that, which is no time of the link's
    parcels = [tier.send(tensor.untyped_storage()) for tensor in given]
    out, back = tier.traffic()
    assert (out.transfers, out.size_bytes, back) == (3, 3 * SIZE, Traffic())
    least_ms = 1e3 * 3 * SIZE / SLOW
    assert 0.9 * least_ms < out.busy_ms < 2 * least_ms
    for parcel in parcels:
        parcel.wait_sent()
        parcel.recall()
        parcel.take()
    assert tier.traffic()[0] == out
    assert (tier.traffic()[1].transfers, tier.traffic()[1].size_bytes) == (3, 3 * SIZE)


# ---- every wait ----------------------------------------------------------------------------------------------


def written_just_before(tier, device):
    """What is sent is still being written by the stream that computes."""
    given = bytes_on(device)
    given.copy_(on_host(0))
    kept_busy(device)
    given.copy_(on_host(1), non_blocking=True)
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    return is_all(tensor_in(parcel.take()), 1)


def written_again_after_it_was_sent(tier, device):
    """Another tensor is where it was, and is written at once."""
    given = bytes_on(device)
    given.copy_(on_host(1))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    place = given.data_ptr()
    del given
    other = bytes_on(device)
    assert other.data_ptr() == place
    other.copy_(on_host(2), non_blocking=True)
    torch.accelerator.synchronize()
    return is_all(tensor_in(parcel.take()), 1) and is_all(other, 2)


def read_still_where_it_comes_back_to(tier, device):
    """The stream that computes still reads what was there before."""
    given = bytes_on(device)
    given.copy_(on_host(1))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    torch.accelerator.synchronize()
    before, told = given, on_host(0)
    before.copy_(on_host(3))
    kept_busy(device)
    told.copy_(before, non_blocking=True)
    del given, before
    parcel.recall()
    torch.accelerator.synchronize()
    return is_all(told, 3) and is_all(tensor_in(parcel.take()), 1)


def read_at_once(tier, device):
    """It is read as soon as it is taken."""
    given = bytes_on(device)
    given.copy_(on_host(1))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    del given
    _others = others_coming_back(tier, device)
    return is_all(tensor_in(parcel.take()), 1)


def given_up_on_its_way_back(tier, device):
    """Another tensor is where it would have been."""
    given = bytes_on(device)
    given.copy_(on_host(1))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    del given
    _others = others_coming_back(tier, device)
    parcel.recall()
    parcel.drop()
    other = bytes_on(device)
    other.fill_(4)
    torch.accelerator.synchronize()
    return is_all(other, 4)


def sent_by_another_stream_into_the_same_memory(tier, device):
    """What comes back to one stream is still being read there."""
    given, second = bytes_on(device), bytes_on(device)
    given.copy_(on_host(1))
    second.copy_(on_host(5))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    _others = others_coming_back(tier, device)
    taken = tensor_in(parcel.take())
    parcel.drop()
    stream = torch.Stream(device)
    with stream:
        other = tier.send(second.untyped_storage())
    torch.accelerator.synchronize()
    with stream:  # the one that waits for what comes back
        return is_all(taken, 1) and is_all(tensor_in(other.take()), 5)


CASES = [
    written_just_before,
    written_again_after_it_was_sent,
    read_still_where_it_comes_back_to,
    read_at_once,
    given_up_on_its_way_back,
    sent_by_another_stream_into_the_same_memory,
]


def fine(tier, device, extension):
    """The cases that come out right, each with slow copies; the tier's memory is as new for each."""
    found = []
    for case in CASES:
        torch.accelerator.synchronize()
        tier.close()
        extension.set_copy_rate(SLOW)
        found.append(case(tier, device))
        extension.set_copy_rate(0.0)
        torch.accelerator.synchronize()
    return found


def waits(monkeypatch, left_out=None):
    """Lines at which a stream is told to wait, as they come; at one of them it is not."""
    seen, wait = [], host_tier._wait

    def told(stream, event):
        line = inspect.currentframe().f_back.f_lineno
        if line not in seen:
            seen.append(line)
        if line != left_out:
            wait(stream, event)

    monkeypatch.setattr(host_tier, "_wait", told)
    return seen


def test_without_any_one_of_its_waits_a_value_is_wrong(tier, device, extension, monkeypatch):
    seen = waits(monkeypatch)
    assert all(fine(tier, device, extension))
    monkeypatch.undo()
    places = [
        number
        for number, line in enumerate(inspect.getsource(host_tier).splitlines(), 1)
        if "_wait(" in line and "def " not in line
    ]
    assert sorted(seen) == places, "every wait is met"
    for place in places:
        waits(monkeypatch, left_out=place)
        assert not all(fine(tier, device, extension)), f"nobody sees that the wait in line {place} is missing"
        monkeypatch.undo()


# ---- steps, limits and faults ----------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.0, 2e8], ids=["at_once", "slow"])
def test_a_step_that_moves_everything_is_eager_s(tier, device, extension, rate):
    extension.set_copy_rate(rate)
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        entry = zoo.get("gpt2-tiny", device=device)
        for _ in range(2):
            if moves:
                with MoveEverything(tier, entry.model.parameters(), least_bytes=KIB):
                    loss = entry.loss(entry.model(*entry.sample))
            else:
                loss = entry.loss(entry.model(*entry.sample))
            loss.backward()
        found.append([loss.detach(), *(parameter.grad for parameter in entry.model.parameters())])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert tier.most_held_bytes > MIB // 2
    del loss
    gc.collect()
    assert tier.held_bytes == 0


def test_a_limit_is_kept_and_told_and_idle_memory_makes_room(device, extension):
    tier = HostTier(device, limit_bytes=3 * MIB)
    parcels = [tier.send(bytes_on(device, MIB).untyped_storage()) for _ in range(3)]
    with pytest.raises(
        OffloadError, match=r"3\.00 MiB are in pinned memory .* 4\.00 KiB more are beyond its limit of 3"
    ):
        tier.send(bytes_on(device, KIB).untyped_storage())
    assert tier.held_bytes == 3 * MIB
    for parcel in parcels:
        parcel.drop()
    other = tier.send(on_host(6, 2 * MIB).to(device).untyped_storage())
    assert is_all(tensor_in(other.take()), 6)
    assert sum(len(pieces) for pieces in tier._idle.values()) == 0


def test_no_pinned_memory_is_told_and_nothing_is_held(tier, device, monkeypatch):
    given, empty = on_host(8, 40 * MIB).to(device), torch.empty

    def fails(*sizes, **options):
        if options.get("pin_memory") and sizes[0] < 32 * MIB:
            raise RuntimeError("cannot pin")
        return empty(*sizes, **options)

    monkeypatch.setattr(torch, "empty", fails)
    with pytest.raises(
        OffloadError, match=r"the host has no 8\.00 MiB of pinned memory left, .*: cannot pin\. Give a low"
    ):
        tier.send(given.untyped_storage())
    assert tier.held_bytes == 0
    monkeypatch.undo()
    assert is_all(tensor_in(tier.send(given.untyped_storage()).take()), 8)


def test_tensors_elsewhere_are_refused(tier):
    with pytest.raises(
        OffloadError, match="tensors on cpu are not moved to pinned memory of the host: only those on test"
    ):
        tier.send(torch.empty(4).untyped_storage())


@pytest.mark.parametrize("rate", [0.0, 1e8], ids=["at_once", "slow"])
@pytest.mark.parametrize("name", ["gpt2-tiny", "resnet18-tiny", "mixer-tiny"])
def test_planned_steps_that_move_data_are_eager_s_in_the_bytes_predicted(tier, device, extension, name, rate):
    entry = zoo.get(name, device=device)
    step = moving(entry.model, entry.sample, tier, share=0.7, seed=1, loss=entry.loss)
    extension.set_copy_rate(rate)
    eager, batches = copy.deepcopy(entry.model), [entry.sample] * 2
    assert_same_training(train(entry.model, batches, entry.loss, step.runner), train(eager, batches, entry.loss))
    extension.set_copy_rate(0.0)
    assert step.peak_bytes() <= 1.01 * step.costs.peak_bytes
    gc.collect()
    assert tier.held_bytes == 0
