"""Lightning with the largest batch that fits: the same steps of the optimizer, set before the first of them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from rockmate import ArgumentError, IntegrationError, Offload
from tests.module.steps import FEW_ROUNDS, assert_same
from tests.trainers import test_lightning as others
from tests.trainers.test_lightning import CallsItself, Classifier, TwoParts, made, result_of

lightning = pytest.importorskip("lightning.pytorch")
integration = pytest.importorskip("rockmate.integrations.lightning")
pytestmark = [*others.pytestmark, pytest.mark.filterwarnings("ignore:.*but have no `val_dataloader`")]
slow = pytest.mark.slow


def loader(batch_size: int) -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(48, 32, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(16, (48,), generator=generator)), batch_size=batch_size)


class Sized(Classifier):
    """Its loader is of its batch."""

    batch_size = 12

    def train_dataloader(self) -> DataLoader:
        return loader(self.batch_size)


class SizedForward(CallsItself):
    def __init__(self):
        super().__init__()
        self.save_hyperparameters({"batch_size": 12})

    def train_dataloader(self) -> DataLoader:
        return loader(self.hparams.batch_size)


class Data(lightning.LightningDataModule):
    def __init__(self, batch_size: int = 12):
        super().__init__()
        self.batch_size = batch_size

    def train_dataloader(self) -> DataLoader:
        return loader(self.batch_size)


class ByHand(Sized):
    automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.manual_backward(self.loss_of(batch))


def fitted(module: Any, *callbacks: Any, folder: Path, data: Any = None, **settings: Any) -> Any:
    torch.manual_seed(3)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    arguments = {"max_epochs": 1, "accelerator": "cpu", "default_root_dir": folder, **quiet, **settings}
    trainer = lightning.Trainer(callbacks=list(callbacks), **arguments)
    trainer.fit(module, data)
    return trainer


def callback(budget: Any, **said: Any) -> Any:
    return integration.RockmateCallback(budget, batch="largest", limits=FEW_ROUNDS, **said)


@pytest.mark.parametrize(
    ("kind", "data", "settings"),
    [
        (Sized, None, {}),
        pytest.param(SizedForward, None, {"precision": "bf16-mixed"}, marks=slow),
        pytest.param(Classifier, Data, {"accumulate_grad_batches": 2}, marks=slow),
    ],
    ids=["module", "hparams", "data module"],
)
def test_the_largest_batch_trains_as_if_it_had_been_given(tmp_path, kind, data, settings):
    rows_of_a_step = 12 * settings.get("accumulate_grad_batches", 1)
    free = callback("1GiB")
    fitted(made(kind), free, folder=tmp_path, data=data and data(), **settings)
    assert (free.batches.rows, free.batches.times) == (rows_of_a_step, 1)
    peak_bytes = max(plan.measured_peak_bytes for part in free.planned.values() for plan in part.plans)

    mine, module = callback(int(0.35 * peak_bytes)), made(kind)
    trainer = fitted(module, mine, folder=tmp_path, data=data and data(), **settings)
    rows, times = mine.batches.rows, mine.batches.times
    assert rows < rows_of_a_step == rows * times
    assert trainer.accumulate_grad_batches == times
    assert len(mine.batches.search.trials) <= 5
    for part in mine.planned.values():
        for plan in part.plans:
            assert plan.measured_peak_bytes <= plan.budget_bytes

    eager = made(kind)
    if data is None:
        integration.lightning_setattr(eager, "batch_size", rows)
    same = {**settings, "accumulate_grad_batches": times}
    fitted(eager, folder=tmp_path, data=data and data(rows), **same)
    assert_same(result_of(module), result_of(eager))


@slow
def test_more_rows_are_trained_at_a_time_where_data_may_move(quick_disk, tmp_path):
    free = callback("1GiB")
    fitted(made(Sized), free, folder=tmp_path)
    peak_bytes = max(plan.measured_peak_bytes for part in free.planned.values() for plan in part.plans)
    mine, module = callback(int(0.35 * peak_bytes), offload=Offload("disk", str(tmp_path))), made(Sized)
    trainer = fitted(module, mine, folder=tmp_path)
    rows, times = mine.batches.rows, mine.batches.times
    assert rows * times == 12
    assert trainer.accumulate_grad_batches == times
    for part in mine.planned.values():
        for plan in part.plans:
            assert plan.measured_peak_bytes <= plan.budget_bytes
    assert any(trial.plan.moves for trial in mine.batches.search.trials if trial.fits)

    eager = made(Sized)
    integration.lightning_setattr(eager, "batch_size", rows)
    fitted(eager, folder=tmp_path, accumulate_grad_batches=times)
    assert_same(result_of(module), result_of(eager))


def test_what_is_free_leaves_room_for_the_state_of_the_optimizer(tmp_path):
    mine, module = integration.RockmateCallback("auto", limits=FEW_ROUNDS), made(Sized)
    fitted(module, mine, folder=tmp_path)
    trained_bytes = sum(parameter.nbytes for parameter in module.parameters())
    split = mine.planned["model"].memory_split
    assert split.residents.optimizer_bytes >= 2 * trained_bytes  # two moments of Adam


@pytest.mark.parametrize(
    ("kind", "said", "data", "words"),
    [
        (Classifier, {}, loader(4), "the batch of Classifier cannot be set.*given to fit have theirs"),
        (TwoParts, {"module": ["model", "head"]}, None, "of TwoParts there are 2"),
        (ByHand, {}, None, "ByHand makes its optimizer's steps itself"),
        (SizedForward, {"module": "model.0"}, None, None),
    ],
)
def test_what_cannot_be_set_is_refused(tmp_path, kind, said, data, words):
    module = made(kind)
    if words is None:  # a part of what is called: it is called by its parts, too
        fitted(module, callback("1GiB", **said), folder=tmp_path)
        return
    with pytest.raises(IntegrationError, match=words):
        fitted(module, callback("1GiB", **said), folder=tmp_path, data=data)


def test_a_part_that_is_not_called_is_named(tmp_path):
    class Spare(Sized):
        def __init__(self):
            super().__init__()
            self.spare = torch.nn.Linear(4, 4)

    module = made(Spare)
    with pytest.raises(IntegrationError, match="did not call 'spare': the largest batch cannot be looked for"):
        fitted(module, callback("1GiB", module="spare"), folder=tmp_path)
    assert module.batch_size == 12


def test_a_part_of_the_eager_peak_is_no_budget_for_a_batch():
    with pytest.raises(ArgumentError, match="which grows with the batch"):
        callback(0.5)
