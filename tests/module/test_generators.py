"""Random generators of the user's own: their numbers are repeated, and their states are eager's after every step."""

import copy
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn

from rkgb import make_sample
from rkgb.replay.replay import record_step
from rockmate import BudgetTooSmall, InputMismatch, PlanMismatch, Rockmate, verify
from rockmate.runtime.step import Step
from tests.module.models import WIDTH, built, rows
from tests.module.noisy import (
    HELD,
    OPERATIONS,
    SHAPE,
    assert_exact,
    assert_states,
    assert_trains_exactly,
    noisy,
    seeded,
    states,
)
from tests.module.steps import recomputing, squares


@pytest.mark.parametrize("draw", OPERATIONS.values(), ids=OPERATIONS)
def test_every_operation_repeats_its_numbers(draw):
    assert_exact(noisy(draw, seeded()), lambda module: [module.held])


@pytest.mark.parametrize("way", HELD)
def test_a_generator_is_found_wherever_a_module_holds_it(way):
    """Also in a copy, which has a copy of it: what eager training of the copy does to the original's shows."""
    hold, noise = HELD[way]
    network = noisy(lambda m, x: x * noise(m), hold(seeded()))
    model = recomputing(network, rows())
    twin, eager = copy.deepcopy(model), copy.deepcopy(network)
    own = model._member.measured.graphs.D_graph.generators[0]
    begin = own.generator.get_state()
    drawn = lambda module: [own.in_module(getattr(module, "original", module))]  # noqa: E731
    assert drawn(twin)[0] is not own.generator
    assert_trains_exactly(twin, eager, drawn, [begin])
    assert torch.equal(own.generator.get_state(), begin)


def test_a_generator_in_a_closure_is_shared_with_copies_as_in_eager_training():
    generator = seeded()
    network = noisy(lambda m, x: x * torch.rand(x.shape, generator=generator))
    begin = generator.get_state()
    model = recomputing(network, rows())
    assert torch.equal(generator.get_state(), begin)
    assert_trains_exactly(copy.deepcopy(model), copy.deepcopy(network), lambda _: [generator], [begin])
    assert_exact(network, lambda _: [generator])


def test_several_generators_each_go_their_own_way():
    def draw(m, x):
        for index, generator in enumerate([*m.held, m.held[0]]):
            x = x * torch.rand(x.shape, generator=generator) + index
        return x

    assert_exact(noisy(draw, [seeded(1), seeded(2), seeded(1)]), lambda module: module.held)


