"""Nested structures keep their shape and their types; only the chosen leaves change."""

import collections
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch

from rkgb.ir.call import Ref, is_ref
from rkgb.tree import is_tensor, leaves, map_leaves


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Record:
    value: Any
    note: str = "note"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: Any
    size: int


class OutputOfALibrary(collections.OrderedDict):
    """As model libraries have: a dictionary whose entries are attributes, too."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)


def ones(tree):
    return map_leaves(torch.ones_like, tree)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tensor: tensor,
        lambda tensor: (tensor, 1),
        lambda tensor: [tensor, None],
        lambda tensor: {"b": tensor, "a": "text"},
        lambda tensor: Point(tensor, 2.0),
        lambda tensor: Record(tensor),
        lambda tensor: Frozen(tensor, 3),
        lambda tensor: {"deep": [({"er": Point(Record((tensor,)), True)},)]},
    ],
    ids=["tensor", "tuple", "list", "dict", "namedtuple", "dataclass", "frozen dataclass", "nested"],
)
def test_mapping_keeps_structure_and_types(wrap):
    zeros = torch.zeros(2)
    mapped = ones(wrap(zeros))
    assert repr(mapped) == repr(wrap(torch.ones(2)))
    assert type(mapped) is type(wrap(zeros))
    assert torch.equal(zeros, torch.zeros(2))


def test_mapping_leaves_the_original_alone():
    inner = [torch.zeros(2)]
    record = Record(inner)
    mapped = ones({"record": record})
    assert mapped["record"] is not record
    assert record.value is inner
    assert inner[0].sum() == 0


def test_classes_of_dictionaries_and_their_order_are_kept():
    tree = OutputOfALibrary(second=torch.zeros(1), first=torch.zeros(1))
    mapped = ones(tree)
    assert type(mapped) is OutputOfALibrary
    assert list(mapped) == ["second", "first"]
    assert mapped.second is mapped["second"]
    assert mapped.second.item() == 1


def test_defaultdict_keeps_its_default():
    mapped = ones(collections.defaultdict(list, key=torch.zeros(1)))
    assert mapped["absent"] == []


def test_a_size_is_a_leaf_not_a_tuple():
    size = torch.zeros(2, 3).shape
    assert ones([size])[0] is size


def test_dataclass_types_are_no_instances():
    assert ones([Record])[0] is Record


def test_leaves_come_in_the_order_of_mapping():
    first, second, third = torch.zeros(1), torch.zeros(2), torch.zeros(3)
    tree = {"b": first, "a": (Point(second, 1), [Record(third)])}
    assert [leaf.shape[0] for leaf in leaves(tree)] == [1, 2, 3]
    seen = []
    map_leaves(lambda leaf: seen.append(leaf), tree)
    assert all(leaf is other for leaf, other in zip(leaves(tree), seen, strict=True))


def test_a_tensor_met_twice_is_two_leaves():
    tensor = torch.zeros(1)
    assert len(leaves((tensor, [tensor]))) == 2


def test_other_leaves_can_be_chosen():
    tree = (Ref("a"), torch.zeros(1), [Ref("b")])
    assert leaves(tree, is_ref) == [Ref("a"), Ref("b")]
    assert map_leaves(lambda ref: ref.name, (Ref("a"), 1), is_ref) == ("a", 1)


def test_only_tensors_are_tensors():
    assert is_tensor(torch.nn.Parameter(torch.zeros(1)))
    assert not is_tensor([torch.zeros(1)])
