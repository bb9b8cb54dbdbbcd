"""NIXL's pull connector: prefill answers with a handle, decode pulls what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from splitroll.engines.arguments import KvTransfer
from splitroll.engines.process import ONLY_IF_CUT
from splitroll.engines.protocol import KvParams
from splitroll.errors import Problem
from splitroll.handoff.backend import kv_role
from splitroll.placement import LOOPBACK, EngineSpec

_HANDLE_KEYS = (
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
)
"""Without any one of these, vLLM's decode scheduler recomputes silently or dies."""


class NixlBackend:
    """vLLM's `NixlConnector` (protocol: vllm 0.32, `kv_connector/v1/nixl/pull_scheduler.py`)."""

    name = "nixl"
    pushes = False

    def problems(self, spec: EngineSpec) -> Iterator[Problem]:
        yield from ()

    def transfer(
        self, spec: EngineSpec, *, engine_id: str, lease_s: float, elastic: bool
    ) -> KvTransfer:
        config: dict[str, Any] = {
            "kv_connector": "NixlConnector",
            "kv_role": kv_role(spec, elastic=elastic),
            "engine_id": engine_id,
            # An engine that cannot load KV says so; it must never recompute unnoticed.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"kv_lease_duration": int(lease_s)},
        }
        if not spec.gpus:
            config["kv_buffer_device"] = "cpu"
        env = {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": spec.host,
            # 0: the process that binds the side channel chooses it (engines/process.py).
            "VLLM_NIXL_SIDE_CHANNEL_PORT": "0",
        }
        if not spec.gpus:
            # Over TCP, UCX's keepalive fills buffers that nobody reads: some minutes after two
            # engines have exchanged KV, the progress thread of one spins and takes a whole core.
            # A peer that dies closes its sockets, and the kernel looks after silent ones.
            env["UCX_KEEPALIVE_INTERVAL"] = "inf"
        if spec.host == LOOPBACK and not spec.gpus:
            env["UCX_NET_DEVICES"] = "lo"  # else UCX listens on every interface
        return KvTransfer(config, env)

    def prefill_params(self) -> KvParams:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }

    def hand_out_params(self, kv: KvParams | None) -> KvParams:
        # With a handle to load as well, the connector clears do_remote_prefill once it has loaded
        # it, and what is left at the end asks for a handle.
        asked = self.prefill_params() if kv is None else {**kv, "do_remote_decode": True}
        return {**asked, ONLY_IF_CUT: True}

    def decode_params(self, handle: KvParams) -> KvParams:
        missing = [key for key in _HANDLE_KEYS if not handle.get(key)]
        if missing or handle.get("do_remote_prefill") is not True:
            raise ValueError(f"a NIXL handle without {', '.join(missing) or 'do_remote_prefill'}")
        # vLLM would report prefill's cache hits as decode's; we count what decode recomputes.
        return {k: v for k, v in handle.items() if k != "remote_prefill_cached_tokens"}
