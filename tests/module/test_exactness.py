"""What users doubt, one mechanism at a time: a plan that recomputes gives eager's bits, or refuses clearly."""

import copy
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rockmate import PlanMismatch, ReplayMismatch
from tests.module.models import ROWS, WIDTH, Normalised, built, images, rows, tokens
from tests.module.steps import assert_same, assert_trains_exactly, recomputing, seen, squares


class Around(nn.Module):
    """A function between two layers, whose activations are there to be recomputed."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.function = function

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.tanh(self.last(torch.sin(self.function(F.gelu(self.first(hidden))))))


def around(function: Callable[[Tensor], Tensor]) -> nn.Module:
    return built(Around, function)


def assert_exact(network: nn.Module, *batches: object) -> None:
    """The plan that keeps least, over several steps, the first on the sample."""
    model = recomputing(network, batches[0])
    assert model.plan.recomputations > 0
    assert_trains_exactly(model, [*batches, batches[0]])


# ---- randomness --------------------------------------------------------------------------------------------


def in_channels(module: nn.Module, *shape: int) -> Callable[[Tensor], Tensor]:
    """`module` on the rows as a batch of maps, which some forms of dropout need."""
    return lambda hidden: module(hidden.view(-1, 8, *shape)).reshape(ROWS, WIDTH)


def attention(hidden: Tensor, **options: object) -> Tensor:
    heads = hidden.view(16, 4, -1, 8)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), dropout_p=0.2, **options).reshape(ROWS, -1)


RANDOM: dict[str, Callable[[Tensor], Tensor]] = {
    "module": nn.Dropout(0.3),
    "module-in-place": lambda hidden: nn.Dropout(0.3, inplace=True)(hidden * 2),
    "channels-1d": in_channels(nn.Dropout1d(0.3), 32),
    "channels-2d": in_channels(nn.Dropout2d(0.3), 8, 4),
    "channels-3d": in_channels(nn.Dropout3d(0.3), 2, 4, 4),
    "alpha": nn.AlphaDropout(0.3),
    "feature-alpha": in_channels(nn.FeatureAlphaDropout(0.3), 8, 4),
    "native": lambda hidden: torch.native_dropout(hidden, 0.3, True)[0],
    "always-on": lambda hidden: F.dropout(hidden, 0.3),
    "nothing-dropped": nn.Dropout(0.0),
    "everything-dropped": nn.Dropout(1.0),
    "attention": attention,
    "causal-attention": partial(attention, is_causal=True),
    "gumbel": partial(F.gumbel_softmax, tau=0.5),
    "gumbel-hard": partial(F.gumbel_softmax, hard=True),
    "bernoulli-of-data": lambda hidden: hidden * torch.bernoulli(hidden.detach().sigmoid()),
    "noise-in-place": lambda hidden: hidden + torch.empty_like(hidden).normal_(0, 0.1).uniform_(-1, 1),
    "permutation": lambda hidden: hidden[torch.randperm(ROWS)],
    "drawn-positions": lambda hidden: hidden[torch.randint(ROWS, (ROWS,))],
    "drawn-classes": lambda hidden: hidden * torch.multinomial(hidden.detach().softmax(-1), 1),
}


@pytest.mark.parametrize("function", RANDOM.values(), ids=RANDOM)
def test_random_operations_are_repeated_with_their_own_numbers(function):
    assert_exact(around(function), rows(), rows(1))


def test_attention_with_dropout_in_torch_s_own_module():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.2, batch_first=True)

        def forward(self, hidden):
            hidden = hidden.view(16, -1, WIDTH)
            mixed, weights = self.attention(hidden.sin(), hidden, hidden.cos(), need_weights=True)
            return torch.tanh(mixed).exp(), weights.square()

    assert_exact(built(Attention), rows(), rows(1))


# ---- state ---------------------------------------------------------------------------------------------------


def normalising(make: Callable[[int], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(3, 8, 3), make(8), nn.GELU(), nn.Conv2d(8, 4, 3), nn.Tanh()).train()


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "batch": nn.BatchNorm2d,
    "batch-without-statistics": partial(nn.BatchNorm2d, track_running_stats=False),
    "batch-without-weights": partial(nn.BatchNorm2d, affine=False),
    "instance": partial(nn.InstanceNorm2d, affine=True, track_running_stats=True),
    "instance-without-statistics": partial(nn.InstanceNorm2d, affine=True),
    "synchronised-alone": nn.SyncBatchNorm,
}


@pytest.mark.parametrize("training", [True, False], ids=["training", "norm-in-eval-mode"])
@pytest.mark.parametrize("make", NORMS.values(), ids=NORMS)
def test_statistics_are_updated_once_a_step_or_not_at_all_in_eval_mode(make, training):
    network = normalising(make)
    network[1].train(training)
    assert_exact(network, images(), images(1))


def test_an_average_over_all_batches_is_refused_as_it_reads_their_count():
    network = normalising(partial(nn.BatchNorm2d, momentum=None))
    state = copy.deepcopy(network.state_dict())
    wrong = r"reads 2 out of its data .* but read 1 when it was traced.* Submodule '1' .* give it a number as momentum"
    with pytest.raises(ReplayMismatch, match=wrong):
        recomputing(network, images())
    assert_same(dict(network.state_dict()), state)


PARAMETRISED = {
    "spectral": (nn.utils.parametrizations.spectral_norm, 0),
    "spectral-between": (nn.utils.parametrizations.spectral_norm, 2),
    "weight": (nn.utils.parametrizations.weight_norm, 2),
    "orthogonal": (nn.utils.parametrizations.orthogonal, 2),
}


# A cut falls between what a block computes for a buffer and the write into it, which later blocks repeat.
@pytest.mark.parametrize(
    ("make", "place"),
    [pytest.param(*p, id=k) for k, p in PARAMETRISED.items()],
)
def test_weights_that_are_computed_in_every_forward(make, place):
    network = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
    network[place] = make(network[place])
    assert_exact(network, rows(), rows(1))


# ---- precision -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_autocast_with_scaled_gradients(dtype):
    """The first scale overflows float16, so that a step is skipped and the scale moves, as in eager training."""
    network = built(Around, nn.Dropout(0.1))
    with torch.autocast("cpu", dtype):
        planned = recomputing(network, rows())
    assert planned.plan.recomputations > 0
    records = []
    for module in (copy.deepcopy(network), planned):
        torch.manual_seed(0)
        optimizer = torch.optim.SGD(module.parameters(), 0.1, momentum=0.9)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1)
        for seed in range(4):
            optimizer.zero_grad()
            torch.clear_autocast_cache()
            with torch.autocast("cpu", dtype):
                output = module(rows(seed))
                loss = squares(output.float())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            records.append(seen(module, (), output) | {"scale": torch.tensor(scaler.get_scale())})
        records[-1] |= {f"final {name}": parameter.detach().clone() for name, parameter in module.named_parameters()}
    for found, expected in zip(records[4:], records[:4], strict=True):
        assert_same(found, expected)


def test_complex_parameters_inputs_and_outputs():
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.complex64) / WIDTH)

        def forward(self, hidden):
            hidden = torch.tanh(hidden @ self.weight) * hidden.conj()
            return torch.view_as_real(hidden.exp()).square(), torch.polar(hidden.abs(), hidden.angle()).sin()

    sample = torch.complex(rows(1), rows(2))

    def loss(output):
        return output[0].mean() + output[1].abs().square().mean()

    model = recomputing(built(Complex), sample, loss=loss)
    assert model.plan.recomputations > 0
    assert_trains_exactly(model, [sample, torch.complex(rows(3), rows(4)).requires_grad_(False)], loss)


# ---- what trains -----------------------------------------------------------------------------------------------


def test_parameters_unfrozen_later_are_planned_anew_and_exact():
    network = built(Around, nn.Dropout(0.1))
    network.first.requires_grad_(False)
    twin = copy.deepcopy(network)
    model = recomputing(network, rows())
    assert_trains_exactly(model, [rows(), rows(1)])
    squares(twin(rows())).backward()
    twin.load_state_dict(network.state_dict())
    for module in (network, twin):
        module.zero_grad()
        module.first.requires_grad_(True)
    with pytest.raises(PlanMismatch, match="plan the module again"):
        model(rows())
    again = recomputing(network, rows())
    assert again.plan.recomputations > 0
    assert_trains_exactly(again, [rows(), rows(1)])
    assert all(parameter.grad is not None for parameter in network.parameters())


def test_inputs_of_several_kinds_some_of_which_require_gradients():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(WIDTH, WIDTH)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, values, indices, mask, scale):
            hidden = F.gelu(self.layer(values) + self.embedding(indices))
            return torch.where(mask, hidden * scale, hidden.sin()).tanh(), indices + 1

    def batch(seed):
        return (
            rows(seed, requires_grad=True),
            tokens(seed),
            rows(seed) > 0,
            torch.tensor(1.5 + seed, dtype=torch.double),
        )

    assert_exact(built(Mixed), batch(0), batch(1))


# ---- storages --------------------------------------------------------------------------------------------------


class Aliases(nn.Module):
    """Outputs that are views of an input, of a parameter, of each other, and an input written as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> tuple[Tensor, ...]:
        inner = torch.tanh(F.gelu(self.layer(hidden)).exp())
        return inner.t(), inner[::2, 1:], hidden.view(-1)[3:], self.layer.weight.t(), inner.unfold(0, 4, 2)


