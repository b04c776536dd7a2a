"""Kernels of our own: what PyTorch's operations give, to the bit, and what their generators draw next."""

import importlib.util

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from rkgb.ir.call import Call, Ref
from rkgb.kernels import KERNELS, bernoulli, mersenne_twister, saved_ms
from rkgb.kernels.bernoulli import LEAST_ELEMENTS, bernoulli_

CPU = torch.device("cpu")
DTYPES = (
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.bool, torch.uint8, torch.int16, torch.int32,
    torch.int64,
)  # fmt: skip
needs_numba = pytest.mark.skipif(importlib.util.find_spec("numba") is None, reason="needs numba")


def forgotten():
    for cached in (bernoulli.quicker, bernoulli._saved_ms_each):
        cached.cache_clear()


@pytest.fixture(autouse=True)
def as_before():
    forgotten()
    yield
    forgotten()


def both(make, p, before=0, own=False):
    """The results of PyTorch's operation and of ours, and what each generator has left."""
    found = []
    for draw in (torch.Tensor.bernoulli_, bernoulli_):
        generator = torch.Generator().manual_seed(3) if own else torch.default_generator.manual_seed(3)
        torch.empty(before).random_(generator=generator)
        tensor = make()
        assert draw(tensor, p, generator=generator if own else None) is tensor
        found.append((tensor, generator.get_state()))
    return found


def assert_same(found):
    (theirs, their_state), (ours, our_state) = found
    assert ours.stride() == theirs.stride()
    assert torch.equal(ours, theirs)
    assert torch.equal(our_state, their_state)


@needs_numba
@settings(max_examples=40, deadline=None)
@given(
    elements=st.integers(1, 3 * LEAST_ELEMENTS),
    p=st.one_of(st.sampled_from([0.0, 1.0, 0.5, 1 - 2**-53, 2**-60, 5e-324]), st.floats(0, 1)),
    dtype=st.sampled_from(DTYPES),
    before=st.integers(0, 1300),
    own=st.booleans(),
)
def test_draws_are_pytorchs_and_so_are_the_next(elements, p, dtype, before, own):
    assert_same(both(lambda: torch.empty(elements, dtype=dtype), p, before, own))


@needs_numba
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4, 8, 32, 32, memory_format=torch.channels_last),
        lambda: torch.empty(64, 16, 32).permute(2, 0, 1),
        lambda: torch.empty(2, 1 << 14)[1],  # with an offset
        lambda: torch.empty(1 << 14, 2)[:, 0],
        lambda: torch.empty(1, 1 << 14).expand(1, 1 << 14),
    ],
)
def test_draws_are_in_the_order_of_pytorchs_wherever_elements_lie(make):
    assert_same(both(make, 0.3))


@needs_numba
def test_large_dense_tensors_are_drawn_by_our_loops_and_others_by_pytorch(our_draws):
    for _ in range(3):
        bernoulli_(torch.empty(LEAST_ELEMENTS), 0.1)
    assert our_draws == [LEAST_ELEMENTS] * 3
    bernoulli_(torch.empty(LEAST_ELEMENTS - 1), 0.1)
    bernoulli_(torch.empty(LEAST_ELEMENTS, 2)[:, 0], 0.1)
    bernoulli_(torch.nn.Parameter(torch.empty(LEAST_ELEMENTS)).data, 0.1)
    assert our_draws == [LEAST_ELEMENTS] * 4


@needs_numba
def test_modes_that_see_operations_see_draws(our_draws):
    class Watching(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen += (func,)
            return func(*args, **(kwargs or {}))

    with Watching() as mode:
        bernoulli_(torch.empty(LEAST_ELEMENTS), 0.1)
    assert torch.ops.aten.bernoulli_.float in mode.seen
    assert not our_draws


@needs_numba
def test_loops_are_proven_on_real_numbers_whatever_mode_is_on():
    with FakeTensorMode():
        assert bernoulli.quicker() is not None


@needs_numba
def test_autograd_notices_that_a_tensor_was_drawn_into(our_draws):
    x = torch.ones(LEAST_ELEMENTS, requires_grad=True)
    mask = torch.ones(LEAST_ELEMENTS)
    product = x * mask
    bernoulli_(mask, 0.5)
    assert our_draws
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_tensors_of_inference_are_drawn_into(our_draws):
    with torch.inference_mode():
        assert_same(both(lambda: torch.empty(LEAST_ELEMENTS), 0.5))
    assert not our_draws  # they have no version to be raised


def test_errors_are_pytorchs():
    with pytest.raises(RuntimeError, match="expects p to be in"):
        bernoulli_(torch.empty(LEAST_ELEMENTS), 1.5)
    leaf = torch.ones(LEAST_ELEMENTS, requires_grad=True)
    with pytest.raises(RuntimeError, match="leaf Variable"):
        bernoulli_(leaf, 0.5)


def test_without_numba_pytorch_draws(monkeypatch):
    monkeypatch.setattr(bernoulli, "drawing", lambda: None)
    forgotten()
    assert saved_ms(1 << 20, CPU) == 0.0
    assert_same(both(lambda: torch.empty(2 * LEAST_ELEMENTS), 0.4))


@needs_numba
@pytest.mark.parametrize("wrong", ["numbers", "state", "error"])
def test_loops_that_are_not_pytorchs_are_left_alone(monkeypatch, our_draws, wrong):
    """As of a release of PyTorch that draws otherwise."""
    draw = mersenne_twister.drawing()

    def other(words, used, places, *given):
        if wrong == "error":
            raise TypeError("no such machine")
        used = draw(words, used, places, *given)
        if wrong == "numbers":
            places[-1] ^= places.dtype.type(1)
        return used - (wrong == "state")

    monkeypatch.setattr(bernoulli, "drawing", lambda: other)
    forgotten()
    assert bernoulli.quicker() is None
    our_draws.clear()
    assert_same(both(lambda: torch.empty(2 * LEAST_ELEMENTS), 0.4))
    assert not our_draws


@needs_numba
def test_graphs_are_run_and_measured_with_them(our_draws):
    call = Call(torch.ops.aten.bernoulli_.float, (Ref("mask"), 0.2))
    assert call.function in KERNELS
    call.evaluate({"mask": torch.empty(LEAST_ELEMENTS)})
    assert our_draws == [LEAST_ELEMENTS]


@needs_numba
def test_what_is_saved_grows_with_what_is_drawn():
    assert saved_ms(LEAST_ELEMENTS - 1, CPU) == 0.0
    assert saved_ms(1 << 20, torch.device("meta")) == 0.0
    assert saved_ms(1 << 21, CPU) == 2 * saved_ms(1 << 20, CPU) > 0
