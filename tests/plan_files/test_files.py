"""Plan files: what is written is read, and whatever is damaged or made to do harm is refused."""

from __future__ import annotations

import copy
import gzip
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from rk_solvers import Greedy
from rockmate import PlanFile, PlanFileError, PlanFileMismatch, Rockmate, plan_files
from rockmate.plan_files import files
from tests.module.steps import assert_trains_exactly, squares

SCHEMA = Path(files.__file__).with_name("schema.json")


class Network(nn.Module):
    """Equal blocks with dropout, a statistic, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.2)) for _ in range(4)]
        self.body = nn.Sequential(*parts, nn.BatchNorm1d(16))
        self.table = torch.linspace(0, 1, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.table


def network() -> nn.Module:
    torch.manual_seed(1)
    return Network()


def sample() -> torch.Tensor:
    return torch.randn(64, 16, generator=torch.Generator().manual_seed(2))


@pytest.fixture(scope="module")
def plan_file() -> PlanFile:
    return Rockmate(network(), sample(), 0.6, loss=squares, solver=Greedy()).plan_file()


def test_what_is_written_is_read(plan_file: PlanFile, tmp_path: Path):
    for name in ("plan.json", "plan.json.gz"):
        path = tmp_path / name
        plan_files.save(plan_file, path)
        assert plan_files.load(path) == plan_file
        first = path.read_bytes()
        plan_files.save(plan_files.load(str(path)), path)
        assert path.read_bytes() == first, "the same plan, the same bytes"
    assert plan_file.plan.recomputations > 0
    assert sorted(os.listdir(tmp_path)) == ["plan.json", "plan.json.gz"], "no part of a file is left"


def test_the_plan_of_a_file_is_the_modules(plan_file: PlanFile):
    planned = Rockmate(network(), sample(), 0.6, loss=squares, solver=Greedy())
    again = planned.plan_file()
    assert again.plan == planned.plan
    assert again.graph == plan_file.graph, "nothing in it differs from process to process, or from time to time"


def test_who_may_read_a_file_is_decided_as_for_other_files(plan_file: PlanFile, tmp_path: Path):
    before = os.umask(0o027)
    try:
        plan_files.save(plan_file, tmp_path / "plan.json")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "plan.json").stat().st_mode) == 0o640


def test_a_file_that_cannot_be_written_leaves_what_was_there(plan_file: PlanFile, tmp_path: Path, monkeypatch):
    path = tmp_path / "plan.json"
    path.write_text("what was there")
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("no")))
    with pytest.raises(OSError, match="no"):
        plan_files.save(plan_file, path)
    assert path.read_text() == "what was there"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_the_schema_is_the_codes_and_accepts_plans(plan_file: PlanFile, request: pytest.FixtureRequest):
    text = json.dumps(files.schema(), indent=1, sort_keys=True) + "\n"
    if request.config.getoption("--update-golden"):
        SCHEMA.write_text(text)
    assert SCHEMA.read_text() == text, "`make golden` writes it anew: raise VERSION if older files cannot be read"
    jsonschema = pytest.importorskip("jsonschema")
    content = json.loads(plan_files.dumps(plan_file))
    jsonschema.Draft202012Validator.check_schema(files.schema())
    jsonschema.validate(content, files.schema())
    content["surprise"] = 1
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(content, files.schema())


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "no JSON"),
        (b"\xff\xfe", "no JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"null", 'does not say "format"'),
        (b'{"format": "rkgb-graph", "version": 1}', 'does not say "format"'),
        (b'{"format": "rockmate-plan", "version": 3}', "Update Rockmate"),
        (b'{"format": "rockmate-plan", "version": 1}', "plan the module again"),
        (b'{"format": "rockmate-plan", "version": 2}', "required"),
        (b'{"format": "rockmate-plan", "version": "1"}', "version"),
        (b'{"format": "rockmate-plan", "version": 2, "version": 2}', "twice"),
        (b'{"format": "rockmate-plan", "version": 2, "x": NaN}', "no number of JSON"),
        (b'{"format": "rockmate-plan", "version": 2, "x": 1' + b"0" * 4000 + b"}", "beyond"),
        (b"\x1f\x8b\x08\x00", "packed by gzip, and damaged"),
        (gzip.compress(b"{}", mtime=0)[:-9], "packed by gzip, and damaged"),
    ],
)
def test_what_is_no_plan_is_refused_and_says_why(content: bytes, told: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(PlanFileError, match=told) as refused:
        plan_files.load(path)
    assert str(path) in refused.value.__notes__[0]


def test_a_small_file_is_not_unpacked_without_end(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(files, "MOST_BYTES", 1 << 16)
    path = tmp_path / "plan.json.gz"
    path.write_bytes(gzip.compress(b" " * (1 << 22)))
    with pytest.raises(PlanFileError, match="larger than"):
        plan_files.load(path)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of all values in a tree of JSON."""
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


