"""Train a tiny GPT-2 under a memory budget on several ranks, by DistributedDataParallel.

torchrun --standalone --nproc-per-node 2 examples/train_ddp.py --budget 0.6

Ranks use CUDA and NCCL where there is a GPU for each of them, else the CPU and gloo.
"""

import argparse
import os

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from rockmate import Rockmate, zoo


def start() -> torch.device:
    """Join the other ranks; returns this one's device."""
    local_rank, local_size = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if torch.cuda.device_count() < local_size:
        distributed.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    distributed.init_process_group("nccl", device_id=device)
    return device


def budget_of(text: str) -> str | float:
    """A part of the eager peak such as 0.6, or a size such as "600 KiB"."""
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Plan, then train."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2 on several ranks under a memory budget.")
    parser.add_argument("--budget", type=budget_of, default=0.6, help='part of the eager peak, or a size ("600 KiB")')
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()

    device = start()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    entry = zoo.get("gpt2-tiny", device=device)
    # The first rank to come here makes the plan, the others follow it.
    model = Rockmate(entry.model, entry.sample, options.budget, loss=entry.loss)
    print(f"rank {rank} of {size}: {model.plan}", flush=True)

    trained = DistributedDataParallel(model, device_ids=[device] if device.type == "cuda" else None)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    for step in range(1, options.steps + 1):
        inputs, target = entry.make_batch(size * (step % 2) + rank)  # of this rank alone
        loss = entry.criterion(trained(*inputs), target)
        loss.backward()  # gradients are averaged over the ranks while it runs
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(loss := loss.detach())
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3}: loss {loss.item() / size:.3f}", flush=True)
    distributed.barrier()  # gloo may abort a process that ends long before the others
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
