"""Mooncake: a decode engine tells the prefill engine where to write, and that one pushes.

The connector answers a prefill with nothing: whoever coordinates mints the transfer's id, and the
decode request names it with the prefill engine's bootstrap address. Our engines answer with just
that, so that a handle is a handle: decode is asked once prefill is done. (Protocol: vllm 0.32,
`kv_connector/v1/mooncake/mooncake_connector.py`.)
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from splitroll.config.schema import Mooncake
from splitroll.engines.arguments import KvTransfer
from splitroll.engines.mooncake_process import BOOTSTRAP_PORT
from splitroll.engines.protocol import KvParams
from splitroll.errors import Problem
from splitroll.handoff.backend import kv_role
from splitroll.placement import EngineSpec

_HANDLE_KEYS = ("transfer_id", "remote_engine_id", "remote_bootstrap_addr")
"""Without any one of these, vLLM's decode scheduler computes the prompt itself."""


class MooncakeBackend:
    """vLLM's `MooncakeConnector`."""

    name = "mooncake"
    pushes = True

    def __init__(self, settings: Mooncake) -> None:
        self._settings = settings

    def problems(self, spec: EngineSpec) -> Iterator[Problem]:
        if ":" in spec.host:
            hint = "set network.subnet to one of IPv4, or use transfer_backend: nixl"
            found = f"{spec.host}, of {spec.name}"
            yield Problem("network", found, "IPv4, with Mooncake", hint)
        if spec.shares:
            hint = "keep it on one node, or use transfer_backend: nixl"
            found = f"{spec.name} on {len(spec.shares)} nodes"
            allowed = "an engine on one node, with Mooncake"
            yield Problem(spec.pool, found, allowed, hint)

    def transfer(
        self, spec: EngineSpec, *, engine_id: str, lease_s: float, elastic: bool
    ) -> KvTransfer:
        protocol = self._settings.protocol
        if protocol == "auto":
            protocol = "rdma" if spec.gpus else "tcp"
        extra: dict[str, Any] = {"mooncake_protocol": protocol}
        if self._settings.device is not None:
            extra["device_name"] = self._settings.device
        config: dict[str, Any] = {
            "kv_connector": "MooncakeConnector",
            "kv_role": kv_role(spec, elastic=elastic),
            "engine_id": engine_id,
            # An engine that cannot load KV says so; it must never recompute unnoticed.
            "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": extra,
        }
        if not spec.gpus:
            config["kv_buffer_device"] = "cpu"
        env = {
            # 0: the engine's own process chooses it, and holds it until it is bound.
            BOOTSTRAP_PORT: "0",
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(int(lease_s)),
            "VLLM_MOONCAKE_CONNECTOR_TIMEOUT": str(math.ceil(self._settings.timeout_s)),
            # Without it each transfer leaves dozens of sockets in TIME_WAIT.
            "MC_TCP_ENABLE_CONNECTION_POOL": "1",
        }
        return KvTransfer(config, env)

    def prefill_params(self) -> KvParams:
        return {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "transfer_id": os.urandom(16).hex(),
        }

    def hand_out_params(self, kv: KvParams | None) -> KvParams:
        # Ids are the prefill engine's own: one that is loaded by may be handed out under, too.
        return self.prefill_params() if kv is None else {**kv, "do_remote_decode": True}

    def decode_params(self, handle: KvParams) -> KvParams:
        missing = [key for key in _HANDLE_KEYS if not handle.get(key)]
        if missing or handle.get("do_remote_prefill") is not True:
            raise ValueError(
                f"a Mooncake handle without {', '.join(missing) or 'do_remote_prefill'}"
            )
        return handle
