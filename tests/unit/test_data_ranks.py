"""Which data-parallel rank takes a request."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace

from conftest import simulated
from splitroll.engines.data_ranks import DataRanks
from splitroll.engines.protocol import (
    DecodeEvent,
    DecodeRequest,
    Engine,
    PrefillOutput,
    PrefillRequest,
)
from splitroll.engines.simulated import SimulatedLauncher
from splitroll.placement import EngineSpec


def test_an_engine_without_ranks_chooses_none() -> None:
    ranks = DataRanks(1)
    assert ranks.choose("a") is None
    with ranks.running(None):
        assert ranks.in_flight == (1,)
    assert ranks.in_flight == (0,)


def test_what_shares_kv_stays_together_and_the_rest_is_spread() -> None:
    ranks = DataRanks(3)
    with contextlib.ExitStack() as stack:
        chosen = []
        for key in ("a", "b", "c", "a", "b", "a", "d"):
            rank = ranks.choose(key)
            stack.enter_context(ranks.running(rank))
            chosen.append(rank)
        assert chosen[:6] == [0, 1, 2, 0, 1, 0]
        assert chosen[6] == 2, "where the least is in flight"
        assert ranks.in_flight == (3, 2, 2)
    assert ranks.in_flight == (0, 0, 0)
    assert ranks.choose("b") == 1, "the KV of an earlier turn is still there"


def test_idle_ranks_take_turns() -> None:
    ranks = DataRanks(3)
    chosen = []
    for key in range(6):
        rank = ranks.choose(key)
        chosen.append(rank)
        with ranks.running(rank):
            pass
    assert chosen == [0, 1, 2, 0, 1, 2]


async def test_every_rank_of_both_is_proven() -> None:
    asked: dict[str, set[int | None]] = {"prefill-0": set(), "decode-0": set()}

    class Ranked(SimulatedLauncher):
        async def launch(self, spec: EngineSpec, generation: int) -> Engine:
            engine = await super().launch(spec, generation)
            ranks = {"prefill-0": 2, "decode-0": 4}[spec.name]
            engine._info = replace(engine.info, data_ranks=ranks)
            prefill, decode = engine.prefill, engine.decode

            async def noted_prefill(request: PrefillRequest) -> PrefillOutput:
                asked[spec.name].add(request.data_rank)
                return await prefill(request)

            def noted_decode(request: DecodeRequest) -> AsyncGenerator[DecodeEvent, None]:
                if request.kv is not None:
                    asked[spec.name].add(request.data_rank)
                return decode(request)

            engine.prefill, engine.decode = noted_prefill, noted_decode
            return engine

    async with simulated("disaggregation.decode_replicas=1", launcher=Ranked()) as system:
        assert len(system.fleet.proofs) == 4
    assert asked == {"prefill-0": {0, 1}, "decode-0": {0, 1, 2, 3}}
