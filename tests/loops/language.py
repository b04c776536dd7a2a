"""Loops that train on sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

from rockmate import TraceWarning
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
    model = run.plan(Recurrent(), 0.9)
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


class Reader(nn.Module):
    """Packed sequences of many lengths through an LSTM of two directions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH, padding_idx=0)
        self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 3))

    def forward(self, data: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(data), lengths, batch_first=True, enforce_sorted=False)
        _, (last, _) = self.cell(packed)
        return self.head(torch.cat((last[0], last[1]), -1))


@LOOPS.add(judged=False, recomputes=False, falls_back=True)  # each batch takes another way through forward
def packed_sequences_of_all_lengths(run: Run) -> None:
    model = run.plan(Reader(), 1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(12):
        lengths = torch.randint(2, 12, (6,))
        data = torch.randint(1, WORDS, (6, 12)) * (torch.arange(12) < lengths[:, None])
        optimizer.zero_grad()
        logits = model(data[:, : int(lengths.max())], lengths)
        loss = F.cross_entropy(logits, lengths % 3)
        loss.backward()
        optimizer.step()
        run.see(model, logits=logits, loss=loss)


class Translator(nn.Module):
    """An encoder and a decoder with masks of the padding, as torch.nn has them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH, padding_idx=0), nn.Embedding(32, WIDTH)
        self.body = nn.Transformer(WIDTH, 2, 1, 1, 32, 0.1, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def _embedded(self, data: Tensor) -> Tensor:
        return self.words(data) + self.places(torch.arange(data.shape[1]))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        causal = nn.Transformer.generate_square_subsequent_mask(target.shape[1], dtype=torch.bool)
        decoded = self.body(
            self._embedded(source),
            self._embedded(target),
            tgt_mask=causal,
            src_key_padding_mask=source == 0,
            tgt_key_padding_mask=target == 0,
            memory_key_padding_mask=source == 0,
            tgt_is_causal=True,
        )
        return self.head(decoded)


def padded(count: int, longest: int) -> Tensor:
    """Rows of words, of which the first is as long as any; what follows a row is 0."""
    lengths = torch.randint(3, longest + 1, (count,))
    lengths[0] = longest
    return torch.randint(1, WORDS, (count, longest)) * (torch.arange(longest) < lengths[:, None])


@LOOPS.add()
def translation_by_batches_that_are_padded_to_their_longest_row(run: Run) -> None:
    model = run.plan(Translator(), 140_000)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for longest in (12, 9, 12, 10, 9, 12):
        source, target = padded(4, longest), padded(4, longest)
        optimizer.zero_grad()
        with run.step(model):
            logits = model(source, target[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=0)
            loss.backward()
        optimizer.step()
        run.see(model, logits=logits, loss=loss)


@LOOPS.add(tells=TraceWarning)  # the hooks that the library makes when hidden states are first asked for
def a_model_of_a_library_whose_hidden_states_are_looked_at_in_evaluation(run: Run) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=WIDTH,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        use_cache=False,
        attention_dropout=0.1,
    )
    model = run.plan(transformers.LlamaForCausalLM(config), 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(3):
        data = ids()
        optimizer.zero_grad()
        with run.step(model):
            found = model(input_ids=data, labels=data)
            found.loss.backward()
        optimizer.step()
        run.see(model, logits=found.logits, loss=found.loss)
        model.eval()
        with torch.no_grad():
            run.see(hidden=list(model(input_ids=data, output_hidden_states=True).hidden_states))
        model.train()
