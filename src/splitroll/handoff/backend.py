"""What a KV connector needs, and the registry of those that splitroll has."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from splitroll.engines.protocol import KvParams
from splitroll.types import Role


class KvBackend(Protocol):
    """A KV connector of vLLM, as data: arguments, environment, and request parameters."""

    name: str

    def engine_config(
        self, *, role: Role, engine_id: str, lease_s: float, on_cpu: bool
    ) -> Mapping[str, Any]:
        """Return vLLM's `kv_transfer_config` for an engine."""
        ...

    def environment(self, *, host: str) -> Mapping[str, str]:
        """Return the environment that the connector reads; `host` is what peers reach."""
        ...

    def prefill_params(self) -> KvParams:
        """Return what a prefill request carries so that it ends with a handle."""
        ...

    def decode_params(self, handle: KvParams) -> KvParams:
        """Return what a decode request carries to load a handle.

        Raises:
            ValueError: when the handle lacks something; sent as is, it would kill the engine.
        """
        ...


def make_backend(name: str) -> KvBackend:
    """Return the backend of that name."""
    return _BACKENDS[name]()


def _nixl() -> KvBackend:
    from splitroll.handoff.nixl import NixlBackend

    return NixlBackend()


_BACKENDS: dict[str, Callable[[], KvBackend]] = {"nixl": _nixl}
