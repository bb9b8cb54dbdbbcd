"""One suite over every implementation of an engine: simulated, and vLLM in a Ray actor."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from splitroll.config.schema import Disaggregation
from splitroll.engines.protocol import (
    DecodeOutput,
    DecodeRequest,
    Engine,
    EngineCounters,
    FirstToken,
    PrefillOutput,
    PrefillRequest,
    Tokens,
)
from splitroll.engines.simulated import Fabric, LatencyModel, SimulatedEngine
from splitroll.errors import InvalidRequest, KvLoadFailed, LegError
from splitroll.handoff.backend import KvBackend, make_backend
from splitroll.rollout import Rollout
from splitroll.types import Role, SamplingParams, VersionSpan
from splitroll.weights.disk import read_files
from splitroll.weights.manifest import checkpoint_manifest
from splitroll.weights.offer import WeightOffer
from splitroll.weights.shm import ShmTransport
from splitroll.weights.source import Source

NIXL = make_backend(Disaggregation())
MOONCAKE = make_backend(Disaggregation(transfer_backend="mooncake"))
GREEDY = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
_ids = itertools.count()


def tokens(count: int) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)


@dataclass
class Pair:
    """A prefill and a decode engine, and fresh prompts that no cache has seen."""

    prefill: Engine
    decode: Engine
    backend: KvBackend
    salt: str = field(default_factory=lambda: os.urandom(8).hex())

    @property
    def block(self) -> int:
        return self.decode.info.block_size

    def prompt(self, tokens: int) -> tuple[int, ...]:
        start = next(_ids)
        return tuple(10 + (start * 31 + i * 7) % 3000 for i in range(tokens))

    async def hand_out(self, prompt: tuple[int, ...]) -> PrefillOutput:
        request = PrefillRequest(f"p{next(_ids)}", prompt, self.backend.prefill_params(), self.salt)
        return await self.prefill.prefill(request)

    def request(self, prompt: tuple[int, ...], sampling: SamplingParams = GREEDY, seed: int = 0,
                kv: object = None, salt: str | None = None,
                hands_out: bool = False) -> DecodeRequest:  # fmt: skip
        params = None if kv is None else self.backend.decode_params(kv)  # type: ignore[arg-type]
        params = self.backend.hand_out_params(params) if hands_out else params
        return DecodeRequest(f"d{next(_ids)}", prompt, sampling, seed, params, salt or self.salt)

    async def run(self, request: DecodeRequest, on: Engine | None = None) -> DecodeOutput:
        events = [event async for event in (on or self.decode).decode(request)]
        assert isinstance(events[-1], DecodeOutput)
        assert all(isinstance(event, FirstToken) for event in events[:-1])
        return events[-1]

    async def counters(self) -> EngineCounters:
        """Of both: who moves KV counts it, be it the one that has it or the one that wants it."""
        return await self.prefill.counters() + await self.decode.counters()

    async def assert_no_block_is_held(self) -> None:
        """Within 5 s, as the README promises."""
        for engine in (self.prefill, self.decode):
            async with asyncio.timeout(5):
                while (load := await engine.load()).held_blocks:
                    await asyncio.sleep(0.05)
            assert (load.running, load.waiting) == (0, 0)


@pytest_asyncio.fixture
async def simulated_pair(tiny_model: Path) -> AsyncIterator[Pair]:
    fabric = Fabric()
    latency = LatencyModel(step_s=0.002)
    roles = {"p": Role.PREFILL, "d": Role.DECODE}
    engines = [
        SimulatedEngine(
            name,
            role,
            fabric,
            engine_id=name,
            latency=latency,
            max_model_len=2048,
            checkpoint=tiny_model,
        )
        for name, role in roles.items()
    ]
    for engine in engines:
        await engine.start()
    pair = Pair(*engines, NIXL)
    yield pair
    await pair.assert_no_block_is_held()


@pytest_asyncio.fixture
async def vllm_pair(split_rollout: Rollout) -> AsyncIterator[Pair]:
    fleet = split_rollout.fleet
    pair = Pair(fleet.ready(Role.PREFILL)[0], fleet.ready(Role.DECODE)[0], NIXL)
    yield pair
    await pair.assert_no_block_is_held()


@pytest_asyncio.fixture(scope="module")
async def mooncake_rollout(tiny_config: dict[str, Any]) -> AsyncIterator[Rollout]:
    overrides = ["disaggregation.transfer_backend=mooncake", "disaggregation.decode_replicas=1"]
    async with Rollout.open(tiny_config, overrides=overrides) as rollout:
        yield rollout


@pytest_asyncio.fixture
async def mooncake_pair(mooncake_rollout: Rollout) -> AsyncIterator[Pair]:
    fleet = mooncake_rollout.fleet
    pair = Pair(fleet.ready(Role.PREFILL)[0], fleet.ready(Role.DECODE)[0], MOONCAKE)
    yield pair
    await pair.assert_no_block_is_held()


REAL = ("vllm_pair", "mooncake_pair")


@pytest.fixture(
    params=["simulated_pair", *(pytest.param(name, marks=pytest.mark.engines) for name in REAL)]
)
def pair(request: pytest.FixtureRequest) -> Pair:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Pair)
    return found


def lengths(block: int) -> list[int]:
    return [1, block - 1, block, block + 1, 3 * block, 3 * block + 5]


async def test_a_handoff_equals_local_generation(pair: Pair) -> None:
    for length in lengths(pair.block):
        prompt = pair.prompt(length)
        moved = await pair.run(pair.request(prompt, kv=(await pair.hand_out(prompt)).kv))
        local = await pair.run(pair.request(prompt, salt=f"{pair.salt}-l{length}"))
        assert moved.token_ids == local.token_ids
        assert moved.logprobs == pytest.approx(local.logprobs, abs=1e-4)


async def test_a_handoff_moves_all_blocks_and_recomputes_only_the_last_token(pair: Pair) -> None:
    before = await pair.counters()
    prompt = pair.prompt(3 * pair.block + 5)
    moved = await pair.run(pair.request(prompt, kv=(await pair.hand_out(prompt)).kv))
    assert moved.cached_tokens >= len(prompt) - 1
    await asyncio.sleep(0.1)
    done = (await pair.counters()) - before
    assert done.kv_pulls == 1
    assert done.computed_tokens <= len(prompt) + 1, "all on prefill, and one on decode"
    assert done.kv_bytes == math.ceil(len(prompt) / pair.block) * pair.decode.info.block_bytes


async def test_only_what_decode_lacks_is_pulled(pair: Pair) -> None:
    prompt = pair.prompt(4 * pair.block + 3)
    await pair.run(pair.request(prompt))
    before = await pair.counters()
    moved = await pair.run(pair.request(prompt, kv=(await pair.hand_out(prompt)).kv))
    assert moved.cached_tokens >= len(prompt) - 1
    await asyncio.sleep(0.1)
    done = (await pair.counters()) - before
    assert done.kv_bytes <= pair.decode.info.block_bytes


async def test_a_handle_holds_blocks_until_it_is_pulled(pair: Pair) -> None:
    prompt = pair.prompt(2 * pair.block)
    output = await pair.hand_out(prompt)
    assert output.computed_tokens == len(prompt)
    assert (await pair.prefill.load()).held_blocks >= 2
    await pair.run(pair.request(prompt, kv=output.kv))


async def test_a_handle_that_was_used_or_given_back_fails_soon(pair: Pair) -> None:
    """Not after the connector's own time limit, and never with the KV of somebody else."""
    prompt = pair.prompt(2 * pair.block)
    used, back = (await pair.hand_out(prompt)).kv, (await pair.hand_out(prompt)).kv
    assert used is not None
    assert back is not None
    await pair.run(pair.request(prompt, kv=used))
    await pair.decode.release(f"r{next(_ids)}", pair.backend.decode_params(back))
    await pair.assert_no_block_is_held()
    if pair.backend.name != "mooncake":
        return  # NIXL reads what is there now: only the handle's age and single use protect it
    for handle in (used, back):
        request = pair.request(prompt, kv=handle, salt=f"{pair.salt}-again{next(_ids)}")
        async with asyncio.timeout(10):
            with pytest.raises(KvLoadFailed):
                await pair.run(request)


