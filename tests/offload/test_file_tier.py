"""Tensors in a file and back: whatever their size, wherever they are, and whatever becomes of the disk."""

import _thread
import ctypes
import errno
import gc
import mmap
import os
import random
import stat
import subprocess
import sys
import textwrap
import threading
import time

import pytest
import torch

from benchmarks.move_everything import MoveEverything
from rkgb.devices.allocation_log import AllocationLog
from rockmate import zoo
from rockmate.errors import OffloadError
from rockmate.offload import scratch_file
from rockmate.offload.file_tier import FileTier
from rockmate.offload.scratch_file import ScratchFile
from rockmate.offload.speed import measured_links
from rockmate.offload.tier import Shape, Traffic

MIB = 1 << 20
SIZES = [0, 1, 511, 512, 513, 4096, 100_003, 8 * MIB - 1, 8 * MIB, 8 * MIB + 1, 20 * MIB + 7]


@pytest.fixture
def tier(tmp_path):
    made = FileTier(tmp_path)
    yield made
    made.close()


def some_bytes(size_bytes, seed=0):
    return torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def tensor_in(storage):
    return torch.empty(0, dtype=torch.uint8).set_(storage)


def there_and_back(tier, tensor):
    parcel = tier.send(tensor.untyped_storage())
    parcel.wait_sent()
    parcel.recall()
    return tensor_in(parcel.take())


# ---- the bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [False, True], ids=["direct", "cached"])
def test_all_sizes_come_back_as_they_were(tmp_path, monkeypatch, cached):
    if cached:
        monkeypatch.setattr(os, "O_DIRECT", 0, raising=False)
    tier = FileTier(tmp_path)
    for size_bytes in SIZES:
        given = some_bytes(size_bytes)
        assert torch.equal(there_and_back(tier, given), given)
    assert (tier.held_bytes, tier.most_held_bytes) == (0, max(SIZES))
    tier.close()


def test_what_each_direction_moves_is_counted(tier):
    assert tier.traffic() == (Traffic(), Traffic())
    parcel = tier.send(some_bytes(2 * MIB).untyped_storage())
    parcel.wait_sent()
    out, back = tier.traffic()
    assert (out.transfers, out.size_bytes) == (1, 2 * MIB)
    assert out.busy_ms > 0
    assert back == Traffic()
    parcel.take()
    there_and_back(tier, some_bytes(100))
    for before, after in zip((out, back), tier.traffic(), strict=True):
        more = after.since(before)
        assert (after.transfers, after.size_bytes) == (2, 2 * MIB + 100)
        assert 0 < more.busy_ms <= after.busy_ms


def test_memory_at_any_address_is_written_and_read(tier):
    """Kernels take some addresses without a copy, and the others by way of a buffer."""
    for start in (0, 1, 64, 511, 512):
        whole = bytearray(3 * MIB + 512)
        given = torch.frombuffer(whole, dtype=torch.uint8)[start : start + 2 * MIB + 5].copy_(some_bytes(2 * MIB + 5))
        own = torch.frombuffer(whole, dtype=torch.uint8, offset=start, count=2 * MIB + 5)
        assert torch.equal(there_and_back(tier, own), given)


def test_nothing_but_the_ends_is_copied(tier, monkeypatch):
    """The kernel takes the middle from where it is, wherever the tensor begins."""
    copied, memmove = [], ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda to, at, size: (copied.append(size), memmove(to, at, size)))
    given = torch.empty(20 * MIB + 100, dtype=torch.uint8).copy_(some_bytes(20 * MIB + 100))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    if tier._opened.file.memory_bytes > 4096:
        pytest.skip("direct access takes other addresses here")
    assert sum(copied) <= 2 * 4096
    back = tensor_in(parcel.take())
    assert torch.equal(back, given)
    starts = {tensor.data_ptr() % tier._opened.file.memory_bytes for tensor in (given, back)}
    assert len(starts) > 1 or sum(copied) <= 4 * 4096