def test_outputs_may_be_views_of_inputs_and_of_parameters():
    model = recomputing(built(Aliases), rows())
    assert model.plan.recomputations > 0
    data = rows(1)
    eager, found = model.original(data), model(data)
    for one, other in zip(eager, found, strict=True):
        assert (one.stride(), one.storage_offset()) == (other.stride(), other.storage_offset())
    for index in (2, 3):
        assert found[index].untyped_storage().data_ptr() == eager[index].untyped_storage().data_ptr()
    assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_views_as_outputs_train_exactly():
    assert_exact(built(Aliases), rows(), rows(1))


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "chain": lambda hidden: hidden.mul(2).add_(1).mul_(3).relu_(),
    "through-a-view": lambda hidden: _written(hidden.clone(), lambda value: value[:, ::2].mul_(0)),
    "through-a-transposed-view": lambda hidden: _written(hidden.clone(), lambda value: value.t()[1:3].exp_()),
    "mask": lambda hidden: _written(hidden.clone(), lambda value: value.masked_fill_(value > 0.5, 0.5)),
    "copy": lambda hidden: torch.zeros_like(hidden).copy_(hidden).tanh_(),
    "assigned-parts": lambda hidden: _assembled(hidden),
}


def _written(value: Tensor, write: Callable[[Tensor], object]) -> Tensor:
    write(value)
    return value


