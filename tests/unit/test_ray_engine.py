"""The driver's side of an engine in an actor, over an actor that is faked: what is told reaches who
waits for it, and nobody waits for an actor that tells nothing more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from splitroll.engines.protocol import DecodeOutput, DecodeRequest, FirstToken
from splitroll.engines.ray_engine import RayEngine
from splitroll.errors import EngineDied, LegError, SplitrollError
from splitroll.types import SamplingParams

OUTPUT = DecodeOutput((5,), (-1.0,), "x", "length", 0, 0.0, 0.0, 0.0, ())


class Method:
    """A method of an actor's handle."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def options(self, **_: Any) -> Method:
        return self

    def remote(self, *args: Any) -> Any:
        return self._call(*args)


class FakeActor:
    """Takes requests, and tells what a test puts into `told`."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.calls: list[str] = []
        self.told: asyncio.Queue[Any] = asyncio.Queue()
        self.fails: Exception | None = None
        self.decode = Method(self._decode)
        self.abort = Method(self._abort)
        self.events = Method(self._events)
        self.close = Method(self._nothing)

    async def _nothing(self, *args: Any) -> None: ...

    async def _abort(self, request_ids: Sequence[str]) -> None:
        self.calls.append(f"abort {','.join(request_ids)}")

    def _decode(self, requests: Sequence[DecodeRequest]) -> Any:
        if self.fails is not None:
            raise self.fails
        self.batches.append([request.request_id for request in requests])
        self.calls.append(f"decode {','.join(self.batches[-1])}")
        return self._nothing()

    async def _events(self) -> AsyncIterator[Any]:
        while True:
            told = await self.told.get()
            if isinstance(told, Exception):
                raise told
            reference: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
            reference.set_result(told)
            yield reference


class FakePlace:
    """What the cluster keeps for an engine."""

    def release(self) -> None: ...


def opened(actor: FakeActor) -> RayEngine:
    engine = RayEngine("e", actor, FakePlace())
    engine._following = asyncio.create_task(engine._follow())
    return engine


async def sample(engine: RayEngine, name: str) -> list[Any]:
    request = DecodeRequest(name, (1, 2), SamplingParams(max_tokens=1), 0)
    return [event async for event in engine.decode(request)]


async def test_what_is_told_reaches_who_waits_for_it() -> None:
    actor = FakeActor()
    engine = opened(actor)
    samples = [asyncio.create_task(sample(engine, name)) for name in "ab"]
    await asyncio.sleep(0.01)
    assert actor.batches == [["a", "b"]], "those of one turn of the loop go together"
    actor.told.put_nowait([("a", FirstToken(0, 0)), ("b", LegError("e", "no")), ("gone", OUTPUT)])
    actor.told.put_nowait([("a", OUTPUT), ("a", None), ("b", None)])
    assert await asyncio.wait_for(samples[0], 2) == [FirstToken(0, 0), OUTPUT]
    with pytest.raises(LegError, match="no"):
        await asyncio.wait_for(samples[1], 2)
    assert engine._samples == {}
    await engine.close()


async def test_an_abort_does_not_overtake_its_request() -> None:
    actor = FakeActor()
    engine = opened(actor)
    waiting = asyncio.create_task(sample(engine, "a"))
    await asyncio.sleep(0)
    await engine.abort(["a"])
    assert actor.calls == ["decode a", "abort a"]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    await engine.close()


@pytest.mark.parametrize("how", ["closed", "stream ends", "stream breaks"])
async def test_nobody_waits_for_an_actor_that_tells_nothing_more(how: str) -> None:
    actor = FakeActor()
    engine = opened(actor)
    waiting = asyncio.create_task(sample(engine, "a"))
    await asyncio.sleep(0.01)
    if how == "closed":
        await engine.close()
    else:
        actor.told.put_nowait(ValueError("odd") if how == "stream breaks" else EngineDied("e", "x"))
    for _ in range(2):  # who waits, and who comes later
        with pytest.raises(EngineDied):
            await asyncio.wait_for(waiting, 2)
        waiting = asyncio.create_task(sample(engine, "b"))
    await asyncio.gather(waiting, return_exceptions=True)
    await engine.close()


async def test_what_does_not_reach_the_actor_fails_just_that() -> None:
    actor = FakeActor()
    engine = opened(actor)
    actor.fails = ValueError("the object store is full")
    with pytest.raises(SplitrollError, match="object store is full"):
        await asyncio.wait_for(sample(engine, "a"), 2)
    actor.fails = None
    actor.told.put_nowait([("b", OUTPUT), ("b", None)])
    waiting = asyncio.create_task(sample(engine, "b"))
    await asyncio.sleep(0.01)
    actor.told.put_nowait([("b", OUTPUT), ("b", None)])
    assert await asyncio.wait_for(waiting, 2) == [OUTPUT]
    await engine.close()