async def test_a_released_handle_frees_its_blocks(pair: Pair) -> None:
    output = await pair.hand_out(pair.prompt(2 * pair.block))
    assert output.kv is not None
    await pair.decode.release(f"r{next(_ids)}", pair.backend.decode_params(output.kv))
    await pair.assert_no_block_is_held()


async def test_an_aborted_sample_ends_at_once_with_what_it_has(pair: Pair) -> None:
    prompt = pair.prompt(pair.block)
    request = pair.request(prompt, SamplingParams(max_tokens=1000, ignore_eos=True))
    stream = pair.decode.decode(request)
    first = await anext(stream)
    assert isinstance(first, FirstToken)
    await pair.decode.abort([request.request_id])
    (output,) = [event async for event in stream]
    assert isinstance(output, DecodeOutput)
    assert output.finish_reason == "abort"
    assert 1 <= len(output.token_ids) == len(output.logprobs) < 1000


async def test_an_aborted_request_with_a_handle_frees_both_engines(pair: Pair) -> None:
    prompt = pair.prompt(3 * pair.block)
    output = await pair.hand_out(prompt)
    request = pair.request(prompt, SamplingParams(max_tokens=500, ignore_eos=True), kv=output.kv)

    async def drain() -> list[object]:
        return [event async for event in pair.decode.decode(request)]

    running = asyncio.create_task(drain())
    await asyncio.sleep(0)
    await pair.decode.abort([request.request_id])
    await asyncio.wait_for(running, 10)