def _assembled(hidden: Tensor) -> Tensor:
    result = hidden.new_empty(hidden.shape)
    result[: ROWS // 2] = hidden[ROWS // 2 :].sin()
    result[ROWS // 2 :] = hidden[: ROWS // 2].cos()
    return result


@pytest.mark.parametrize("function", IN_PLACE.values(), ids=IN_PLACE)
def test_operations_in_place(function):
    assert_exact(around(function), rows(), rows(1))


@pytest.mark.parametrize("arrange", [lambda x: x.t().contiguous().t(), lambda x: x.repeat(1, 2)[:, ::2]])
def test_inputs_that_are_not_contiguous(arrange):
    batches = [arrange(rows(seed)) for seed in (0, 1)]
    assert not batches[0].is_contiguous()
    assert_exact(around(nn.Dropout(0.1)), *batches)


def test_images_and_weights_with_the_channels_last():
    network = built(Normalised).to(memory_format=torch.channels_last)
    batches = [images(seed).contiguous(memory_format=torch.channels_last) for seed in (0, 1)]
    assert_exact(network, *batches)


# ---- opaque operations -----------------------------------------------------------------------------------------


class Sorted(torch.autograd.Function):
    """Attributes of the context, tensors saved and not, an output without gradient, a number among the arguments."""

    @staticmethod
    def forward(ctx, value, power):
        ordered, order = value.sort(dim=-1)
        ctx.power, ctx.order, ctx.shape = power, order, value.shape
        ctx.save_for_backward(ordered)
        ctx.mark_non_differentiable(order)
        ctx.set_materialize_grads(False)
        return ordered**power, order

    @staticmethod
    def backward(ctx, gradient, _):
        if gradient is None:
            return None, None
        (ordered,) = ctx.saved_tensors
        inner = gradient * ctx.power * ordered ** (ctx.power - 1)
        return inner.new_zeros(ctx.shape).scatter(-1, ctx.order, inner), None


class InPlaceFunction(torch.autograd.Function):
    """Writes into its argument, and says so."""

    @staticmethod
    def forward(ctx, value):
        ctx.mark_dirty(value)
        value.exp_()
        ctx.save_for_backward(value)
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


CUSTOM: dict[str, Callable[[Tensor], Tensor]] = {
    "context-and-an-output-without-gradient": lambda x: torch.add(*Sorted.apply(x.sigmoid(), 3)),
    "checkpoint": lambda x: checkpoint(torch.tanh, x * 2, use_reentrant=False).sin(),
    "checkpoint-in-checkpoint": lambda x: checkpoint(
        lambda y: checkpoint(lambda z: F.dropout(z, 0.2).exp(), y.sin(), use_reentrant=False).tanh(),
        x,
        use_reentrant=False,
    ),
    "checkpoint-reentrant": lambda x: checkpoint(lambda y: F.dropout(y, 0.2).exp(), x, use_reentrant=True).tanh(),
}


def test_a_function_that_writes_into_its_argument():
    assert_exact(around(lambda x: InPlaceFunction.apply(x * 2).sin()), rows(), rows(1))


@pytest.mark.parametrize("function", CUSTOM.values(), ids=CUSTOM)
def test_operations_with_a_backward_of_their_own(function):
    assert_exact(around(function), rows(), rows(1))


class Clipped(torch.autograd.Function):
    """Returns its argument as it came; its backward is not the derivative."""

    @staticmethod
    def forward(ctx, value, most):
        ctx.most = most
        return value

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-ctx.most, ctx.most), None


class Tripled(torch.autograd.Function):
    """Sets its context up apart, and computes with it there, too."""

    @staticmethod
    def forward(value, mask=None):
        return value.sin(), value

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[0].cos() * 3)

    @staticmethod
    def backward(ctx, gradient, other):
        return gradient * ctx.saved_tensors[0] + 2 * other, None


