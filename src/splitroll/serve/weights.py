"""vLLM's weight-transfer endpoints, for a fleet as for one server; see `splitroll.driven`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body

from splitroll.driven import DrivenUpdates
from splitroll.rollout import Rollout
from splitroll.serve.refused import Refused

_RPC_TIMEOUT_S = 600.0
_MOST_VERSION_DIGITS = 18
_OF_NOTHING = hashlib.sha256().hexdigest()
"""What a worker says of a parameter that its layer has taken into another form and emptied, as all
linear layers on CPU do."""


def weights_router(rollout: Rollout, driven: DrivenUpdates) -> APIRouter:
    """Return the endpoints by which a trainer changes weights, and looks at them."""
    router = APIRouter()

    @router.post("/init_weight_transfer_engine")
    async def init_weight_transfer_engine(
        init_info: Annotated[dict[str, Any], Body(embed=True)],
    ) -> Mapping[str, Any]:
        """Have all engines' workers join the trainer's group; `rank_offset` is the first one's."""
        return await driven.init(init_info)

    @router.post("/shutdown_weight_transfer_engine")
    async def shutdown_weight_transfer_engine() -> Mapping[str, Any]:
        """Have them leave it."""
        return await driven.shutdown()

    @router.post("/start_weight_update")
    async def start_weight_update() -> Mapping[str, Any]:
        """Begin an update."""
        return await driven.start()

    @router.post("/update_weights")
    async def update_weights(
        update_info: Annotated[dict[str, Any], Body(embed=True)],
    ) -> Mapping[str, Any]:
        """Take a part of it: what vLLM's transports take, or {"folder": ...} with shm and disk."""
        return await driven.update(update_info)

    @router.post("/finish_weight_update")
    async def finish_weight_update(
        weight_version: Annotated[str | None, Body(embed=True)] = None,
    ) -> Mapping[str, Any]:
        """End it; the version is a whole number above the present one, or one more than it."""
        if weight_version is None:
            return await driven.finish(None)
        if not weight_version.isascii() or not weight_version.isdigit():
            raise _no_version(weight_version)
        if len(weight_version) > _MOST_VERSION_DIGITS:
            raise _no_version(weight_version)
        return await driven.finish(int(weight_version))

    @router.post("/weight_checker")
    async def weight_checker(
        action: Annotated[Literal["checksum", "compare"], Body(embed=True)],
        baseline: Annotated[dict[str, str] | None, Body(embed=True)] = None,
    ) -> dict[str, Any]:
        """Checksums of what engines hold, by engine and parameter; or where a baseline differs.

        A parameter whose layer keeps a form of its own has no checksum, and is `unchecked`: with
        any, no difference elsewhere is no match, and no mismatch either: null.
        """
        if action == "compare" and baseline is None:
            message = "action=compare needs a baseline: what action=checksum returned"
            raise Refused(400, "BadRequestError", message)
        found: dict[str, str] = {}
        for name, answers in (await _ask_workers(rollout, "compute_weight_checksums")).items():
            for answer in answers:
                found |= {f"{name}/{key}": value for key, value in answer.items()}
        checksums = {name: value for name, value in found.items() if value != _OF_NOTHING}
        unchecked = sorted(found.keys() - checksums.keys())
        if action == "checksum":
            return {"checksums": checksums, "unchecked": unchecked}
        baseline = baseline or {}
        names = sorted((checksums.keys() | baseline.keys()).difference(unchecked))
        differing = [name for name in names if checksums.get(name) != baseline.get(name)]
        match = False if differing else None if unchecked else True
        return {"match": match, "mismatches": differing, "unchecked": unchecked}

    @router.post("/collective_rpc")
    async def collective_rpc(
        method: Annotated[str, Body(embed=True)],
        args: Annotated[list[Any] | None, Body(embed=True)] = None,
        kwargs: Annotated[dict[str, Any] | None, Body(embed=True)] = None,
        timeout: Annotated[float, Body(embed=True, gt=0, le=_RPC_TIMEOUT_S)] = _RPC_TIMEOUT_S,
    ) -> dict[str, Any]:
        """Call a method of all engines' workers by name; answers are in the engines' order. Off
        unless the configuration says serve.collective_rpc: true."""
        if not rollout.config.serve.collective_rpc:
            message = "/collective_rpc is off: see serve.collective_rpc"
            raise Refused(404, "NotFoundError", message)
        given = args or [], kwargs or {}
        answers = await _ask_workers(rollout, method, *given, timeout_s=timeout)
        return {"results": [_plain(one) for many in answers.values() for one in many]}

    return router


async def _ask_workers(
    rollout: Rollout,
    method: str,
    args: list[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    timeout_s: float = _RPC_TIMEOUT_S,
) -> dict[str, list[Any]]:
    """Return what the workers of every engine answer, by the engine's name."""
    engines = rollout.fleet.ready()
    asked = [engine.call_workers(method, *(args or ()), **(kwargs or {})) for engine in engines]
    try:
        async with asyncio.timeout(timeout_s):
            answers = await asyncio.gather(*asked)
    except TimeoutError as exc:
        raise TimeoutError(f"{method}: no answer in {timeout_s:g} s") from exc
    return {e.info.name: answer for e, answer in zip(engines, answers, strict=True)}


def _plain(value: Any) -> Any:
    """Return what vLLM's endpoint makes of an answer."""
    return value if value is None or isinstance(value, dict | list) else str(value)


def _no_version(found: str) -> Refused:
    message = f"weight_version is {found[:40]!r}: it must be a whole number"
    return Refused(400, "BadRequestError", message)
