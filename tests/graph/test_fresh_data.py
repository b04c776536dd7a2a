"""Data that no random numbers can stand for: the replay check takes others, made of the sample, and says so."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rkgb import ReplayMismatch, TraceError, TraceWarning, make_sample
from rkgb.pipeline import exact_trace
from rkgb.replay.fresh import fresh_sample, offers
from rkgb.replay.replay import replay_check
from rockmate import Rockmate, verify
from tests.graph.programs import Program, linear, rows

INDEX, VALUE = "IndexError", "ValueError"


def looked_up(m, ids):
    return m.layer(m.table(ids.long()))


def module_of(function, **parts):
    torch.manual_seed(0)
    return Program(function, table=nn.Embedding(10, 4), layer=linear(4, 4), **parts)


def checked(condition, message):
    if not bool(condition):
        raise ValueError(message)


def spread(m, x):
    return m.layer(F.gelu(m.layer(x)))


def zero_or_one(m, x, mask):
    with torch.no_grad():
        checked(((mask == 0) | (mask == 1)).all(), "a mask is 0 or 1")
    return spread(m, x) * mask


def distribution(m, p):
    checked(torch.allclose(p.sum(-1), torch.ones(len(p)), atol=1e-3), "probabilities sum to one")
    return spread(m, p)


def definite(m, a):
    return spread(m, torch.linalg.cholesky(a))


def boxes(m, b):
    checked((b[:, 0] < b[:, 2]).all() and (b[:, 1] < b[:, 3]).all(), "x1 < x2 and y1 < y2")
    return spread(m, b)


def table_of_boxes(m, b):
    return m.layer(m.table(b[:, 0].long()) + b[:, 1:])


def one_hot(m, ids):
    return spread(m, F.one_hot(ids.long(), 4).float())


def positive(m, x):
    return spread(m, (x + 1).log())


def symmetric(m, a):
    checked(torch.equal(a, a.T), "a matrix is symmetric")
    return spread(m, a)


def graph(m, x, edges):
    checked((edges[0] < 3).all(), "three sources")
    return torch.zeros_like(x).index_add(0, edges[1], m.layer(x)[edges[0]])


def finite(m, x):
    y = spread(m, x.clamp(min=-0.5).add(0.5).sqrt() if bool(x.isfinite().all()) else x)
    checked(y.isfinite().all(), "NaN in the output")
    return y


def spd(count, size):
    a = rows(count, size, size)
    return a @ a.mT + size * torch.eye(size)


def sample_of(name):
    torch.manual_seed(1)
    x = rows(8, 4)
    return {
        "ids in floats": (looked_up, (torch.arange(8).float(),)),
        "equal ids in floats": (looked_up, (torch.full((8,), 9.0),)),
        "mask in floats": (zero_or_one, (x, (x > 0).float())),
        "mask of ones": (zero_or_one, (x, torch.ones(8, 1))),
        "probabilities": (distribution, (x.softmax(-1),)),
        "definite": (definite, (spd(8, 4),)),
        "boxes": (boxes, (torch.cat([x.abs(), x.abs() + 1 + rows(8, 4).abs()], -1)[:, [0, 1, 4, 5]],)),
        "table of boxes": (table_of_boxes, (torch.cat([torch.arange(8.0)[:, None], x.sigmoid()], -1),)),
        "one hot": (one_hot, (torch.full((8,), 3.0),)),
        "log": (positive, (x.abs() - 0.9,)),
        "symmetric": (symmetric, (spd(1, 4)[0],)),
        "edges": (graph, (x, torch.stack([torch.arange(8) % 3, torch.arange(8)]))),
        "dictionary": (lambda m, d: looked_up(m, d["a"]["ids"][0]), ({"a": {"ids": [torch.full((8,), 7.0)]}},)),
        "bytes": (lambda m, x: spread(m, x.float() / 255), (torch.arange(32, dtype=torch.uint8).view(8, 4),)),
        "complex": (lambda m, x: spread(m, x.abs()), (torch.complex(x, rows(8, 4)),)),
        "empty": (lambda m, x, none: spread(m, x) + none.sum(), (x, torch.empty(0, 4))),
        "sorted": (
            lambda m, x, n: spread(m, x) * (checked((n.diff() <= 0).all(), "sorted") or n.sum()),
            (x, 8 - torch.arange(8)),
        ),
    }[name]


TOLD = {
    "equal ids in floats": ("rows in another order", INDEX),
    "probabilities": ("rows in another order", VALUE),
    "mask of ones": ("rows in another order", VALUE),
    "definite": ("rows in another order", "_LinAlgError"),
    "boxes": ("rows in another order", VALUE),
    "one hot": ("rows in another order", "RuntimeError"),
    "symmetric": ("the sample itself", VALUE),
    "dictionary": ("rows in another order", INDEX),
    "log": ("rows in another order", "gives NaN"),
}
NAMES = [*TOLD, "ids in floats", "mask in floats", "table of boxes", "edges", "bytes", "complex", "empty", "sorted"]


@pytest.mark.parametrize("name", NAMES)
def test_data_that_random_numbers_cannot_stand_for_are_traced_and_what_was_tried_is_told(name):
    function, arguments = sample_of(name)
    module = module_of(function)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        exact_trace(module, make_sample(module, arguments), may_branch=True)
    told = [
        str(one.message) for one in caught if one.category is TraceWarning and "takes no random" in str(one.message)
    ]
    if name not in TOLD:
        assert told == []
        return
    (text,) = told
    taken, cause = TOLD[name]
    assert f"compared with it on the sample's {taken}" in text or f"compared with it on {taken}" in text
    assert cause in text
    assert "rockmate.verify" in text


def test_what_cannot_be_given_at_random_trains_exactly():
    function, arguments = sample_of("equal ids in floats")
    with pytest.warns(TraceWarning, match="takes no random data"):
        result = verify(module_of(function), arguments, 1 << 20)
    assert result.exact, result


def test_a_constant_of_the_data_is_found_by_data_made_of_the_sample_too():
    module = module_of(lambda m, ids: looked_up(m, ids) * m.seen(ids))
    module.seen = lambda ids: float(ids.numpy().copy().cumsum().std())
    with pytest.raises(ReplayMismatch, match="does not hold for other data"):
        exact_trace(module, make_sample(module, (torch.tensor([9.0, 9.0, 9.0, 8.5]),)))


def test_a_module_that_takes_nothing_any_more_is_told_with_all_that_was_tried(monkeypatch):
    is_checked = []

    def check(*arguments):
        is_checked.append(True)
        return replay_check(*arguments)

    def until_it_is_checked(m, x):
        if is_checked:
            raise KeyError("no more")
        return spread(m, x)

    monkeypatch.setattr("rkgb.pipeline.replay_check", check)
    module = module_of(until_it_is_checked)
    with pytest.raises(TraceError, match=r"random numbers.*KeyError.*the sample itself \(KeyError: 'no more'\)"):
        exact_trace(module, make_sample(module, (rows(8, 4),)), "record")


def test_whole_numbers_in_columns_are_those_of_the_sample():
    table = torch.cat([torch.arange(6.0)[:, None], torch.ones(6, 1), rows(6, 3)], -1)
    (drawn,) = fresh_sample(make_sample(nn.Identity(), table), ids_kept=True).tensors
    assert sorted(drawn[:, 0].tolist()) == list(range(6))
    assert drawn[:, 1].tolist() == [1] * 6
    assert not torch.isin(drawn[:, 2:], table[:, 2:]).any()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (4, 3), (2, 0, 3), (2, 3, 4)])
def test_every_offer_is_made_of_every_kind_of_tensor(dtype, shape):
    given = rows(*shape).mul(9).to(dtype) if shape else torch.tensor(3.0).to(dtype)
    sample = make_sample(nn.Identity(), given)
    for offer in offers(sample):
        (made,) = offer.of(sample, 3).tensors
        assert (made.shape, made.dtype, made.stride()) == (given.shape, dtype, given.stride())
        assert made.untyped_storage()._cdata != given.untyped_storage()._cdata


def test_a_planned_module_says_once_what_its_proof_is_of():
    function, arguments = sample_of("symmetric")
    with pytest.warns(TraceWarning, match=r"compared with it on the sample itself.*is shown by less") as caught:
        Rockmate(module_of(function), arguments, 1 << 20, cache=False)
    assert len([one for one in caught if "takes no random" in str(one.message)]) == 1
