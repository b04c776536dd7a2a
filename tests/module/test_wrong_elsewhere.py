"""Cases in which other ways to save memory are wrong or refuse, each shown beside ours, which is exact."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from tests.module.models import WIDTH, Layers, Tied, built, images, rows, tokens
from tests.module.steps import assert_same, assert_trains_exactly, recomputing, seen, squares


def step_of(module: nn.Module, data: Tensor) -> dict[str, Tensor | None]:
    torch.manual_seed(3)
    module.zero_grad()
    output = module(data)
    squares(output).backward()
    return seen(module, (data,), output)


# ---- batch normalisation under torch.utils.checkpoint ----------------------------------------------------------


class Blocks(nn.Module):
    """Convolutions with batch normalisation, each of them checkpointed on request."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(channels, 8, 3), nn.BatchNorm2d(8), nn.GELU()) for channels in (3, 8)
        )
        self.checkpointed = checkpointed

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.checkpointed else block(hidden)
        return hidden


def test_checkpoint_counts_a_batch_twice_and_we_count_it_once():
    eager, checkpointed = built(Blocks, False), built(Blocks, True)
    model = recomputing(copy.deepcopy(eager), images())
    assert model.plan.recomputations > 0
    expected, theirs, ours = (step_of(module, images(1)) for module in (eager, checkpointed, model))
    name = "buffer blocks.0.1.num_batches_tracked"
    assert (expected[name], theirs[name], ours[name]) == (1, 2, 1)
    assert not torch.equal(theirs["buffer blocks.0.1.running_mean"], expected["buffer blocks.0.1.running_mean"])
    assert_same(ours, expected)
    assert_trains_exactly(model, [images(1), images(2)])


# ---- tied weights under DistributedDataParallel -----------------------------------------------------------------


@pytest.fixture
def world(tmp_path) -> Iterator[None]:
    """A world of this process alone."""
    if not dist.is_available() or not dist.is_gloo_available():
        pytest.skip("this build of PyTorch has no gloo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'world'}", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


class TwiceUsed(nn.Module):
    """One layer used twice, each time in a reentrant checkpoint of its own on request."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.checkpointed = checkpointed

    def forward(self, hidden: Tensor) -> Tensor:
        for _ in range(2):
            hidden = checkpoint(self.part, hidden, use_reentrant=True) if self.checkpointed else self.part(hidden)
        return hidden

    def part(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.layer(hidden)).sin()


@pytest.mark.usefixtures("world")
@pytest.mark.ci
def test_tied_weights_in_several_processes_are_refused_under_checkpoint_and_exact_with_us():
    data = rows(1, requires_grad=True)
    theirs = DistributedDataParallel(built(TwiceUsed, True), find_unused_parameters=True)
    with pytest.raises(RuntimeError, match="mark a variable ready only once"):
        squares(theirs(data)).backward()
    for network, sample in ((built(TwiceUsed, False), data), (built(Tied), tokens())):
        model = recomputing(network, sample)
        assert model.plan.recomputations > 0
        expected = step_of(copy.deepcopy(network), sample)
        ours = step_of(DistributedDataParallel(model, find_unused_parameters=True), sample)
        assert_same({name.replace("module.", ""): value for name, value in ours.items()}, expected)


# ---- dropout in torch.compile under a memory budget -------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # what the compiler says of itself
@pytest.mark.ci
def test_compiled_dropout_under_a_memory_budget_has_other_gradients_than_its_own_outputs():
    """With eager's own kernels, thus eager's outputs to the bit: what it recomputes draws other masks."""
    config = pytest.importorskip("torch._functorch.config")
    eager = built(Layers, 2, 0.5)
    compiled = copy.deepcopy(eager)
    model = recomputing(copy.deepcopy(eager), rows())
    assert model.plan.recomputations > 0
    expected, ours = (step_of(module, rows(1)) for module in (eager, model))
    try:
        with config.patch(activation_memory_budget=0.1):
            run = torch.compile(compiled, backend="aot_eager")
            torch.manual_seed(3)
            output = run(rows(1))
            squares(output).backward()
    except (ImportError, NotImplementedError, torch._dynamo.exc.TorchDynamoException) as error:
        pytest.skip(f"torch.compile does not work here: {error}")
    finally:
        torch._dynamo.reset()
    assert torch.equal(output, expected["output 0"])
    weight = compiled.layers[0].weight
    assert not torch.allclose(weight.grad, expected["gradient of layers.0.weight"])
    assert_same(ours, expected)
