"""Train a tiny GPT-2 under a memory budget given as text.

python examples/train_with_budget_string.py --budget "600 KiB"
"""

import argparse
import os
import sys

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from rockmate import BudgetTooSmall, Rockmate, zoo


def main() -> None:
    """Plan, then train."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 under a memory budget.")
    parser.add_argument("--budget", default="600 KiB", help='most memory of a step, such as "600 KiB" (the default)')
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()

    entry = zoo.get("gpt2-tiny")
    try:
        model = Rockmate(entry.model, entry.sample, options.budget, loss=entry.loss)
    except BudgetTooSmall as error:
        sys.exit(str(error))
    print(model.plan)

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        inputs, target = entry.make_batch(step % 2)
        loss = entry.criterion(model(*inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1 or step % 10 == 0:
            print(f"step {step:3}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
