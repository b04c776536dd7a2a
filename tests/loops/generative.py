"""Loops that train models of data: autoencoders, quantisers, mixtures of experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rockmate import TraceWarning
from tests.loops.harness import Registry, Run
from tests.loops.optimising import WIDTH, layers, rows

LOOPS = Registry()


class Variational(nn.Module):
    """Keeps the loss of its code in an attribute, as much public code does."""

    def __init__(self, code: int = 4) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(out=2 * code), layers(rows=code)
        self.divergence = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, -1)
        self.divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        if self.training:
            mean = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(mean)


@LOOPS.add(quick=True)
def a_variational_autoencoder_whose_weight_of_the_code_grows(run: Run) -> None:
    model = run.plan(Variational())
    inner = getattr(model, "original", model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for index in range(5):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(data), data) + min(1.0, index / 3) * inner.divergence
            loss.backward()
        optimizer.step()
        run.see(loss=loss, divergence=inner.divergence)
        model.eval()
        with torch.no_grad():
            run.see(model, output=model(data), divergence=inner.divergence)
        model.train()


class Quantiser(nn.Module):
    """A codebook that moves with the data, and straight-through gradients; its loss is returned."""

    def __init__(self, count: int = 12) -> None:
        super().__init__()
        self.encoder, self.decoder = layers(), layers()
        codes = torch.randn(count, WIDTH)
        self.register_buffer("codes", codes)
        self.register_buffer("sizes", torch.ones(count))
        self.register_buffer("sums", codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.encoder(x)
        indices = torch.cdist(z.detach(), self.codes).argmin(-1)
        chosen = F.embedding(indices, self.codes)
        if self.training:
            with torch.no_grad():
                of_code = F.one_hot(indices, len(self.codes)).to(z.dtype)
                self.sizes.mul_(0.9).add_(of_code.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(of_code.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.sizes.clamp(min=1e-3)[:, None])
        commitment = F.mse_loss(z, chosen)
        return self.decoder(z + (chosen - z).detach()), commitment, indices


@LOOPS.add()
def a_quantiser_with_a_codebook_of_averages(run: Run) -> None:
    model = run.plan(Quantiser())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        data = rows()
        optimizer.zero_grad()
        with run.step(model):
            output, commitment, indices = model(data)
            loss = F.mse_loss(output, data) + 0.25 * commitment
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss, indices=indices)


class Experts(nn.Module):
    """Each row goes to its two best experts; how evenly they are used is an auxiliary loss."""

    def __init__(self, count: int = 4) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 48), nn.GELU(), nn.Linear(48, WIDTH)) for _ in range(count)
        )
        self.balance = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        weights, chosen = shares.topk(2, -1)
        weights = weights / weights.sum(-1, keepdim=True)
        load = F.one_hot(chosen, len(self.experts)).float().sum(1).mean(0)
        self.balance = len(self.experts) * (load * shares.mean(0)).sum()
        output = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            row, place = torch.where(chosen == index)
            output.index_add_(0, row, expert(x[row]) * weights[row, place, None])
        return x + output


# Every batch has other counts of rows for each expert.
@LOOPS.add(judged=False, recomputes=False, falls_back=True, tells=TraceWarning)
def experts_with_a_loss_of_their_balance(run: Run) -> None:
    model = run.plan(nn.Sequential(layers(), Experts(), layers()), 0.95)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(4):
        data = rows()
        optimizer.zero_grad()
        output = model(data)
        loss = F.mse_loss(output, data) + 0.01 * model[1].balance
        loss.backward()
        optimizer.step()
        run.see(model, output=output, loss=loss)


class MaskedAutoencoder(nn.Module):
    """Sees a quarter of the patches, drawn within forward, and is to tell the others."""

    def __init__(self, patches: int = 16, width: int = 24) -> None:
        super().__init__()
        self.patch = nn.Linear(WIDTH, width)
        self.places = nn.Parameter(torch.randn(1, patches, width) * 0.02)
        self.hidden = nn.Parameter(torch.zeros(1, 1, width))
        self.encoder = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.decoder = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, norm_first=True)
        self.pixels = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        batch, patches, _ = x.shape
        order = torch.rand(batch, patches).argsort(1)
        kept = order[:, : patches // 4, None]
        tokens = self.patch(x) + self.places
        seen = self.encoder(tokens.gather(1, kept.expand(-1, -1, tokens.shape[-1])))
        filled = torch.cat((seen, self.hidden.expand(batch, patches - kept.shape[1], -1)), 1)
        back = order.argsort(1)[..., None].expand(-1, -1, tokens.shape[-1])
        told = self.pixels(self.decoder(filled.gather(1, back) + self.places))
        mask = torch.ones(batch, patches).scatter(1, kept[..., 0], 0.0)
        loss = ((told - x).square().mean(-1) * mask).sum() / mask.sum()
        return loss, told


@LOOPS.add()
def a_masked_autoencoder(run: Run) -> None:
    model = run.plan(MaskedAutoencoder(), 0.9)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, betas=(0.9, 0.95))
    for _ in range(4):
        data = torch.randn(4, 16, WIDTH)
        optimizer.zero_grad()
        with run.step(model):
            loss, told = model(data)
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss, told=told)
