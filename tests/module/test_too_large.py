"""A model whose eager step does not fit the memory is planned and trained all the same, and exactly so.

Steps that are to fail run in processes of their own, this file as a script: limits on memory cannot be taken back.
"""

import copy
import gc
import json
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rkgb.devices.out_of_memory import is_out_of_memory
from rockmate import BudgetError, PeakMemory, Rockmate
from tests.module.models import WIDTH, Layers, Smooth, built
from tests.module.module_state import state_of
from tests.module.steps import FEW_ROUNDS, Trained, assert_same, assert_same_training, squares, train
from tests.scripts import run_script

MIB = 1 << 20
STEPS = 2
# Of the eager step's peak: what the process may take beyond what it has when the step starts, and the plan's budget.
SHARE_FREE, SHARE_BUDGET = 0.7, 0.4


class Images(nn.Module):
    """Convolutions with batch normalisation and dropout around residual connections."""

    def __init__(self, depth: int = 4, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(depth))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(channels, 5)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.stem(images)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            hidden = hidden + self.dropout(F.relu(norm(convolution(hidden))))
        return self.head(hidden.mean(dim=(2, 3)))


def chain() -> nn.Module:
    """Layers of linear, GELU and dropout, whose output is small beside its activations."""
    return nn.Sequential(Layers(8), nn.Linear(WIDTH, 1))


def smooth() -> nn.Module:
    """Cheap layers whose activations are twice as large."""
    return nn.Sequential(Smooth(6), nn.Linear(WIDTH, 1))


