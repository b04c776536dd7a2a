"""Small modules that must be traced exactly: `CASES[name]()` builds (module, sample)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.graph.programs import Program, linear, rows, scale

Case = tuple[nn.Module, Any]  # the module and its sample
Cases = dict[str, Callable[[], Case]]


class Pair(NamedTuple):
    """A named tuple as an output."""

    first: Tensor
    second: Tensor


@dataclass
class Answer:
    """A dataclass as an output, as model libraries return."""

    logits: Tensor
    hidden: tuple[Tensor, ...] | None = None
    label: str = "answer"


class Square(torch.autograd.Function):
    """A custom function whose backward is not the derivative: it shows whether the function itself is repeated."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * gradient * x


class SumAndProduct(torch.autograd.Function):
    """A custom function of several outputs, with an argument that is no tensor."""

    @staticmethod
    def forward(ctx, x, factor, y):
        ctx.factor = factor
        ctx.save_for_backward(x, y)
        return factor * x + y, x * y

    @staticmethod
    def backward(ctx, of_sum, of_product):
        x, y = ctx.saved_tensors
        return ctx.factor * of_sum + of_product * y, None, of_sum + of_product * x


class OwnDropout(torch.autograd.Function):
    """A custom function that draws numbers."""

    @staticmethod
    def forward(ctx, x):
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


def tokens(*shape: int) -> Tensor:
    return torch.randint(7, shape or (2, 3))


def image(channels: int = 3) -> Tensor:
    return rows(2, channels, 8, 8)


def layered(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers)


def program(function: Callable[..., Any], **parts: Any) -> nn.Module:
    """A program with one linear layer of width 4, `layer`, beside its own parts."""
    return Program(function, layer=linear(), **parts)


def on_rows(function: Callable[..., Any], **parts: Any) -> Case:
    """`program` on a sample [3, 4]."""
    return program(function, **parts), rows()


def layers_on_rows(*layers: nn.Module) -> Case:
    """Layers one after another on a sample [3, 4]."""
    return layered(*layers), rows()


