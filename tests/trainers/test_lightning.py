"""Lightning trains planned modules as it trains the modules themselves: losses, parameters, checkpoints, bit by bit."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from rk_solvers import Limits
from rockmate import IntegrationError, Rockmate
from tests.module.steps import assert_same

lightning = pytest.importorskip("lightning.pytorch")
fabric = pytest.importorskip("lightning.fabric")
integration = pytest.importorskip("rockmate.integrations.lightning")

pytestmark = [
    pytest.mark.filterwarnings("ignore::rockmate.ReplanWarning"),  # the last batch of an epoch is shorter
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*GPU available but not used"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*is deprecated"),
]


def tokenwise() -> nn.Sequential:
    """From tokens to tokens: activations outweigh parameters."""
    return nn.Sequential(
        nn.Linear(16, 64),
        nn.GELU(),
        nn.Dropout(0.1),
        nn.BatchNorm1d(32),
        nn.Linear(64, 64),
        nn.GELU(),
        nn.Linear(64, 16),
    )


class Classifier(lightning.LightningModule):
    """Calls a module that it holds."""

    def __init__(self):
        super().__init__()
        self.model = tokenwise()
        self.losses = []

    def features(self, inputs: Tensor) -> Tensor:
        return self.model(inputs)

    def loss_of(self, batch: list[Tensor]) -> Tensor:
        inputs, targets = batch
        return F.cross_entropy(self.features(inputs).mean(1), targets)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.log("train_loss", loss)
        self.losses.append(loss.detach())
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.losses.append(self.loss_of(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class TwoParts(Classifier):
    """No forward; a training step that calls two modules."""

    def __init__(self):
        super().__init__()
        self.head = tokenwise()

    def features(self, inputs: Tensor) -> Tensor:
        return self.head(self.model(inputs))


class CallsItself(TwoParts):
    """Its forward calls its parts."""

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(F.gelu(self.model(inputs)))

    def features(self, inputs: Tensor) -> Tensor:
        return self(inputs)


def data(count: int = 52) -> DataLoader:
    """Batches of 16; the last one is shorter."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 32, 16, generator=generator)
    targets = torch.randint(16, (count,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=16)


def trained(module: Classifier, *callbacks: Any, folder: Path, checkpoint: Path | None = None, **settings: Any) -> Any:
    """The trainer after a fit."""
    torch.manual_seed(3)
    arguments = {
        "max_epochs": 2,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": folder,
        **settings,
    }
    trainer = lightning.Trainer(callbacks=list(callbacks), **arguments)
    trainer.fit(module, data(), data(20), ckpt_path=checkpoint)
    return trainer


def made(kind: type[Classifier]) -> Classifier:
    torch.manual_seed(0)
    return kind()


def result_of(module: Classifier) -> dict[str, Any]:
    return {"losses": torch.stack(module.losses), "random stream": torch.get_rng_state(), **module.state_dict()}


@pytest.mark.parametrize(
    ("kind", "module", "settings"),
    [
        (Classifier, None, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
        (Classifier, "model", {"precision": "bf16-mixed"}),
        (CallsItself, None, {}),
        (TwoParts, ["model", "head"], {}),
    ],
    ids=["accumulated", "bf16", "forward", "two parts"],
)
def test_a_fit_is_that_of_the_module_itself(tmp_path, kind, module, settings):
    eager, planned = made(kind), made(kind)
    trained(eager, folder=tmp_path, **settings)
    expected = result_of(eager)
    callback = integration.RockmateCallback(0.9, module=module)
    trained(planned, callback, folder=tmp_path, **settings)
    assert_same(result_of(planned), expected)
    for part in callback.planned.values():
        assert part.plans, "planned on the first batch"
    # Afterwards the modules themselves are back.
    assert not any(isinstance(submodule, Rockmate) for submodule in planned.modules())
    assert "forward" not in vars(planned)
    assert list(planned.state_dict()) == list(eager.state_dict())


class StreamAtSecondEpoch(lightning.Callback):
    """A checkpoint does not hold where the random stream was: note it, or put it there."""

    def __init__(self):
        self.state = None

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if (trainer.current_epoch, batch_idx) != (1, 0):
            return
        if self.state is None:
            self.state = torch.get_rng_state()
        else:
            torch.set_rng_state(self.state)


class Alternating(TwoParts):
    """Trains its parts in turns, as adversarial networks are: while one is trained, the other is frozen."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.loss_of(batch)
            self.manual_backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)
            self.losses.append(loss.detach())

    def configure_optimizers(self) -> Any:
        return [torch.optim.AdamW(part.parameters(), lr=0.01) for part in (self.model, self.head)]


@pytest.mark.ci
def test_parts_that_are_trained_in_turns_have_a_plan_for_each_turn(tmp_path):
    eager, planned = made(Alternating), made(Alternating)
    trained(eager, folder=tmp_path)
    expected = result_of(eager)
    callback = integration.RockmateCallback(1.0, module=["model", "head"])
    trained(planned, callback, folder=tmp_path)
    assert_same(result_of(planned), expected)
    # The head's input has a gradient in one turn only; the model has nothing to train in the other.
    assert [len(callback.planned[path].plans) for path in ("model", "head")] == [2, 4]


@pytest.mark.ci
def test_a_fit_that_is_resumed_from_a_checkpoint_ends_as_one_that_was_not_interrupted(tmp_path):
    eager, first, second = (made(Classifier) for _ in range(3))
    stream = StreamAtSecondEpoch()
    trained(eager, stream, folder=tmp_path, num_sanity_val_steps=0)
    expected = result_of(eager)
    settings = {"folder": tmp_path, "num_sanity_val_steps": 0}
    trainer = trained(first, integration.RockmateCallback(0.9), max_epochs=1, **settings)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    assert list(torch.load(tmp_path / "half.ckpt", weights_only=False)["state_dict"]) == list(eager.state_dict())
    trained(second, integration.RockmateCallback(0.9), stream, checkpoint=tmp_path / "half.ckpt", **settings)
    second.losses[:0] = first.losses
    assert_same(result_of(second), expected)


@pytest.mark.ci
def test_checkpoints_written_while_it_trains_hold_the_module_itself(tmp_path):
    planned = made(Classifier)
    checkpoints = lightning.callbacks.ModelCheckpoint(tmp_path, every_n_train_steps=3, save_top_k=-1)
    trained(planned, integration.RockmateCallback(0.9), checkpoints, folder=tmp_path, enable_checkpointing=True)
    written = sorted(tmp_path.glob("*.ckpt"))
    assert written
    loaded = Classifier.load_from_checkpoint(written[-1])
    assert loaded.state_dict().keys() == planned.state_dict().keys()


@pytest.mark.ci
def test_a_second_fit_keeps_the_plans_of_the_first(tmp_path):
    planned, callback = made(Classifier), integration.RockmateCallback(0.9)
    trained(planned, callback, folder=tmp_path)
    plans = callback.planned["model"].plans
    trained(planned, callback, folder=tmp_path)
    assert callback.planned["model"].plans == plans


@pytest.mark.slow
@pytest.mark.ci
def test_a_fit_that_moves_data_is_that_of_the_module_itself(tmp_path, quick_disk):
    expected, planned = made(Classifier), made(Classifier)
    trained(expected, folder=tmp_path)
    result = result_of(expected)
    callback = integration.RockmateCallback(0.6, offload="disk", limits=Limits(search_s=0.5, extra_s=0.0, rounds=1))
    trained(planned, callback, folder=tmp_path)
    assert callback.planned["model"].plans[-1].moves > 0
    assert_same(result_of(planned), result)


@pytest.mark.parametrize(
    ("kind", "module", "message"),
    [
        (Classifier, "net", "no submodule 'net' to plan.*'model'"),
        (TwoParts, None, r"2 modules with parameters to train \(model, head\): which one is to be planned"),
        (Classifier, "", "did not call forward, so nothing is planned"),
    ],
)
def test_what_cannot_be_planned_is_refused_and_the_module_given_back(tmp_path, kind, module, message):
    planned = made(kind)
    before = planned.model
    with pytest.raises(IntegrationError, match=message):
        trained(planned, integration.RockmateCallback(0.9, module=module), folder=tmp_path)
    assert planned.model is before
    assert "forward" not in vars(planned)


@pytest.mark.ci
def test_an_error_while_training_gives_the_module_back(tmp_path):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise ZeroDivisionError
            return self.loss_of(batch)

    planned = made(Fails)
    with pytest.raises(ZeroDivisionError):
        trained(planned, integration.RockmateCallback(0.9), folder=tmp_path)
    assert type(planned.model) is nn.Sequential


@pytest.mark.ci
def test_a_planned_module_within_a_lightning_module_needs_no_callback(tmp_path):
    eager, planned = made(Classifier), made(Classifier)
    trained(eager, folder=tmp_path)
    expected = result_of(eager)
    planned.model = Rockmate(planned.model, budget=0.9)
    trained(planned, folder=tmp_path)
    assert_same(result_of(planned), expected)
    with pytest.raises(IntegrationError, match="planned already"):
        trained(planned, integration.RockmateCallback(0.9), folder=tmp_path)


@pytest.mark.slow
@pytest.mark.ci
def test_fabric_sets_planned_modules_up_as_the_modules_themselves():
    results = []
    for make in (tokenwise, lambda: Rockmate(tokenwise(), budget="2 MiB")):
        torch.manual_seed(0)
        setup = fabric.Fabric(accelerator="cpu", precision="bf16-mixed")
        module = make()
        module, optimizer = setup.setup(module, torch.optim.AdamW(module.parameters(), lr=0.01))
        torch.manual_seed(3)
        for inputs, _ in data():
            loss = module(inputs).square().mean()
            setup.backward(loss)
            setup.clip_gradients(module, optimizer, max_norm=0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append({**module.state_dict(), "loss": loss.detach(), "random stream": torch.get_rng_state()})
    assert_same(results[1], results[0])
    assert len(module.plans) == 2


def test_without_the_library_the_error_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    place = importlib.util.spec_from_file_location("without_lightning", integration.__file__)
    with pytest.raises(ImportError, match="needs the lightning library, which is not installed"):
        place.loader.exec_module(importlib.util.module_from_spec(place))
