"""Lightning: a callback that trains a LightningModule, or a part of it, within a memory budget."""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch

from rockmate.errors import IntegrationError
from rockmate.memory.budget import Budget
from rockmate.module import Rockmate

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError as missing:
    raise ImportError(
        "rockmate.integrations.lightning needs the lightning library, which is not installed: pip install lightning"
    ) from missing


class RockmateCallback(Callback):
    """Train under a memory budget: ``Trainer(callbacks=[RockmateCallback("2GiB")])``.

    While ``trainer.fit`` runs, a module of the LightningModule is replaced by the planned one, which plans on the first
    training batch; afterwards the module itself is back. Parameters, keys of checkpoints, optimizers and what
    ``training_step`` returns are the same. Validation runs the module itself.

    Args:
        budget: of a training step of the planned module, as `Rockmate` takes it.
        module: path of the module to plan, such as "model" or "net.encoder", or several paths, each of which gets the
            budget. "" is ``forward`` of the LightningModule itself, for a ``training_step`` that calls ``self(...)``.
            By default, the one child that has parameters to train; where there are several, ``forward``.
        options: what else `Rockmate` takes (``loss``, ``solver``, ``time_limit``, ``shapes``, …).

    Attributes:
        planned: the planned modules by path, once a fit has started: ``callback.planned["model"].plans``.

    Raises:
        IntegrationError: there is no such module, or none can be chosen, when a fit starts; ``training_step`` did not
            call any planned module, after the first batch.
    """

    def __init__(self, budget: Budget = None, *, module: str | Iterable[str] | None = None, **options: Any) -> None:
        super().__init__()
        self._budget = budget
        self._paths = [module] if isinstance(module, str) else None if module is None else list(module)
        self._options = options
        self._places: list[tuple[dict[str, Any], str, torch.nn.Module | None]] = []  # what to put back, and where
        self.planned: dict[str, Rockmate] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put planned modules in the places of the modules that they plan."""
        self._put_back()
        for path in self._paths if self._paths is not None else [_path_to_plan(pl_module)]:
            target = _submodule(pl_module, path)
            known = self.planned.get(path)
            if known is None or _planned_of(known) is not target:  # a second fit keeps the plans of the first
                original = target if path else _Forward(pl_module)
                self.planned[path] = Rockmate(original, budget=self._budget, **self._options)
            self._put(pl_module, path, target)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Refuse to go on where nothing is planned: memory would not be bounded, and nobody would know."""
        if self.planned and not any(planned.plans for planned in self.planned.values()):
            paths = " nor ".join(repr(path) if path else "forward" for path in self.planned)
            raise IntegrationError(
                f"training_step of {type(pl_module).__name__} did not call {paths}, so nothing is planned. Give the "
                'path of the module that it calls: RockmateCallback(budget, module="…"), "" for self(...).'
            )

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Put the modules themselves back."""
        self._put_back()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Put the modules themselves back."""
        self._put_back()

    def _put(self, root: LightningModule, path: str, target: torch.nn.Module) -> None:
        if not path:
            self._places.append((root.__dict__, "forward", root.__dict__.get("forward")))
            root.__dict__["forward"] = self.planned[path].forward
            return
        # Wherever the module is registered: it may have two names.
        for parent in list(root.modules()):
            for name, child in parent._modules.items():
                if child is target:
                    self._places.append((parent.__dict__["_modules"], name, child))
        for place, name, child in self._places:
            if child is target:
                place[name] = self.planned[path]

    def _put_back(self) -> None:
        for place, name, earlier in reversed(self._places):
            if earlier is None:
                place.pop(name, None)
            else:
                place[name] = earlier
        self._places.clear()


class _Forward(torch.nn.Module):
    """``forward`` of a module as a module of its own: what holds it may then call the planned one in its place."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        state = self.__dict__
        state["_of"] = module
        for shared in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            state[shared] = getattr(module, shared)
        state["forward"] = types.MethodType(type(module).forward, module)

    @property
    def training(self) -> bool:
        """The module's own mode."""
        return "_of" not in self.__dict__ or bool(self.__dict__["_of"].training)

    @training.setter
    def training(self, mode: bool) -> None:
        if "_of" in self.__dict__:
            self.__dict__["_of"].training = mode


def _planned_of(planned: Rockmate) -> torch.nn.Module:
    """The module of the user's that `planned` is in the place of."""
    original = planned.original
    return original.__dict__["_of"] if type(original) is _Forward else original


def _trained_children(module: LightningModule) -> list[str]:
    return [name for name, child in module.named_children() if any(p.requires_grad for p in child.parameters())]


def _path_to_plan(module: LightningModule) -> str:
    """The only child with parameters to train, else "" for a forward that the module has."""
    children = _trained_children(module)
    if len(children) == 1:
        return children[0]
    if type(module).forward is not LightningModule.forward:
        return ""
    raise IntegrationError(
        f"{type(module).__name__} has no forward, and {len(children)} modules with parameters to train "
        f"({', '.join(children) or 'none'}): which one is to be planned? Say RockmateCallback(budget, module="
        f'"{children[0] if children else "…"}"), or give several paths; each gets the budget.'
    )


def _submodule(module: LightningModule, path: str) -> torch.nn.Module:
    try:
        found = module.get_submodule(path)
    except AttributeError:
        raise IntegrationError(
            f"{type(module).__name__} has no submodule {path!r} to plan. Its children with parameters to train are "
            f'{", ".join(map(repr, _trained_children(module))) or "none"}; "" stands for its own forward.'
        ) from None
    if isinstance(found, Rockmate):
        raise IntegrationError(
            f"submodule {path!r} of {type(module).__name__} is planned already. Leave the callback out, or give it the "
            "module itself."
        )
    return found
