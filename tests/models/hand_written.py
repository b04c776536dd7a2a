"""Networks as people write them in plain PyTorch: attention, convolutions, recurrence."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.models.factories import VOCABULARY, Factories, Model, images, on, tokens

WIDTH = 32
HEADS = 4
POSITIONS = 16


class SelfAttention(nn.Module):
    """Causal attention, by the fused function or spelled out with a mask that is a buffer."""

    def __init__(self, fused: bool, dropout: float) -> None:
        super().__init__()
        self.to_qkv, self.to_output = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.fused, self.dropout = fused, dropout
        self.of_weights, self.of_output = nn.Dropout(dropout), nn.Dropout(dropout)
        self.register_buffer("visible", torch.ones(POSITIONS, POSITIONS).tril().bool(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.to_qkv(x).view(batch, length, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4)
        query, key, value = heads.unbind(0)
        if self.fused:
            dropout = self.dropout if self.training else 0.0
            mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        else:
            scores = query @ key.mT / math.sqrt(query.size(-1))
            scores = scores.masked_fill(~self.visible[:length, :length], float("-inf"))
            mixed = self.of_weights(scores.softmax(dim=-1)) @ value
        return self.of_output(self.to_output(mixed.transpose(1, 2).reshape(batch, length, width)))


class DecoderBlock(nn.Module):
    """Attention and a perceptron, each normalised before and added."""

    def __init__(self, fused: bool, dropout: float) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = SelfAttention(fused, dropout)
        self.perceptron = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(approximate="tanh"), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.perceptron(self.norm_2(x))


class LanguageModel(nn.Module):
    """A small GPT-2; its head may share the weights of the embedding."""

    def __init__(self, layers: int = 3, fused: bool = True, tied: bool = True, dropout: float = 0.1) -> None:
        super().__init__()
        self.of_tokens, self.of_positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(POSITIONS, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(DecoderBlock(fused, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.of_tokens.weight

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.size(1), device=text.device)
        x = self.dropout(self.of_tokens(text) + self.of_positions(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def language_model(**options: bool) -> Model:
    """A GPT-2 with these options, on full sentences."""
    return on(LanguageModel(**options), tokens(2, POSITIONS))


def brain_float_language_model() -> Model:
    module, args, kwargs = language_model()
    return module.bfloat16(), args, kwargs


def complex_rotation(x: Tensor, turns: Tensor) -> Tensor:
    """Rotary positions: pairs of features as complex numbers, turned by an angle for each position."""
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turns).flatten(-2)


class RotaryAttention(nn.Module):
    """Attention with rotary positions, the angles being a complex constant made in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.norm = nn.RMSNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        length, half = x.size(1), WIDTH // HEADS // 2
        frequencies = 10_000.0 ** (-torch.arange(half) / half)
        turns = torch.polar(torch.ones(length, half), torch.outer(torch.arange(length).float(), frequencies))
        query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.to_qkv(x).chunk(3, -1))
        query, key = complex_rotation(query, turns), complex_rotation(key, turns)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, dropout_p=0.1)
        return self.norm(x + mixed.transpose(1, 2).flatten(-2))


def double_convolution(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions, each normalised and rectified in place."""
    layers: list[nn.Module] = []
    for size in (inputs, outputs):
        layers += [nn.Conv2d(size, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """Down and up again, with the features of each level carried across."""

    def __init__(self, levels: int = 3, width: int = 8) -> None:
        super().__init__()
        sizes = [width * 2**level for level in range(levels + 1)]
        self.down = nn.ModuleList(map(double_convolution, [3, *sizes[:-2]], sizes[:-1]))
        self.bottom = double_convolution(sizes[-2], sizes[-1])
        self.widen = nn.ModuleList(nn.ConvTranspose2d(2 * size, size, 2, 2) for size in sizes[-2::-1])
        self.up = nn.ModuleList(double_convolution(2 * size, size) for size in sizes[-2::-1])
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for level in self.down:
            across.append(level(x))
            x = F.max_pool2d(across[-1], 2)
        x = self.bottom(x)
        for widen, level in zip(self.widen, self.up, strict=True):
            x = level(torch.cat([across.pop(), widen(x)], dim=1))
        return self.head(x)


class MixerBlock(nn.Module):
    """A perceptron over patches, then one over channels."""

    def __init__(self, patches: int, channels: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(channels) for _ in range(2))
        self.over_patches, self.over_channels = (
            nn.Sequential(nn.Linear(n, 2 * n), nn.GELU(), nn.Dropout(0.1), nn.Linear(2 * n, n))
            for n in (patches, channels)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_patches(self.norms[0](x).mT).mT
        return x + self.over_channels(self.norms[1](x))


class Mixer(nn.Module):
    """MLP-Mixer on patches of 8 x 8."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, WIDTH, 8, 8)
        self.blocks = nn.Sequential(*(MixerBlock(16, WIDTH) for _ in range(blocks)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x).flatten(2).mT).mean(dim=1))


