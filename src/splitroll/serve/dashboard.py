"""The page that shows what goes on, and the events that keep it alive."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, StreamingResponse

from splitroll.engines.protocol import Engine, EngineLoad
from splitroll.errors import SplitrollError
from splitroll.rollout import Rollout
from splitroll.serve.refused import Refused
from splitroll.types import RouteKind, Sample

_KEPT = 2000
"""Samples that can be looked at, at most; and their tokens, prompts included."""
_KEPT_TOKENS = 2_000_000
_EVERY_S = 0.5
_ASK_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Seen:
    """A sample that ended, and when, in seconds of the epoch."""

    number: int
    end_s: float
    sample: Sample

    def to_json(self) -> dict[str, Any]:
        """Return what the page draws: the phases as spans on engines, newest last."""
        sample, timing = self.sample, self.sample.timing
        begun_s = self.end_s - timing.decode_s
        arrived_s = begun_s - timing.transfer_s
        route = sample.route
        spans: list[list[Any]] = [
            [route.last, "transfer", arrived_s, begun_s],
            [route.last, "decode", begun_s, self.end_s],
        ]
        if route.kind is not RouteKind.SHARED:  # its leader's is drawn
            spans.insert(0, [route.prefill, "prefill", arrived_s - timing.prefill_s, arrived_s])
        return {
            "number": self.number,
            "id": sample.id,
            "sample": sample.sample,
            "route": route.kind.value,
            "prefill": route.prefill,
            "decode": route.last,
            "finish_reason": sample.finish_reason,
            "prompt_tokens": len(sample.prompt_token_ids),
            "tokens": len(sample.token_ids),
            "weight_version": sample.weight_version,
            "score": sample.score,
            "queued_s": timing.queued_s,
            "prefill_s": timing.prefill_s,
            "transfer_s": timing.transfer_s,
            "decode_s": timing.decode_s,
            "spans": spans,
        }


class Recorder:
    """Keeps the newest samples, numbered from 1."""

    def __init__(self, rollout: Rollout) -> None:
        self._numbers = itertools.count(1)
        self._seen: deque[Seen] = deque(maxlen=_KEPT)
        self._tokens = 0
        rollout.dispatcher.on_sample(self.note)

    def note(self, sample: Sample) -> None:
        if len(self._seen) == _KEPT:
            self._tokens -= _tokens(self._seen[0].sample)
        self._seen.append(Seen(next(self._numbers), time.time(), sample))
        self._tokens += _tokens(sample)
        while self._tokens > _KEPT_TOKENS and len(self._seen) > 1:
            self._tokens -= _tokens(self._seen.popleft().sample)

    def since(self, number: int) -> list[Seen]:
        """Return the samples that came after one."""
        newer = itertools.takewhile(lambda seen: seen.number > number, reversed(self._seen))
        return list(newer)[::-1]

    def find(self, number: int) -> Seen | None:
        return next((seen for seen in self._seen if seen.number == number), None)


def _tokens(sample: Sample) -> int:
    return len(sample.prompt_token_ids) + len(sample.token_ids)


def dashboard_router(rollout: Rollout) -> APIRouter:
    """Return the page's endpoints."""
    router = APIRouter()
    recorder = Recorder(rollout)
    page = files("splitroll.serve").joinpath("static/dashboard.html").read_text()

    @router.get("/dashboard", response_class=HTMLResponse)
    async def dashboard() -> str:
        """The page. It holds no data: that comes with the events."""
        return page

    @router.get("/dashboard/events")
    async def events(request: Request, once: bool = False) -> StreamingResponse:
        """Server-sent events: the engines now, and the samples since the event before."""

        async def stream() -> AsyncGenerator[str, None]:
            last = 0
            while not (closing(request) or await request.is_disconnected()):
                new = recorder.since(last)
                last = new[-1].number if new else last
                event = {**await _state(rollout), "samples": [seen.to_json() for seen in new]}
                yield f"data: {json.dumps(event)}\n\n"
                if once:
                    return
                await asyncio.sleep(_EVERY_S)

        return StreamingResponse(stream(), media_type="text/event-stream")

    @router.get("/dashboard/samples/{number}")
    async def sample(number: int) -> JSONResponse:
        """One sample whole, with its texts."""
        seen = recorder.find(number)
        if seen is None:
            message = f"sample {number} is not among the newest {_KEPT}"
            raise Refused(404, "NotFoundError", message)
        found = seen.sample
        prompt = await asyncio.to_thread(rollout.tokenizer.decode, found.prompt_token_ids)
        text = await asyncio.to_thread(rollout.tokenizer.decode, found.token_ids)
        whole = {"prompt": prompt, "text": text, "why": dict(found.route.why)}
        return JSONResponse({**seen.to_json(), **whole})

    return router


def closing(request: Request) -> bool:
    """Return whether the service is about to end."""
    return bool(getattr(request.app.state, "closing", False))


async def _state(rollout: Rollout) -> dict[str, Any]:
    """Return the fleet as it is."""
    fleet, stats = rollout.fleet, rollout.dispatcher.stats
    ready = {engine.info.name: engine for engine in fleet.ready()}
    loads = dict(
        zip(ready, await asyncio.gather(*(_load(one) for one in ready.values())), strict=True)
    )
    engines = []
    for name, member in fleet.members.items():
        engine, load = ready.get(name), loads.get(name)
        engines.append(
            {
                "name": name,
                "role": member.spec.role.value,
                "state": member.state.value,
                "restarts": member.restarts,
                "running": load.running if load else None,
                "waiting": load.waiting if load else None,
                "held_blocks": load.held_blocks if load else None,
                "open_handles": load.pinned if load else None,
                "blocks": engine.info.num_blocks if engine else None,
                "tokens_in_flight": rollout.dispatcher.load.get(name, 0),
            }
        )
    return {
        "now": time.time(),
        "model": rollout.facts.name,
        "weight_version": fleet.weight_version,
        "paused": rollout.is_paused,
        "engines": engines,
        "routes": dict(stats.routes),
        "handoffs": stats.handoffs,
        "moves": stats.moves,
        "retries": stats.retries,
        "recomputed_tokens": stats.recomputed_tokens,
    }


async def _load(engine: Engine) -> EngineLoad | None:
    try:
        async with asyncio.timeout(_ASK_TIMEOUT_S):
            return await engine.load()
    except (SplitrollError, TimeoutError):
        return None  # the fleet's own watch says what became of it
