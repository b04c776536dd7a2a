"""Loops that train on images."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, update_bn

from tests.loops.harness import Registry, Run

LOOPS = Registry()
CLASSES = 5


def convolutions(width: int = 8) -> nn.Sequential:
    """Two blocks with batch normalisation, pooling, dropout, and a classifier."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.GELU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.GELU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(4 * width, CLASSES),
    )


def images(count: int = 8, size: int = 12) -> Tensor:
    return torch.randn(count, 3, size, size)


def labelled(count: int = 8, size: int = 12) -> tuple[Tensor, Tensor]:
    return images(count, size), torch.randint(CLASSES, (count,))


@LOOPS.add(quick=True)
def image_classification_with_a_short_last_batch(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=1e-4)
    batches = [labelled(8), labelled(8), labelled(3)]
    for _ in range(2):
        for data, labels in batches:
            optimizer.zero_grad()
            with run.step(model):
                logits = model(data)
                loss = F.cross_entropy(logits, labels)
                loss.backward()
            optimizer.step()
            run.see(model, logits=logits, loss=loss)


@LOOPS.add(quick=True)
def evaluation_between_epochs(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        model.train()
        for _ in range(2):
            data, labels = labelled()
            optimizer.zero_grad(set_to_none=True)
            with run.step(model):
                loss = F.cross_entropy(model(data), labels, label_smoothing=0.1)
                loss.backward()
            optimizer.step()
            run.see(model, loss=loss)
        model.eval()
        correct = 0
        with torch.no_grad():
            for count in (8, 5):
                data, labels = labelled(count)
                correct += (model(data).argmax(1) == labels).sum().item()
        run.see(model, correct=[correct])


@LOOPS.add()
def evaluation_in_train_mode_without_gradients(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        data, labels = labelled()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.cross_entropy(model(data), labels)
            loss.backward()
        optimizer.step()
        with torch.no_grad():  # batch normalisation goes on counting
            validation = F.cross_entropy(model(images(4)), torch.zeros(4, dtype=torch.long))
        run.see(model, loss=loss, validation=validation)


def _accumulate(run: Run, set_to_none: bool) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    optimizer.zero_grad(set_to_none=set_to_none)
    for index in range(12):
        data, labels = labelled()
        with run.step(model):
            loss = F.cross_entropy(model(data), labels) / 3
            loss.backward()
        if index % 3 == 2:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
        run.see(model, loss=loss)


@LOOPS.add(quick=True)
def gradient_accumulation_from_none(run: Run) -> None:
    _accumulate(run, set_to_none=True)


@LOOPS.add()
def gradient_accumulation_from_zeros(run: Run) -> None:
    _accumulate(run, set_to_none=False)


class Pyramid(nn.Module):
    """Three scales, joined, with a grid that is made when the size changes: a detector's head."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(width, width, 3, stride=2, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))
        self.head = nn.Conv2d(width, 4, 1)
        self.grid: Tensor | None = None

    def forward(self, x: Tensor) -> list[Tensor]:
        x = F.silu(self.stem(x))
        outputs = []
        for down, norm in zip(self.down, self.norms, strict=True):
            x = F.silu(norm(down(x)))
            outputs.append(self.head(x))
        height, width = x.shape[-2:]
        if self.grid is None or self.grid.shape[-2:] != (height, width):
            rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
            self.grid = torch.stack((rows, columns)).float()
        centres = outputs[-1][:, :2].sigmoid() + self.grid
        return [*outputs, centres]


@LOOPS.add(recomputes=False)  # keep-all is the smallest plan, too: its peak is in a backward
def images_of_several_scales(run: Run) -> None:
    model = run.plan(Pyramid(), 0.85)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9, nesterov=True)
    for size in (24, 16, 20, 24, 16, 20):
        data = images(4, size)
        optimizer.zero_grad()
        with run.step(model, extra_bytes=4 * 10**4):  # squares of what the heads give
            outputs = model(data)
            loss = sum(output.square().mean() for output in outputs)
            loss.backward()
        optimizer.step()
        run.see(model, outputs=outputs, loss=loss)


@LOOPS.add()
def statistics_of_batch_normalisation_frozen(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for epoch in range(4):
        model.train()
        if epoch >= 2:
            for part in model.modules():
                if isinstance(part, nn.BatchNorm2d):
                    part.eval()
                    part.weight.requires_grad_(False)
                    part.bias.requires_grad_(False)
        for _ in range(2):
            data, labels = labelled()
            optimizer.zero_grad()
            with run.step(model):
                loss = F.cross_entropy(model(data), labels)
                loss.backward()
            optimizer.step()
            run.see(model, loss=loss)


@LOOPS.add()
def averaged_weights_and_their_statistics(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    averaged = AveragedModel(model)
    batches = [labelled() for _ in range(2)]
    for _ in range(3):
        for data, labels in batches:
            optimizer.zero_grad()
            with run.step(model):
                loss = F.cross_entropy(model(data), labels)
                loss.backward()
            optimizer.step()
            run.see(model, loss=loss)
        averaged.update_parameters(model)
    update_bn(batches, averaged)
    averaged.eval()
    with torch.no_grad():
        run.see(model, averaged.module, output=averaged(batches[0][0]))


@LOOPS.add(quick=True)
def mixup_and_label_smoothing(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    mixing = torch.distributions.Beta(0.4, 0.4)
    for _ in range(5):
        data, labels = labelled()
        share = mixing.sample().item()
        order = torch.randperm(len(data))
        mixed = share * data + (1 - share) * data[order]
        optimizer.zero_grad()
        with run.step(model):
            logits = model(mixed)
            one, other = (F.cross_entropy(logits, target, label_smoothing=0.1) for target in (labels, labels[order]))
            loss = share * one + (1 - share) * other
            loss.backward()
        optimizer.step()
        run.see(model, logits=logits, loss=loss)


@LOOPS.add()
def distillation_from_a_frozen_teacher(run: Run) -> None:
    teacher = convolutions(12).eval().requires_grad_(False)
    model = run.plan(convolutions())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    temperature = 3.0
    for _ in range(4):
        data, labels = labelled()
        with torch.no_grad():
            wanted = (teacher(data) / temperature).softmax(-1)
        optimizer.zero_grad()
        with run.step(model):
            logits = model(data)
            soft = F.kl_div((logits / temperature).log_softmax(-1), wanted, reduction="batchmean")
            loss = F.cross_entropy(logits, labels) + temperature**2 * soft
            loss.backward()
        optimizer.step()
        run.see(model, teacher, logits=logits, loss=loss)


@LOOPS.add()
def a_teacher_that_is_a_moving_average(run: Run) -> None:
    model = run.plan(convolutions())
    teacher = copy.deepcopy(model)
    teacher.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for _ in range(5):
        data, labels = labelled()
        with torch.no_grad():
            wanted = teacher(data + 0.1 * torch.randn_like(data)).softmax(-1)
        optimizer.zero_grad()
        with run.step(model):
            logits = model(data)
            loss = F.cross_entropy(logits, labels) + F.mse_loss(logits.softmax(-1), wanted)
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        run.see(model, teacher, loss=loss)


@LOOPS.add()
def parts_frozen_and_thawed_midway(run: Run) -> None:
    model = run.plan(convolutions())
    optimizer: Any = None
    for epoch in range(3):
        model.requires_grad_(epoch != 1)
        model[-1].requires_grad_(True)
        if epoch == 2:
            model[0].requires_grad_(False)
        optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], 0.05)
        for _ in range(3):
            data, labels = labelled()
            optimizer.zero_grad()
            with run.step(model):
                loss = F.cross_entropy(model(data), labels)
                loss.backward()
            optimizer.step()
            run.see(model, loss=loss)
        model.zero_grad()


class StochasticDepth(nn.Module):
    """Residual blocks of which some are left out, drawn by Python for each call, and by sample within."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.GELU()) for _ in range(4)
        )
        self.head = nn.Linear(width, CLASSES)
        self.rate = 0.2

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.dropped(block(x))
        return self.head(x.mean((2, 3)))

    def dropped(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = x.new_empty(x.shape[0], 1, 1, 1).bernoulli_(1 - self.rate)
        return x * kept.div_(1 - self.rate)


@LOOPS.add()
def stochastic_depth(run: Run) -> None:
    model = run.plan(StochasticDepth())
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    for index in range(6):
        model.rate = 0.1 * (index // 2)  # a schedule of the rate, as some recipes have
        data, labels = labelled()
        optimizer.zero_grad()
        with run.step(model):
            logits = model(data)
            loss = F.cross_entropy(logits, labels)
            loss.backward()
        optimizer.step()
        run.see(model, logits=logits, loss=loss)
