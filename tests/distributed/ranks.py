"""Processes of one gloo group, started once and kept: each test's functions run on all of them at the same time."""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
from torch import distributed

TIMEOUT_S = 240
PLACE = torch.device("cpu")  # of this rank's models and batches
_THREADS = 1  # of each rank: sums are split among threads, so that their number is part of what a result is


class Ranks:
    """`size` processes. A failure ends them all, and the next call starts anew.

    `begin` makes the group in each, from a store, the rank, their number, and how long to wait.
    """

    def __init__(self, size: int, begin: Callable[[Any, int, int, timedelta], None] | None = None) -> None:
        self.size = size
        self._begin = begin or _begin_gloo
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """What ``function(*arguments)`` returns on each rank. Raises `AssertionError` with the first traceback."""
        if not self._processes:
            self._start()
        try:
            for pipe in self._pipes:
                pipe.send((function, arguments))
            answers = self._answers()
        except BaseException:
            self.stop(force=True)
            raise
        return [answers[rank] for rank in range(self.size)]

    def _answers(self) -> dict[int, Any]:
        """As they come: where one rank fails, its fellows may wait for it in vain."""
        waiting = dict(zip(self._pipes, range(self.size), strict=True))
        answers: dict[int, Any] = {}
        while waiting:
            ready = wait(list(waiting), TIMEOUT_S)
            assert ready, f"ranks {sorted(waiting.values())} gave no answer in {TIMEOUT_S} s"
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    failure, answers[rank] = pipe.recv()
                except EOFError:
                    raise AssertionError(f"rank {rank} ended with code {self._processes[rank].exitcode}") from None
                assert failure is None, f"\nrank {rank}:\n{failure}"
        return answers

    def _start(self) -> None:
        context = mp.get_context("spawn")
        self._folder = tempfile.TemporaryDirectory(prefix="ranks")
        store = Path(self._folder.name) / "store"
        for rank in range(self.size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(there, rank, self.size, str(store), self._begin), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)

    def stop(self, *, force: bool = False) -> None:
        """End the processes: by a word, or, with `force`, by a signal."""
        for pipe in self._pipes:
            if not force:
                pipe.send(None)
            pipe.close()
        for process in self._processes:
            if force:
                process.kill()
            process.join(timeout=2)  # what Python and its libraries take to end is of no interest here
            process.kill()
            process.join()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None


def _begin_gloo(store: Any, rank: int, size: int, timeout: timedelta) -> None:
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)


def _serve(
    pipe: Connection, rank: int, size: int, store_path: str, begin: Callable[[Any, int, int, timedelta], None]
) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if os.uname().sysname == "Darwin" else "lo")
    torch.set_num_threads(_THREADS)
    begin(distributed.FileStore(store_path, size), rank, size, timedelta(seconds=TIMEOUT_S // 2))
    while (work := pipe.recv()) is not None:
        function, arguments = work
        torch.manual_seed(rank)
        try:
            pipe.send((None, function(*arguments)))
        except BaseException:  # noqa: BLE001, told to the test
            with contextlib.suppress(BrokenPipeError):  # another rank's failure was heard first
                pipe.send((traceback.format_exc(), None))
            break
    distributed.destroy_process_group()
