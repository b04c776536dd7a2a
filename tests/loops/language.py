"""Loops that train on sequences."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.harness import Registry, Run

LOOPS = Registry()
WORDS, WIDTH = 20, 16


class Decoder(nn.Module):
    """A small GPT with tied weights; returns logits, and the loss where targets are given."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(32, WIDTH)
        self.norm, self.queries, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.wide = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH))
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.dropout(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        q, k, v = self.queries(self.norm(x)).view(*ids.shape, 2, 3 * WIDTH // 2).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(x.shape)))
        logits = self.head(x + self.dropout(self.wide(x)))
        return logits, None if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def ids(length: int = 16) -> Tensor:
    return torch.randint(WORDS, (4, length + 1))


def _train(run: Run, model: nn.Module, optimizer: torch.optim.Optimizer, data: Tensor) -> None:
    optimizer.zero_grad()
    with run.step(model):
        logits, loss = model(data[:, :-1], data[:, 1:])
        loss.backward()
    optimizer.step()
    run.see(model, logits=logits, loss=loss)


@LOOPS.add(quick=True)
def a_language_model_that_generates_between_steps(run: Run) -> None:
    model = run.plan(Decoder(), 0.85)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(4):
        _train(run, model, optimizer, ids())
        model.eval()
        with torch.no_grad():
            written = ids(1)
            for _ in range(4):
                logits, _ = model(written)
                written = torch.cat((written, logits[:, -1].softmax(-1).multinomial(1)), 1)
        run.see(model, written=written)
        model.train()


@LOOPS.add()
def a_curriculum_of_lengths(run: Run) -> None:
    model = run.plan(Decoder(), 75_000)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for length in (8, 8, 12, 12, 16, 16, 12):
        _train(run, model, optimizer, ids(length))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, WIDTH), nn.GRU(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, data: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        output, state = self.cell(self.words(data.T), state)
        return self.head(F.gelu(output)), state


@LOOPS.add(judged=False)
def a_recurrent_network_whose_state_is_carried(run: Run) -> None:
    model = run.plan(Recurrent(), 0.95)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = torch.zeros(1, 4, WIDTH)
    for _ in range(5):
        data = ids()
        optimizer.zero_grad()
        logits, state = model(data[:, :-1], state.detach())
        loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].T.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        run.see(model, logits=logits, state=state, loss=loss)