ARITHMETIC: Cases = {
    "linear": lambda: layers_on_rows(linear(4, 5), nn.ReLU(), linear(5, 4)),
    "residual": lambda: on_rows(lambda m, x: x + m.layer(x)),
    "value_read_by_many": lambda: on_rows(lambda m, x: (h := m.layer(x)) * h.sigmoid() + h.exp() - h),
    "layer_called_again": lambda: on_rows(lambda m, x: m.layer(torch.tanh(m.layer(x)))),
    "einsum": lambda: (Program(lambda m, x: torch.einsum("bij,jk->bik", x, m.w), w=scale((4, 5))), rows(2, 3, 4)),
    "cat": lambda: on_rows(lambda m, x: torch.cat([m.layer(x), x], dim=1)),
    "stack": lambda: on_rows(lambda m, x: torch.stack([m.layer(x), x]).sum(0)),
    "where": lambda: on_rows(lambda m, x: torch.where(x > 0, m.layer(x), 0.5)),
    "topk_and_sort": lambda: on_rows(lambda m, x: m.layer(x).topk(2)[0] + m.layer(x).sort(-1)[0][:, 1:3]),
    "complex": lambda: on_rows(lambda m, x: torch.fft.rfft(m.layer(x)) * 2j),
    "fft_magnitude": lambda: on_rows(lambda m, x: torch.fft.rfft(m.layer(x)).abs()),
    "empty_part": lambda: on_rows(lambda m, x: m.layer(x)[:0].sum() + m.layer(x).sum()),
    "loss_inside": lambda: (program(lambda m, x, y: F.cross_entropy(m.layer(x), y)), (rows(), torch.tensor([0, 3, 1]))),
}
NUMBERS: Cases = {
    "number_is_no_tensor_in_promotion": lambda: on_rows(lambda m, x: m.layer(x).bfloat16() * 2.5 + 1),
    "number_with_integer_tensor": lambda: (program(lambda m, x: m.layer((x * 2.5).float())), tokens(3, 4)),
    "zero_dim_tensor_with_half": lambda: on_rows(lambda m, x: m.layer(x).half() * torch.tensor(2.5)),
    "zero_dim_buffer_of_double": lambda: on_rows(lambda m, x: m.layer(x) * m.s, s=torch.tensor(2.5).double()),
    "zero_dim_buffer_promotes_integers": lambda: (
        Program(lambda m, x: (x * m.s) * m.w, s=torch.tensor(2.5).double(), w=scale()),
        tokens(3, 4),
    ),
    "boolean_number": lambda: on_rows(lambda m, x: m.layer(x) * True + (x.shape[0] > 2)),
    "half_precision_model": lambda: (layered(linear(), nn.LayerNorm(4)).bfloat16(), rows().bfloat16()),
    "double_precision_model": lambda: (layered(linear(), nn.LayerNorm(4)).double(), rows().double()),
    "casts": lambda: (program(lambda m, x: m.layer(x.to(torch.float32)).to(x.dtype)), rows().double()),
}
VIEWS: Cases = {
    "view_and_permute": lambda: on_rows(lambda m, x: m.layer(x).view(3, 2, 2).permute(1, 0, 2).reshape(2, 6)),
    "chunk": lambda: (Program(lambda m, x: math.prod(m.p(x).chunk(3, dim=-1)), p=linear(4, 6)), rows()),
    "split": lambda: (
        Program(lambda m, x: sum(p.sum() * p.exp().mean() for p in m.p(x).split([1, 4], 1)), p=linear(4, 5)),
        rows(),
    ),
    "unbind": lambda: on_rows(lambda m, x: sum(m.layer(x).unbind(0))),
    "tensor_split": lambda: on_rows(lambda m, x: torch.cat(m.layer(x).tensor_split(2))),
    "expanded_parameter": lambda: on_rows(lambda m, x: m.w.expand(3, 4) * m.layer(x), w=scale((1, 4))),
    "narrow": lambda: on_rows(lambda m, x: m.layer(x).narrow(1, 1, 2) * 2),
    "as_strided": lambda: on_rows(lambda m, x: m.layer(x).as_strided((2, 2), (4, 1), 1)),
    "unfold": lambda: on_rows(lambda m, x: m.layer(x).unfold(0, 2, 1).sum(-1)),
    "moved_dimensions": lambda: on_rows(lambda m, x: m.layer(x).movedim(0, 1).unsqueeze(0).squeeze().T.contiguous()),
    "slices": lambda: on_rows(lambda m, x: m.layer(x)[1:, ::2] + m.layer(x)[..., -1:][1:]),
    "index_by_constant": lambda: on_rows(lambda m, x: m.layer(x)[torch.tensor([2, 0])][:, None, 1:]),
    "index_by_input": lambda: (program(lambda m, x, i: m.layer(x)[i]), (rows(), torch.tensor([1, 0, 2]))),
    "view_of_input": lambda: (Program(lambda m, x: m.p(x.view(4, 3)), p=linear(3)), rows(3, 4, requires_grad=True)),
    "only_views": lambda: (nn.Flatten(), rows(2, 3, 4, requires_grad=True)),
}
IN_PLACE: Cases = {
    "add_in_place": lambda: on_rows(lambda m, x: m.layer(x).add_(x)),
    "relu_in_place": lambda: layers_on_rows(linear(), nn.ReLU(inplace=True), linear()),
    "write_through_a_view": lambda: on_rows(lambda m, x: ((h := m.layer(x))[:, :2].mul_(2), h)[1]),
    "writes_to_view_and_base": lambda: on_rows(lambda m, x: ((h := m.layer(x)).view(-1).mul_(2), h.relu_())[1]),
    "read_before_the_write": lambda: on_rows(lambda m, x: ((h := m.layer(x)) * 3).sigmoid() + h.add_(1).sigmoid()),
    "written_by_what_it_gave": lambda: on_rows(lambda m, x: (h := m.layer(x)).add_(h.sigmoid())),
    "item_assignment": lambda: on_rows(
        lambda m, x: ((h := m.layer(x) * 1).__setitem__((slice(None), 0), x[:, 1]), h)[1]
    ),
    "filling_a_fresh_tensor": lambda: on_rows(lambda m, x: ((o := torch.zeros(5, 4))[1:4].copy_(m.layer(x)), o * 2)[1]),
    "clamp_in_place": lambda: on_rows(lambda m, x: F.softplus(m.layer(x)).clamp_(max=1.0).clamp_min(0.1)),
    "buffer_as_a_counter": lambda: on_rows(lambda m, x: m.layer(x) * m.n.add_(1), n=torch.zeros(())),
    "buffer_as_a_mean": lambda: on_rows(
        lambda m, x: (m.mean.lerp_(x.mean(0), 0.1), m.layer(x))[1], mean=torch.zeros(4)
    ),
    "buffer_as_a_cache": lambda: on_rows(lambda m, x: m.layer((m.c[:3].copy_(x), m.c)[1]), c=torch.zeros(5, 4)),
}
NORMALISATION: Cases = {
    "batch_norm_1d": lambda: layers_on_rows(linear(), nn.BatchNorm1d(4), nn.ReLU()),
    "batch_norm_2d": lambda: (layered(nn.Conv2d(3, 5, 3), nn.BatchNorm2d(5), nn.ReLU(inplace=True)), image()),
    "batch_norm_without_statistics": lambda: layers_on_rows(linear(), nn.BatchNorm1d(4, track_running_stats=False)),
    "batch_norm_in_evaluation": lambda: layers_on_rows(linear(), nn.BatchNorm1d(4).eval(), linear()),
    "batch_norm_called_twice": lambda: on_rows(lambda m, x: m.norm(m.norm(m.layer(x))), norm=nn.BatchNorm1d(4)),
    "instance_norm": lambda: (
        layered(nn.Conv2d(3, 5, 3), nn.InstanceNorm2d(5, affine=True, track_running_stats=True)),
        image(),
    ),
    "layer_norm": lambda: layers_on_rows(linear(), nn.LayerNorm(4)),
    "group_norm": lambda: (layered(nn.Conv2d(3, 6, 3), nn.GroupNorm(2, 6)), image()),
    "rms_norm": lambda: layers_on_rows(linear(), nn.RMSNorm(4)),
    "spectral_norm": lambda: layers_on_rows(nn.utils.parametrizations.spectral_norm(linear()), nn.Tanh()),
    "weight_norm": lambda: layers_on_rows(nn.utils.parametrizations.weight_norm(linear()), nn.Tanh()),
    "channels_last": lambda: (
        layered(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        image().to(memory_format=torch.channels_last),
    ),
}
RANDOMNESS: Cases = {
    "dropout": lambda: layers_on_rows(linear(4, 40), nn.Dropout(0.3), linear(40)),
    "dropout_in_place": lambda: layers_on_rows(linear(4, 40), nn.Dropout(0.3, inplace=True), linear(40)),
    "dropout_of_channels": lambda: (layered(nn.Conv1d(4, 4, 3), nn.Dropout1d(0.3)), rows(3, 4, 9)),
    "alpha_dropout": lambda: layers_on_rows(linear(), nn.AlphaDropout(0.3)),
    "noise": lambda: on_rows(lambda m, x: m.layer(x) + torch.randn_like(x) * torch.rand(4)),
    "random_slope": lambda: layers_on_rows(linear(), nn.RReLU()),
    "gumbel_softmax": lambda: on_rows(lambda m, x: F.gumbel_softmax(m.layer(x), hard=True)),
}
SHAPES: Cases = {
    "half_of_the_columns": lambda: on_rows(
        lambda m, x: m.layer(x).flatten(1)[:, : x.shape[1] // 2] / x.shape[-1] ** 0.5
    ),
    "sizes_in_a_view": lambda: (
        program(lambda m, x: m.layer(x).view(x.size(0) * x.size(1), 2, -1).transpose(0, 1)),
        rows(2, 3, 4),
    ),
    "positions": lambda: (
        program(lambda m, x: m.layer(x) + m.e(torch.arange(x.size(1))), e=nn.Embedding(9, 4)),
        rows(2, 3, 4),
    ),
    "number_of_elements": lambda: on_rows(lambda m, x: m.layer(x).sum() / x.numel() * x.dim()),
    "loop_over_rows": lambda: on_rows(lambda m, x: torch.stack([m.layer(row) for row in x.split(1)])),
    "new_tensors_of_that_shape": lambda: on_rows(lambda m, x: m.layer(x) + torch.ones_like(x) + x.new_zeros(4)),
    "grid": lambda: on_rows(
        lambda m, x: m.layer(x) + torch.stack(torch.meshgrid(torch.arange(3), torch.arange(4), indexing="ij")).sum(0)
    ),
}
MASKS: Cases = {
    "additive_mask": lambda: (
        program(lambda m, x, k: m.layer(x) + (1.0 - k[:, None]) * -1e4),
        (rows(), torch.tensor([1.0, 0, 1])),
    ),
    "integer_mask": lambda: (
        program(lambda m, x, k: m.layer(x) + (1 - k[:, None].to(x.dtype)) * torch.finfo(x.dtype).min),
        (rows(), torch.tensor([1, 0, 1])),
    ),
    "causal_mask": lambda: (
        program(lambda m, x: m.layer(x).masked_fill(torch.ones(4, 4).triu(1).bool(), float("-inf")).softmax(-1)),
        rows(4, 4),
    ),
    "padding_mask": lambda: (
        Program(lambda m, x, k: m.a(x, x, x, key_padding_mask=k)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        (rows(2, 3, 8), torch.tensor([[False, False, True], [False, True, True]])),
    ),
}
LAYERS: Cases = {
    "embedding": lambda: (layered(nn.Embedding(7, 5), linear(5, 3)), tokens()),
    "embedding_bag": lambda: (layered(nn.EmbeddingBag(7, 5), linear(5, 3)), tokens()),
    "tied_weights": lambda: (Program(lambda m, t: F.linear(m.e(t), m.e.weight), e=nn.Embedding(7, 4)), tokens()),
    "convolutions_and_pooling": lambda: (
        layered(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.ConvTranspose2d(4, 2, 2), nn.AdaptiveAvgPool2d(1)),
        image(),
    ),
    "upsampling": lambda: (layered(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")), image()),
    "attention_function": lambda: (
        Program(
            lambda m, x: F.scaled_dot_product_attention(
                *m.p(x).view(2, 3, 2, 6).transpose(1, 2).chunk(3, -1), dropout_p=0.2, is_causal=True
            ),
            p=linear(4, 12),
        ),
        rows(2, 3, 4),
    ),
    "attention_module": lambda: (nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True), (rows(2, 3, 8),) * 3),
    "encoder_layer": lambda: (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), rows(2, 3, 8)),
    "decoder_layer": lambda: (nn.TransformerDecoderLayer(8, 2, 16, norm_first=True), (rows(2, 3, 8), rows(5, 3, 8))),
    "lstm": lambda: (nn.LSTM(4, 5, num_layers=2, dropout=0.2, bidirectional=True), rows(2, 3, 4)),
    "gru": lambda: (nn.GRU(4, 5, batch_first=True), rows(2, 3, 4)),
    "lstm_cell": lambda: (nn.LSTMCell(4, 5), rows(2, 4)),
    "custom_function": lambda: on_rows(lambda m, x: m.layer(Square.apply(m.layer(x)))),
    "custom_function_of_two_outputs": lambda: on_rows(lambda m, x: SumAndProduct.apply(m.layer(x), 2.5, x.tanh())),
    "custom_function_that_draws": lambda: on_rows(lambda m, x: OwnDropout.apply(m.layer(x))),
    "checkpointed": lambda: on_rows(
        lambda m, x: torch.utils.checkpoint.checkpoint(m.layer, x.exp(), use_reentrant=False)
    ),
}
GRADIENT_MODES: Cases = {
    "region_without_gradient": lambda: on_rows(lambda m, x: m.layer(x) / without_gradient(m.layer, x).abs()),
    "layer_without_gradient": lambda: on_rows(lambda m, x: m.teacher(x) - m.layer(x), teacher=silent(linear())),
    "in_place_without_gradient": lambda: on_rows(lambda m, x: m.layer(x) * without_gradient(relu_of, m.layer, x)),
    "detached": lambda: on_rows(lambda m, x: m.layer(x) * m.layer(x).detach()),
    "frozen_first_layer": lambda: layers_on_rows(linear().requires_grad_(False), nn.ReLU(), linear()),
    "frozen_last_layer": lambda: layers_on_rows(linear(), nn.ReLU(), linear().requires_grad_(False)),
    "frozen_convolution": lambda: (
        layered(nn.Conv2d(3, 3, 3).requires_grad_(False), nn.ReLU(), nn.Conv2d(3, 4, 1)),
        image(),
    ),
    "frozen_normalisation": lambda: layers_on_rows(linear(), nn.BatchNorm1d(4).requires_grad_(False), linear()),
    "input_that_requires_gradient": lambda: (layered(linear(), nn.Tanh()), rows(3, 4, requires_grad=True)),
    "gradient_computed_inside": lambda: on_rows(lambda m, x: gradient_of_sum(m.layer, x) + m.layer.weight),
}
STRUCTURES: Cases = {
    "dictionary": lambda: on_rows(lambda m, x: {"a": m.layer(x), "b": [x.tanh(), 3, None]}),
    "named_tuple": lambda: on_rows(lambda m, x: Pair(m.layer(x), x.tanh())),
    "dataclass": lambda: on_rows(lambda m, x: Answer(m.layer(x), (x.tanh(),))),
    "keyword_arguments": lambda: (
        program(lambda m, x, other, factor=2.0: m.layer(x) * factor + other),
        {"x": rows(), "other": rows()},
    ),
    "nested_input": lambda: (program(lambda m, x: m.layer(x[0]) + x[1]["other"]), ([rows(), {"other": rows()}],)),
    "one_tensor_given_twice": lambda: (program(lambda m, x, y: m.layer(x) * y), (rows(),) * 2),
    "several_outputs": lambda: on_rows(lambda m, x: (m.layer(x), m.layer(x).exp(), x.sum())),
    "integer_output": lambda: on_rows(lambda m, x: (h := m.layer(x), h.argmax(-1))),
    "output_is_an_input": lambda: on_rows(lambda m, x: (m.layer(x), x)),
    "output_is_a_parameter": lambda: on_rows(lambda m, x: (m.layer(x), m.layer.weight)),
    "one_output_twice": lambda: on_rows(lambda m, x: (h := m.layer(x), h, h.view(-1))),
    "parameters_at_the_root": lambda: (
        Program(lambda m, x: x * m.weight + m.bias, weight=scale(), bias=rows(4)),
        rows(),
    ),
    "parameter_called_like_an_operation": lambda: on_rows(lambda m, x: m.layer(x) * m.linear_0, linear_0=scale()),
    "parameter_called_like_an_input": lambda: on_rows(lambda m, x: m.layer(x) * m.input_0, input_0=scale()),
    "list_of_parameters": lambda: (
        Program(lambda m, t: F.embedding(t, m.embedding[0]), embedding=nn.ParameterList([scale((7, 4))])),
        tokens(),
    ),
    "paths_that_differ_in_a_dot": lambda: (
        Program(lambda m, x: x * m.a.b + m.a_b - m.a_b_0, a=Program(len, b=scale()), a_b=scale(), a_b_0=scale()),
        rows(),
    ),
    "keys_that_are_no_identifiers": lambda: (
        Program(lambda m, x: m.d["a-b"](x) + m.d["c d"](x), d=nn.ModuleDict({"a-b": linear(), "c d": linear()})),
        rows(),
    ),
    "unused_input": lambda: (program(lambda m, x, unused: m.layer(x)), (rows(), rows())),
    "identity": lambda: (nn.Identity(), rows()),
}
GROUPS: dict[str, Cases] = {
    "arithmetic": ARITHMETIC,
    "numbers": NUMBERS,
    "views": VIEWS,
    "in_place": IN_PLACE,
    "normalisation": NORMALISATION,
    "randomness": RANDOMNESS,
    "shapes": SHAPES,
    "masks": MASKS,
    "layers": LAYERS,
    "gradient_modes": GRADIENT_MODES,
    "structures": STRUCTURES,
}
CASES: Cases = {f"{group}-{name}": build for group, cases in GROUPS.items() for name, build in cases.items()}


def silent(layer: nn.Module) -> nn.Module:
    """`layer`, run without gradient."""
    return Program(lambda m, x: without_gradient(m.layer, x), layer=layer)


def without_gradient(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    with torch.no_grad():
        return function(*arguments)


def relu_of(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).relu_()


def gradient_of_sum(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.autograd.grad(layer(x).sum(), layer.weight)[0]
