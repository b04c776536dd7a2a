"""Accelerate prepares planned modules as it prepares the modules themselves: steps are equal, bit by bit."""

import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rkgb import ModelError
from rockmate import Rockmate
from tests.module.steps import assert_same

accelerate = pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning")  # the last batch of an epoch is shorter


class Classifier(nn.Module):
    """Activations outweigh parameters; there are dropout and buffers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.BatchNorm1d(32), nn.Linear(64, 64), nn.GELU()
        )
        self.head = nn.Linear(64, 4)

    def forward(self, inputs: Tensor, scale: float = 1.0) -> dict[str, Tensor]:
        return {"logits": self.head(self.body(inputs)).mean(1) * scale}


def built() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(22, 32, 16, generator=generator)
    return DataLoader(TensorDataset(inputs, torch.randint(4, (22,), generator=generator)), batch_size=4)


@pytest.fixture(autouse=True)
def _fresh_state():
    """Accelerate keeps its settings for the whole process."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Run:
    """A module, prepared, with its optimizer, scheduler and data."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        self.accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, **settings)
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        prepared = self.accelerator.prepare(module, optimizer, data(), scheduler)
        self.module, self.optimizer, self.data, self.scheduler = prepared
        self.losses: list[Tensor] = []

    def epoch(self) -> None:
        for inputs, targets in self.data:
            with self.accelerator.accumulate(self.module):
                logits = self.module(inputs)["logits"]
                loss = F.cross_entropy(logits, targets)
                self.accelerator.backward(loss)
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.module.parameters(), 0.5)
                self.optimizer.step()
                self.scheduler.step()
                self.optimizer.zero_grad()
            self.losses.append(loss.detach())

    def result(self) -> dict[str, Any]:
        state = self.accelerator.get_state_dict(self.module)
        return {"losses": torch.stack(self.losses), "random stream": torch.get_rng_state(), **state}


def after_two_epochs(module: nn.Module, **settings: Any) -> dict[str, Any]:
    torch.manual_seed(3)
    run = Run(module, **settings)
    run.epoch()
    run.epoch()
    return run.result()


def assert_planned_once_for_each_kind_of_batch(planned: Rockmate) -> None:
    """Batches of four and of two; a plan of its own may be there for steps that find gradients, and add to them."""
    kinds = [(plan.calls, plan.gradient_bytes > 0) for plan in planned.plans]
    assert len(kinds) == len(set(kinds))
    assert len({calls for calls, _ in kinds}) == 2


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_prepared_modules_train_as_the_module_itself(precision):
    expected = after_two_epochs(built(), mixed_precision=precision)
    planned = Rockmate(built(), budget=0.75)
    assert_same(after_two_epochs(planned, mixed_precision=precision), expected)
    assert_planned_once_for_each_kind_of_batch(planned)


@pytest.mark.ci
@pytest.mark.slow
def test_a_module_that_was_planned_for_mixed_precision_ahead_is_not_planned_again():
    expected = after_two_epochs(built(), mixed_precision="bf16")
    planned = Rockmate(built(), budget=0.75)
    with torch.autocast("cpu", torch.bfloat16):
        for rows in (4, 2):
            planned.plan_for(torch.randn(rows, 32, 16))
    assert_same(after_two_epochs(planned, mixed_precision="bf16"), expected)
    assert_planned_once_for_each_kind_of_batch(planned)


@pytest.mark.slow
def test_unwrapping_gives_the_planned_module_as_it_was():
    signature = inspect.signature(Classifier().forward)
    for keep in (True, False):
        planned = Rockmate(built(), budget="1 MiB")
        run = Run(planned, mixed_precision="bf16")
        assert inspect.signature(run.module.forward) == signature
        run.epoch()
        unwrapped = run.accelerator.unwrap_model(run.module, keep_fp32_wrapper=keep)
        assert unwrapped is planned
        assert inspect.signature(unwrapped.forward) == signature
        inputs = torch.randn(4, 32, 16)
        with torch.no_grad():
            assert unwrapped(inputs)["logits"].dtype is torch.float32
        assert "forward" not in vars(planned.original)
        plans = len(planned.plans)
        unwrapped(inputs)["logits"].sum().backward()  # with the wrapper under autocast, else not
        assert len(planned.plans) == (plans if keep else plans + 1)


@pytest.mark.ci
@pytest.mark.slow
def test_a_saved_state_is_loaded_into_another_planned_module(tmp_path):
    torch.manual_seed(3)
    eager = Run(built())
    eager.epoch()
    eager.epoch()
    expected = eager.result()

    torch.manual_seed(3)
    first = Run(Rockmate(built(), budget=0.75))
    first.epoch()
    first.accelerator.save_state(tmp_path)
    second = Run(Rockmate(Classifier(), budget=0.75))
    second.accelerator.load_state(tmp_path)
    second.losses = first.losses
    second.epoch()
    assert_same(second.result(), expected)
    # Files are the module's own: they are loaded into one that is not planned.
    second.accelerator.save_model(second.module, tmp_path / "model")
    accelerate.load_checkpoint_in_model(Classifier(), tmp_path / "model", strict=True)
    plain = Run(Classifier())
    plain.accelerator.load_state(tmp_path)
    assert plain.module.state_dict().keys() == expected.keys() - {"losses", "random stream"}


@pytest.mark.ci
def test_a_module_that_was_prepared_before_it_is_planned_trains_alike():
    expected = after_two_epochs(built(), mixed_precision="bf16")
    run = Run(built(), mixed_precision="bf16")
    torch.manual_seed(3)
    run.module = planned = Rockmate(run.module, budget=0.75)
    run.epoch()
    run.epoch()
    assert_same(run.result(), expected)
    assert planned.plans


def test_weights_that_are_offloaded_between_calls_are_refused():
    module = built()
    accelerate.cpu_offload(module, torch.device("cpu"))
    planned = Rockmate(module, budget=0.75)
    with pytest.raises(ModelError, match=r"'body\.0\.weight' of Classifier is on the meta device.* cannot be planned"):
        planned(torch.randn(4, 32, 16))
