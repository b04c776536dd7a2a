"""Calls made in a process of their own, while this one goes on.

The search in a back end cannot be interrupted from Python, and it prints from its own code. Apart, Ctrl-C takes effect
at once, what is printed goes nowhere, and another core is at work. Where no process can be started, calls are made
here. A call that raises, or that ends the process, gives no answer; what went wrong is told in a warning, once.
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
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO, Any

Call = tuple[Callable[..., Any], tuple[Any, ...]]

# Run before anything is imported. The lowest priority alone leaves its process a core of two for a while after each
# wait of a thread of others; one that is idle by policy is interrupted at once.
_YIELD = """
import contextlib, os
with contextlib.suppress(OSError, AttributeError):
    os.nice(19)
with contextlib.suppress(OSError, AttributeError):
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
"""


class SideProcessWarning(UserWarning):
    """A call made in a process of its own failed: a search went on without its answer."""


@dataclass(frozen=True, slots=True)
class _Answered:
    value: Any


@dataclass(frozen=True, slots=True)
class _Raised:
    told: str  # the exception as text: not every exception can be pickled


@dataclass(frozen=True, slots=True)
class _Gone:
    """The process has ended."""


_Reply = _Answered | _Raised | _Gone


class SideProcess:
    """A process that makes one call after the other; `close` it, or use it in a `with` statement.

    Functions, arguments and answers must be picklable. Of failures each is told once (`SideProcessWarning`).
    `yielding`, it and what it starts run when nothing else has to be done, where the system knows such processes.
    """

    def __init__(self, *, yielding: bool = False) -> None:
        self._yielding = yielding
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
        self._deadline = 0.0
        self._call = ""  # the name of what was called last
        self._interrupted = False
        self._told: set[str] = set()

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
        self._call, self._interrupted = getattr(function, "__qualname__", repr(function)), False
        try:
            stream = self._launch()
            pickle.dump((function, arguments), stream, pickle.HIGHEST_PROTOCOL)
            stream.flush()
        except (OSError, ValueError):  # no process may be started here, or it has gone
            self.close()
            self._answers.put(_reply(function, arguments))

    def answered(self) -> bool:
        """Whether `wait` would return at once."""
        return not self._answers.empty() or time.monotonic() >= self._deadline

    def wait(self, otherwise: Any) -> Any:
        """The answer to the call started last; `otherwise` if it failed, or did not end within its time limit.

        Warns (`SideProcessWarning`) of a call that raised, or that ended the process, unless `interrupt` was called.
        """
        try:
            reply = self._answers.get(timeout=max(0.0, self._deadline - time.monotonic()))
        except queue.Empty:
            self.close()
            return otherwise
        if isinstance(reply, _Answered):
            return reply.value
        if isinstance(reply, _Raised):
            self._tell(f"raised {reply.told}")
            return otherwise
        status = None if self._process is None else self._process.wait()
        self.close()
        self._tell(f"ended the process with status {status}")  # a negative one is that of a signal: -9, out of memory
        return otherwise

    def _tell(self, failure: str) -> None:
        if self._interrupted or failure in self._told:
            return
        self._told.add(failure)
        warnings.warn(
            f"the call of {self._call} in a process of its own {failure}. The search goes on without its answer: the "
            "plan is a valid one, but may be slower, and less may be proven of it.",
            SideProcessWarning,
            stacklevel=3,
        )

    def interrupt(self, grace_s: float) -> None:
        """Tell the call made there to end, as Ctrl-C would; `wait` gives what it answers within `grace_s` seconds."""
        self._deadline = min(self._deadline, time.monotonic() + grace_s)
        self._interrupted = True
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
                [sys.executable, "-c", (_YIELD if self._yielding else "") + f"from {__name__} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                # Ctrl-C in the terminal is for this process alone. Not by a session of its own: Linux shares its cores
                # evenly between sessions, whatever the priorities of their processes.
                process_group=0,
            )
            listener = threading.Thread(target=_listen, args=(self._process.stdout, self._answers), daemon=True)
            listener.start()
        stream = self._process.stdin
        assert stream is not None
        return stream


def _listen(stream: IO[bytes], answers: queue.SimpleQueue[_Reply]) -> None:
    """Pass on what a process answers, and that it has gone."""
    with contextlib.suppress(EOFError, OSError, ValueError, pickle.UnpicklingError):
        while True:
            answers.put(pickle.load(stream))
    answers.put(_Gone())


def _reply(function: Callable[..., Any], arguments: tuple[Any, ...]) -> _Reply:
    """What a call returned, or raised."""
    try:
        return _Answered(function(*arguments))
    except Exception as error:  # noqa: BLE001  whatever it is, the other side tells it
        return _Raised("".join(traceback.format_exception_only(error)).strip() + _place(error))


def _place(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno})" if len(frames) > 1 else ""


def serve(calls: IO[bytes], answers: IO[bytes]) -> None:
    """Make calls until there are no more."""
    while True:
        try:
            function, arguments = pickle.load(calls)
        except EOFError:
            return
        reply = _reply(function, arguments)
        try:
            packed = pickle.dumps(reply, pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # noqa: BLE001  objects may raise anything when they are pickled
            packed = pickle.dumps(_Raised(f"{type(error).__name__}: the answer cannot be sent: {error}"))
        answers.write(packed)
        answers.flush()


def main() -> None:
    """What the process runs: standard output is for answers alone, whatever back ends print to it."""
    with os.fdopen(os.dup(1), "wb") as answers:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        serve(sys.stdin.buffer, answers)
