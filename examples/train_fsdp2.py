"""Train a tiny GPT-2 on several ranks that each hold a part of every parameter, within one budget for activations.

torchrun --standalone --nproc-per-node 2 examples/train_fsdp2.py --budget 0.6

Ranks use CUDA and NCCL where there is a GPU for each of them, else the CPU and gloo. `--bf16` computes in bfloat16.
"""

import argparse
import os

# On a busy machine OpenMP's threads, spinning while they wait, make small operations a hundred times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import rockmate.distributed
from rockmate import zoo


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
    """A part of what the eager step takes, such as 0.6, or a size such as "600 KiB"."""
    try:
        return float(text)
    except ValueError:
        return text


def main() -> None:
    """Plan and shard, then train."""
    parser = argparse.ArgumentParser(description="Train a tiny GPT-2, sharded over several ranks, under a budget.")
    parser.add_argument("--budget", type=budget_of, default=0.6, help='part of the eager step, or a size ("600 KiB")')
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--bf16", action="store_true", help="gather parameters, and compute, in bfloat16")
    options = parser.parse_args()

    device = start()
    rank, size = distributed.get_rank(), distributed.get_world_size()
    entry = zoo.get("gpt2-tiny", device=device)
    inputs, _ = entry.make_batch(rank)
    plans = rockmate.distributed.apply(
        entry.model,
        options.budget,
        sample=inputs,
        loss=entry.loss,
        mesh=init_device_mesh(device.type, (size,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16 if options.bf16 else None),
    )
    print(f"rank {rank} of {size}: {plans}", flush=True)

    optimizer = torch.optim.AdamW(entry.model.parameters(), lr=3e-3)  # of this rank's part of each parameter
    for step in range(1, options.steps + 1):
        inputs, target = entry.make_batch(size * (step % 2) + rank)  # of this rank alone
        loss = entry.criterion(entry.model(*inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        distributed.all_reduce(loss := loss.detach())
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step:3}: loss {loss.item() / size:.3f}", flush=True)
    distributed.barrier()  # gloo may abort a process that ends long before the others
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
