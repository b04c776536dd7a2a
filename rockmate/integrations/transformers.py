"""Trainers of Hugging Face: a callback that trains their model within a memory budget, TRL's trainers among them."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from itertools import islice
from types import FrameType
from typing import Any

import torch
from torch.utils.data import Subset

from rkgb import Sample
from rockmate.errors import IntegrationError
from rockmate.integrations.asked import WhichBatch, check_asked, leaves_state_out, options_of
from rockmate.integrations.micro_batches import MicroBatches, captured, random_numbers_kept
from rockmate.memory.budget import Budget
from rockmate.module import Rockmate
from rockmate.options import PlanOptions

try:
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as missing:
    raise ImportError(
        "rockmate.integrations.transformers needs the transformers library, which is not installed: "
        "pip install transformers"
    ) from missing

_ROWS_LOOKED_AT = 1024  # for the longest of them
_GIVE_IT = "Give it to the constructor, Trainer(callbacks=[RockmateCallback(...)]), or call its attach(trainer)"
_BATCH = "_train_batch_size"  # of a trainer: it reads its arguments' only when it is made
_AnyTrainer = Any  # a Trainer: its own annotations are narrower than what it takes, and than what it holds


class RockmateCallback(TrainerCallback):
    """Train under a memory budget: ``Trainer(callbacks=[RockmateCallback("auto", batch="largest")])``.

    When training starts, the trainer's model is replaced by the planned one, which plans on the first batch. What is
    computed, logged and saved is the same. Evaluation and generation run the model itself.

    Args:
        budget: of a training step, as `Rockmate` takes it. "auto" is the memory that is free, less what parameters,
            gradients and the state of the optimizer will take.
        batch: "largest" takes as many rows at a time as fit, and accumulates as many of these batches as give the
            step the same rows: both are set in the trainer's arguments, before the first step. It is looked for on the
            longest of the first thousand rows. None leaves both as they are.
        options: what else `Rockmate` takes (``solver``, ``time_limit``, ``shapes``, ``scope``, …).

    Attributes:
        planned: the planned model, once training has started; None before.
        batches: rows at a time, how often, and what the search found; None before, and without a search.

    Raises:
        ArgumentError: another `batch`, or a part of the eager peak as a budget for the largest batch.
        BudgetError: a budget that cannot be read.
        IntegrationError: when training starts: the trainer is not known, its model is planned already, or it shards
            the model; after the first step: nothing was planned.
    """

    def __init__(self, budget: Budget = "auto", *, batch: WhichBatch = None, **options: Any) -> None:
        check_asked(budget, batch)
        self._budget = budget
        self._batch = batch
        self._options = options_of(options)
        self._trainer: weakref.ref[_AnyTrainer] | None = None
        self.planned: Rockmate | None = None
        self.batches: MicroBatches | None = None

    def attach(self, trainer: _AnyTrainer) -> None:
        """Plan the model of `trainer` when it trains: for a trainer that was made without this callback."""
        if self._trainer is not None and self._trainer() is trainer:
            return
        self._trainer = weakref.ref(trainer)
        if self not in trainer.callback_handler.callbacks:
            trainer.add_callback(self)
        train, make = trainer.train, trainer.model_init

        @wraps(train)
        def planned_train(*args: Any, **kwargs: Any) -> Any:
            self._start(trainer)
            return train(*args, **kwargs)

        trainer.train = planned_train
        if make is not None:  # each `train` begins with a model of its own
            trainer.model_init = self._planning(make, trainer)

    # ---- events of the trainer -------------------------------------------------------------------------------

    def on_init_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Learn which trainer this is: its events do not say."""
        trainer = _trainer_at_work(self)
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse to train where the model is not planned: memory would not be bounded, and nobody would know."""
        if self.planned is None:
            raise IntegrationError(
                "RockmateCallback was added to a trainer that had been made, too late to learn which one. " + _GIVE_IT
            )

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Refuse to go on where nothing was planned."""
        planned = self.planned
        if planned is not None and not planned.plans and not planned.fallbacks:
            raise IntegrationError(
                f"the trainer did not call its {type(planned.original).__name__} in a training step, so nothing is "
                "planned: it may have called a part of it. Wrap that part before the trainer gets the model, "
                "model.part = Rockmate(model.part, budget=...), and leave the callback out."
            )

    # ---- when training starts --------------------------------------------------------------------------------

    def _start(self, trainer: _AnyTrainer) -> None:
        _refuse_sharded(trainer)
        if self._batch is not None and self.batches is None:
            self._choose_batch(trainer)
        if trainer.model_init is not None or (self.planned is not None and trainer.model is self.planned):
            return
        if isinstance(trainer.model, Rockmate):
            raise IntegrationError(
                "the trainer's model is planned already. Leave the callback out, or give the trainer the model itself."
            )
        self.planned = self._plan(trainer.model, trainer)
        trainer.model = trainer.model_wrapped = self.planned

    def _plan(self, model: torch.nn.Module, trainer: _AnyTrainer) -> Rockmate:
        return Rockmate(model, budget=self._budget, options=self._options_for(trainer))

    def _planning(self, make: Callable[..., torch.nn.Module], trainer: _AnyTrainer) -> Callable[..., torch.nn.Module]:
        @wraps(make)
        def planned_init(*trial: Any) -> torch.nn.Module:
            self.planned = self._plan(make(*trial), trainer)
            return self.planned

        return planned_init

    def _options_for(self, trainer: _AnyTrainer) -> PlanOptions:
        """Where all that is free is the budget, the optimizer's state, which comes with its first step, counts."""
        options = self._options
        if not leaves_state_out(self._budget, options):
            return options
        if trainer.model_init is None:
            trainer.create_optimizer()  # as training does itself, a little later
            return replace(options, scope="total", optimizer=trainer.optimizer)
        kind, settings = trainer.optimizer_cls_and_kwargs or trainer.get_optimizer_cls_and_kwargs(trainer.args)
        return replace(options, scope="total", optimizer=partial(kind, **settings))

    # ---- the largest batch -----------------------------------------------------------------------------------

    def _choose_batch(self, trainer: _AnyTrainer) -> None:
        args = trainer.args
        given = MicroBatches(args.per_device_train_batch_size, args.gradient_accumulation_steps)
        model = trainer.model
        with random_numbers_kept(args.device):
            rows = _longest_rows(trainer.train_dataset)

            def make(batch: int) -> tuple[torch.nn.Module, Sample]:
                return model, _call_of(trainer, rows, batch)

            model.train()
            with trainer.accelerator.autocast():
                found = given.largest(make, self._budget, self._options_for(trainer))
        agreed = min(_of_all_processes(found.batch))
        self.batches = given.of(agreed, found)
        args.per_device_train_batch_size, args.gradient_accumulation_steps = self.batches.rows, self.batches.times
        setattr(trainer, _BATCH, args.train_batch_size)