async def test_an_abort_that_races_with_a_finishing_prefill_loses_no_handle(pair: Pair) -> None:
    """The abort comes at every moment around the end: either it ends in an error or a handle."""
    prompt = pair.prompt(4 * pair.block)
    begun = asyncio.get_running_loop().time()
    output = await pair.hand_out(prompt)
    took_s = asyncio.get_running_loop().time() - begun
    handles = [output.kv]
    for i in range(24):
        prompt = pair.prompt(4 * pair.block)
        request = PrefillRequest(f"p{next(_ids)}", prompt, pair.backend.prefill_params(), pair.salt)
        leg = asyncio.create_task(pair.prefill.prefill(request))
        await asyncio.sleep(took_s * i / 16)
        await pair.prefill.abort([request.request_id])
        try:
            handles.append((await leg).kv)
        except LegError:
            continue
    for kv in handles:
        assert kv is not None
        await pair.decode.release(f"r{next(_ids)}", pair.backend.decode_params(kv))
    await pair.assert_no_block_is_held()


async def test_aborting_what_is_not_there_does_nothing(pair: Pair) -> None:
    await pair.decode.abort(["no-such-request"])
    await pair.decode.health()


async def test_every_token_has_a_log_probability(pair: Pair) -> None:
    for seed in range(3):
        output = await pair.run(pair.request(pair.prompt(20), SamplingParams(max_tokens=9), seed))
        assert len(output.token_ids) == len(output.logprobs) > 0
        assert all(logprob <= 0 for logprob in output.logprobs)


async def test_what_nobody_wants_changes_no_token(pair: Pair) -> None:
    prompt = pair.prompt(20)
    wanted = await pair.run(pair.request(prompt))
    bare = dataclasses.replace(pair.request(prompt), top_logprobs=None, text=False)
    output = await pair.run(bare)
    assert output.token_ids == wanted.token_ids
    assert len(output.logprobs) in (0, len(output.token_ids))
    stop = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, stop=("no such text",))
    stopping = dataclasses.replace(pair.request(prompt, stop), top_logprobs=None, text=False)
    assert (await pair.run(stopping)).token_ids == wanted.token_ids


