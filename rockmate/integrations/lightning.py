"""Lightning: a callback that trains a LightningModule, or a part of it, within a memory budget."""

from __future__ import annotations

import types
from collections.abc import Iterable
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from rkgb import Sample
from rkgb.state.module_state import training_mode
from rkgb.tree import leaves
from rockmate.errors import IntegrationError
from rockmate.integrations.asked import WhichBatch, check_asked, leaves_state_out, options_of
from rockmate.integrations.micro_batches import MicroBatches, captured, random_numbers_kept
from rockmate.memory.budget import Budget
from rockmate.module import Rockmate
from rockmate.options import PlanOptions

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr, lightning_setattr
except ImportError as missing:
    raise ImportError(
        "rockmate.integrations.lightning needs the lightning library, which is not installed: pip install lightning"
    ) from missing


_BATCH_SIZE = "batch_size"  # of a LightningModule, its hparams or its data module: what Lightning's own tuner sets, too
_LOADER = "_combined_loader"  # of the fit's loop, as Lightning's own tuner resets it
_BATCHES_LOOKED_AT = 8  # for the largest of them, where sequences have many lengths


class RockmateCallback(Callback):
    """Train under a memory budget: ``Trainer(callbacks=[RockmateCallback("2GiB")])``.

    While ``trainer.fit`` runs, a module of the LightningModule is replaced by the planned one, which plans on the first
    training batch; afterwards the module itself is back. Parameters, keys of checkpoints, optimizers and what
    ``training_step`` returns are the same. Validation runs the module itself.

    Args:
        budget: of a training step of the planned module, as `Rockmate` takes it. None and "auto" are the memory that is
            free, less what parameters, gradients and the state of the optimizer will take, where there is one.
        module: path of the module to plan, such as "model" or "net.encoder", or several paths, each of which gets the
            budget. "" is ``forward`` of the LightningModule itself, for a ``training_step`` that calls ``self(...)``.
            By default, the one child that has parameters to train; where there are several, ``forward``.
        batch: "largest" takes as many rows at a time as fit, and accumulates as many of these batches as give the
            step the same rows: both are set before the first step, ``batch_size`` of the LightningModule or its data
            module, which its loader is to read, and the trainer's ``accumulate_grad_batches``. None leaves them.
        options: what else `Rockmate` takes (``loss``, ``solver``, ``time_limit``, ``shapes``, …).

    Attributes:
        planned: the planned modules by path, once a fit has started: ``callback.planned["model"].plans``.
        batches: rows at a time, how often, and what the search found; None before, and without a search.

    Raises:
        ArgumentError: another `batch`, or a part of the eager peak as a budget for the largest batch.
        BudgetError: a budget that cannot be read.
        IntegrationError: there is no such module, or none can be chosen, when a fit starts; ``training_step`` did not
            call any planned module, after the first batch.
    """

    def __init__(
        self,
        budget: Budget = None,
        *,
        module: str | Iterable[str] | None = None,
        batch: WhichBatch = None,
        **options: Any,
    ) -> None:
        super().__init__()
        check_asked(budget, batch)
        self._budget = budget
        self._batch = batch
        self._paths = [module] if isinstance(module, str) else None if module is None else list(module)
        self._options = options_of(options)
        self._places: list[tuple[dict[str, Any], str, torch.nn.Module | None]] = []  # what to put back, and where
        self.planned: dict[str, Rockmate] = {}
        self.batches: MicroBatches | None = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Put planned modules in the places of the modules that they plan."""
        self._put_back()
        paths = self._paths if self._paths is not None else [_path_to_plan(pl_module)]
        options = self._options_for(trainer)
        if self._batch is not None and self.batches is None:
            self._choose_batch(trainer, pl_module, paths, options)
        for path in paths:
            target = _submodule(pl_module, path)
            known = self.planned.get(path)
            if known is None or _planned_of(known) is not target:  # a second fit keeps the plans of the first
                original = target if path else _Forward(pl_module)
                self.planned[path] = Rockmate(original, budget=self._budget, options=options)
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

    def _options_for(self, trainer: Trainer) -> PlanOptions:
        """Where all that is free is the budget, the optimizer's state, which comes with its first step, counts."""
        options, optimizers = self._options, trainer.optimizers
        if len(optimizers) != 1 or not leaves_state_out(self._budget, options):
            return options
        return replace(options, scope="total", optimizer=optimizers[0])

    # ---- the largest batch -----------------------------------------------------------------------------------

    def _choose_batch(
        self, trainer: Trainer, pl_module: LightningModule, paths: list[str], options: PlanOptions
    ) -> None:
        given = _given_batches(trainer, pl_module, paths)
        target = _submodule(pl_module, paths[0])
        model = target if paths[0] else _Forward(pl_module)

        def make(batch: int) -> tuple[torch.nn.Module, Sample]:
            lightning_setattr(pl_module, _BATCH_SIZE, batch)
            return model, self._call_of(trainer, pl_module, paths[0], target)

        with random_numbers_kept(pl_module.device):
            try:
                with trainer.precision_plugin.forward_context():
                    found = given.largest(make, self._budget, options)
            finally:
                lightning_setattr(pl_module, _BATCH_SIZE, given.rows)
        rows = int(trainer.strategy.reduce(torch.tensor(float(found.batch)), reduce_op="min"))  # of all processes
        self.batches = given.of(rows, found)
        lightning_setattr(pl_module, _BATCH_SIZE, self.batches.rows)
        trainer.accumulate_grad_batches = self.batches.times
        setattr(trainer.fit_loop, _LOADER, None)  # where it was made already: it is made anew

    def _call_of(self, trainer: Trainer, root: LightningModule, path: str, target: torch.nn.Module) -> Sample:
        """What a training step calls the module at `path` with: on the largest of some batches."""
        batches = islice(_loader_hook(trainer, root)(), _BATCHES_LOOKED_AT)
        batch = trainer.strategy.batch_to_device(max(batches, key=_numbers_in))

        def step(stand_in: torch.nn.Module) -> Any:
            self._put_in_place(root, path, target, stand_in)
            return root.training_step(batch, 0)

        raised: Exception | None = None
        try:
            with training_mode(root):
                sample = captured(step)
        except Exception as error:  # noqa: BLE001  such as for what it logs, after a call of another module
            sample, raised = None, error
        finally:
            self._put_back()
        if sample is None:
            raise IntegrationError(
                f"training_step of {type(root).__name__} did not call {path!r}: the largest batch cannot be looked "
                'for. Give the path of the module that it calls: RockmateCallback(..., module="…"), "" for self(...).'
            ) from raised
        return sample

    # ---- modules in the places of others ---------------------------------------------------------------------

    def _put(self, root: LightningModule, path: str, target: torch.nn.Module) -> None:
        self._put_in_place(root, path, target, self.planned[path])

    def _put_in_place(self, root: LightningModule, path: str, target: torch.nn.Module, other: torch.nn.Module) -> None:
        if not path:
            self._places.append((root.__dict__, "forward", root.__dict__.get("forward")))
            root.__dict__["forward"] = other.forward
            return
        # Wherever the module is registered: it may have two names.
        for parent in list(root.modules()):
            for name, child in parent._modules.items():
                if child is target:
                    self._places.append((parent.__dict__["_modules"], name, child))
        for place, name, child in self._places:
            if child is target:
                place[name] = other

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


