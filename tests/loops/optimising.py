"""Loops whose optimizers, losses and gradients are not the usual ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from rockmate import DoubleBackwardWarning
from tests.loops.harness import Registry, Run

LOOPS = Registry()
WIDTH = 16


def layers(rows: int = WIDTH, hidden: int = 32, out: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(rows, hidden),
        nn.GELU(),
        nn.LayerNorm(hidden),
        nn.Dropout(0.1),
        nn.Linear(hidden, hidden),
        nn.Tanh(),
        nn.Linear(hidden, hidden),
        nn.GELU(),
        nn.Linear(hidden, out),
    )


def rows(count: int = 96, width: int = WIDTH) -> Tensor:
    return torch.randn(count, width)


@LOOPS.add(quick=True)
def clipped_gradients_and_a_schedule(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=6)
    for _ in range(5):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data)
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()
        run.see(model, loss=loss, norm=norm, rate=schedule.get_last_lr())


def _under_autocast(run: Run, loss_inside: bool) -> None:
    model = run.plan(layers(), 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(4):
        data = rows()
        optimizer.zero_grad()
        with run.step(model, extra_bytes=3 * data.nbytes):  # the loss in full precision, and its gradient
            with torch.autocast("cpu", torch.bfloat16):
                output = model(data)
                loss = F.mse_loss(output, data.to(output.dtype)) if loss_inside else None
            if loss is None:
                loss = F.mse_loss(output.float(), data)
            loss.backward()
        optimizer.step()
        run.see(model, output=output, loss=loss)


@LOOPS.add()
def autocast_with_the_loss_inside(run: Run) -> None:
    _under_autocast(run, loss_inside=True)


@LOOPS.add()
def autocast_with_the_loss_outside(run: Run) -> None:
    _under_autocast(run, loss_inside=False)


@LOOPS.add()
def a_scaled_loss_whose_steps_are_skipped(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for index in range(5):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data)
            if index == 2:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        run.see(model, loss=loss, scale=[scaler.get_scale()])


@LOOPS.add()
def lbfgs_with_a_closure(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=3)
    data = rows()
    for _ in range(3):

        def closure() -> Tensor:
            optimizer.zero_grad()
            with run.step(model):
                loss = F.mse_loss(model(data), data)
                loss.backward()
            return loss

        run.see(model, loss=optimizer.step(closure))


@LOOPS.add()
def sharpness_aware_minimisation(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(4):
        data = rows()
        with run.step(model):
            F.mse_loss(model(data), data).backward()
        with torch.no_grad():
            norm = torch.stack([one.grad.norm() for one in model.parameters()]).norm()
            moves = [one.grad * (0.05 / (norm + 1e-12)) for one in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data)
            loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        run.see(model, loss=loss, norm=norm)
        optimizer.zero_grad()


class TwoTasks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = layers()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x = F.gelu(self.trunk(x))
        return {"one": self.heads[0](x), "other": self.heads[1](x)}


@LOOPS.add(judged=False)  # a graph that is retained keeps what its first backward recomputes, too
def two_tasks_with_a_backward_each(run: Run) -> None:
    model = run.plan(TwoTasks())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        data, labels = rows(), torch.randint(4, (96,))
        optimizer.zero_grad()
        outputs = model(data)
        losses = [F.cross_entropy(output, labels) for output in outputs.values()]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        optimizer.step()
        run.see(model, outputs=outputs, losses=losses)


@LOOPS.add()
def maml_with_an_inner_loop(run: Run) -> None:
    model = run.plan(layers(), 0.85)
    learner = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(3):
        optimizer.zero_grad()
        for _ in range(2):  # tasks; first order, as most code has it
            learner.load_state_dict(model.state_dict())
            inner = torch.optim.SGD(learner.parameters(), 0.01)
            support, query = rows(), rows()
            for _ in range(2):
                inner.zero_grad()
                F.mse_loss(learner(support), support).backward()
                inner.step()
            inner.zero_grad()
            loss = F.mse_loss(learner(query), query)
            loss.backward()
            for meta, fast in zip(model.parameters(), learner.parameters(), strict=True):
                meta.grad = fast.grad.clone() if meta.grad is None else meta.grad + fast.grad
        optimizer.step()
        with run.step(model):
            validation = F.mse_loss(model(query), query)
            validation.backward()
        run.see(model, learner, loss=loss, validation=validation)


@LOOPS.add(tells=DoubleBackwardWarning)
def physics_informed_with_a_double_backward(run: Run) -> None:
    model = run.plan(nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)), 0.9)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        points = torch.rand(64, 2, requires_grad=True)
        optimizer.zero_grad()
        with run.step(model, extra_bytes=10**6):  # two backwards are more than the plan is for
            values = model(points)
            (slope,) = torch.autograd.grad(values.sum(), points, create_graph=True)
            (curve,) = torch.autograd.grad(slope[:, 0].sum(), points, create_graph=True)
            loss = (slope[:, 1] - 0.1 * curve[:, 0]).square().mean() + values.square().mean()
            loss.backward()
        optimizer.step()
        run.see(model, values=values, slope=slope, loss=loss)


class Forces(nn.Module):
    """Energies of atoms and their forces, by the gradient inside forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(3, 32), nn.SiLU(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 1))

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions.detach().requires_grad_()
        energy = self.energy(positions).sum()
        (gradient,) = torch.autograd.grad(energy, positions, create_graph=True)
        return energy, -gradient


@LOOPS.add(recomputes=False)
def a_force_field(run: Run) -> None:
    model = run.plan(Forces(), 1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        positions = rows(64, 3)
        optimizer.zero_grad()
        with run.step(model):
            energy, forces = model(positions)
            loss = energy.square() * 1e-4 + (forces + positions).square().mean()
            loss.backward()
        optimizer.step()
        run.see(model, energy=energy, forces=forces, loss=loss)


class LowRank(nn.Module):
    """A frozen layer and what is learnt beside it."""

    def __init__(self, base: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))
        self.dropout = nn.Dropout(0.05)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.dropout(x) @ self.down.T @ self.up.T * 2


@LOOPS.add()
def low_rank_adapters_beside_a_frozen_base(run: Run) -> None:
    module = layers().requires_grad_(False)
    for index, part in enumerate(module):
        if isinstance(part, nn.Linear):
            module[index] = LowRank(part)
    model = run.plan(module, 0.85)
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], 1e-2)
    for _ in range(4):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data)
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss)


def _normalised(run: Run, norm: Any) -> None:
    model = run.plan(
        nn.Sequential(
            norm(nn.Linear(WIDTH, 32)),
            nn.GELU(),
            norm(nn.Linear(32, 32)),
            nn.GELU(),
            norm(nn.Linear(32, 32)),
            nn.Tanh(),
            nn.Linear(32, WIDTH),
        ),
        0.85,
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for index in range(6):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data)
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss)
        if index == 3:
            model.eval()
            with torch.no_grad():
                run.see(model, output=model(data))
            model.train()


@LOOPS.add()
def normalised_weights(run: Run) -> None:
    _normalised(run, weight_norm)


@LOOPS.add()
def spectrally_normalised_weights(run: Run) -> None:
    _normalised(run, spectral_norm)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layers() for _ in range(2))
        self.checkpoints = True

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.checkpoints and self.training else block(x))
        return x


@LOOPS.add(recomputes=False)
def checkpointing_of_the_models_own(run: Run) -> None:
    model = run.plan(Checkpointed(), 1.0)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data)
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss)