async def test_truncation_shows_and_a_stop_token_ends_a_sample(pair: Pair) -> None:
    prompt = pair.prompt(20)
    whole = await pair.run(pair.request(prompt))
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 8)
    stop = whole.token_ids[3]
    first = whole.token_ids.index(stop)
    sampling = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(stop,))
    stopped = await pair.run(pair.request(prompt, sampling))
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == whole.token_ids[: first + 1]


async def test_a_first_token_that_stops_is_an_ordinary_handoff(pair: Pair) -> None:
    prompt = pair.prompt(2 * pair.block)
    first = (await pair.run(pair.request(prompt, salt=pair.salt + "x"))).token_ids[0]
    sampling = SamplingParams(max_tokens=8, temperature=0.0, stop_token_ids=(first,))
    kv = (await pair.hand_out(prompt)).kv
    output = await pair.run(pair.request(prompt, sampling, kv=kv))
    assert output.token_ids == (first,)
    assert output.finish_reason == "stop"


async def test_seeds_tell_samples_apart_and_repeat_them(pair: Pair) -> None:
    prompt = pair.prompt(20)
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    runs = [await pair.run(pair.request(prompt, sampling, seed)) for seed in (1, 2, 3, 1)]
    tokens = [run.token_ids for run in runs]
    assert tokens[0] == tokens[3]
    assert len(set(tokens)) == 3


async def test_a_request_at_fault_is_refused_and_the_engine_lives(pair: Pair) -> None:
    prompt = pair.prompt(pair.decode.info.max_model_len + 1)
    with pytest.raises(InvalidRequest):
        await pair.run(pair.request(prompt))
    await pair.decode.health()


async def test_the_prefix_cache_is_dropped_only_when_nothing_is_held(pair: Pair) -> None:
    prompt = pair.prompt(2 * pair.block)
    output = await pair.hand_out(prompt)
    assert not await pair.prefill.reset_prefix_cache()
    await pair.run(pair.request(prompt, kv=output.kv))
    await pair.assert_no_block_is_held()
    assert await pair.prefill.reset_prefix_cache()
    again = await pair.hand_out(prompt)
    assert again.computed_tokens == len(prompt)
    assert again.kv is not None
    await pair.decode.release(f"r{next(_ids)}", pair.backend.decode_params(again.kv))


async def test_many_requests_at_once_all_end(pair: Pair) -> None:
    requests = [
        pair.request(pair.prompt(40 + i), SamplingParams(max_tokens=10, ignore_eos=True), i)
        for i in range(40)
    ]
    outputs = await asyncio.gather(*(pair.run(request) for request in requests))
    assert [len(output.token_ids) for output in outputs] == [10] * 40


@contextlib.asynccontextmanager
async def weights_of(pair: Pair, checkpoint: Path) -> AsyncIterator[Callable[[float], WeightOffer]]:
    """Offers of the checkpoint's weights, scaled; both engines end with its own, and version 0."""
    named = dict(read_files(checkpoint))
    manifest = checkpoint_manifest(checkpoint)
    transport = ShmTransport(bucket_bytes=10**6, timeout_s=5)

    def offer(factor: float) -> WeightOffer:
        outbox = transport.begin(1, [manifest], [os.getpid()])
        outbox.plan.write(0, Source({n: t * factor for n, t in named.items()}), ())
        transport.commit(outbox)
        return outbox.offer()

    try:
        yield offer
    finally:
        for engine in (pair.prefill, pair.decode):
            await engine.pause()
            await engine.load_weights(WeightOffer(folder=str(checkpoint)))
            assert await engine.reset_prefix_cache(preempt=True)
            await engine.set_weight_version(0)
            await engine.resume()
        transport.close()


