"""The endpoints that concern the fleet as a whole, under vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from splitroll.errors import ConfigError
from splitroll.rollout import Rollout
from splitroll.serve.metrics import CONTENT_TYPE, Metrics

if TYPE_CHECKING:
    from splitroll.serve.core import FleetCore, FrontEnd


_ASK_TIMEOUT_S = 5.0


class AbortRequest(BaseModel):
    """The body of `/abort_requests`."""

    model_config = ConfigDict(extra="forbid")
    request_ids: list[str] | None = None


def control_router(rollout: Rollout, core: FleetCore, client: FrontEnd) -> APIRouter:
    """Return the control endpoints of a fleet."""
    router = APIRouter()
    fleet, told = rollout.fleet, Metrics(rollout)

    @router.get("/health")
    async def health() -> JSONResponse:
        """Whether any engine serves."""
        engines = {name: member.state.value for name, member in fleet.members.items()}
        return JSONResponse({"engines": engines}, status_code=200 if fleet.ready() else 503)

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus' series of the fleet, and of its engines."""
        return Response(await told.text(), media_type=CONTENT_TYPE)

    @router.get("/get_world_size")
    async def get_world_size(include_dp: bool = True) -> dict[str, int]:
        """Workers of all engines together."""
        return {"world_size": sum(engine.info.world_size for engine in fleet.ready())}

    @router.get("/weight_info")
    async def weight_info() -> dict[str, Any]:
        """The weight version that serves."""
        return {"weight_version": await core.get_weight_version_async()}

    @router.get("/is_paused")
    async def is_paused() -> dict[str, bool]:
        return {"is_paused": rollout.is_paused}

    @router.post("/pause")
    async def pause(
        mode: Annotated[Literal["abort", "wait", "keep"], Query()] = "abort",
        clear_cache: Annotated[bool, Query()] = True,
    ) -> JSONResponse:
        """Let nothing be generated on any engine until `/resume`.

        Args:
            mode: what becomes of what is under way: it ends as it is, or is waited for; "keep" is
                refused.
            clear_cache: drop prefix caches as well.
        """
        if mode == "keep":
            return _error(400, "a fleet pauses with mode=wait or mode=abort", "BadRequestError")
        try:
            await rollout.pause(abort=mode == "abort")
        except ConfigError as exc:
            return _error(409, str(exc), "ConflictError")
        except TimeoutError:
            limit_s = rollout.config.weights.timeout_s
            message = f"samples did not end in {limit_s:g} s; the fleet stays paused"
            return _error(504, message, "TimeoutError")
        cleared = clear_cache and await core.reset_prefix_cache_async()
        return JSONResponse({"status": "paused", "cache_cleared": cleared})

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        rollout.resume()
        return {"status": "resumed"}

    @router.post("/abort_requests")
    async def abort_requests(request: Request) -> JSONResponse:
        """End requests as they are: those of {"request_ids": [...]}; all, without a body."""
        try:
            asked = AbortRequest.model_validate_json(await request.body() or b"{}")
        except ValidationError:
            message = 'the body is {"request_ids": [...]}, or empty to end all'
            return _error(400, message, "BadRequestError")
        states = client.output_processor.request_states
        if asked.request_ids:
            await client.abort(asked.request_ids)
            return JSONResponse({"status": "aborted", "aborted": len(asked.request_ids)})
        every = list(states)
        await client.abort([*every, *client.output_processor.parent_requests], internal=True)
        return JSONResponse({"status": "aborted", "aborted": len(every)})

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> JSONResponse:
        """Drop the prefix caches of all engines; 409 where one has blocks in use."""
        done = await core.reset_prefix_cache_async(reset_running_requests)
        if done:
            return JSONResponse({"status": "reset"})
        message = "an engine has KV blocks in use: pause the fleet, or wait for its requests"
        return _error(409, message, "ConflictError")

    @router.get("/server_info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
        """What serves, in the form that clients of vLLM look at."""
        counters = await fleet.counters_within(_ASK_TIMEOUT_S)
        return {
            "vllm_config": {
                "model": rollout.facts.name,
                "weight_transfer_config": None,  # its endpoints are not served
                "parallel_config": {"world_size": (await get_world_size())["world_size"]},
            },
            "engines": {
                engine.info.name: {
                    "role": engine.info.role.value,
                    "dtype": engine.info.dtype,
                    "max_num_seqs": engine.info.max_num_seqs,
                    "kv_blocks": engine.info.num_blocks,
                    "block_size": engine.info.block_size,
                    "generated_tokens": counters[engine.info.name].generated_tokens,
                }
                for engine in fleet.ready()
                if engine.info.name in counters
            },
        }

    return router


def _error(status: int, message: str, kind: str) -> JSONResponse:
    error = {"message": message, "type": kind, "param": None, "code": status}
    return JSONResponse({"error": error}, status_code=status)
