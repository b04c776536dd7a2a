"""Models by name: of the zoo, of a package, of a file; with a sample and a batch of their own, or given."""

import textwrap

import pytest
import torch
from torch import nn

from rkgb import make_sample
from rockmate import zoo
from rockmate.cli.samples import read_sample
from rockmate.cli.targets import TargetError, find_source

HERE = "tests.cli.test_targets"
ready = nn.Linear(4, 2)


class Made:
    @staticmethod
    def inside():
        return nn.Linear(4, 2), torch.randn(3, 4)


def of_any_batch(batch=5, device="cpu"):
    return nn.Linear(4, 2, device=device), torch.randn(batch, 4, device=device), torch.sum


def shapes(target):
    return [tuple(tensor.shape) for tensor in make_sample(target.model, target.sample).tensors]


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-tiny")])
def test_entries_of_the_zoo_have_any_batch(name):
    source = find_source(name)
    usual, small, large = source.target(), source.target(3), source.target(19)
    for batch, target in ((3, small), (19, large)):
        assert [shape[0] for shape in shapes(target)] == [batch] * len(shapes(usual))
        assert [shape[1:] for shape in shapes(target)] == [shape[1:] for shape in shapes(usual)]
    with torch.no_grad():
        assert torch.isfinite(small.loss(small.model(*small.sample)))  # type: ignore[misc]


def test_packages_classes_and_ready_modules_are_found():
    assert shapes(find_source(f"{HERE}:Made.inside").target()) == [(3, 4)]
    text = read_sample(["float32[N,4]"])
    source = find_source(f"{HERE}:ready", text)
    assert source.target(7).model is ready
    assert shapes(source.target(7)) == [(7, 4)]
    assert shapes(find_source("torch.nn:Identity", text).target(2)) == [(2, 4)]


def test_a_factory_takes_the_batch_and_the_device_that_it_has_parameters_for():
    source = find_source(f"{HERE}:of_any_batch")
    assert shapes(source.target()) == [(5, 4)]
    assert shapes(source.target(9)) == [(9, 4)]
    assert source.target().loss is torch.sum
    assert find_source(f"{HERE}:of_any_batch", device="meta").target().model.weight.is_meta


def test_model_and_sample_are_moved_to_the_device():
    target = find_source(f"{HERE}:Made.inside", device="meta").target()
    assert target.model.weight.is_meta
    assert target.sample.is_meta


def test_files_are_found_and_find_what_is_beside_them(tmp_path):
    (tmp_path / "beside.py").write_text("WIDTH = 6\n")
    (tmp_path / "mine.py").write_text(
        textwrap.dedent(
            """
            import torch
            from dataclasses import dataclass
            from beside import WIDTH

            @dataclass
            class Options:
                width: "int" = WIDTH

            def make():
                return torch.nn.Linear(Options().width, 2), torch.randn(3, WIDTH)
            """
        )
    )
    assert shapes(find_source(f"{tmp_path / 'mine.py'}:make").target()) == [(3, 6)]


def test_a_file_is_not_taken_for_a_module_of_that_name(tmp_path):
    (tmp_path / "zoo.py").write_text("import torch\nmake = lambda: (torch.nn.Linear(1, 1), torch.ones(1, 1))\n")
    (tmp_path / "json.py").write_text("import torch\nmake = lambda: (torch.nn.Linear(2, 1), torch.ones(1, 2))\n")
    assert shapes(find_source(f"{tmp_path / 'zoo.py'}:make").target()) == [(1, 1)]
    assert shapes(find_source(f"{tmp_path / 'json.py'}:make").target()) == [(1, 2)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("absent.py:make", "there is no file absent.py"),
        (f"{HERE}:Made.outside", "AttributeError"),
        (f"{HERE}:ready", "for a model alone, give its sample: --sample"),
        ("torch.nn:Identity", "for a model alone"),
    ],
)
def test_what_is_not_there_is_told(name, message):
    with pytest.raises(TargetError, match=message):
        find_source(name).target()


def test_a_batch_that_nothing_takes_is_refused():
    with pytest.raises(TargetError, match="has a batch of its own"):
        find_source(f"{HERE}:Made.inside").target(4)
    with pytest.raises(TargetError, match="has a batch of its own"):
        find_source(f"{HERE}:ready", read_sample(["[3,4]"])).target(4)