async def load(engine: Engine, offer: WeightOffer, version: int) -> None:
    await engine.pause()
    await engine.load_weights(offer)
    assert await engine.reset_prefix_cache(preempt=True)
    await engine.set_weight_version(version)
    await engine.resume()


async def test_new_weights_change_answers_and_their_versions(pair: Pair, tiny_model: Path) -> None:
    prompt = pair.prompt(3 * pair.block)
    before = await pair.run(pair.request(prompt))
    assert before.weight_versions == (VersionSpan(0, 0, 8),)
    async with weights_of(pair, tiny_model) as offer:
        await load(pair.decode, offer(1.5), 7)
        after = await pair.run(pair.request(prompt))
        assert after.weight_versions == (VersionSpan(7, 0, 8),)
        assert after.token_ids != before.token_ids
        assert after.cached_tokens == 0, "a cache that outlived its weights"
        await load(pair.prefill, offer(1.5), 7)
        handed_out = await pair.hand_out(pair.prompt(20))
        assert handed_out.weight_version == 7
        assert handed_out.kv is not None
        await pair.decode.release(f"r{next(_ids)}", pair.backend.decode_params(handed_out.kv))
        await pair.assert_no_block_is_held()
        await load(pair.decode, offer(1.0), 8)
        back = await pair.run(pair.request(prompt))
        assert back.token_ids == before.token_ids


async def test_a_paused_engine_keeps_its_requests_and_goes_on_under_new_weights(
    pair: Pair, tiny_model: Path
) -> None:
    prompt = pair.prompt(40)
    sampling = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    async with weights_of(pair, tiny_model) as offer:
        stream = pair.decode.decode(pair.request(prompt, sampling))
        first = await anext(stream)
        assert isinstance(first, FirstToken)
        assert first.weight_version == 0
        await pair.decode.pause()
        late = asyncio.create_task(pair.run(pair.request(prompt)))
        await asyncio.sleep(0.1)
        assert not late.done(), "it computes while it is paused"
        await pair.decode.load_weights(offer(1.5))
        assert await pair.decode.reset_prefix_cache(preempt=True)
        await pair.decode.set_weight_version(3)
        await pair.decode.resume()
        whole = await anext(stream)
        assert isinstance(whole, DecodeOutput)
        assert [span.version for span in whole.weight_versions] == [0, 3]
        assert whole.weight_versions[-1].end == len(whole.token_ids) == 400
        at = whole.weight_versions[0].end
        assert (await late).weight_versions == (VersionSpan(3, 0, 8),)
        # What follows is what the new weights say after these tokens, computed from nothing.
        longer = prompt + whole.token_ids[:at]
        sampling = SamplingParams(max_tokens=400 - at, temperature=0.0, ignore_eos=True)
        fresh = await pair.run(pair.request(longer, sampling, salt=f"{pair.salt}-fresh"))
        if isinstance(pair.decode, SimulatedEngine):
            return  # its tokens depend on how many it has generated itself
        assert fresh.token_ids == whole.token_ids[at:]


async def test_a_pause_that_aborts_returns_what_there_is(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=400, ignore_eos=True)
    jobs = [
        asyncio.create_task(pair.run(pair.request(pair.prompt(30), sampling))) for _ in range(3)
    ]
    await asyncio.sleep(0.2)
    await pair.decode.pause(abort=True)
    outputs = await asyncio.wait_for(asyncio.gather(*jobs), 5)
    await pair.decode.resume()
    for output in outputs:
        assert output.finish_reason == "abort"
        assert 0 < len(output.token_ids) == len(output.logprobs) < 400
        assert output.weight_versions == (VersionSpan(0, 0, len(output.token_ids)),)