def _trainer_at_work(callback: TrainerCallback) -> _AnyTrainer | None:
    """The trainer whose constructor is telling `callback` that it is done: one of the callers."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, Trainer) and callback in caller.callback_handler.callbacks:
            return caller
        frame = frame.f_back
    return None


def _refuse_sharded(trainer: _AnyTrainer) -> None:
    if trainer.is_deepspeed_enabled or trainer.is_fsdp_enabled:
        raise IntegrationError(
            "the trainer shards its model (FSDP or DeepSpeed): a plan of the whole model would gather all of it. Plan "
            "single blocks with rockmate.distributed, and leave the callback out."
        )


def _longest_rows(dataset: Any) -> Any:
    """The first rows of a dataset, the longest of them first: a dataset of the same kind, where that can be."""
    if not hasattr(dataset, "__getitem__"):
        rows = list(islice(iter(dataset), _ROWS_LOOKED_AT))
        return sorted(rows, key=_length, reverse=True)
    count = min(len(dataset), _ROWS_LOOKED_AT)
    order = sorted(range(count), key=lambda place: _length(dataset[place]), reverse=True)
    return _taken(dataset, order)


def _taken(rows: Any, places: Sequence[int]) -> Any:
    """These rows: columns that the model does not know are taken out of datasets of the datasets library alone."""
    return rows.select(places) if hasattr(rows, "select") else Subset(rows, places)


def _length(row: Any) -> int:
    """Numbers in its largest part."""
    parts = row.values() if isinstance(row, dict) else row if isinstance(row, (tuple, list)) else [row]
    return max((_size(part) for part in parts), default=0)


def _size(part: Any) -> int:
    if isinstance(part, torch.Tensor):
        return part.numel()
    return len(part) if hasattr(part, "__len__") else 1


def _call_of(trainer: _AnyTrainer, rows: Any, batch: int) -> Sample:
    """What a training step of `batch` rows calls the model with."""
    processes = trainer.args.world_size
    taken = _taken(rows, [place % len(rows) for place in range(batch * processes)])
    with _training_on(trainer, taken, batch):
        (inputs,), count = trainer.get_batch_samples(iter(trainer.get_train_dataloader()), 1, trainer.args.device)
        with trainer.compute_loss_context_manager():
            sample = captured(lambda model: trainer.compute_loss(model, inputs, num_items_in_batch=count))
    if sample is None:
        raise IntegrationError(
            f"{type(trainer).__name__}.compute_loss did not call the model that it was given: the largest batch cannot "
            "be looked for. Give the batch yourself, and leave batch out of RockmateCallback."
        )
    return sample


@contextmanager
def _training_on(trainer: _AnyTrainer, dataset: Any, batch: int) -> Iterator[None]:
    """Context: the trainer's data are others, and its batch is another."""
    kept = trainer.train_dataset, getattr(trainer, _BATCH)
    trainer.train_dataset = dataset
    setattr(trainer, _BATCH, batch)
    try:
        yield
    finally:
        trainer.train_dataset = kept[0]
        setattr(trainer, _BATCH, kept[1])


def _of_all_processes(number: int) -> list[int]:
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [number]
    numbers: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(numbers, number)
    return numbers