def at(tree: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        tree = tree[step]
    return tree


def believed(content: dict[str, Any]) -> bytes:
    """As one would write it who knows how the digest is made."""
    content.pop("digest", None)
    try:
        digest = files.digest_of(msgspec.convert(content, PlanFile))
    except Exception:  # noqa: BLE001  what is no plan has none
        digest = "0" * 64
    return json.dumps(content | {"digest": digest}).encode()


def test_a_file_of_before_is_read_whose_backwards_tell_their_operations_by_their_names(plan_file: PlanFile):
    content = json.loads(plan_files.dumps(plan_file))
    content.pop("digest")
    for op in content["problem"]["backward"]:
        del op["op"]
    for block in content["measured"]["blocks"]:
        block["profile"]["normalise_ms"] = block["profile"].pop("restore_ms")
    old = json.dumps(content | {"digest": files._digest(content)}).encode()
    assert files.loads(old) == plan_file
    calls = {op.name for op in plan_file.graph.operations}
    assert {op.op for op in plan_file.problem.backward} <= calls | {""}


def test_a_backward_of_what_is_not_in_the_graph_is_refused(plan_file: PlanFile):
    content = json.loads(plan_files.dumps(plan_file))
    content["problem"]["backward"][1]["op"] = "nowhere"
    with pytest.raises(PlanFileError, match="the backward of 'nowhere', which is no operation of its graph"):
        files.loads(believed(content))


UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # a smaller forgery says no more
ODD = st.sampled_from(
    [None, True, -1, 0, 1, 2, 3, 2**53 + 1, 1e300, 0.5, "", "x", "os.system", "../../x", "a b", "\ud800", [], {}, [[]]]
)


@settings(max_examples=150, deadline=None, phases=UNSHRUNK)
@given(data=st.data())
def test_a_flipped_byte_is_seen(plan_file: PlanFile, data: st.DataObject):
    content = bytearray(plan_files.dumps(plan_file))
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= data.draw(st.integers(1, 255))
    try:
        found = plan_files.loads(bytes(content))
    except PlanFileError:
        return
    assert found == plan_file, "white space, or another way to write the same"


@pytest.mark.filterwarnings("ignore::rockmate.errors.PlanFileWarning")  # of another PyTorch, where that was forged
@settings(max_examples=30, deadline=None, phases=UNSHRUNK)
@given(data=st.data())
@pytest.mark.ci
def test_what_was_forged_is_refused_or_trains_exactly(plan_file: PlanFile, data: st.DataObject):
    content = json.loads(plan_files.dumps(plan_file))
    *above, last = data.draw(st.sampled_from(list(places(content))[1:]))
    holder = at(content, tuple(above))
    if isinstance(holder, dict) and data.draw(st.integers(0, 4)) == 0:
        del holder[last]
    else:
        other = at(content, data.draw(st.sampled_from(list(places(content)))))
        holder[last] = copy.deepcopy(data.draw(st.one_of(ODD, st.just(other))))  # or a part would hold itself
    try:
        forged = plan_files.loads(believed(json.loads(json.dumps(content))))
        planned = Rockmate(network(), sample(), plan=forged)
    except (PlanFileError, PlanFileMismatch):
        return
    assert_trains_exactly(planned, [sample()] * 2)
