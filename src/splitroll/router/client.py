"""What is asked of vLLM servers over HTTP, and of a router in front of them."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from splitroll.engines.protocol import DecodeRequest, EngineCounters, EngineLoad
from splitroll.errors import InvalidRequest, LegError, Problem
from splitroll.router.command_lines import Server
from splitroll.router.guard import TOKEN_HEADER

SESSION_HEADER = "x-session-id"
"""Where vllm-router's consistent_hash looks for what belongs together."""

_TOLD_CHARACTERS = 500
_READ = tuple(
    f"vllm:{name}"
    for name in (
        "prompt_tokens_by_source_total",
        "generation_tokens_total",
        "num_preemptions_total",
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "cache_config_info",
        "nixl_",
    )
)
_STREAM_EVERY = 32
"""Tokens between two pieces of an answer, where nobody follows them."""


class Client:
    """Asks servers, in one session of connections.

    Args:
        name: of who is asked, in errors.
        token: that servers which we started ask for before they change anything.
    """

    def __init__(self, name: str, token: str = "") -> None:
        self._name = name
        self._headers = {TOKEN_HEADER: token} if token else None
        # The limits are those of whoever asks; a server may close an idle connection just when it
        # is used again, so none is.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        timeout = aiohttp.ClientTimeout(total=None)
        self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)

    async def close(self) -> None:
        await self._session.close()

    async def get_text(self, url: str) -> str:
        async with self._session.get(url) as answer:
            text = await answer.text()
            self._check(answer.status, text)
            return text

    async def is_healthy(self, url: str) -> bool:
        """Return whether something answers that it serves; raises OSError if nothing answers."""
        async with self._session.get(f"{url}/health") as answer:
            return answer.status == 200

    async def post(
        self, url: str, body: Any = None, params: Mapping[str, str] | None = None
    ) -> Any:
        """Return the answer's JSON; LegError with what it says if it is an error."""
        asking = self._session.post(url, json=body, params=params, headers=self._headers)
        async with asking as answer:
            text = await answer.text()
            self._check(answer.status, text)
            return json.loads(text) if text else None

    async def generate(
        self, url: str, request: DecodeRequest, model: str
    ) -> AsyncGenerator[Mapping[str, Any], None]:
        """Yield the pieces of one sample as they come: the only choice of each.

        Raises:
            InvalidRequest, LegError: what the server said.
            aiohttp.ClientError, OSError: the connection broke.
        """
        headers = {"x-request-id": request.request_id}
        if request.session:
            headers[SESSION_HEADER] = request.session
        body = generate_body(request, model)
        path = f"{url}/inference/v1/generate"
        async with self._session.post(path, json=body, headers=headers) as answer:
            self._check(answer.status, "" if answer.status == 200 else await answer.text())
            async for line in answer.content:
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if not data:
                    continue
                piece = json.loads(data)
                if "error" in piece:
                    error = piece["error"]
                    self._check(int(error.get("code") or 500), str(error.get("message", error)))
                if choices := piece.get("choices"):
                    yield choices[0]

    def _check(self, status: int, text: str) -> None:
        if status == 200:
            return
        told = _message(text)[:_TOLD_CHARACTERS]
        if status == 404 and "model" not in told.lower():
            told += "; is the server started with --enable-scale-out?"
        if status in (400, 422):
            hint = "change the request"
            raise InvalidRequest([Problem("request", told, "what the server accepts", hint)])
        raise LegError(self._name, f"HTTP {status}: {told}")


def generate_body(request: DecodeRequest, model: str) -> dict[str, Any]:
    """Return a sample's request to `/inference/v1/generate`."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "request_id": request.request_id,
        "model": model,
        "token_ids": list(request.token_ids),
        "stream": True,
        "sampling_params": {
            "max_tokens": sampling.max_tokens,
            "min_tokens": sampling.min_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            "repetition_penalty": sampling.repetition_penalty,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop": list(sampling.stop),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": sampling.ignore_eos,
            "seed": request.seed,
            "logprobs": request.top_logprobs,
            "stream_interval": request.stream or _STREAM_EVERY,
        },
    }
    if request.cache_salt is not None:
        body["cache_salt"] = request.cache_salt
    return body


class Metrics:
    """One server's own series, as it told them."""

    def __init__(self, text: str) -> None:
        # There are a thousand lines, of which a dozen matter.
        lines = "\n".join(line for line in text.splitlines() if line.startswith(_READ)) + "\n"
        families = text_string_to_metric_families(lines)
        self._samples = [sample for family in families for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """Return the sum of a series over all other labels."""
        wanted = labels.items()
        return sum(
            float(sample.value)
            for sample in self._samples
            if sample.name == f"vllm:{name}" and wanted <= sample.labels.items()
        )

    def label(self, name: str, label: str) -> int:
        """Return a label of a series that tells a number by it; 0 if there is none."""
        values = (s.labels.get(label, "") for s in self._samples if s.name == f"vllm:{name}")
        return next((int(value) for value in values if value.isdigit()), 0)

    def counters(self) -> EngineCounters:
        by_source = "prompt_tokens_by_source_total"
        failed = "nixl_num_failed_transfers_total", "nixl_num_failed_notifications_total"
        return EngineCounters(
            computed_tokens=int(self.total(by_source, source="local_compute")),
            cache_hit_tokens=int(self.total(by_source, source="local_cache_hit")),
            pulled_tokens=int(self.total(by_source, source="external_kv_transfer")),
            generated_tokens=int(self.total("generation_tokens_total")),
            preemptions=int(self.total("num_preemptions_total")),
            kv_pulls=int(self.total("nixl_bytes_transferred_count")),
            kv_bytes=int(self.total("nixl_bytes_transferred_sum")),
            kv_pull_s=self.total("nixl_xfer_time_seconds_sum"),
            kv_failures=int(sum(map(self.total, failed))),
            kv_expired=int(self.total("nixl_num_kv_expired_reqs_total")),
        )

    def load(self) -> EngineLoad:
        """Return what it holds, as of its last step; handles are not told apart."""
        blocks = self.label("cache_config_info", "num_gpu_blocks")
        return EngineLoad(
            running=int(self.total("num_requests_running")),
            waiting=int(self.total("num_requests_waiting")),
            held_blocks=round(self.total("kv_cache_usage_perc") * blocks),
        )


async def metrics_of(client: Client, servers: Sequence[Server]) -> dict[str, Metrics]:
    """Return every server's metrics by its name."""
    return {s.name: Metrics(await client.get_text(f"{s.url}/metrics")) for s in servers}


def _message(text: str) -> str:
    """Return what an error says, without its JSON."""
    try:
        error = json.loads(text)
    except ValueError:
        return text.strip() or "(nothing)"
    if isinstance(error, dict):
        error = error.get("error", error.get("detail", error))
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
