"""The resource tracker of an engine cleans up although its engine's process group is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = """
import multiprocessing, os, sys, time
from multiprocessing import resource_tracker
from splitroll.engines import tracker

if sys.argv[1] == "apart":
    tracker.start_apart()
context = multiprocessing.get_context("spawn")
lock = context.Lock()
print(lock._semlock.name, resource_tracker._resource_tracker._pid, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("where", ["apart", "in the group"])
def test_a_killed_process_group_leaves_semaphores_only_with_its_tracker(where: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, where],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    name, tracker = process.stdout.readline().split()
    semaphore = Path(f"/dev/shm/sem.{name[1:]}")
    try:
        assert semaphore.exists()
        assert (os.getpgid(int(tracker)) == process.pid) is (where != "apart")
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(10)
        end = time.monotonic() + (10 if where == "apart" else 1)
        while semaphore.exists() and time.monotonic() < end:
            time.sleep(0.02)
        assert semaphore.exists() is (where != "apart")
    finally:
        process.kill()
        semaphore.unlink(missing_ok=True)
        process.stdout.close()
