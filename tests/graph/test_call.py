"""A call is data: it tells what it reads and writes, and evaluates in any environment."""

import pytest
import torch

from rkgb.ir.call import Call, Ref, bind, ref_names
from tests.graph.cases import Square

aten = torch.ops.aten
A, B, C = Ref("a"), Ref("b"), Ref("c")


def test_inputs_are_named_once_in_argument_order():
    call = Call(aten.cat.default, ([B, A, B],), {"dim": 0, "other": (C, A)})
    assert call.inputs == ["b", "a", "c"]


def test_references_show_their_name():
    assert repr(A) == "%a"
    assert ref_names({"x": [A, (B, A)]}) == ["a", "b"]


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (aten.linear.default, "linear"),
        (aten.add_.Tensor, "add_"),
        (Square.apply, "apply"),
        (torch.relu, "relu"),
    ],
)
def test_operations_have_short_names(function, name):
    assert Call(function).op_name == name


@pytest.mark.parametrize(
    ("call", "written"),
    [
        (Call(aten.add.Tensor, (A, B)), []),
        (Call(aten.add_.Tensor, (A, B)), ["a"]),
        (Call(aten.relu_.default, (A,)), ["a"]),
        (Call(aten.index_put_.default, (A, [B], C)), ["a"]),
        (Call(aten.div.out, (A, B), {"out": C}), ["c"]),
        (Call(aten.view.default, (A, [2])), []),
        (Call(Square.apply, (A,)), []),
    ],
    ids=["add", "add_", "relu_", "index_put_", "out", "view", "custom function"],
)
def test_what_is_written_comes_from_the_schema(call, written):
    assert call.written == written


def test_evaluation_puts_values_in_the_place_of_references():
    values = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([10.0, 20.0])}
    assert Call(aten.add.Tensor, (A, B), {"alpha": 2}).evaluate(values).tolist() == [21.0, 42.0]
    assert Call(aten.cat.default, ([A, B, A],)).evaluate(values).tolist() == [1, 2, 10, 20, 1, 2]


def test_evaluation_of_an_unknown_name_fails():
    with pytest.raises(KeyError, match="b"):
        Call(aten.neg.default, (B,)).evaluate({"a": torch.zeros(1)})


def test_results_are_bound_to_the_names_of_a_pattern():
    values = {}
    bind(A, 1, values)
    bind([B, (C, Ref("d"))], (2, [3, 4]), values)
    assert values == {"a": 1, "b": 2, "c": 3, "d": 4}


def test_results_without_a_name_are_dropped():
    values = {}
    bind((A, None), (1, 2), values)
    assert values == {"a": 1}


def test_a_pattern_of_another_length_is_refused():
    with pytest.raises(ValueError, match="shorter"):
        bind([A, B], [1], {})
