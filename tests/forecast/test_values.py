"""What a forward reads of masks, positions and constants is known without data; what comes of parameters is not."""

import pytest
import torch
from torch import nn

from rkgb.devices.allocation_log import AllocationLog
from rkgb.shapes.dataless import Dataless
from rkgb.shapes.device import standing_for
from rkgb.shapes.machine import named_machine
from rockmate import PeakMemory, TraceError, estimate


class Net(nn.Module):
    def __init__(self, look):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.register_buffer("order", torch.arange(8))
        self.look = look

    def forward(self, given, mask):
        return self.layer(given) * self.look(self, given, mask)


def rows(mask):
    return torch.randn(len(mask), 8), mask


LOOKS = {
    "whether all hold": lambda net, given, mask: 2.0 if bool(mask.all()) else 3.0,
    "a number of a buffer": lambda net, given, mask: float(net.order[3].item()),
    "a list of a constant": lambda net, given, mask: float(sum(torch.tensor([1, 2, 3]).tolist())),
    "places in a list": lambda net, given, mask: 2.0 if 7 in net.order[[-1, 0]] else 3.0,
    "how many places hold": lambda net, given, mask: float(len(mask.nonzero())),
    "an array": lambda net, given, mask: float(mask.sum().numpy()),
    "what was written": lambda net, given, mask: float(torch.zeros(4).fill_(2.0).sum()),
    "what all must be": lambda net, given, mask: 1.0 if torch.distributions.Normal(given.mean(), 1.0) else 2.0,
}


@pytest.mark.parametrize("look", LOOKS.values(), ids=LOOKS.keys())
def test_what_comes_of_the_sample_and_of_constants_is_known(look):
    found = estimate(Net(look), rows(torch.tensor([True, False, True, True])), batches=False, time_limit=0.1)
    assert not found.unplanned
    assert found.smallest is not None
    assert found.peak_bytes > 4 * 8 * 4


ASSERTIONS = {
    "nan": lambda made: made.isnan().any(),
    "inf": lambda made: torch.isinf(made).sum() > 0,
    "finite": lambda made: not torch.isfinite(made).all(),
    "either": lambda made: (made.isposinf() | made.isneginf()).any(),
    "itself": lambda made: (made != made).any(),
}


@pytest.mark.parametrize("fails", ASSERTIONS.values(), ids=ASSERTIONS.keys())
def test_what_comes_of_parameters_is_taken_for_finite(fails):
    def look(net, given, mask):
        assert not fails(net.layer(given))
        return 2.0

    found = estimate(Net(look), rows(torch.ones(4, dtype=torch.bool)), batches=False, time_limit=0.1)
    assert not found.unplanned


class Experts(nn.Module):
    """A mixture as many are written: experts in a loop, each with the rows that its router sends there."""

    def __init__(self, choose, experts=4):
        super().__init__()
        self.router = nn.Linear(8, experts, bias=False)
        self.experts = nn.ModuleDict({f"expert_{place}": nn.Linear(8, 8) for place in range(experts)})
        self.choose = choose
        with torch.no_grad():  # the rows of `evenly` go to one after the other
            self.router.weight.copy_(torch.eye(experts, 8))

    def forward(self, given):
        scores = self.router(given)
        chosen = self.choose(scores)
        hits = nn.functional.one_hot(chosen, scores.shape[-1]).permute(2, 1, 0)
        made = torch.zeros_like(given)
        for expert in torch.greater(hits.sum(dim=(-1, -2)), 0).nonzero():
            _, rows_of = torch.where(hits[expert[0]])
            made.index_add_(0, rows_of, self.experts[f"expert_{expert[0]}"](given[rows_of]))
        return made


def evenly(count):
    return torch.eye(8)[torch.arange(count) % 4] + 0.5 * torch.eye(8)[(torch.arange(count) + 1) % 4]


CHOICES = {
    "topk": lambda scores: scores.topk(1, dim=-1).indices,
    "two": lambda scores: scores.topk(2).indices,
    "argmax": lambda scores: scores.argmax(-1, keepdim=True),
    "max": lambda scores: scores.max(dim=1).indices.unsqueeze(1),
    "transposed": lambda scores: scores.t().contiguous().max(dim=0, keepdim=True).indices.t(),
}


@pytest.mark.parametrize("choose", CHOICES.values(), ids=CHOICES.keys())
def test_a_router_is_taken_to_choose_each_as_often(choose):
    model, given = Experts(choose), evenly(64)
    found = estimate(model, given, loss=torch.sum, batches=False, time_limit=0.1)
    with PeakMemory(torch.device("cpu")) as memory:
        output = model(given)
        output.sum().backward()
    assert found.eager.step_peak_bytes == memory.peak_bytes
    assert any("each is taken to be chosen as often" in told for told in found.unknown)


