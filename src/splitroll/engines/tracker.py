"""Python's resource tracker of an engine: it must outlive every other process of the engine.

It removes the shared memory and the semaphores of those that died, as soon as the last has. Ray
kills all that is in a worker's process group 200 ms after the worker is gone (ray 2.60,
`process_group_cleanup_enabled`), which on a busy machine is too early for it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from multiprocessing import resource_tracker, util
from unittest import mock


def start_apart() -> None:
    """Start this process's resource tracker in a process group of its own.

    Must run before anything starts it otherwise; the children of this process share it.
    """
    with mock.patch.object(util, "spawnv_passfds", _spawn_apart):
        resource_tracker.ensure_running()


def _spawn_apart(path: bytes, args: list[str], passed: Sequence[int]) -> int:
    kept = [(os.POSIX_SPAWN_DUP2, fd, fd) for fd in passed]
    return os.posix_spawn(path, args, os.environ, file_actions=kept, setpgroup=0)
