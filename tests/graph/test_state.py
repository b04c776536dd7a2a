"""A borrowed module comes back as it was, even from code that fails."""

import pytest
import torch
from torch import nn

from rkgb.state.module_state import module_state_kept, training_mode
from tests.graph.programs import Program, linear, rows, state_of, with_gradients


class Stop(Exception):
    pass


def normalised() -> nn.Module:
    return with_gradients(nn.Sequential(linear(), nn.BatchNorm1d(4), nn.Dropout(0.5)))


def train_a_step(module: nn.Module) -> None:
    module(rows()).sum().backward()


def write_a_buffer(module: nn.Module) -> None:
    module[1].running_mean.fill_(7.0)


def put_another_tensor_in_the_place_of_a_buffer(module: nn.Module) -> None:
    module[1].running_mean = torch.full((4,), 7.0)


def drop_a_buffer(module: nn.Module) -> None:
    module[1].running_mean = None


def register_a_buffer(module: nn.Module) -> None:
    module.register_buffer("cache", rows())


def zero_gradients(module: nn.Module) -> None:
    module.zero_grad(set_to_none=False)


def draw_numbers(_: nn.Module) -> None:
    torch.rand(3)


CHANGES = [
    train_a_step,
    write_a_buffer,
    put_another_tensor_in_the_place_of_a_buffer,
    drop_a_buffer,
    register_a_buffer,
    zero_gradients,
    draw_numbers,
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_undone(change):
    module = normalised()
    before = state_of(module)
    with module_state_kept(module):
        change(module)
    assert state_of(module) == before


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changes_are_undone_after_an_exception(change):
    def change_and_fail() -> None:
        with module_state_kept(module):
            change(module)
            raise Stop

    module = normalised()
    before = state_of(module)
    with pytest.raises(Stop):
        change_and_fail()
    assert state_of(module) == before


def test_gradients_start_as_none_inside():
    module = normalised()
    with module_state_kept(module):
        assert all(parameter.grad is None for parameter in module.parameters())


def test_gradients_come_back_as_the_same_tensors():
    module = normalised()
    gradients = [parameter.grad for parameter in module.parameters()]
    with module_state_kept(module):
        train_a_step(module)
    assert all(parameter.grad is old for parameter, old in zip(module.parameters(), gradients, strict=True))


def test_missing_gradients_stay_missing():
    module = linear()
    with module_state_kept(module):
        train_a_step(module)
    assert module.weight.grad is None


def test_buffers_that_share_their_bytes_are_restored():
    shared = torch.zeros(4)
    module = Program(len, one=shared, view=shared[1:])
    with module_state_kept(module):
        module.view.fill_(1.0)
    assert shared.tolist() == [0, 0, 0, 0]
    assert module.view.data_ptr() == shared[1:].data_ptr()


def test_borrowing_can_be_nested():
    module = normalised()
    before = state_of(module)
    with module_state_kept(module):
        train_a_step(module)
        inside = state_of(module)
        with module_state_kept(module):
            train_a_step(module)
        assert state_of(module) == inside
    assert state_of(module) == before


def test_training_mode_trains_an_evaluating_module_and_puts_every_part_back():
    module = nn.Sequential(nn.Sequential(linear().train(), nn.Dropout()), nn.BatchNorm1d(4)).eval()
    module[0][1].train()
    before = [part.training for part in module.modules()]
    with training_mode(module):
        assert all(part.training for part in module.modules())
    assert [part.training for part in module.modules()] == before


def test_training_mode_leaves_frozen_parts_of_a_training_module_alone():
    module = nn.Sequential(linear(), nn.BatchNorm1d(4)).train()
    module[1].eval()
    with training_mode(module):
        assert [part.training for part in module.modules()] == [True, True, False]


def test_training_mode_is_undone_after_an_exception():
    module = linear().eval()
    with pytest.raises(Stop), training_mode(module):
        raise Stop
    assert not module.training