def test_one_generator_may_serve_several_modules_and_the_default_one_by_name():
    generator = seeded()

    class Several(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(noisy(OPERATIONS["rand"], generator, 1) for _ in range(2))

        def forward(self, hidden):
            for part in self.parts:
                hidden = part(hidden)
            return hidden * torch.rand(SHAPE, generator=torch.default_generator)

    def drawn(module):
        assert module.parts[0].held is module.parts[1].held
        return [module.parts[0].held]

    assert_exact(built(Several), drawn)


def test_operations_recorded_below_autograd_repeat_their_numbers():
    """Under autocast only the recording tracer serves."""
    network = noisy(OPERATIONS["bernoulli-in-place"], seeded())
    begin, twin = states([network.held]), copy.deepcopy(network)
    with torch.autocast("cpu", torch.bfloat16):
        model = recomputing(network, rows())
    assert model._member.measured.graphs.B_graph.tracer == "record"
    assert model.plan.recomputations > 0
    for module in (model, twin):
        module.forward = torch.autocast("cpu", torch.bfloat16)(module.forward)
    assert_trains_exactly(model, twin, lambda module: [module.held], begin)


def test_a_generator_may_have_a_name_that_a_value_has_too():
    def draw(m, x):
        return x * torch.rand(x.shape, generator=m.input_0)

    network = noisy(draw)
    network.input_0 = seeded()
    assert_exact(network, lambda module: [module.input_0])


def test_a_generator_may_be_an_argument_and_no_other_is_accepted_in_its_place():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = noisy(lambda m, x: x * torch.rand(x.shape, generator=m.held))

        def forward(self, hidden, generator):
            self.inner.held = generator
            try:
                return self.inner(hidden)
            finally:
                self.inner.held = None

    generator, network = seeded(), built(Given)
    model = recomputing(network, (rows(), generator))
    assert_states([generator], states([seeded()]))
    found = model(rows(1), generator)
    torch.manual_seed(0)
    found, after = model(rows(1), generator.manual_seed(3)), generator.get_state()
    torch.manual_seed(0)
    expected = network(rows(1), generator.manual_seed(3))
    assert torch.equal(found, expected)
    assert_states([generator], [after])
    with pytest.raises(InputMismatch):
        model(rows(1), seeded())


@pytest.mark.cuda
def test_a_generator_of_a_gpu_repeats_its_numbers():
    def draw(m, x):
        return x * torch.rand(x.shape, generator=m.held, device="cuda") + torch.empty_like(x).normal_(generator=m.held)

    generator = Generator("cuda").manual_seed(3)
    network = noisy(draw, generator).cuda()
    begin = generator.get_state()
    model = recomputing(network, rows().cuda())
    assert model.plan.recomputations > 0
    assert torch.equal(generator.get_state(), begin)
    own = model._member.measured.graphs.D_graph.generators
    sample = make_sample(network, rows(1).cuda())
    expected, found = (record_step(network, sample, lambda data, m=m: data.call(m), own=own) for m in (network, model))
    assert expected.first_difference(found) is None


# ---- whatever happens -----------------------------------------------------------------------------------------------


@pytest.mark.ci
@pytest.mark.slow
def test_plans_within_budgets_and_refusals_leave_the_state_alone():
    network = noisy(OPERATIONS["rand"], seeded(), 4)
    begin = network.held.get_state()
    with pytest.raises(BudgetTooSmall):
        Rockmate(network, rows(), 1000, loss=squares)
    for budget in (0.8, 0.6):
        model = Rockmate(network, rows(), budget, loss=squares)
        assert model.plan.measured_peak_bytes <= model.plan.budget_bytes
        assert torch.equal(network.held.get_state(), begin)


def test_a_forward_that_fails_while_it_is_traced_has_not_drawn():
    generator = seeded()
    begin = generator.get_state()

    def draw(m, x):
        torch.rand(x.shape, generator=generator)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        recomputing(noisy(draw), rows())
    assert torch.equal(generator.get_state(), begin)


@pytest.mark.parametrize("method", ["rewind", "fill"])
def test_a_recomputation_that_fails_gives_the_state_back(method, monkeypatch):
    network = noisy(OPERATIONS["twice-with-others-between"], seeded())
    begin, eager = states([network.held]), copy.deepcopy(network)
    model = recomputing(network, rows())
    loss = squares(model(rows()))
    left, default = network.held.get_state(), torch.get_rng_state()
    right = getattr(Step, method)

    def failing(step: Step, *args: Any, **kwargs: Any) -> None:
        right(step, *args, **kwargs)
        raise InterruptedError

    with monkeypatch.context() as patch:
        patch.setattr(Step, method, failing)
        with pytest.raises(InterruptedError):
            loss.backward()
    assert_states([network.held], [left])
    assert torch.equal(torch.get_rng_state(), default)
    assert_trains_exactly(model, eager, lambda module: [module.held], begin)


def test_draws_between_forward_and_backward_do_not_matter():
    """The backward repeats the numbers of its own forward: of two, in either order, and twice over one graph."""
    network = noisy(OPERATIONS["rand"], seeded())
    model = recomputing(network, rows())
    gradients = []
    for module in (network, model):
        torch.manual_seed(0)
        network.held.manual_seed(0)
        losses = [squares(module(rows(seed))) for seed in (1, 2)]
        torch.rand(5, generator=network.held)
        state = network.held.get_state()
        parameters = list(module.parameters())
        for loss in reversed(losses):
            for keep in (True, False):
                gradients.append(torch.autograd.grad(loss, parameters, retain_graph=keep))
        assert torch.equal(network.held.get_state(), state)
    for eager, found in zip(gradients[:4], gradients[4:], strict=True):
        assert all(torch.equal(one, other) for one, other in zip(eager, found, strict=True))


def test_another_generator_put_in_place_is_drawn_from_as_in_eager_training():
    network = noisy(OPERATIONS["rand"], seeded())
    eager = copy.deepcopy(network)
    model = recomputing(network, rows())
    for module in (network, eager):
        module.held = seeded(11)
    assert_trains_exactly(model, eager, lambda module: [module.held], states([seeded(11)]))


def test_a_generator_replaced_before_the_backward_is_not_moved_by_it():
    network = noisy(OPERATIONS["rand"], seeded())
    model = recomputing(network, rows())
    gradients = []
    for module in (network, model):
        torch.manual_seed(0)
        network.held = seeded()
        loss = squares(module(rows()))
        network.held = seeded(11)
        gradients.append(torch.autograd.grad(loss, list(module.parameters())))
        assert_states([network.held], states([seeded(11)]))
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))


def test_something_else_in_the_generator_s_place_is_named():
    network = noisy(OPERATIONS["rand"], seeded())
    model = recomputing(network, rows())
    network.held = None
    with pytest.raises(PlanMismatch, match=r"%rand_0 drew from a generator .* there is a NoneType now"):
        model(rows())


def test_threads_that_share_a_generator_each_repeat_their_own_numbers():
    """Which thread draws what is open; that its backward has the numbers of its forward is not."""

    def shown(layer: nn.Linear, hidden: Tensor, noise: Tensor) -> Tensor:
        return torch.sin(F.gelu(layer(hidden)) * noise)

    class Shared(nn.Module):
        def __init__(self, generator: Generator) -> None:
            super().__init__()
            self.layer, self.generator = nn.Linear(WIDTH, WIDTH), generator

        def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
            noise = torch.rand(SHAPE, generator=self.generator, device=hidden.device)
            return shown(self.layer, hidden, noise), noise * 1

    generator = seeded()
    models = [recomputing(built(Shared, generator), rows()) for _ in range(3)]
    assert all(model.plan.recomputations > 0 for model in models)
    wrong: list[str] = []

    def work(model: Rockmate) -> None:
        for seed in range(25):
            output, noise = model(rows(seed))
            found = torch.autograd.grad(squares(output), list(model.parameters()))
            again = shown(model.layer, rows(seed), noise.detach())
            expected = torch.autograd.grad(squares(again), list(model.parameters()))
            if not all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)):
                wrong.append(f"batch {seed}")

    threads = [threading.Thread(target=work, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    alone = seeded()
    for _ in range(25 * len(models)):
        torch.rand(SHAPE, generator=alone, device=alone.device)
    assert torch.equal(generator.get_state(), alone.get_state())


@pytest.mark.parametrize("closure", [False, True])
def test_verify_follows_generators_and_leaves_them_as_they_were(closure):
    generator = seeded()
    network = noisy(OPERATIONS["rand"], generator)
    if closure:
        network = noisy(lambda m, x: x * torch.rand(x.shape, generator=generator))
    begin = generator.get_state()
    found = verify(network, rows(), 0.7, loss=squares)
    assert found.exact, found
    assert found.eager_is_deterministic
    assert found.plan.recomputations > 0
    assert verify(recomputing(network, rows()), rows(), loss=squares).exact
    assert torch.equal(generator.get_state(), begin)