class DenseNet(nn.Module):
    """Every layer reads the outputs of all before it; then a transition halves them."""

    def __init__(self, layers: int = 5, growth: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        widths = [growth * (index + 1) for index in range(layers + 1)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.Conv2d(width, growth, 3, padding=1))
            for width in widths[:-1]
        )
        self.transition = nn.Sequential(nn.Conv2d(widths[-1], widths[-1] // 2, 1), nn.AvgPool2d(2))
        self.head = nn.Linear(widths[-1] // 2, 10)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(F.dropout(layer(torch.cat(features, dim=1)), 0.1, self.training))
        return self.head(self.transition(torch.cat(features, dim=1)).mean(dim=(2, 3)))


class Inception(nn.Module):
    """Branches of unlike sizes side by side, and an auxiliary classifier that training alone has."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 6, 5, padding=2)
        self.deep = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.Conv2d(3, 2, 1))
        self.norm = nn.BatchNorm2d(20, eps=0.001)
        self.head, self.auxiliary = nn.Linear(20, 10), nn.Linear(20, 10)

    def forward(self, x: Tensor) -> dict[str, Tensor] | Tensor:
        joined = torch.cat([branch(x) for branch in (self.narrow, self.wide, self.deep, self.pooled)], dim=1)
        features = self.norm(joined).relu().mean(dim=(2, 3))
        logits = self.head(F.dropout(features, 0.4, self.training))
        if not self.training:
            return logits
        return {"logits": logits, "auxiliary": self.auxiliary(F.dropout(features, 0.7))}


def vgg() -> Model:
    """VGG: convolutions and pooling in a line, and a wide perceptron with dropout."""
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2)]
    head = [nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(inplace=True), nn.Dropout(0.5), nn.Linear(32, 10)]
    return on(nn.Sequential(*layers, *head), images())


class Recurrent(nn.Module):
    """A recurrent layer and a linear one; the final states are outputs, too."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * (1 + layer.bidirectional), 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | tuple[Tensor, Tensor]]:
        features, states = self.layer(x)
        return self.head(features), states


def recurrent(kind: type[nn.RNNBase], bidirectional: bool = False) -> Model:
    """Two recurrent layers with dropout between them."""
    layer = kind(8, 16, num_layers=2, batch_first=True, dropout=0.2, bidirectional=bidirectional)
    return on(Recurrent(layer), torch.randn(2, 5, 8))


class UnrolledRecurrence(nn.Module):
    """One cell called for every step of time, its state carried by a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.first = nn.GRUCell(8, 16), nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        state, states = self.first.expand(x.size(0), -1), []
        for step in x.unbind(1):
            state = self.cell(step, state)
            states.append(state)
        return torch.stack(states, dim=1)


def transformer() -> Model:
    """The encoder and decoder of nn.Transformer, with a causal mask."""
    module = nn.Transformer(WIDTH, HEADS, 2, 2, 2 * WIDTH, dropout=0.1, batch_first=True)
    mask = nn.Transformer.generate_square_subsequent_mask(6)
    return on(module, torch.randn(2, 8, WIDTH), torch.randn(2, 6, WIDTH), tgt_mask=mask, tgt_is_causal=True)


def transformer_encoder(padded: bool = False) -> Model:
    """nn.TransformerEncoder; `padded` hides the ends of both sentences."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.1, batch_first=True, norm_first=padded)
    module = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    hidden = {"src_key_padding_mask": torch.arange(8) >= torch.tensor([[5], [7]])} if padded else {}
    return on(module, torch.randn(2, 8, WIDTH), **hidden)


HAND_WRITTEN: Factories = {
    "gpt2_fused_tied": partial(language_model, fused=True, tied=True),
    "gpt2_eager": partial(language_model, fused=False, tied=False),
    "gpt2_eager_tied": partial(language_model, fused=False, tied=True),
    "gpt2_bfloat16": brain_float_language_model,
    "rotary_attention": lambda: on(RotaryAttention(), torch.randn(2, 6, WIDTH)),
    "transformer": transformer,
    "transformer_encoder": transformer_encoder,
    "transformer_encoder_padded": partial(transformer_encoder, padded=True),
    "unet": lambda: on(UNet(), images()),
    "mixer": lambda: on(Mixer(), images()),
    "densenet": lambda: on(DenseNet(), images(size=16)),
    "inception": lambda: on(Inception(), images(size=8)),
    "vgg": vgg,
    "lstm": partial(recurrent, nn.LSTM),
    "lstm_bidirectional": partial(recurrent, nn.LSTM, bidirectional=True),
    "gru": partial(recurrent, nn.GRU),
    "gru_bidirectional": partial(recurrent, nn.GRU, bidirectional=True),
    "unrolled_recurrence": lambda: on(UnrolledRecurrence(), torch.randn(2, 5, 8)),
}
