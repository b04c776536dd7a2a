"""Each model in a process of its own: what goes wrong in one is a reason in its row, and ends nothing else."""

from __future__ import annotations

import multiprocessing
import resource
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers

MOST_BYTES = 12 << 30  # of address space: a configuration that grew by mistake fails alone
# What takes seconds to import, once for all processes; a language model of the library imports most of the rest.
PRELOADED = ["rockmate", "benchmarks.families", "transformers.models.llama.modeling_llama"]


def preload() -> None:
    """Have processes begin with what takes seconds to import."""
    multiprocessing.set_forkserver_preload(PRELOADED)


def _work(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int, told: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    try:
        told.send(function(*arguments))
    except Exception as error:  # noqa: BLE001  whatever stops one is the reason in its row
        told.send(f"{type(error).__name__}: {error}")


def isolated(function: Callable[..., Any], arguments: tuple[Any, ...], threads: int, most_seconds: float) -> Any:
    """What `function` returns in a process of its own; as text, why there is nothing: what it raised, or its end."""
    context = multiprocessing.get_context("forkserver")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(function, arguments, threads, sending))
    process.start()
    sending.close()
    found: Any = f"took more than {most_seconds:g} s"
    try:
        if receiving.poll(most_seconds):
            found = receiving.recv()
    except EOFError:
        process.join()
        found = f"its process ended with code {process.exitcode}"
    finally:
        process.kill()
        process.join()
    return found
