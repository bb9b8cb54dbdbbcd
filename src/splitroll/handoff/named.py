"""Any other connector of vLLM's, by its name, whose prefill answers with a handle as NIXL's does.

`MultiConnector` with a NIXL child is one (NIXL moves the KV of handoffs, the other child whatever
it is for). One that answers with no handle starts, and is refused by the proof of its first pair.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from splitroll.config.schema import Connector
from splitroll.engines.arguments import KvTransfer
from splitroll.handoff.nixl import NixlBackend
from splitroll.placement import EngineSpec


class NamedBackend(NixlBackend):
    """See the module's docstring."""

    name = "connector"

    def __init__(self, settings: Connector) -> None:
        self._settings = settings

    def transfer(
        self, spec: EngineSpec, *, engine_id: str, lease_s: float, elastic: bool
    ) -> KvTransfer:
        nixl = super().transfer(spec, engine_id=engine_id, lease_s=lease_s, elastic=elastic)
        role = nixl.config["kv_role"]
        config: dict[str, Any] = {
            **nixl.config,
            "kv_connector": self._settings.name,
            "kv_connector_extra_config": _arguments(self._settings.arguments, role, lease_s),
        }
        if self._settings.module_path is not None:
            config["kv_connector_module_path"] = self._settings.module_path
        return replace(nixl, config=config)


def _arguments(given: Mapping[str, Any], role: str, lease_s: float) -> dict[str, Any]:
    """Return a connector's arguments, with what its children need: their engine's role, and NIXL
    the lease that handles are aged by."""
    if "connectors" not in given:
        return dict(given)
    children = [
        {
            "kv_role": role,
            **child,
            **(
                {
                    "kv_connector_extra_config": {
                        **child.get("kv_connector_extra_config", {}),
                        "kv_lease_duration": int(lease_s),
                    }
                }
                if str(child.get("kv_connector", "")).startswith("Nixl")
                else {}
            ),
        }
        for child in given["connectors"]
    ]
    return {**given, "connectors": children}