async def test_a_handle_is_counted_as_pinned_until_it_is_given_back(pair: Pair) -> None:
    """Nobody pauses a prefill engine before: vLLM's pause waits for its handles."""
    output = await pair.hand_out(pair.prompt(50))
    assert (await pair.prefill.load()).pinned == 1
    assert output.kv is not None
    await pair.decode.release(f"r{next(_ids)}", pair.backend.decode_params(output.kv))
    async with asyncio.timeout(5):
        while (await pair.prefill.load()).pinned:
            await asyncio.sleep(0.05)


async def test_loading_that_fails_names_why_and_can_be_repeated(
    pair: Pair, tiny_model: Path
) -> None:
    prompt = pair.prompt(40)
    before = await pair.run(pair.request(prompt))
    async with weights_of(pair, tiny_model) as offer:
        whole = offer(1.5)
        assert whole.segment is not None
        gone = dataclasses.replace(whole.segment, id="00" * 16)
        await pair.decode.pause()
        with pytest.raises(LegError, match="is something else"):
            await pair.decode.load_weights(dataclasses.replace(whole, segment=gone))
        await load(pair.decode, whole, 1)
        assert (await pair.run(pair.request(prompt))).token_ids != before.token_ids
    assert (await pair.run(pair.request(prompt))).token_ids == before.token_ids


async def test_files_that_lack_a_parameter_are_refused(pair: Pair, tiny_model: Path) -> None:
    names = tuple(spec.name for spec in checkpoint_manifest(tiny_model))
    async with weights_of(pair, tiny_model):
        await pair.decode.pause()
        with pytest.raises(LegError, match="parameter absent: not in"):
            await pair.decode.load_weights(
                WeightOffer(folder=str(tiny_model), names=(*names, "absent"))
            )
        await load(pair.decode, WeightOffer(folder=str(tiny_model), names=names), 1)


async def test_a_cut_sample_hands_out_its_kv_and_another_engine_goes_on_exactly(
    pair: Pair,
) -> None:
    for length in (pair.block - 1, 2 * pair.block + 5):
        prompt = pair.prompt(length)
        whole = await pair.run(pair.request(prompt, tokens(16), salt=f"{pair.salt}-w{length}"))
        first = await pair.run(pair.request(prompt, tokens(9), hands_out=True))
        assert first.kv is not None
        so_far = prompt + first.token_ids
        second = await pair.run(pair.request(so_far, tokens(7), kv=first.kv), on=pair.prefill)
        assert first.token_ids + second.token_ids == whole.token_ids
        assert first.logprobs + second.logprobs == pytest.approx(whole.logprobs, abs=1e-4)
        # All KV moved; the last token has none yet, so it is computed as in any step.
        assert second.cached_tokens >= len(so_far) - 1


async def test_a_leader_loads_a_handle_and_hands_out_another(pair: Pair) -> None:
    prompt = pair.prompt(2 * pair.block + 3)
    whole = await pair.run(pair.request(prompt, tokens(12), salt=f"{pair.salt}-w"))
    kv = (await pair.hand_out(prompt)).kv
    first = await pair.run(pair.request(prompt, tokens(6), kv=kv, hands_out=True))
    assert first.kv is not None
    assert first.cached_tokens >= len(prompt) - 1
    second = await pair.run(
        pair.request(prompt + first.token_ids, tokens(6), kv=first.kv), on=pair.prefill
    )
    assert first.token_ids + second.token_ids == whole.token_ids


async def test_a_leader_that_loaded_a_handle_and_is_preempted_goes_on(pair: Pair) -> None:
    """As when KV runs out, and as in a weight update that keeps what is under way."""
    prompt = pair.prompt(2 * pair.block + 3)
    whole = await pair.run(pair.request(prompt, tokens(60), salt=f"{pair.salt}-w"))
    kv = (await pair.hand_out(prompt)).kv
    request = pair.request(prompt, tokens(60), kv=kv, hands_out=True)
    async with asyncio.timeout(30), contextlib.aclosing(pair.decode.decode(request)) as events:
        assert isinstance(await anext(events), FirstToken)
        await pair.decode.pause()
        assert await pair.decode.reset_prefix_cache(preempt=True)
        await pair.decode.resume()
        output = [event async for event in events][-1]
    assert isinstance(output, DecodeOutput)
    assert output.token_ids == whole.token_ids
    assert output.kv is not None
    await pair.prefill.release(f"r{next(_ids)}", pair.backend.decode_params(output.kv))


