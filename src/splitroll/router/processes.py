"""Servers as child processes: started in parallel, ended together."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncGenerator, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from splitroll.errors import FleetError
from splitroll.router.tied import tied

_POLL_S = 0.2
_POLL_TIMEOUT_S = 5.0
_END_TIMEOUT_S = 20.0
_TOLD_LINES = 20
_TAIL_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Command:
    """A server to start.

    Attributes:
        ready_url: what answers 200 once it serves.
        log: the file that its output goes to.
        env: variables on top of this process's own.
        cores: CPU cores to stay on; empty leaves the choice to the system.
    """

    name: str
    argv: Sequence[str]
    ready_url: str
    log: Path
    env: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] = ()


@contextlib.asynccontextmanager
async def running(
    commands: Sequence[Command], *, timeout_s: float
) -> AsyncGenerator[list[Child], None]:
    """Start servers in parallel, wait until all are ready, and end them at exit.

    Yields their processes, in the order of `commands`. None outlives this process, or the thread
    that runs this.

    Raises:
        FleetError: when one ends, or is not ready in time, with the last lines of its log.
    """
    children: list[Child] = []
    try:
        for command in commands:
            children.append(await Child.start(command))
        await all_of(child.ready(timeout_s) for child in children)
        yield children
    finally:
        await all_of(child.end() for child in children)


async def all_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all works at once; the first error cancels the others and is raised."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Child:
    """One server process."""

    def __init__(self, command: Command, process: asyncio.subprocess.Process) -> None:
        self._command = command
        self._process = process
        self.pid = process.pid

    @classmethod
    async def start(cls, command: Command) -> Child:
        command.log.parent.mkdir(parents=True, exist_ok=True)
        with command.log.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *tied(command.argv, command.cores),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | command.env,
                start_new_session=True,  # an interrupt at the terminal reaches us alone
            )
        return cls(command, process)

    async def ready(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        timeout = aiohttp.ClientTimeout(total=_POLL_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while self._process.returncode is None:
                if await self._answers(session):
                    return
                if time.monotonic() > deadline:
                    raise self._failed(f"it was not ready in {timeout_s:g} s")
                await asyncio.sleep(_POLL_S)
        raise self._failed(f"it ended with exit code {self._process.returncode}")

    async def ended(self) -> str:
        """Return when the process has ended: with what, and the last lines of its log."""
        code = await self._process.wait()
        return f"{self._command.name} ended with exit code {code}; {self._last_words()}"

    async def end(self) -> None:
        process = self._process
        if process.returncode is None:
            process.terminate()
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_END_TIMEOUT_S):
                    await process.wait()
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too
        await process.wait()

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(self._command.ready_url) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    def _failed(self, cause: str) -> FleetError:
        return FleetError(f"{self._command.name} did not start: {cause}; {self._last_words()}")

    def _last_words(self) -> str:
        return f"its log ends with:\n{_last_lines(self._command.log) or '(nothing)'}"


def _last_lines(log: Path) -> str:
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - _TAIL_BYTES))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-_TOLD_LINES:])
