"""Makes an engine's processes forks of its actor, on CPU; on GPUs vLLM spawns them."""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing
import os
import signal
import socket
from typing import Any

_PR_SET_PDEATHSIG = 1
_used = False


def fork_from_actor() -> None:
    """Make the engine's processes forks of this actor, that has imported vLLM: on CPU each would
    spend more on that than on all else of its start.

    vLLM spawns them from a Ray actor, since they might use Ray, which only its Ray executor does;
    and on CPU, where it would set each process's OpenMP threads, which ours have from the actor.
    Nothing that this process has computed may have started such threads.
    """
    global _used
    from vllm import plugins
    from vllm.v1.engine import coordinator, utils
    from vllm.v1.executor import multiproc_executor

    _used = True
    forks = Forks(plugins)
    os.register_at_fork(before=forks.before, after_in_child=forks.begin)
    for module in (coordinator, utils, multiproc_executor):
        module.get_mp_context = lambda: multiprocessing.get_context("fork")


def are_used() -> bool:
    """Return whether this process, or one that it is a fork of, called `fork_from_actor`."""
    return _used


def die_with(parent: int | None) -> None:
    """End this process with its parent. EngineCore outlives one that dies hard, and keeps its
    ports and memory."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class Forks:
    """Makes a fork what a process that was spawned is, as far as it matters here."""

    def __init__(self, plugins: Any) -> None:
        self._plugins = plugins
        self._parent = 0

    def before(self) -> None:
        self._parent = os.getpid()

    def begin(self) -> None:
        die_with(self._parent)
        _answer_signals_as_usual()
        _listen_to_nothing()
        self._plugins.plugins_loaded = False  # `process` is one, and acts in the forks


def _answer_signals_as_usual() -> None:
    """Ray's workers have their own handlers."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT})


def _listen_to_nothing() -> None:
    """Else ports of the parent's, as its Ray worker's, would stay open with nobody to answer. Their
    numbers are kept, since objects that were copied may yet close them."""
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(number)) as one:
                listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if listens:
                os.dup2(null, number, inheritable=False)
    os.close(null)
