"""Samples written as text: what is drawn is what is written, and what cannot be read is told."""

import pytest
import torch

from rockmate.cli.samples import DTYPES, SampleTextError, read_sample


def drawn(*texts, batch=None, seed=0):
    return read_sample(texts).draw(batch, seed=seed)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_tensors_have_the_type_and_shape_that_are_written(name):
    bound = "<7" if not (DTYPES[name].is_floating_point or DTYPES[name].is_complex or name == "bool") else ""
    (tensor,) = drawn(f"{name}[3, 4,5]{bound}").args
    assert (tensor.dtype, tensor.shape) == (DTYPES[name], (3, 4, 5))
    assert not tensor.requires_grad
    if bound:
        assert 0 <= tensor.min()
        assert tensor.max() == 6  # of sixty numbers
    assert (tensor != tensor.flatten()[0]).any()


def test_float32_is_the_type_where_none_is_said_and_a_tensor_may_have_no_dimension():
    first, second = drawn("[2,3], float64[]").args
    assert (first.dtype, first.shape) == (torch.float32, (2, 3))
    assert (second.dtype, second.shape) == (torch.float64, ())


def test_arguments_are_positional_ones_in_order_then_keyword_ones_from_one_text_or_several():
    one = drawn("int64[2,3]<9, float32[4], mask=bool[2,3]=1, use_cache=false, name='a,b', scale=0.5, past=none")
    several = drawn(
        "int64[2,3]<9", "float32[4]", "mask = bool[2,3]=1", "use_cache=False,name='a,b'", "scale=0.5,past=None"
    )
    for sample in (one, several):
        assert [tensor.shape for tensor in sample.args] == [(2, 3), (4,)]
        assert sample.kwargs["mask"].equal(torch.ones(2, 3, dtype=torch.bool))
        assert {name: value for name, value in sample.kwargs.items() if name != "mask"} == {
            "use_cache": False,
            "name": "a,b",
            "scale": 0.5,
            "past": None,
        }
    assert all(map(torch.equal, one.args, several.args))


def test_what_is_drawn_depends_on_the_seed_alone():
    before = torch.get_rng_state()
    assert torch.equal(drawn("[64]").args[0], drawn("[64]").args[0])
    assert not torch.equal(drawn("[64]").args[0], drawn("[64]", seed=1).args[0])
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("text", "number"),
    [("int64[4]=3", 3), ("float32[4]=-0.5", -0.5), ("bool[4]=1", True), ("complex64[4]=1+2j", 1 + 2j), ("[4]=0", 0.0)],
)
def test_a_tensor_may_be_filled_with_one_number(text, number):
    (tensor,) = drawn(text).args
    assert torch.equal(tensor, torch.full((4,), number, dtype=tensor.dtype))


def test_inputs_may_require_gradients():
    first, second = drawn("float32[4,2] grad", "float64[3]=1 grad").args
    assert first.requires_grad
    assert first.is_leaf
    assert second.requires_grad


def test_n_is_the_batch():
    text = read_sample(["x=float32[N,3,8], y=int64[2N]<5", "z=[ 3N , 2]"])
    assert text.has_batch
    kwargs = text.draw(4).kwargs
    assert [tensor.shape for tensor in kwargs.values()] == [(4, 3, 8), (8,), (12, 2)]
    assert not read_sample(["[4,3]"]).has_batch
    with pytest.raises(SampleTextError, match="N is not given"):
        text.draw()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ([""], "'' cannot be read"),
        (["float32[2,3"], "cannot be read"),
        (["float31[2,3]"], "of type 'float31', which is none of float32"),
        (["float32[2,x]"], "the dimension 'x' is neither a number nor N"),
        (["float32[2,-1]"], "the dimension '-1'"),
        (["int64[4]"], 'does not say which numbers: write "int64.4.<1000"'),
        (["int64[4]<0"], "at least 1"),
        (["float32[4]<9"], "only whole numbers are drawn below a bound"),
        (["int64[4]=0.5"], "'0.5' is no number of its type"),
        (["int64[4]=many"], "'many' is no number to fill a tensor with"),
        (["int64[4]<3 grad"], "tensors of int64 have no gradient"),
        (["x=[4], [4]"], "comes after a keyword argument"),
        (["x=[4], x=[4]"], "'x' is given twice"),
        (["3, x='text'"], "holds no tensor"),
        (["[4], __import__('os')"], "cannot be read"),
        (["[4], (1, 2)"], "is a tuple"),
    ],
)
def test_what_cannot_be_read_is_told(texts, message):
    with pytest.raises(SampleTextError, match=message):
        read_sample(texts)