def large(name: str, seed: int = 0, scale: int = 1, device: str = "cpu") -> Tensor:
    """A batch for the model of that name: on the whole, activations of some hundred MiB divided by `scale`."""
    shape = {"chain": (65536, WIDTH), "smooth": (131072, WIDTH), "images": (320, 3, 32, 32)}[name]
    return torch.randn((shape[0] // scale, *shape[1:]), generator=torch.Generator().manual_seed(seed)).to(device)


MODELS = {"chain": chain, "images": Images, "smooth": smooth}


# ---- as a script: a process under a limit -----------------------------------------------------------------


def limited_to(free_bytes: int) -> None:
    """From here on, let this process take no more than that beyond what it has."""
    held_bytes = psutil.Process().memory_info().vms
    resource.setrlimit(resource.RLIMIT_AS, (held_bytes + free_bytes, resource.RLIM_INFINITY))


def warmed_up(name: str) -> None:
    """Load every library and start every thread that training and planning use: they take address space, too."""
    small = large(name, scale=64)
    model = built(MODELS[name])
    planned = Rockmate(model, small, 0.7, loss=squares, limits=FEW_ROUNDS)
    train(model, [small], forward=planned)  # the first optimizer imports torch's compiler
    gc.collect()


def eager_step(name: str) -> dict[str, object]:
    """One step, and whether it failed for want of memory."""
    model, batch = built(MODELS[name]), large(name)
    try:
        with PeakMemory() as memory:
            output = model(batch)  # held to the end, as training loops do
            squares(output).backward()
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return {"fits": False}
    return {"fits": True, "peak_bytes": memory.peak_bytes}


def eager_training(name: str, results: str) -> dict[str, object]:
    """Steps of training, kept in a file."""
    torch.save(train(built(MODELS[name]), [large(name, seed) for seed in range(STEPS)]), results)
    return eager_step(name)


def planned_training(name: str, results: str, budget: int | None) -> dict[str, object]:
    """The same steps under a plan that is made here."""
    told: list[str] = []
    model = built(MODELS[name])
    planned = Rockmate(
        model, large(name), budget, loss=squares, limits=FEW_ROUNDS, progress=lambda stage, *_: told.append(stage)
    )
    batches = (large(name, seed) for seed in range(STEPS))
    torch.save(train(model, batches, forward=planned), results)
    batch = large(name)
    model.zero_grad()
    with PeakMemory() as memory:
        output = planned(batch)
        squares(output).backward()
    plan = planned.plan
    return {
        "told": told,
        "budget_bytes": plan.budget_bytes,
        "measured_peak_bytes": plan.measured_peak_bytes,
        "eager_peak_bytes": plan.baseline_peak_bytes,
        "peak_bytes": memory.peak_bytes,
        "recomputations": plan.recomputations,
    }


def planned_within_less_and_less(name: str, eager_peak_bytes: int) -> list[dict[str, object]]:
    """Planning under limits from what suffices to hardly anything: where each attempt ended, and how.

    In this order, as oneDNN, once short of memory for a primitive, never makes that primitive again.
    """
    model, batch = built(MODELS[name]), large(name)
    squares(model(large(name, scale=64))).backward()  # gradients and statistics to be found again
    ends: list[dict[str, object]] = []
    for share in (SHARE_FREE, 0.4, 0.3, 0.25, 0.2, 0.15, 0.1, 0.05, 0.02):
        before, told, end = state_of(model), ["nothing"], {}
        gc.collect()
        limited_to(int(share * eager_peak_bytes))
        try:
            Rockmate(
                model,
                batch,
                int(SHARE_BUDGET * eager_peak_bytes),
                loss=squares,
                limits=FEW_ROUNDS,
                progress=lambda stage, *_, told=told: told.append(stage),
            )
        except BudgetError as error:  # seen before the step of the plan runs
            end = {"refused": str(error)}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            end = {"notes": error.__notes__}
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert_same(state_of(model), before)
        ends.append({"stage": told[-1], **end})
    return ends


def as_script(task: str, name: str, results: str, free_bytes: int, budget: int) -> None:
    """Do one of the tasks within `free_bytes` (0: without a limit), and print what came of it."""
    torch.set_num_threads(2)
    warmed_up(name)
    if free_bytes:
        limited_to(free_bytes)
    if task == "eager":
        print(json.dumps(eager_training(name, results)))
    elif task == "eager step":
        print(json.dumps(eager_step(name)))
    elif task == "planned":
        print(json.dumps(planned_training(name, results, budget or None)))
    else:
        print(json.dumps(planned_within_less_and_less(name, budget)))


# ---- under a limit on the address space -------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run one of the tasks in a process of its own."""
    # Where large blocks come from the heap of the C library, they leave gaps that no other fits: a process then needs
    # up to twice its tensors, and by how much it does would decide these tests.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", "65536")
    monkeypatch.setenv("MALLOC_ARENA_MAX", "2")  # an arena is 64 MiB of address space

    def run_task(task: str, name: str, free_bytes: int = 0, budget: int = 0) -> object:
        results = str(tmp_path / task)
        arguments = (task, name, results, str(int(free_bytes)), str(int(budget)))
        return json.loads(run_script("-m", "tests.module.test_too_large", *arguments).splitlines()[-1])

    return run_task


def trained(tmp_path: Path, task: str) -> Trained:
    return torch.load(tmp_path / task, weights_only=False)


linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")


@linux
@pytest.mark.slow
@pytest.mark.parametrize("name", ["chain", "images"])
def test_what_does_not_fit_eagerly_trains_exactly_within_its_budget(run, tmp_path, name):
    eager = run("eager", name)
    peak_bytes = eager["peak_bytes"]
    assert peak_bytes > 100 * MIB, "beside what a process takes anyway, the model is too small to show anything"
    free_bytes = SHARE_FREE * peak_bytes
    assert run("eager step", name, free_bytes) == {"fits": False}
    planned = run("planned", name, free_bytes, SHARE_BUDGET * peak_bytes)
    assert planned["peak_bytes"] == planned["measured_peak_bytes"] <= planned["budget_bytes"]
    assert any("on disk" in stage for stage in planned["told"])
    assert planned["eager_peak_bytes"] == pytest.approx(peak_bytes, rel=0.01)  # predicted, as it cannot be measured
    assert_same_training(trained(tmp_path, "planned"), trained(tmp_path, "eager"))


@linux
@pytest.mark.slow
def test_without_a_budget_a_plan_is_for_what_the_limit_leaves(run, tmp_path):
    eager = run("eager", "smooth")
    free_bytes = SHARE_FREE * eager["peak_bytes"]
    planned = run("planned", "smooth", free_bytes)
    assert 0.3 * free_bytes < planned["measured_peak_bytes"] <= planned["budget_bytes"] < free_bytes
    assert planned["recomputations"] > 0
    assert_same_training(trained(tmp_path, "planned"), trained(tmp_path, "eager"))


@linux
@pytest.mark.slow
def test_where_planning_runs_out_of_memory_it_says_so_and_leaves_all_as_it_was(run):
    peak_bytes = run("eager step", "images")["peak_bytes"]
    ends = run("sweep", "images", budget=peak_bytes)
    failed = [end for end in ends if "notes" in end]
    assert failed, "no limit was too low to plan"
    for end in failed:
        assert [note for note in end["notes"] if note.startswith("No memory was left")], end
    refused = [str(end["refused"]) for end in ends if "refused" in end]
    assert all("is more than there is: a step would take" in told for told in refused)
    assert ends[0].keys() == {"stage"}, "70 % of the eager peak must suffice"
    assert len({end["stage"] for end in ends}) > 2, "all limits ended planning at the same stage"


# ---- on a GPU ---------------------------------------------------------------------------------------------


@contextmanager
def share_of_the_device(free_bytes: float) -> Iterator[None]:
    """Let this process take no more of the GPU than that beyond what its tensors have."""
    device = torch.cuda.current_device()
    before = torch.cuda.get_per_process_memory_fraction(device)
    gc.collect()
    torch.cuda.empty_cache()
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + free_bytes) / total_bytes, device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, device)
        torch.cuda.empty_cache()


