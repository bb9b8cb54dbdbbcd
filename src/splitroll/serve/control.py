"""The endpoints that concern the fleet as a whole, under vLLM's names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, ValidationError

from splitroll.rest import PauseMode
from splitroll.rollout import Rollout
from splitroll.serve.metrics import CONTENT_TYPE, Metrics
from splitroll.serve.refused import Refused

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
        mode: Annotated[PauseMode, Query()] = "abort",
        clear_cache: Annotated[bool, Query()] = True,
    ) -> dict[str, Any]:
        """Let nothing be generated on any engine until `/resume`.

        Args:
            mode: what becomes of what is under way: it ends as it is, is waited for, or stands
                still and goes on later.
            clear_cache: drop prefix caches as well, unless what is under way is kept.
        """
        try:
            await rollout.pause(mode)
        except TimeoutError as exc:
            limit_s = rollout.config.weights.timeout_s
            message = f"samples did not end in {limit_s:g} s; the fleet stays paused"
            raise TimeoutError(message) from exc
        cleared = clear_cache and mode != "keep" and await core.reset_prefix_cache_async()
        return {"status": "paused", "cache_cleared": cleared}

    @router.post("/resume")
    async def resume() -> dict[str, str]:
        await rollout.resume()
        return {"status": "resumed"}

    @router.post("/abort_requests")
    async def abort_requests(request: Request) -> dict[str, Any]:
        """End requests as they are: those of {"request_ids": [...]}; all, without a body."""
        try:
            asked = AbortRequest.model_validate_json(await request.body() or b"{}")
        except ValidationError as exc:
            message = 'the body is {"request_ids": [...]}, or empty to end all'
            raise Refused(400, "BadRequestError", message) from exc
        states = client.output_processor.request_states
        if asked.request_ids:
            await client.abort(asked.request_ids)
            return {"status": "aborted", "aborted": len(asked.request_ids)}
        every = list(states)
        await client.abort([*every, *client.output_processor.parent_requests], internal=True)
        return {"status": "aborted", "aborted": len(every)}

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(reset_running_requests: bool = False) -> dict[str, bool]:
        """Drop the prefix caches of all engines; 409 where one has blocks in use."""
        if await core.reset_prefix_cache_async(reset_running_requests):
            return {"success": True}
        message = "an engine has KV blocks in use: pause the fleet, or wait for its requests"
        raise Refused(409, "ConflictError", message)

    @router.get("/server_info")
    async def server_info(config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
        """What serves, in the form that clients of vLLM look at."""
        counters = await fleet.counters_within(_ASK_TIMEOUT_S)
        transport = rollout.config.weights.transport
        native = transport in ("nccl", "ipc")
        return {
            "weight_transport": transport,
            "vllm_config": {
                "model": rollout.facts.name,
                # By it a trainer knows whether to open a GPU transport of vLLM's.
                "weight_transfer_config": {"backend": transport} if native else None,
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