def _given_batches(trainer: Trainer, module: LightningModule, paths: list[str]) -> MicroBatches:
    """What the user asked for. Raises `IntegrationError` where it cannot be changed."""
    name = type(module).__name__
    if len(paths) != 1:
        raise IntegrationError(
            f"the largest batch is looked for where one module is planned, and of {name} there are {len(paths)} "
            f"({', '.join(map(repr, paths))}): give the batch yourself, or one path."
        )
    if not lightning_hasattr(module, _BATCH_SIZE) or _loader_hook(trainer, module) is None:
        raise IntegrationError(
            f"the batch of {name} cannot be set: batch='largest' needs an attribute batch_size of it, or of its data "
            "module, and a train_dataloader() that makes the loader with it. Loaders that are given to fit have theirs."
        )
    if not module.automatic_optimization:
        raise IntegrationError(
            f"{name} makes its optimizer's steps itself: how many batches it accumulates is not known. Give the batch "
            "yourself."
        )
    return MicroBatches(int(lightning_getattr(module, _BATCH_SIZE) or 1), trainer.accumulate_grad_batches)


def _loader_hook(trainer: Trainer, module: LightningModule) -> Any:
    """What makes the loader; None where it was given."""
    datamodule = getattr(trainer, "datamodule", None)
    if datamodule is not None:
        return datamodule.train_dataloader
    own = type(module).train_dataloader is not LightningModule.train_dataloader
    return module.train_dataloader if own else None


def _numbers_in(batch: Any) -> int:
    return sum(tensor.numel() for tensor in leaves(batch) if isinstance(tensor, torch.Tensor))


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