def test_shapes_are_those_that_were(tier):
    base = torch.randn(40, 50, dtype=torch.float64)
    for tensor in (base, base.t(), base[3:, ::2], base[:, 7], base.view(torch.int64), base[1, 1]):
        parcel = tier.send(tensor.untyped_storage())
        back = Shape.of(tensor).within(parcel.take())
        assert torch.equal(back, tensor)
        assert (back.stride(), back.storage_offset()) == (tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("seed", range(4))
def test_many_at_once_in_any_order(tier, seed):
    chance, away = random.Random(seed), []
    for number in range(200):
        if away and chance.random() < 0.55:
            parcel, content = away.pop(chance.randrange(len(away)))
            for step in chance.sample([parcel.wait_sent, parcel.recall], chance.randrange(3)):
                step()
            if chance.random() < 0.8:
                assert torch.equal(tensor_in(parcel.take()), content)
            if chance.random() < 0.2:
                assert torch.equal(tensor_in(parcel.take()), content), "it is still there"
            parcel.drop()
        else:
            content = some_bytes(int(2 ** chance.uniform(0, 21)), number)
            away.append((tier.send(content.untyped_storage()), content))
    held_bytes = sum(content.nbytes for _, content in away)
    tier.close()  # waits for what is under way
    assert tier.held_bytes == held_bytes
    away.clear()
    assert tier.held_bytes == 0


def test_bytes_are_let_go_of_when_it_was_waited_for_and_held_from_the_recall_on(tier):
    """So peaks are known in advance, however fast the disk is."""
    parcels = []
    with AllocationLog(torch.device("cpu")) as log:
        for _ in range(30):
            parcels.append(tier.send(torch.empty(4 * MIB, dtype=torch.uint8).untyped_storage()))
            parcels[-1].wait_sent()
    assert log.peak_bytes == 4 * MIB
    with AllocationLog(torch.device("cpu")) as log:
        for parcel in parcels[:3]:
            parcel.recall()
        while parcels:
            parcels.pop(0).take()
    assert log.peak_bytes == 12 * MIB


def test_a_step_that_moves_everything_is_eager_s(tier):
    found = []
    for moves in (False, True):
        torch.manual_seed(0)
        entry = zoo.get("gpt2-tiny")
        losses = []
        for _ in range(2):
            if moves:
                with MoveEverything(tier, entry.model.parameters(), least_bytes=1024):
                    loss = entry.loss(entry.model(*entry.sample))
            else:
                loss = entry.loss(entry.model(*entry.sample))
            loss.backward()
            losses.append(loss.detach())
        found.append((losses, [parameter.grad for parameter in entry.model.parameters()]))
    for ours, eagers in zip(*found, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, eagers, strict=True))
    assert tier.most_held_bytes > MIB // 2
    del loss
    gc.collect()
    assert tier.held_bytes == 0


