"""Calls made in a process of their own, while this one goes on.

The search in a back end cannot be interrupted from Python, and it prints from its own code. Apart, Ctrl-C takes effect
at once, what is printed goes nowhere, and another core is at work. Where no process can be started, calls are made
here.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO, Any

Call = tuple[Callable[..., Any], tuple[Any, ...]]


class SideProcess:
    """A process that makes one call after the other; `close` it, or use it in a `with` statement.

    Functions, arguments and answers must be picklable.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[tuple[Any, bool]] = queue.SimpleQueue()
        self._deadline = 0.0

    def __enter__(self) -> SideProcess:
        return self

    def __exit__(self, *details: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Start the process, which takes some tenths of a second until it is ready, if there will be calls."""
        with contextlib.suppress(OSError, ValueError):  # `start` will see to it
            self._launch()

    def start(self, time_limit_s: float, function: Callable[..., Any], *arguments: Any) -> None:
        """Begin to make a call, which should end within the time limit; `wait` gives the answer."""
        self._deadline = time.monotonic() + time_limit_s
        try:
            stream = self._launch()
            pickle.dump((function, arguments), stream, pickle.HIGHEST_PROTOCOL)
            stream.flush()
        except (OSError, ValueError):  # no process may be started here, or it has gone
            self.close()
            self._answers.put((function(*arguments), True))

    def answered(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._answers.empty() or time.monotonic() >= self._deadline

    def wait(self, otherwise: Any) -> Any:
        """The answer to the call started last; `otherwise` if it failed, or did not end within its time limit."""
        try:
            answer, answered = self._answers.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            answered = False
        if answered:
            return answer
        self.close()
        return otherwise

    def interrupt(self, grace_s: float) -> None:
        """Tell the call made there to end, as Ctrl-C would; `wait` gives what it answers within `grace_s` seconds."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)
        if self._process is not None:
            with contextlib.suppress(OSError, ValueError):  # it has ended, or this system has no such signal
                self._process.send_signal(signal.SIGINT)

    def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        self._answers = queue.SimpleQueue()
        if process is not None:
            process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # what was not flushed has no reader any more
                    stream.close()  # type: ignore[union-attr]

    def _launch(self) -> IO[bytes]:
        """The stream of calls to the process, started if there is none."""
        if self._process is None:
            path = os.pathsep.join(entry for entry in sys.path if entry)
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C in the terminal is for this process alone
            )
            listener = threading.Thread(target=_listen, args=(self._process.stdout, self._answers), daemon=True)
            listener.start()
        stream = self._process.stdin
        assert stream is not None
        return stream


def _listen(stream: IO[bytes], answers: queue.SimpleQueue[tuple[Any, bool]]) -> None:
    """Pass on what a process answers, and that it has gone."""
    with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
        while True:
            answers.put((pickle.load(stream), True))
    answers.put((None, False))


def serve(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Make calls until there are no more. One that raises ends the process, which the other side will see."""
    while True:
        try:
            function, arguments = pickle.load(calls)
        except EOFError:
            return
        pickle.dump(function(*arguments), answers, pickle.HIGHEST_PROTOCOL)
        answers.flush()


def main() -> None:
    """What the process runs: standard output is for answers alone, whatever back ends print to it."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        serve(sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
