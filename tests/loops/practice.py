"""Loops with what people put around training: checkpoints, hooks, profilers, workers, threads."""

from __future__ import annotations

import io
import threading
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tests.loops.harness import SEED, Registry, Run
from tests.loops.optimising import WIDTH, layers, rows

LOOPS = Registry()


def _step(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> Tensor:
    optimizer.zero_grad()
    with run.step(model):
        loss = F.mse_loss(model(data), data)
        loss.backward()
    optimizer.step()
    return loss


@LOOPS.add(quick=True)
def training_that_is_saved_and_goes_on_in_new_modules(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        run.see(model, loss=_step(run, model, optimizer, rows()))
    file = io.BytesIO()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
    torch.save(states, file)
    file.seek(0)
    found = torch.load(file, weights_only=True)
    torch.manual_seed(SEED + 1)
    other = run.plan(layers())
    again = torch.optim.AdamW(other.parameters(), 1.0)
    other.load_state_dict(found["model"])
    again.load_state_dict(found["optimizer"])
    torch.set_rng_state(found["random"])
    for _ in range(3):
        run.see(other, loss=_step(run, other, again, rows()))


@LOOPS.add()
def hooks_that_look_at_outputs_and_scale_gradients(run: Run) -> None:
    module = layers()
    for parameter in module[0].parameters():
        parameter.register_hook(lambda gradient: gradient * 0.5)
    model = run.plan(module)
    means: list[Tensor] = []
    model.register_forward_hook(lambda _part, _given, output: means.append(output.detach().mean()))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        means.clear()
        loss = _step(run, model, optimizer, rows())
        run.see(model, loss=loss, means=means)


@LOOPS.add(judged=False)  # another profiler looks already
def steps_within_a_profiler_that_waits_warms_up_and_looks(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    schedule = torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=1)
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], schedule=schedule) as profiler:
        for count in (96, 96, 96, 32, 96):
            data = rows(count)
            optimizer.zero_grad()
            loss = F.mse_loss(model(data), data)
            loss.backward()
            optimizer.step()
            profiler.step()
            run.see(model, loss=loss)


@LOOPS.add()
def anomaly_detection_for_the_first_steps(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for index in range(4):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Anomaly Detection has been enabled")
            with torch.autograd.set_detect_anomaly(index < 2):
                run.see(model, loss=_step(run, model, optimizer, rows()))


class Squares(Dataset[Tensor]):
    """Rows that workers make, from numbers of their own."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))


@LOOPS.add()
def data_that_workers_make(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for data in DataLoader(Squares(), batch_size=64, num_workers=2, shuffle=True, multiprocessing_context="fork"):
        run.see(model, loss=_step(run, model, optimizer, data))  # the last batch is a short one


class Tempered(nn.Module):
    """A soft choice whose temperature falls by the epoch, and dropout that grows by it."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.choice, self.options = layers(), nn.Linear(WIDTH, 6), nn.Parameter(torch.randn(6, WIDTH))
        self.temperature, self.epoch = 1.0, 0

    def forward(self, x: Tensor) -> Tensor:
        chosen = (self.choice(self.body(x)) / self.temperature).softmax(-1)
        return F.dropout(chosen @ self.options, 0.02 * self.epoch, self.training)


@LOOPS.add()
def a_temperature_and_a_dropout_by_the_epoch(run: Run) -> None:
    model = run.plan(Tempered())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(5):
        model.epoch, model.temperature = epoch, 0.9**epoch
        for data in DataLoader(TensorDataset(rows(192)), batch_size=96):
            run.see(model, loss=_step(run, model, optimizer, data[0]))


@LOOPS.add(judged=False)  # both run at once
def two_models_that_train_in_threads_of_their_own(run: Run) -> None:
    models = [run.plan(nn.Sequential(*(one for one in layers() if not isinstance(one, nn.Dropout)))) for _ in range(2)]
    batches = [[rows() for _ in range(4)] for _ in models]
    failed: list[Exception] = []

    def train(model: nn.Module, data: list[Tensor]) -> None:
        try:
            optimizer = torch.optim.SGD(model.parameters(), 0.05)
            for batch in data:
                optimizer.zero_grad()
                F.mse_loss(model(batch), batch).backward()
                optimizer.step()
        except Exception as error:  # noqa: BLE001  to be seen outside
            failed.append(error)

    threads = [threading.Thread(target=train, args=pair) for pair in zip(models, batches, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    run.see(*models)