@pytest.mark.cuda
@pytest.mark.parametrize("budget", [SHARE_BUDGET, None], ids=["bytes", "what is free"])
def test_what_does_not_fit_the_share_of_a_gpu_eagerly_trains_within_it(budget):
    # Blocks of 64 MiB have segments of their own: small ones would share some, whose gaps nothing else can use.
    batches = [torch.cat([large("chain", seed, device="cuda")] * 8) for seed in range(STEPS)]
    model = built(chain).cuda()
    untrained = copy.deepcopy(model.state_dict())
    squares(model(batches[0][:64])).backward()  # the workspaces of libraries, which stay
    model.zero_grad()

    def trained_anew(forward: nn.Module | None = None) -> Trained:
        model.load_state_dict(untrained)
        return train(model, batches, forward=forward)

    eager, again = trained_anew(), trained_anew()
    assert_same_training(again, eager)  # no kernel of this model adds in an order of its own
    model.zero_grad()
    with PeakMemory("cuda") as memory:
        output = model(batches[0])
        squares(output).backward()
    del output
    model.zero_grad()
    model.load_state_dict(untrained)
    with share_of_the_device(SHARE_FREE * memory.peak_bytes):
        with pytest.raises(torch.OutOfMemoryError):
            squares(model(batches[0])).backward()
        model.zero_grad()
        gc.collect()
        size_bytes = budget and int(budget * memory.peak_bytes)
        planned = Rockmate(model, batches[0], size_bytes, loss=squares, limits=FEW_ROUNDS)
        assert planned.plan.measured_peak_bytes <= planned.plan.budget_bytes < SHARE_FREE * memory.peak_bytes
        assert planned.plan.baseline_peak_bytes == pytest.approx(memory.peak_bytes, rel=0.01)
        assert_same_training(trained_anew(planned), eager)


if __name__ == "__main__":
    as_script(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
