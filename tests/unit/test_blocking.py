"""The blocking twin: interrupted, it ends its work on the loop before it goes on."""

from __future__ import annotations

import asyncio
import signal
import threading

import pytest

from splitroll.blocking import BlockingRollout


def test_an_interrupt_ends_the_work_before_it_is_raised() -> None:
    rollout = BlockingRollout()
    rollout._thread.start()
    seen: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            seen.append("ended")

    main = threading.main_thread().ident
    assert main is not None
    timer = threading.Timer(0.2, signal.pthread_kill, (main, signal.SIGINT))
    # A shell that runs this in the background has SIGINT ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            rollout._wait(work())
    finally:
        signal.signal(signal.SIGINT, handler)
    assert seen == ["ended"]
    rollout._stop()
    assert not rollout._thread.is_alive()


def test_errors_of_the_work_come_through() -> None:
    rollout = BlockingRollout()
    rollout._thread.start()

    async def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        rollout._wait(fails())
    rollout._stop()


def test_it_must_be_entered_first() -> None:
    with pytest.raises(RuntimeError, match="with statement"):
        BlockingRollout().activity()
