"""Keeps the allocator's costs true to what engines report: a short probe, then all their steps."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

from splitroll.dispatch.allocator import Allocator
from splitroll.engines.protocol import DecodeRequest, Engine, StepStats
from splitroll.errors import SplitrollError
from splitroll.fleet.fleet import Fleet
from splitroll.types import SamplingParams

Learn = Callable[[Engine], Awaitable[None]]

log = logging.getLogger(__name__)

_PROBE_TOKENS = 256
_PROBE_BATCHES = (1, 4)
_PROBE_STEPS = 6
_PROBE_TIMEOUT_S = 60.0
_INTERVAL_S = 0.5
_ANSWER_TIMEOUT_S = 10.0


@contextlib.asynccontextmanager
async def observed(
    fleet: Fleet,
    allocator: Allocator,
    *,
    probe: bool = True,
    tap: Callable[[Sequence[StepStats]], None] = lambda steps: None,
) -> AsyncGenerator[None, None]:
    """Probe every engine, then learn from all that serve as long as this is open.

    Args:
        tap: is shown every step too.
    """

    async def learn(engine: Engine) -> None:
        steps = await engine.steps()
        tap(steps)
        if steps and allocator.books.knows(engine.info.name):
            allocator.observe_steps(allocator.books.number(engine.info.name), steps)

    if probe:
        await asyncio.gather(*(_probe(engine, fleet, learn) for engine in fleet.ready()))
    watching = asyncio.create_task(_watch(fleet, allocator, learn))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _probe(engine: Engine, fleet: Fleet, learn: Learn) -> None:
    """Have an engine compute a prompt and decode a few tokens, alone and in a batch."""
    try:
        async with asyncio.timeout(_PROBE_TIMEOUT_S), fleet.uncounted(engine):
            await engine.steps()
            for batch in _PROBE_BATCHES:
                salt = f"probe-{os.urandom(8).hex()}"
                await asyncio.gather(*(_run(engine, salt, index) for index in range(batch)))
            await learn(engine)
    except (SplitrollError, TimeoutError) as exc:
        # It serves all the same: what it costs will be seen in its work.
        log.warning("no probe of %s: %s: %s", engine.info.name, type(exc).__name__, exc)


async def _run(engine: Engine, salt: str, index: int) -> None:
    tokens = min(_PROBE_TOKENS, engine.info.max_model_len - _PROBE_STEPS - 1)
    request = DecodeRequest(
        request_id=f"{salt}-{index}",
        token_ids=tuple(100 + i % 400 for i in range(tokens)),
        sampling=SamplingParams(max_tokens=_PROBE_STEPS, temperature=0.0, ignore_eos=True),
        seed=0,
        cache_salt=salt,
    )
    async for _ in engine.decode(request):
        pass


async def _watch(fleet: Fleet, allocator: Allocator, learn: Learn) -> None:
    while True:
        await asyncio.sleep(_INTERVAL_S)
        if not allocator.books.load:
            continue
        for engine in fleet.ready():
            # A wall: supervision reports engines that fail; here they only teach nothing.
            with contextlib.suppress(SplitrollError, TimeoutError):
                async with asyncio.timeout(_ANSWER_TIMEOUT_S):
                    await learn(engine)
