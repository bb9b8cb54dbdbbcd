"""From a configuration to a fleet that is proven, with its handoff and its dispatcher."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence

from splitroll.config import Config
from splitroll.config.topology import kv_roles
from splitroll.dispatch.dispatcher import Dispatcher
from splitroll.engines.protocol import Engine
from splitroll.fleet.fleet import Fleet, Launcher, Prover
from splitroll.fleet.prove import PairProof, proof_prompt, prove_pairs
from splitroll.handoff.backend import KvBackend, make_backend
from splitroll.handoff.cleanup import Cleanup
from splitroll.handoff.legs import Handoff, LegLimits
from splitroll.placement import EngineSpec

OnState = Callable[[Fleet], None]

_VOCAB_FOR_PROOF = 4096
"""The proof's prompt uses low token ids only, which every model has."""

_CLEANUP_MARGIN_S = 10.0


@contextlib.asynccontextmanager
async def open_fleet(
    config: Config,
    specs: Sequence[EngineSpec],
    launcher: Launcher,
    on_state: OnState = lambda fleet: None,
) -> AsyncGenerator[tuple[Fleet, Handoff], None]:
    """Open a fleet, real or simulated by its launcher, and the handoff between its engines."""
    # Nothing is left to clean up once the leases of all handles have ended.
    cleanup = Cleanup(limit_s=config.disaggregation.kv_lease_s + _CLEANUP_MARGIN_S)
    handoffs: list[Handoff] = []
    roles = kv_roles(config)

    def make_prover(fleet: Fleet) -> Prover:
        handoffs.append(_make_handoff(config, cleanup, lambda: fleet.up(*roles.loaders)))

        async def prove(prefills: Sequence[Engine], decodes: Sequence[Engine]) -> list[PairProof]:
            if not prefills or not decodes:
                return []
            info = decodes[0].info
            prompt = proof_prompt(_VOCAB_FOR_PROOF, info.block_size, info.max_model_len)
            return await prove_pairs(handoffs[0], prefills, decodes, prompt, fleet.weight_version)

        return prove

    opening = Fleet.open(specs, launcher, config.limits, make_prover, on_state, kv_roles=roles)
    async with opening as fleet:
        try:
            yield fleet, handoffs[0]
        finally:
            await cleanup.close()


def make_dispatcher(config: Config, fleet: Fleet, handoff: Handoff) -> Dispatcher:
    """Return the dispatcher of a fleet."""
    # A pause that keeps requests would meet handles of segments that have just ended.
    moves = is_elastic(config) and config.weights.in_flight == "drain"
    return Dispatcher(fleet, handoff, config.dispatch, config.limits, moves=moves)


def is_elastic(config: Config) -> bool:
    """Return whether any engine may hand KV to any other."""
    return config.disaggregation.enabled and config.dispatch.roles == "elastic"


def _make_handoff(
    config: Config, cleanup: Cleanup, decoders: Callable[[], Sequence[Engine]]
) -> Handoff:
    section = config.disaggregation
    limits = LegLimits(
        lease_s=section.kv_lease_s,
        handoff_timeout_s=section.handoff_timeout_s,
        prefill_timeout_s=config.limits.prefill_timeout_s,
        sample_timeout_s=config.limits.sample_timeout_s,
    )
    return Handoff(make_backend(section), limits, cleanup, decoders)


def backend_of(config: Config) -> KvBackend | None:
    """Return the KV backend of a fleet; None of a colocated one."""
    if not config.disaggregation.enabled:
        return None
    return make_backend(config.disaggregation)
