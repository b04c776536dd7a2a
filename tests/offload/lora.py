"""A small Transformer with low-rank adapters on a frozen base, as fine-tuning has it."""

import torch
import torch.nn.functional as F
from torch import nn


class Adapted(nn.Module):
    """A frozen linear layer with an adapter beside it."""

    def __init__(self, base, rank=4):
        super().__init__()
        self.base = base
        self.base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.02)
        self.up = nn.Parameter(torch.randn(base.out_features, rank) * 0.02)

    def forward(self, hidden):
        return self.base(hidden) + hidden @ self.down.t() @ self.up.t()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = Adapted(nn.Linear(width, 3 * width))
        self.out = nn.Linear(width, width)
        self.wide = nn.Linear(width, 2 * width)
        self.narrow = nn.Linear(2 * width, width)
        self.scale = nn.Parameter(torch.rand(width, width) + 0.5)  # read twice, once transposed

    def forward(self, hidden):
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, dim=-1)
        mixed = F.softmax(query @ key.transpose(1, 2) / query.shape[-1] ** 0.5, dim=-1) @ value
        hidden = hidden + self.out(torch.tanh(mixed))
        hidden = hidden + F.dropout(self.narrow(F.gelu(self.wide(hidden))), 0.1, self.training)
        return hidden + torch.tanh(hidden @ self.scale) @ self.scale.t() * 0.01


class LoraModel(nn.Module):
    """Its head is tied to its embedding."""

    def __init__(self, width=160, layers=3, vocabulary=200):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(name.endswith((".down", ".up")))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def frozen(model):
    """Parameters that do not train."""
    return [parameter for parameter in model.parameters() if not parameter.requires_grad]


def trained(model):
    """Parameters that do."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def next_token_loss(logits, tokens):
    """Cross-entropy of each next token."""
    return F.cross_entropy(logits[:, :-1].reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))


def batch(seed=0, rows=4, length=24, vocabulary=200):
    """Random tokens."""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(seed))
