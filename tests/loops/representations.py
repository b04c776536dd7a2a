"""Loops that train several modules, or one module several times a step."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.loops.harness import Registry, Run
from tests.loops.optimising import layers, rows

LOOPS = Registry()


@LOOPS.add(judged=False)  # a step of both takes what both keep
def adversarial_steps_by_turns(run: Run) -> None:
    maker, critic = run.plan(layers()), run.plan(layers(out=1))
    makers, critics = (torch.optim.Adam(one.parameters(), 1e-3) for one in (maker, critic))
    for _ in range(4):
        fake = maker(rows())
        critics.zero_grad()
        loss = F.softplus(-critic(rows())).mean() + F.softplus(critic(fake.detach())).mean()
        loss.backward()
        critics.step()
        critic.requires_grad_(False)
        makers.zero_grad()
        other = F.softplus(-critic(fake)).mean()
        other.backward()
        makers.step()
        critic.requires_grad_(True)
        run.see(maker, critic, fake=fake, losses=[loss, other])


@LOOPS.add()
def contrastive_views_by_one_encoder(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        data = rows()
        optimizer.zero_grad()
        with run.step(model, model, extra_bytes=6 * 96 * 96 * 4):  # the table of similarities
            one, other = (F.normalize(model(data + 0.1 * torch.randn_like(data)), dim=-1) for _ in range(2))
            loss = F.cross_entropy(one @ other.T / 0.1, torch.arange(len(data)))
            loss.backward()
        optimizer.step()
        run.see(model, one=one, other=other, loss=loss)


@LOOPS.add()
def triplets_by_one_encoder(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for _ in range(4):
        optimizer.zero_grad()
        with run.step(model, model, model):
            anchor, near, far = (model(rows()) for _ in range(3))
            loss = F.triplet_margin_loss(anchor, near, far)
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss)


@LOOPS.add()
def diffusion_at_random_times(run: Run) -> None:
    model = run.plan(layers())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    kept = torch.linspace(0.99, 0.01, 10)
    for _ in range(4):
        data = rows()
        noise, share = torch.randn_like(data), kept[torch.randint(10, (len(data), 1))]
        noisy = share.sqrt() * data + (1 - share).sqrt() * noise
        optimizer.zero_grad()
        with run.step(model):
            loss = F.mse_loss(model(noisy), noise)
            loss.backward()
        optimizer.step()
        run.see(model, loss=loss)


@LOOPS.add()
def a_policy_gradient_that_samples_without_gradients(run: Run) -> None:
    model = run.plan(layers(out=4))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(4):
        states = rows()
        with torch.no_grad():
            actions = torch.distributions.Categorical(logits=model(states)).sample()
        optimizer.zero_grad()
        with run.step(model):
            loss = F.cross_entropy(model(states), actions)
            loss.backward()
        optimizer.step()
        run.see(model, actions=actions, loss=loss)