class Straight(torch.autograd.Function):
    """Calls another's forward as a function, and has a view of its argument for an output."""

    @staticmethod
    def forward(ctx, value):
        return Clipped.forward(ctx, value.view(-1), 3.0).view_as(value)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


clipped, tripled, straight, sorted_, in_place = (
    function.apply for function in (Clipped, Tripled, Straight, Sorted, InPlaceFunction)
)
BOUND: dict[str, Callable[[Tensor], Tensor]] = {
    "argument-returned": lambda x: clipped(x.exp(), 1e-6).sin(),
    "context-set-up-apart": lambda x: torch.add(*tripled(x.exp())).sin(),
    "view-returned": lambda x: straight(x.exp()).sin(),
    "output-without-gradient": lambda x: torch.add(*sorted_(x.sigmoid(), 3)),
    "argument-written": lambda x: in_place(x * 2).sin(),
    "without-gradient": lambda x: clipped(x.detach().exp(), 1.0).sin() * x,
}


@pytest.mark.parametrize("reads", [False, True], ids=["jit", "record"])
@pytest.mark.parametrize("function", BOUND.values(), ids=BOUND)
def test_functions_whose_apply_was_bound_when_a_file_was_imported(function, reads):
    """As kernels of libraries are. A model that reads its data is recorded, and traced by PyTorch otherwise."""
    network = around(lambda x: function(x) if not reads or x.isfinite().all() else x)
    assert_exact(network, rows(), rows(1))
