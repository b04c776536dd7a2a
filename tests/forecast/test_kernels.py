"""Operations without data are called once for arguments that are alike: no more would come of calling them again."""

import pytest
import torch

from rkgb.shapes.kernels import Kernels
from rkgb.shapes.machine import Machine

aten = torch.ops.aten


def without_data(*sizes, dtype=torch.float32):
    return torch.empty(*sizes, dtype=dtype, device="meta")


@pytest.fixture
def kernels():
    return Kernels(Machine("an accelerator", "cuda", None))


class Counting:
    """Which operations PyTorch was asked for."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __getattr__(self, name):
        return getattr(self.function, name)

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return self.function(*args, **kwargs)


@pytest.mark.parametrize(
    ("function", "others"),
    [
        (aten.add_.Tensor, lambda: (without_data(4, 3),)),
        (aten.add_.Tensor, lambda: (without_data(3),)),
        (aten.mul_.Scalar, lambda: (2.0,)),
        (aten.addcdiv_.default, lambda: (without_data(4, 3), without_data(4, 1))),
        (aten.copy_.default, lambda: (without_data(4, 3, dtype=torch.float16),)),
    ],
)
def test_what_is_written_into_is_what_is_returned(kernels, function, others):
    counting = Counting(function)
    for _ in range(3):
        written = without_data(4, 3)
        assert kernels.call(counting, (written, *others()), {}) is written
    assert counting.calls == 1
    kernels.call(counting, (without_data(4, 3).double(), *others()), {})
    assert counting.calls == 2


def test_arguments_that_do_not_go_together_are_refused_each_time(kernels):
    for _ in range(2):
        with pytest.raises(RuntimeError):
            kernels.call(aten.add_.Tensor, (without_data(4, 3), without_data(5)), {})
        with pytest.raises(RuntimeError):
            kernels.call(aten._foreach_add_.List, ([without_data(4)], [without_data(5)]), {})
        with pytest.raises(RuntimeError):
            kernels.call(aten._foreach_add_.List, ([without_data(4)], [without_data(4)] * 2), {})


def test_operations_that_change_sizes_are_called_each_time(kernels):
    for function, args, sizes in [
        (aten.resize_.default, ([6],), (6,)),
        (aten.t_.default, (), (3, 4)),
        (aten.unsqueeze_.default, (0,), (1, 4, 3)),
        (aten.squeeze_.default, (), (4, 3)),
    ]:
        for _ in range(2):
            changed = without_data(4, 3)
            kernels.call(function, (changed, *args), {})
            assert changed.shape == sizes


def test_optimizers_of_many_tensors_write_into_them_alone(kernels):
    tensors, gradients = [without_data(4, 3), without_data(2)], [without_data(4, 3), without_data(2)]
    before = [(t.shape, t.stride(), t._version) for t in tensors]
    assert kernels.call(aten._foreach_add_.List, (tensors, gradients), {"alpha": 0.1}) is None
    assert kernels.call(aten._foreach_addcdiv_.Scalar, (tensors, gradients, gradients), {}) is None
    assert [(t.shape, t.stride(), t._version) for t in tensors] == before
    for _ in range(2):
        made = kernels.call(aten._foreach_sqrt.default, (tensors,), {})
        assert [t.shape for t in made] == [t.shape for t in tensors]
        assert all(one is not other for one, other in zip(made, tensors, strict=True))


def test_views_are_views_each_time(kernels):
    for _ in range(2):
        whole = without_data(4, 3)
        part = kernels.call(aten.view.default, (whole, [12]), {})
        assert part.untyped_storage()._cdata == whole.untyped_storage()._cdata
