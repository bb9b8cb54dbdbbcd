"""What a KV connector needs, and the registry of those that splitroll has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from splitroll.engines.arguments import KvTransfer
from splitroll.engines.protocol import KvParams
from splitroll.placement import EngineSpec


class KvBackend(Protocol):
    """A KV connector of vLLM, as data: arguments, environment, and request parameters."""

    name: str

    def transfer(
        self, spec: EngineSpec, *, engine_id: str, lease_s: float, elastic: bool
    ) -> KvTransfer:
        """Return what the connector needs to run in an engine; peers reach it at `spec.host`.

        Args:
            elastic: the engine may hand KV out and load it, whatever its role.
        """
        ...

    def prefill_params(self) -> KvParams:
        """Return what a prefill request carries so that it ends with a handle."""
        ...

    def hand_out_params(self, kv: KvParams | None) -> KvParams:
        """Return a decode request's parameters so that it also ends with a handle to its own KV.

        Args:
            kv: what it carries already.
        """
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
