"""What the command line calls a model: a name of the zoo, or a place in the user's code."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rkgb import Sample
from rkgb.tree import is_tensor, map_leaves
from rockmate import zoo
from rockmate.cli.samples import SampleText, SampleTextError

Loss = Callable[[Any], torch.Tensor]


class TargetError(ValueError):
    """What the command line names is neither an entry of the zoo nor a factory of a model and its sample."""


@dataclass(frozen=True, slots=True)
class Target:
    """A model with what a training step needs."""

    model: torch.nn.Module
    sample: Any
    loss: Loss | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where targets come from: one for each batch, if that may be chosen."""

    name: str
    make: Callable[[int | None], Target] = field(repr=False)
    takes_batch: bool = True  # else it makes the one that it has

    def target(self, batch: int | None = None) -> Target:
        """The model and its sample, of `batch` rows where that is given.

        Raises `TargetError` where there is no such batch, or the user's code fails.
        """
        if batch is not None and not self.takes_batch:
            raise TargetError(
                f"{self.name} has a batch of its own. For another one, give its factory a parameter `batch`, or say "
                "--sample with N in the place of the batch: --sample 'float32[N,3,32,32]'"
            )
        return self.make(batch)


def find_source(name: str, sample: SampleText | None = None, device: str | None = None) -> Source:
    """The source called `name`: a zoo name, "package.module:attribute" or "file.py:attribute".

    An attribute is a factory of (model, sample) or (model, sample, loss), a module, or a factory of a module; for the
    latter two, and in the place of another sample, there is `sample`. A factory may have parameters `batch` and
    `device`. Model and sample are moved to `device`, or left where they are made. Nothing is made yet, but for the
    import.

    Raises:
        TargetError: there is no such entry or attribute, or importing it fails.
    """
    if ":" not in name:
        return _zoo_source(name, sample, device)
    made = _attribute(name)
    if not callable(made):
        raise TargetError(f"{name} gives no model: TypeError: {type(made).__name__!r} object is not callable")
    if isinstance(made, torch.nn.Module):
        model = made

        def make_again(batch: int | None) -> Target:
            return _completed(name, model, sample, batch, device)

        return Source(name, make_again, sample is not None and sample.has_batch)
    parameters = _parameters(made)

    def make(batch: int | None) -> Target:
        given: dict[str, Any] = {"device": device} if device is not None and "device" in parameters else {}
        if "batch" in parameters and batch is not None:
            given["batch"] = batch
        try:
            result = made(**given)
        except Exception as error:  # whatever the user's code raises
            raise TargetError(f"{name} gives no model: {type(error).__name__}: {error}") from error
        return _completed(name, result, sample, batch, device)

    return Source(name, make, "batch" in parameters or (sample is not None and sample.has_batch))


def load_target(name: str) -> tuple[torch.nn.Module, Any, Any]:
    """Model, sample and loss (None where there is none) of a name; raises as `find_source` and `Source.target`."""
    target = find_source(name).target()
    return target.model, target.sample, target.loss


# ---- the zoo -----------------------------------------------------------------------------------------------


def _zoo_source(name: str, sample: SampleText | None, device: str | None) -> Source:
    if name not in zoo.names():
        raise TargetError(
            f"the zoo has no {name!r}; it has {', '.join(zoo.names())}. For a model of your own, give "
            "package.module:factory, or path/to/file.py:factory"
        )

    def make(batch: int | None) -> Target:
        entry = zoo.get(name, device=device or "cpu", batch=None if sample is not None else batch)
        if sample is not None:
            return _completed(name, entry.model, sample, batch, device)
        return Target(entry.model, entry.sample, entry.loss)

    return Source(name, make, sample is None or sample.has_batch)


# ---- the user's code ---------------------------------------------------------------------------------------


def _attribute(name: str) -> Any:
    place, _, attribute = name.rpartition(":")
    try:
        found: Any = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # whatever the user's code raises
        raise TargetError(f"{name} gives no model: {type(error).__name__}: {error}") from error
    return found


def _from_package(name: str) -> Any:
    """A module of the user's, found from the working directory as Python finds what it runs from there."""
    _search(Path.cwd())
    return importlib.import_module(name)


def _from_file(path: Path) -> Any:
    path = path.resolve()
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {os.path.relpath(path)}")
    _search(path.parent)
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(path):
        return known
    name = path.stem if known is None else f"{path.stem}_of_{abs(hash(path))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # it ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search(folder: Path) -> None:
    """Have Python find modules in `folder`: before those that are installed, and after its own.

    Processes that planning starts look there, too, and a json.py of the user's is not theirs.
    """
    if str(folder) not in sys.path:
        installed = (place for place, path in enumerate(sys.path) if path.endswith(("site-packages", "dist-packages")))
        sys.path.insert(next(installed, len(sys.path)), str(folder))


def _parameters(made: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters that a factory can be given."""
    if isinstance(made, type) and issubclass(made, torch.nn.Module):
        return frozenset()  # a class of modules: its `device` is not the command line's
    try:
        return frozenset(inspect.signature(made).parameters)
    except (TypeError, ValueError):  # of a builtin
        return frozenset()


def _completed(name: str, made: Any, sample: SampleText | None, batch: int | None, device: str | None) -> Target:
    """What a factory returned, with `sample` where one is given."""
    if isinstance(made, torch.nn.Module):
        if sample is None:
            raise TargetError(
                f"{name} must return (model, sample) or (model, sample, loss), not a {type(made).__name__}; for a "
                "model alone, give its sample: --sample 'float32[8,3,32,32]'"
            )
        made = (made, None)
    if not isinstance(made, tuple) or len(made) not in (2, 3):
        raise TargetError(f"{name} must return (model, sample) or (model, sample, loss), not a {_described(made)}")
    model, own_sample, loss = (*made, None)[:3]
    if sample is not None:
        try:
            own_sample = sample.draw(batch)
        except SampleTextError as error:
            raise TargetError(str(error)) from None
    if device is not None and isinstance(model, torch.nn.Module):
        model, own_sample = model.to(device), _moved(own_sample, device)
    return Target(model, own_sample, loss)


def _moved(sample: Any, device: str) -> Any:
    """The sample on `device`, its tensors leaves of autograd."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(device).requires_grad_(tensor.requires_grad)

    if isinstance(sample, Sample):
        return sample.with_tensors([moved(tensor) for tensor in sample.tensors])
    return map_leaves(lambda leaf: moved(leaf) if is_tensor(leaf) else leaf, sample)


def _described(made: object) -> str:
    return f"tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