def test_links_are_measured_and_nothing_is_left_of_it(tmp_path):
    tier, state = FileTier(tmp_path, limit_bytes=200 * MIB), torch.get_rng_state()
    memory = measured_links(tier, torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert (memory.limit_bytes, memory.staging_bytes) == (200 * MIB, tier.staging_bytes)
    assert all(1 < link.bytes_per_ms < 1e9 and 0 <= link.latency_ms < 1e4 for link in (memory.out, memory.back))
    assert tier.held_bytes == 0
    assert tier.most_held_bytes <= 200 * MIB
    tier.close()
    small = FileTier(tmp_path, limit_bytes=MIB)
    measured_links(small, torch.device("cpu"))
    assert 0 < small.most_held_bytes <= MIB
    small.close()
    with pytest.raises(OffloadError, match="leaves nothing to move"):
        measured_links(FileTier(tmp_path, limit_bytes=1), torch.device("cpu"))


# ---- limits and faults -----------------------------------------------------------------------------------------


def test_a_limit_is_kept_and_told(tmp_path):
    tier = FileTier(tmp_path, limit_bytes=3 * MIB)
    first = tier.send(some_bytes(2 * MIB).untyped_storage())
    with pytest.raises(
        OffloadError, match=r"2\.00 MiB are in a file in .*, and 1\.50 MiB more are beyond its limit of 3"
    ):
        tier.send(some_bytes(3 * MIB // 2).untyped_storage())
    assert tier.held_bytes == 2 * MIB
    first.wait_sent()
    first.drop()
    assert torch.equal(there_and_back(tier, some_bytes(3 * MIB)), some_bytes(3 * MIB))


def test_a_full_disk_is_told_and_nothing_is_lost(tier, monkeypatch):
    given, write = some_bytes(2 * MIB), os.pwrite

    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    parcel = tier.send(given.untyped_storage())
    for _ in range(2):
        with pytest.raises(
            OffloadError, match=r"2\.00 MiB could not be written to .*: the disk is full \(.* are free\)"
        ):
            parcel.wait_sent()
    parcel.drop()
    assert tier.held_bytes == 0
    monkeypatch.setattr(os, "pwrite", write)
    assert torch.equal(there_and_back(tier, given), given)


def test_a_file_may_not_grow_beyond_what_the_system_allows(tmp_path):
    """As a full disk, told by the kernel."""
    told = run(
        f"""
        import resource, torch
        from rockmate.errors import OffloadError
        from rockmate.offload.file_tier import FileTier
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        tier = FileTier({str(tmp_path)!r})
        small, large = (torch.arange(number) for number in (1000, 1 << 20))
        parcel = tier.send(small.untyped_storage())
        try:
            tier.send(large.untyped_storage()).wait_sent()
        except OffloadError as error:
            print("told:", error)
        assert torch.equal(torch.empty(0, dtype=torch.int64).set_(parcel.take()), small)
        """
    )
    assert "told: 8.00 MiB could not be written to a file in" in told.stdout
    assert told.returncode == 0


def test_what_cannot_be_read_is_told_and_never_taken_for_the_tensor(tier, monkeypatch):
    given = some_bytes(2 * MIB)
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    read = os.preadv

    def broken(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(OffloadError, match=r"could not be read from .*: Input/output error"):
        parcel.take()
    monkeypatch.setattr(os, "preadv", read)
    other = tier.send(given.untyped_storage())
    other.wait_sent()
    os.ftruncate(tier._opened.file.descriptor, 0)
    with pytest.raises(OffloadError, match="ends at byte"):
        other.take()


def test_folders_that_cannot_be_used_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(OffloadError, match=r"no scratch file can be made in .*missing.*: No such file.* Give the path"):
        FileTier(tmp_path / "missing")
    for other in ("/proc/self", "/dev/shm"):
        if not os.path.isdir(other):
            continue
        with pytest.raises(OffloadError, match="no scratch file can be made|is in memory"):
            FileTier(other).send(some_bytes(5).untyped_storage())
    with pytest.raises(OffloadError, match="tensors on meta are not written"):
        FileTier(tmp_path).send(torch.empty(4, device="meta").untyped_storage())


def test_a_slow_disk_is_waited_for(tier, monkeypatch):
    given, write, read = some_bytes(MIB), ScratchFile.write, ScratchFile.read
    monkeypatch.setattr(ScratchFile, "write", lambda *a: (time.sleep(0.2), write(*a)))
    monkeypatch.setattr(ScratchFile, "read", lambda *a: (time.sleep(0.2), read(*a)))
    assert torch.equal(there_and_back(tier, given), given)


def test_what_is_closed_meanwhile_is_told(tier):
    parcel = tier.send(some_bytes(MIB).untyped_storage())
    parcel.wait_sent()
    tier.close()
    with pytest.raises(OffloadError, match="was closed before the step ended"):
        parcel.take()
    assert torch.equal(there_and_back(tier, some_bytes(MIB)), some_bytes(MIB)), "a new file is made"


def test_ctrl_c_while_it_is_waited_for_leaves_all_usable(tier, monkeypatch):
    given, read = some_bytes(MIB), ScratchFile.read
    monkeypatch.setattr(ScratchFile, "read", lambda *a: (time.sleep(1.0), read(*a)))
    parcel = tier.send(given.untyped_storage())
    parcel.wait_sent()
    timer = threading.Timer(0.2, _thread.interrupt_main)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        parcel.take()
    timer.join()
    assert torch.equal(tensor_in(parcel.take()), given)
    parcel.drop()
    assert torch.equal(there_and_back(tier, given), given)


# ---- processes --------------------------------------------------------------------------------------------------


def run(code):
    code = textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)


def test_nobody_else_can_read_it_and_nothing_is_left(tier, tmp_path):
    parcel = tier.send(some_bytes(MIB).untyped_storage())
    parcel.wait_sent()
    told = os.fstat(tier._opened.file.descriptor)
    assert stat.S_IMODE(told.st_mode) == 0o600
    assert told.st_nlink == 0
    assert list(tmp_path.iterdir()) == []


def test_where_nameless_files_do_not_exist_the_name_is_taken_away_at_once(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    file = ScratchFile(str(tmp_path))
    assert os.fstat(file.descriptor).st_nlink == 0
    assert stat.S_IMODE(os.fstat(file.descriptor).st_mode) == 0o600
    assert list(tmp_path.iterdir()) == []
    file.close()


def test_nothing_is_left_of_a_process_that_was_killed(tmp_path):
    told = run(
        f"""
        import os, signal, torch
        from rockmate.offload.file_tier import FileTier
        tier = FileTier({str(tmp_path)!r})
        parcel = tier.send(torch.randn(1 << 20).untyped_storage())
        parcel.wait_sent()
        os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    assert told.returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_forks_reads_what_was_there_and_writes_to_its_own(tier):
    first, second = some_bytes(MIB, 1), some_bytes(MIB, 2)
    parcel = tier.send(first.untyped_storage())
    parcel.wait_sent()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            fine = torch.equal(there_and_back(tier, second), second) and torch.equal(tensor_in(parcel.take()), first)
            code = 0 if fine else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert torch.equal(tensor_in(parcel.take()), first)


@pytest.mark.slow
def test_two_processes_share_a_folder(tmp_path):
    code = textwrap.dedent(
        f"""
        import sys, torch
        from rockmate.offload.file_tier import FileTier
        tier = FileTier({str(tmp_path)!r})
        contents = [torch.full((100_000,), float(sys.argv[1]) + place) for place in range(20)]
        parcels = [tier.send(content.untyped_storage()) for content in contents]
        for content, parcel in zip(contents, parcels):
            assert torch.equal(torch.empty(0).set_(parcel.take()), content)
        """
    )
    both = [subprocess.Popen([sys.executable, "-c", code, str(number)]) for number in (0, 1000)]
    assert [one.wait(timeout=120) for one in both] == [0, 0]


def test_the_cache_of_the_system_does_not_grow(tier):
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mincore"):
        pytest.skip("this system does not tell which pages are in its cache")
    there_and_back(tier, some_bytes(8 * MIB))
    view = mmap.mmap(tier._opened.file.descriptor, 8 * MIB)
    pages = (ctypes.c_ubyte * (8 * MIB // mmap.PAGESIZE))()
    address = torch.frombuffer(view, dtype=torch.uint8).data_ptr()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(8 * MIB), pages) == 0
    assert sum(page & 1 for page in pages) <= 1


def test_alignment_is_a_page_where_the_system_does_not_tell(tmp_path, monkeypatch):
    monkeypatch.setattr(scratch_file, "_STATX_DIOALIGN", 0)
    tier = FileTier(tmp_path)
    assert torch.equal(there_and_back(tier, some_bytes(MIB + 3)), some_bytes(MIB + 3))
    assert tier._opened.file.memory_bytes == tier._opened.file.block_bytes == 4096
    tier.close()


def test_a_parcel_that_is_collected_while_its_tier_is_at_work_waits_for_nothing(tier):
    """A collection of garbage runs wherever memory is taken: within what holds the lock, too."""
    parcel = tier.send(torch.ones(1000).untyped_storage())
    parcel.wait_sent()
    with tier._lock:
        parcel.drop()
        assert tier.held_bytes == 4000
    tier.send(torch.ones(10).untyped_storage()).drop()
    tier.close()
    assert tier.held_bytes == 0
