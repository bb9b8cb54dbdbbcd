"""The order of a handoff, on simulated engines: single use, siblings, limits, aborts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

import pytest

from splitroll.config.schema import Disaggregation
from splitroll.engines.protocol import DecodeRequest, KvParams, PrefillOutput, PrefillRequest
from splitroll.engines.simulated import Fabric, Faults, LatencyModel, SimulatedEngine
from splitroll.errors import HandleRefused, InvalidRequest, KvLoadFailed, LegError, LegTimeout
from splitroll.handoff.backend import make_backend
from splitroll.handoff.cleanup import Cleanup
from splitroll.handoff.legs import Handoff, LegLimits
from splitroll.types import Role, SamplingParams

PROMPT = tuple(range(100, 170))
LIMITS = LegLimits(lease_s=2.0, handoff_timeout_s=0.5, prefill_timeout_s=0.5, sample_timeout_s=1.0)


class Pair:
    """A prefill and a decode engine with the handoff between them, on a clock we can move."""

    def __init__(self, latency: LatencyModel | None = None) -> None:
        fabric = Fabric()
        self.prefill = SimulatedEngine(
            "p", Role.PREFILL, fabric, engine_id="p-0", latency=latency, faults=Faults()
        )
        self.decode = SimulatedEngine(
            "d", Role.DECODE, fabric, engine_id="d-0", latency=latency, faults=Faults()
        )
        self.cleanup = Cleanup(limit_s=2.0)
        self.skew_s = 0.0
        self.handoff = Handoff(
            make_backend(Disaggregation()), LIMITS, self.cleanup, lambda: [self.decode], self.clock
        )

    def clock(self) -> float:
        return asyncio.get_running_loop().time() + self.skew_s

    async def held(self) -> tuple[int, int]:
        await self.cleanup.drain()
        await asyncio.sleep(0.01)
        prefill, decode = await self.prefill.load(), await self.decode.load()
        return prefill.held_blocks, decode.held_blocks


@contextlib.asynccontextmanager
async def pair(latency: LatencyModel | None = None) -> AsyncIterator[Pair]:
    one = Pair(latency)
    await one.prefill.start()
    await one.decode.start()
    yield one
    await one.cleanup.drain()


def requests(count: int = 1, max_tokens: int = 6, prefix: str = "r") -> list[DecodeRequest]:
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    return [DecodeRequest(f"{prefix}{i}", PROMPT, sampling, seed=i) for i in range(count)]


async def test_a_group_costs_one_pull_and_its_samples_equal_local_ones() -> None:
    async with pair() as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        moved = await p.handoff.decode(p.decode, handle, requests(4), weight_version=0)
        local = await p.handoff.decode(p.decode, None, requests(4, prefix="l"), weight_version=0)
        assert moved.errors == []
        assert moved.handed_off
        assert moved.recomputed_tokens == 0
        tokens = [output.token_ids for output in moved.outputs.values()]
        assert len(set(tokens)) == 4
        assert sorted(tokens) == sorted(output.token_ids for output in local.outputs.values())
        counters = await p.decode.counters()
        assert counters.kv_pulls == 1
        assert await p.held() == (0, 0)


async def test_siblings_are_not_admitted_before_the_leaders_first_token() -> None:
    async with pair(LatencyModel(pull_s=0.1)) as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        leg = asyncio.create_task(p.handoff.decode(p.decode, handle, requests(4), weight_version=0))
        await asyncio.sleep(0.05)
        assert (await p.decode.load()).running == 1
        result = await leg
        assert len(result.outputs) == 4


async def test_a_second_use_of_a_handle_is_refused_and_runs_nothing() -> None:
    async with pair() as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        await p.handoff.decode(p.decode, handle, requests(), weight_version=0)
        before = await p.decode.counters()
        again = await p.handoff.decode(p.decode, handle, requests(3, prefix="b"), weight_version=0)
        assert [type(error) for error in again.errors] == [HandleRefused]
        assert (await p.decode.counters()) == before


async def test_an_old_handle_is_refused_and_its_blocks_freed() -> None:
    async with pair() as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        p.skew_s = LIMITS.lease_s - LIMITS.handoff_timeout_s + 0.01
        result = await p.handoff.decode(p.decode, handle, requests(2), weight_version=0)
        assert [type(error) for error in result.errors] == [HandleRefused]
        assert await p.held() == (0, 0)


async def test_a_handle_of_another_weight_version_is_refused_and_freed() -> None:
    async with pair() as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        result = await p.handoff.decode(p.decode, handle, requests(2), weight_version=1)
        assert [type(error) for error in result.errors] == [HandleRefused]
        assert await p.held() == (0, 0)


async def test_a_failed_kv_load_is_an_error_and_frees_both_sides() -> None:
    async with pair() as p:
        p.decode.faults.fail_kv_loads = 1
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        result = await p.handoff.decode(p.decode, handle, requests(3), weight_version=0)
        assert [type(error) for error in result.errors] == [KvLoadFailed]
        assert result.outputs == {}
        assert await p.held() == (0, 0)


async def test_a_request_that_decode_refuses_gives_its_handle_back_at_once() -> None:
    async with pair() as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        result = await p.handoff.decode(
            p.decode, handle, requests(3, max_tokens=9000), weight_version=0
        )
        assert [type(error) for error in result.errors] == [InvalidRequest]
        assert await p.held() == (0, 0)


async def test_a_prefill_without_a_handle_is_an_error() -> None:
    async with pair() as p:
        p.prefill.faults.lose_handles = True
        with pytest.raises(LegError, match="no KV handle"):
            await p.handoff.prefill(p.prefill, "x", PROMPT)


async def test_a_decode_that_computes_the_prompt_again_is_counted() -> None:
    async with pair() as p:
        p.decode.faults.ignore_kv = True
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        result = await p.handoff.decode(p.decode, handle, requests(), weight_version=0)
        assert result.recomputed_tokens == len(PROMPT) - 1


async def test_siblings_that_compute_the_prompt_again_are_counted_too() -> None:
    async with pair() as p:
        p.decode.faults.forget_prefixes = True
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        result = await p.handoff.decode(p.decode, handle, requests(4), weight_version=0)
        assert result.handed_off
        assert result.recomputed_tokens == 3 * (len(PROMPT) // 32 * 32)


async def test_a_leg_cancelled_before_it_begins_gives_its_handle_back() -> None:
    async with pair() as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        settled: list[bool] = []
        handle.when_settled(lambda: settled.append(True))
        leg = asyncio.create_task(p.handoff.decode(p.decode, handle, requests(3), weight_version=0))
        await asyncio.sleep(0)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        assert await p.held() == (0, 0)
        assert settled == [True]
        assert p.handoff.cancelled == 1
        p.handoff.give_back(handle)
        assert p.handoff.cancelled == 1, "given back once"


async def test_without_a_handle_a_leader_may_queue_longer_than_a_handoff_may_take() -> None:
    async with pair(LatencyModel(prefill_token_s=0.01)) as p:
        result = await p.handoff.decode(p.decode, None, requests(2), weight_version=0)
        assert result.errors == []


async def test_a_slow_prefill_times_out_and_frees_its_blocks() -> None:
    async with pair(LatencyModel(prefill_token_s=0.02)) as p:
        with pytest.raises(LegTimeout):
            await p.handoff.prefill(p.prefill, "x", PROMPT)
        assert await p.held() == (0, 0)


async def test_a_cancelled_prefill_frees_its_blocks() -> None:
    async with pair(LatencyModel(prefill_token_s=0.001)) as p:
        leg = asyncio.create_task(p.handoff.prefill(p.prefill, "x", PROMPT))
        await asyncio.sleep(0.02)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        assert await p.held() == (0, 0)


async def test_a_prefill_that_finishes_while_it_is_cancelled_gives_its_handle_back() -> None:
    async with pair() as p:
        leg = asyncio.create_task(p.handoff.prefill(p.prefill, "x", PROMPT))
        while not p.prefill._pinned:
            await asyncio.sleep(0)
        leg.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            p.handoff.give_back(await leg)  # it may have won the race
        assert await p.held() == (0, 0)


async def test_a_leader_without_a_first_token_in_time_is_aborted_and_all_is_freed() -> None:
    async with pair(LatencyModel(pull_s=5.0)) as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        result = await p.handoff.decode(p.decode, handle, requests(3), weight_version=0)
        assert [type(error) for error in result.errors] == [LegTimeout]


async def test_a_cancelled_group_frees_both_sides() -> None:
    async with pair(LatencyModel(step_s=0.05)) as p:
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        leg = asyncio.create_task(
            p.handoff.decode(p.decode, handle, requests(4, 50), weight_version=0)
        )
        await asyncio.sleep(0.12)
        leg.cancel()
        await asyncio.gather(leg, return_exceptions=True)
        await asyncio.sleep(0.1)
        assert await p.held() == (0, 0)


async def test_a_decode_engine_that_dies_before_the_pull_frees_the_prefill_engine() -> None:
    async with pair(LatencyModel(pull_s=0.05)) as p:
        other = SimulatedEngine("d2", Role.DECODE, p.prefill._fabric, engine_id="d2-0")
        await other.start()
        p.handoff._decoders = lambda: [p.decode, other]
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        leg = asyncio.create_task(p.handoff.decode(p.decode, handle, requests(3), weight_version=0))
        await asyncio.sleep(0.02)
        p.decode.kill()
        result = await leg
        assert result.outputs == {}
        await p.cleanup.drain()
        assert (await p.prefill.load()).held_blocks == 0


async def test_the_end_of_every_request_is_told_once() -> None:
    async with pair() as p:
        ended: list[str] = []
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        await p.handoff.decode(
            p.decode,
            handle,
            requests(4),
            weight_version=0,
            on_end=lambda request, output: ended.append(request.request_id),
        )
        assert sorted(ended) == ["r0", "r1", "r2", "r3"]


async def test_a_clean_up_that_fails_is_counted_and_one_that_hangs_is_ended() -> None:
    cleanup = Cleanup(limit_s=0.05)

    async def fails() -> None:
        raise ValueError

    cleanup.spawn("fails", fails())
    cleanup.spawn("hangs", asyncio.sleep(60))
    await asyncio.wait_for(cleanup.drain(), 2)
    assert cleanup.failures == 2


async def failing(request_ids: Sequence[str]) -> None:
    raise LegError("x", "a call of Ray's failed")


async def test_an_abort_that_fails_settles_the_handle_all_the_same() -> None:
    async with pair(LatencyModel(pull_s=5.0)) as p:
        settled = []
        handle = await p.handoff.prefill(p.prefill, "x", PROMPT)
        handle.when_settled(lambda: settled.append(True))
        p.decode.abort = failing  # type: ignore[method-assign]
        await p.handoff.decode(p.decode, handle, requests(3), weight_version=0)
        await p.cleanup.drain()
        assert settled == [True]


async def test_an_abort_that_fails_loses_no_handle_of_a_late_prefill() -> None:
    async with pair() as p:
        prefill = p.prefill.prefill

        async def late(request: PrefillRequest) -> PrefillOutput:
            await asyncio.sleep(0.7)
            return await prefill(request)

        p.prefill.prefill = late  # type: ignore[method-assign]
        p.prefill.abort = failing  # type: ignore[method-assign]
        with pytest.raises(LegTimeout):
            await p.handoff.prefill(p.prefill, "x", PROMPT)
        assert await p.held() == (0, 0)
        assert p.handoff.cancelled == 1


async def test_a_handle_is_given_back_on_another_engine_where_the_first_fails() -> None:
    async with pair() as p:
        other = SimulatedEngine("d2", Role.DECODE, p.prefill._fabric, engine_id="d2-0")
        await other.start()

        async def release(request_id: str, params: KvParams) -> None:
            raise LegError("d", "a call of Ray's failed")

        p.decode.release = release  # type: ignore[method-assign]
        p.handoff._decoders = lambda: [p.decode, other]
        p.handoff.give_back(await p.handoff.prefill(p.prefill, "x", PROMPT))
        assert await p.held() == (0, 0)
        assert p.cleanup.failures == 0


async def test_the_limit_of_a_sample_counts_from_its_first_token_also_in_a_stream() -> None:
    async with pair(LatencyModel(step_s=0.1)) as p:
        (request,) = requests(1, 40)
        streamed = [replace(request, stream=True)]
        begun_s = p.clock()
        result = await p.handoff.decode(p.decode, None, streamed, weight_version=0)
        assert [type(error) for error in result.errors] == [LegTimeout]
        assert p.clock() - begun_s < 2.5
