"""A recurrent model over batches of many lengths, its state carried from batch to batch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy

torch.manual_seed(0)
words, layers, head = nn.Embedding(2000, 256), nn.LSTM(256, 512, 2, batch_first=True, dropout=0.2), nn.Linear(512, 2000)
parameters = [*words.parameters(), *layers.parameters(), *head.parameters()]
optimizer = torch.optim.RMSprop(parameters, lr=1e-3)
state = None
for length in (48, 64, 32, 64, 56, 40):
    tokens = torch.randint(2000, (16, length + 1))
    hidden, state = layers(words(tokens[:, :-1]), state)
    state = tuple(one.detach() for one in state)
    loss = cross_entropy(head(hidden).flatten(0, 1), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(loss.item())