async def test_a_sample_that_ends_by_itself_hands_out_nothing(pair: Pair) -> None:
    prompt = pair.prompt(pair.block + 3)
    whole = await pair.run(pair.request(prompt, tokens(8), salt=f"{pair.salt}-w"))
    sampling = SamplingParams(
        max_tokens=8, temperature=0.0, ignore_eos=True, stop_token_ids=(whole.token_ids[4],)
    )
    stopped = await pair.run(pair.request(prompt, sampling, hands_out=True))
    assert stopped.finish_reason == "stop"
    assert stopped.kv is None
    await pair.assert_no_block_is_held()


async def test_a_handle_to_generated_tokens_can_be_given_back(pair: Pair) -> None:
    prompt = pair.prompt(2 * pair.block)
    output = await pair.run(pair.request(prompt, tokens(5), hands_out=True))
    assert output.kv is not None
    assert (await pair.decode.load()).pinned == 1
    await pair.prefill.release(f"r{next(_ids)}", pair.backend.decode_params(output.kv))
    # Going on where it is needs no handle: what it generated is in the prefix cache.
    again = await pair.run(pair.request(prompt + output.token_ids, tokens(5)))
    assert again.cached_tokens >= 2 * pair.block
    await pair.assert_no_block_is_held()


async def test_an_engine_reports_its_steps(pair: Pair) -> None:
    await pair.decode.steps()
    prompt = pair.prompt(3 * pair.block + 1)
    output = await pair.run(pair.request(prompt, tokens(8)))
    steps = await pair.decode.steps()
    assert sum(step.prefill_tokens for step in steps) >= len(prompt) - output.cached_tokens
    assert sum(step.sequences for step in steps) == 7
    assert all(step.seconds > 0 for step in steps)
    decoding = [step for step in steps if step.sequences]
    assert all(step.context_tokens > len(prompt) for step in decoding)
    assert await pair.decode.steps() == []


@pytest.mark.parametrize("every", [1, 3, 100])
async def test_tokens_stream_each_once_and_in_order(pair: Pair, every: int) -> None:
    request = dataclasses.replace(pair.request(pair.prompt(40), tokens(10)), stream=every)
    events = [event async for event in pair.decode.decode(request)]
    output = events[-1]
    assert isinstance(output, DecodeOutput)
    pieces = [event for event in events if isinstance(event, Tokens)]
    # At least as many as asked for: an engine puts together what its reader is late for.
    assert all(len(piece.token_ids) >= every for piece in pieces[:-1])
    assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert sum((piece.token_ids for piece in pieces), ()) == output.token_ids
    assert sum((piece.logprobs for piece in pieces), ()) == output.logprobs
    assert "".join(piece.text for piece in pieces) == output.text
    # Whoever leads is known by its first token, before any other comes.
    assert isinstance(events[0], FirstToken)
    assert sum(isinstance(event, FirstToken) for event in events) == 1


async def test_an_aborted_stream_ends_with_what_was_sent(pair: Pair) -> None:
    request = dataclasses.replace(pair.request(pair.prompt(40), tokens(500)), stream=1)
    sent: list[int] = []
    output = None
    async for event in pair.decode.decode(request):
        if isinstance(event, Tokens):
            sent += event.token_ids
            if len(sent) == 5:
                await pair.decode.abort([request.request_id])
        elif isinstance(event, DecodeOutput):
            output = event
    assert output is not None
    assert output.finish_reason == "abort"
    assert tuple(sent) == output.token_ids
    await pair.assert_no_block_is_held()
