"""Loops that train several modules, or one module several times a step."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.loops.harness import Registry, Run
from tests.loops.optimising import WIDTH, layers, rows

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


@LOOPS.add()
def an_online_network_that_predicts_a_slower_one(run: Run) -> None:
    encoder, head = run.plan(layers()), run.plan(layers())
    slow = copy.deepcopy(encoder).requires_grad_(False)
    optimizer = torch.optim.AdamW([*encoder.parameters(), *head.parameters()], 1e-3)
    for _ in range(4):
        data = rows()
        views = [data + 0.1 * torch.randn_like(data) for _ in range(2)]
        with torch.no_grad():
            wanted = [F.normalize(slow(view), dim=-1) for view in views]
        optimizer.zero_grad()
        with run.step(encoder, encoder, head, head):
            told = [F.normalize(head(encoder(view)), dim=-1) for view in views]
            loss = 4 - 2 * ((told[0] * wanted[1]).sum(-1) + (told[1] * wanted[0]).sum(-1)).mean()
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, new in zip(slow.parameters(), encoder.parameters(), strict=True):
                kept.lerp_(new, 0.05)
        run.see(encoder, head, slow, loss=loss)


class GraphNetwork(nn.Module):
    """Sums messages along edges; mini-batches have other nodes and edges each."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 48), nn.Linear(48, 48)
        self.head = nn.Linear(48, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            x = layer(x)
            x = F.gelu(x + torch.zeros_like(x).index_add(0, edges[1], x[edges[0]]))
        graphs = int(graph.max()) + 1
        return self.head(x.new_zeros(graphs, x.shape[-1]).index_add(0, graph, x))


@LOOPS.add(judged=False, recomputes=False, falls_back=True)  # no two batches are of the same shapes
def mini_batches_of_graphs(run: Run) -> None:
    model = run.plan(GraphNetwork(), 1.0)
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(6):
        sizes = torch.randint(3, 9, (4,))
        graph = torch.arange(4).repeat_interleave(sizes)
        nodes = len(graph)
        edges = torch.randint(nodes, (2, 3 * nodes))
        optimizer.zero_grad()
        logits = model(rows(nodes), edges, graph)
        loss = F.cross_entropy(logits, sizes % 3)
        loss.backward()
        optimizer.step()
        run.see(model, logits=logits, loss=loss)
