"""The weighted gate: capacity, order, cancellation."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitroll.dispatch.gate import WeightedGate


async def test_it_lets_in_up_to_its_capacity() -> None:
    gate = WeightedGate(3)
    await gate.acquire(2)
    await gate.acquire(1)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(gate.acquire(1), 0.01)
    gate.release(1)
    await asyncio.wait_for(gate.acquire(1), 1)


async def test_a_weight_above_the_capacity_is_let_in_alone() -> None:
    gate = WeightedGate(3)
    await gate.acquire(1)
    big = asyncio.create_task(gate.acquire(10))
    await asyncio.sleep(0)
    assert not big.done()
    gate.release(1)
    await asyncio.wait_for(big, 1)


async def test_a_small_weight_does_not_overtake_a_large_one() -> None:
    gate = WeightedGate(3)
    await gate.acquire(2)
    large = asyncio.create_task(gate.acquire(3))
    await asyncio.sleep(0)
    small = asyncio.create_task(gate.acquire(1))
    await asyncio.sleep(0)
    assert not small.done()
    gate.release(2)
    await asyncio.wait_for(large, 1)
    gate.release(3)
    await asyncio.wait_for(small, 1)


async def test_a_cancelled_wait_does_not_block_those_behind_it() -> None:
    gate = WeightedGate(2)
    await gate.acquire(2)
    first = asyncio.create_task(gate.acquire(2))
    second = asyncio.create_task(gate.acquire(1))
    await asyncio.sleep(0)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    gate.release(2)
    await asyncio.wait_for(second, 1)
    assert gate.held == 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=30),
    st.integers(0, 8),
)
def test_nothing_is_left_held_whatever_is_cancelled(
    requests: list[tuple[int, bool]], capacity: int
) -> None:
    async def run() -> None:
        gate = WeightedGate(capacity)

        async def use(weight: int) -> None:
            async with gate.hold(weight):
                assert gate.held <= capacity or gate.held == weight
                await asyncio.sleep(0)

        tasks = [asyncio.create_task(use(weight)) for weight, _ in requests]
        await asyncio.sleep(0)
        for task, (_, cancel) in zip(tasks, requests, strict=True):
            if cancel:
                task.cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        assert all(result is None or isinstance(result, asyncio.CancelledError) for result in done)
        assert gate.held == 0

    asyncio.run(run())


async def test_the_least_key_goes_first_and_equal_ones_in_order_of_arrival() -> None:
    gate = WeightedGate(1)
    await gate.acquire(1)
    entered: list[str] = []

    async def use(name: str, key: float) -> None:
        async with gate.hold(1, key):
            entered.append(name)

    jobs = [("late", 5.0), ("a", 2.0), ("b", 2.0), ("first", -1.0), ("c", 2.0)]
    tasks = [asyncio.create_task(use(*job)) for job in jobs]
    await asyncio.sleep(0)
    gate.release(1)
    await asyncio.wait_for(asyncio.gather(*tasks), 1)
    assert entered == ["first", "a", "b", "c", "late"]


async def test_nobody_passes_one_with_a_lesser_key_who_does_not_fit_yet() -> None:
    gate = WeightedGate(4)
    await gate.acquire(3)
    large = asyncio.create_task(gate.acquire(4, 1.0))
    await asyncio.sleep(0)
    small = asyncio.create_task(gate.acquire(1, 2.0))
    await asyncio.sleep(0)
    assert not small.done()
    ahead = asyncio.create_task(gate.acquire(1, 0.0))
    await asyncio.wait_for(ahead, 1)
    assert not large.done()
    assert not small.done()
    gate.release(4)
    await asyncio.wait_for(large, 1)


@settings(max_examples=50, deadline=None)
@given(st.integers(1, 8), st.floats(0, 20), st.lists(st.integers(1, 4), min_size=1, max_size=60))
def test_nothing_waits_for_ever_while_keys_grow_with_time(
    large: int, head_start: float, weights: list[int]
) -> None:
    """Each turn one leaves and another comes, with a key up to `head_start` before its time."""

    async def run() -> None:
        gate = WeightedGate(8)
        await gate.acquire(8)
        waiting = asyncio.create_task(gate.acquire(large, 0.0))
        await asyncio.sleep(0)
        inside, turns = 8, 0
        come = []
        for turn, weight in enumerate(weights):
            come.append(asyncio.create_task(gate.acquire(weight, turn + 1 - head_start)))
            await asyncio.sleep(0)
        while not waiting.done():
            gate.release(inside)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            inside, turns = gate.held, turns + 1
            assert turns <= head_start + 2
        for task in come:
            task.cancel()
        await asyncio.gather(*come, return_exceptions=True)

    asyncio.run(run())


async def test_parts_that_are_given_back_early_let_others_in() -> None:
    gate = WeightedGate(8)
    async with gate.hold_parts(8, 4) as give_back:
        waiting = asyncio.create_task(gate.acquire(4))
        await asyncio.sleep(0)
        give_back()
        await asyncio.sleep(0)
        assert not waiting.done()
        give_back()
        await asyncio.sleep(0)
        assert waiting.done()
        for _ in range(5):
            give_back()  # no more than was held is ever given back
        assert gate.held == 4
    assert gate.held == 4
    gate.release(4)
