"""The sample is read as the user would call the module, or refused with the signature."""

import collections

import pytest
import torch
from torch import nn

from rkgb import Sample, SampleError, make_all_graphs, make_sample
from tests.graph.programs import rows


class TwoArguments(nn.Module):
    def forward(self, first, second=None, *, factor=1.0):
        return first * factor if second is None else first + second


def test_a_tensor_is_the_only_positional_argument():
    x = rows()
    sample = make_sample(nn.Linear(4, 4), x)
    assert sample.args == (x,)
    assert sample.kwargs == {}


@pytest.mark.parametrize("kind", [tuple, list])
def test_a_sequence_holds_positional_arguments(kind):
    x, y = rows(), rows()
    sample = make_sample(TwoArguments(), kind([x, y]))
    assert sample.args[0] is x
    assert sample.args[1] is y


@pytest.mark.parametrize("kind", [dict, collections.OrderedDict, collections.UserDict])
def test_a_mapping_holds_keyword_arguments(kind):
    x, y = rows(), rows()
    sample = make_sample(TwoArguments(), kind(second=y, first=x))
    assert torch.equal(sample.call(TwoArguments()), x + y)


def test_a_sample_has_one_form_however_its_arguments_are_passed():
    x, y = rows(), rows()
    forms = [(x, y), {"second": y, "first": x}, Sample((x,), {"second": y})]
    samples = [make_sample(TwoArguments(), form) for form in forms]
    assert all(sample.skeleton() == samples[0].skeleton() for sample in samples)
    assert all(sample.tensors[0] is x and sample.tensors[1] is y for sample in samples)


def test_keyword_arguments_can_be_given_beside_positional_ones():
    x, y = rows(), rows()
    sample = make_sample(TwoArguments(), x, {"second": y})
    assert torch.equal(sample.call(TwoArguments()), x + y)


def test_a_sample_stays_a_sample():
    sample = Sample((rows(),), {"factor": 2.0})
    assert make_sample(TwoArguments(), sample, {"factor": 3.0}).kwargs == {"factor": 3.0}


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"frist": rows()}, "missing a required argument: 'first'"),
        ({"first": rows(), "third": 3}, "unexpected keyword argument 'third'"),
        ((rows(), rows(), rows()), "too many positional arguments"),
        ((), "missing a required argument: 'first'"),
    ],
    ids=["misspelt", "unknown", "too many", "none"],
)
def test_arguments_that_do_not_fit_are_refused_with_the_signature(arguments, reason):
    with pytest.raises(SampleError, match=reason) as caught:
        make_sample(TwoArguments(), arguments)
    assert "TwoArguments.forward(first, second=None, *, factor=1.0)" in str(caught.value)
    assert "a dict of keyword arguments" in str(caught.value)


@pytest.mark.parametrize("sample", [3, "text", {"first": 1.0}, ([1, 2],)])
def test_a_sample_without_a_tensor_is_refused(sample):
    with pytest.raises(SampleError, match="the sample of TwoArguments holds no tensor"):
        make_sample(TwoArguments(), sample)


def test_the_pipeline_refuses_such_samples_too():
    with pytest.raises(SampleError, match="too many positional"):
        make_all_graphs(nn.Linear(4, 4), (rows(), rows()))


def test_tensors_are_found_in_nested_arguments_in_order():
    x, y, z = rows(1), rows(2), rows(3)
    sample = make_sample(TwoArguments(), ([x, {"deep": y}],), {"second": (z, 1)})
    assert [tensor.shape[0] for tensor in sample.tensors] == [1, 2, 3]


def test_other_tensors_take_the_same_places():
    sample = make_sample(TwoArguments(), ([rows(1), {"deep": rows(2)}],), {"factor": 2.0})
    other = sample.with_tensors([torch.zeros(1), torch.ones(2)])
    assert other.args[0][1]["deep"].tolist() == [1.0, 1.0]
    assert other.kwargs == {"factor": 2.0}
    assert sample.tensors[1].tolist() != [1.0, 1.0]


def test_the_skeleton_tells_structure_and_numbers_but_no_values():
    one = make_sample(TwoArguments(), (rows(3), [rows(4), 5]))
    same = make_sample(TwoArguments(), (rows(7), [rows(8), 5]))
    other = make_sample(TwoArguments(), (rows(3), [rows(4), 6]))
    assert one.skeleton() == same.skeleton()
    assert one.skeleton() != other.skeleton()


def test_a_copy_shares_nothing_with_the_sample():
    sample = make_sample(TwoArguments(), (rows(3, 4, requires_grad=True), rows().t()))
    copied = sample.copy()
    for tensor, other in zip(sample.tensors, copied.tensors, strict=True):
        assert torch.equal(tensor, other)
        assert tensor.data_ptr() != other.data_ptr()
        assert (tensor.requires_grad, tensor.stride()) == (other.requires_grad, other.stride())
        assert other.is_leaf


def test_a_copy_keeps_strides_and_what_tensors_share():
    wide, batch = rows(16, 8), rows(5)
    given = (batch, batch, wide[:, :3], wide[3:, 1:], batch.to(torch.complex64).conj(), wide[:0], wide.t())
    twins = Sample(given, {}).copy().tensors
    assert twins[0] is twins[1]
    assert len({twins[place].untyped_storage().data_ptr() for place in (2, 3, 5, 6)}) == 1
    twins[3].zero_()
    assert not twins[6].t()[3:, 1:].any()
    for one, other in zip(given, Sample(given, {}).copy().tensors, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()
        assert one.numel() == 0 or one.data_ptr() != other.data_ptr()
        assert one.data_ptr() % 64 == other.data_ptr() % 64


def test_a_copy_of_a_slice_of_a_data_set_is_not_one_of_the_data_set():
    data = torch.randn(100_000, 16)
    (copied,) = Sample((data[50_003:50_019],), {}).copy().tensors
    assert torch.equal(copied, data[50_003:50_019])
    assert copied.untyped_storage().nbytes() <= 16 * 16 * 4 + 64
