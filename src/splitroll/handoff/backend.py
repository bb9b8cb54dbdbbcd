"""What a KV connector needs, and the registry of those that splitroll has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from splitroll.config.schema import Disaggregation
from splitroll.engines.arguments import KvTransfer
from splitroll.engines.protocol import KvParams
from splitroll.errors import ConfigError, Problem
from splitroll.placement import EngineSpec
from splitroll.types import Role


class KvBackend(Protocol):
    """A KV connector of vLLM, as data: arguments, environment, and request parameters."""

    name: str
    pushes: bool
    """Whether the engine that has KV moves it, and counts it, and not the one that wants it."""

    def problems(self, spec: EngineSpec) -> Iterator[Problem]:
        """Yield why an engine cannot take part where it was placed."""
        ...

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


def kv_role(spec: EngineSpec, *, elastic: bool) -> str:
    """Return vLLM's name for an engine's part in handoffs."""
    if elastic or spec.role is Role.BOTH:
        return "kv_both"
    return "kv_producer" if spec.role is Role.PREFILL else "kv_consumer"


def check_backend(backend: KvBackend | None, specs: Sequence[EngineSpec]) -> None:
    """Check that engines can take part in handoffs where they were placed.

    Raises:
        ConfigError: with all that cannot.
    """
    problems = [] if backend is None else [p for spec in specs for p in backend.problems(spec)]
    if problems:
        raise ConfigError(problems)


def make_backend(settings: Disaggregation) -> KvBackend:
    """Return the backend that a configuration names."""
    return _BACKENDS[settings.transfer_backend](settings)


def _nixl(settings: Disaggregation) -> KvBackend:
    from splitroll.handoff.nixl import NixlBackend

    return NixlBackend()


def _mooncake(settings: Disaggregation) -> KvBackend:
    from splitroll.handoff.mooncake import MooncakeBackend

    return MooncakeBackend(settings.mooncake)


def _named(settings: Disaggregation) -> KvBackend:
    from splitroll.handoff.named import NamedBackend

    return NamedBackend(settings.connector)


_BACKENDS: dict[str, Callable[[Disaggregation], KvBackend]] = {
    "nixl": _nixl,
    "mooncake": _mooncake,
    "connector": _named,
}