def test_what_only_accelerators_compute_is_not_known():
    """As experts of transformers count their rows there."""

    def look(net, given, mask):
        chosen = net.layer(given).topk(1).indices.int().flatten()
        return 1.0 + 0.0 * torch.histc(chosen, bins=8, min=0, max=7).float().sum()

    found = estimate(Net(look), rows(torch.ones(4, dtype=torch.bool)), device="24GiB", batches=False, time_limit=0.1)
    assert found.peak_bytes > 0


def test_a_choice_that_decides_on_nothing_is_not_told_of():
    look = lambda net, given, mask: net.layer(given).sort(dim=0).indices.float()  # noqa: E731
    found = estimate(Net(look), rows(torch.ones(4, dtype=torch.bool)), batches=False, time_limit=0.1)
    assert not found.unplanned
    assert not any("chosen" in told for told in found.unknown)


def test_a_number_that_is_not_known_may_be_logged():
    log = []
    look = lambda net, given, mask: log.append(f"{net.layer(given).mean()} {mask.sum():>3}") or 2.0  # noqa: E731
    assert estimate(Net(look), rows(torch.ones(4, dtype=torch.bool)), batches=False, time_limit=0.1).peak_bytes > 0
    assert log[0].endswith("   4")


def test_a_mask_is_known_in_the_backward_of_what_was_written_by_it():
    class Writing(Net):
        def forward(self, given, mask):
            made, hidden = torch.zeros_like(given), self.layer(given)
            made[mask] += self.layer(hidden[mask])
            made[~mask] = hidden[~mask]
            return made

    model, rows_of = Writing(None), rows(torch.arange(64) < 40)
    found = estimate(model, rows_of, loss=torch.sum, batches=False, time_limit=0.1)
    assert not found.unplanned
    with PeakMemory(torch.device("cpu")) as memory:
        output = model(*rows_of)  # held to the end, as training loops do
        output.sum().backward()
    assert found.eager.step_peak_bytes == memory.peak_bytes


def test_rows_that_a_mask_selects_are_as_many_as_hold():
    class Selecting(Net):
        def forward(self, given, mask):
            return self.layer(given)[mask]

    few = estimate(Selecting(None), rows(torch.arange(64) < 2), batches=False, time_limit=0.1)
    many = estimate(Selecting(None), rows(torch.arange(64) < 60), batches=False, time_limit=0.1)
    assert many.peak_bytes > few.peak_bytes + 50 * 8 * 4


@pytest.mark.parametrize(
    "look",
    [
        lambda net, given, mask: float(net.layer(given).sum()),
        lambda net, given, mask: len(net.layer(given)[0].nonzero()),
        lambda net, given, mask: net.layer(given).tolist()[0][0],
    ],
)
def test_what_comes_of_parameters_is_refused_in_words(look):
    with pytest.raises(TraceError, match="computed with parameters.*Measure the model itself"):
        estimate(Net(look), rows(torch.ones(4, dtype=torch.bool)))


def test_a_draw_is_anything_and_leaves_the_stream_as_it_was():
    sample, model = (
        rows(torch.ones(4, dtype=torch.bool)),
        Net(lambda net, given, mask: 2.0 if torch.rand(()) < 2 else 3.0),
    )
    before = torch.get_rng_state()
    assert estimate(model, sample, batches=False, time_limit=0.1).peak_bytes > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_a_long_draw_takes_no_time_and_nothing_is_read_of_it():
    """Masks of dropout are as long as activations, and nobody reads them."""
    rows_of = rows(torch.ones(4, dtype=torch.bool))
    short = Net(lambda net, given, mask: 2.0 if torch.rand(1 << 10).sum() > 0 else 3.0)
    assert estimate(short, rows_of, batches=False, time_limit=0.1).peak_bytes > 0
    with pytest.raises(TraceError, match="a long draw"):
        estimate(Net(lambda net, given, mask: 2.0 if torch.rand(1 << 17).sum() > 0 else 3.0), rows_of)


def test_places_in_the_order_of_events_take_nothing_where_there_are_no_data():
    machine = named_machine("cpu")
    with standing_for(machine, Dataless(machine, None).values) as shapes, AllocationLog(torch.device("meta")) as log:
        held = torch.empty(3 << 10, dtype=torch.uint8, device="meta")
        before_ms = shapes.clock.now_ms
        log.mark()
        assert shapes.clock.now_ms == before_ms
        del held
        log.mark()
    assert [event.size_bytes for event in log.events] == [3 << 10, -(3 << 10)]
    assert log.marks == [1, 2]
