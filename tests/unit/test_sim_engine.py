"""The virtual engine against cases reckoned by hand: when each step begins and ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from splitroll.dispatch.cost import StepCost
from splitroll.sim.engine import Clock, Job, VirtualEngine

COST = StepCost(step=1.0, sequence=0.5, context=0.01, token=0.1, pair=0.001)


class Bench:
    """An engine, and the times at which its jobs' prompts and ends were told."""

    def __init__(self, cost: StepCost = COST, **settings: float) -> None:
        self.clock = Clock()
        self.engine = VirtualEngine(self.clock, cost, **settings)  # type: ignore[arg-type]
        self.prompts: dict[str, float] = {}
        self.ends: dict[str, float] = {}

    def job(
        self,
        name: str,
        prompt_tokens: int,
        tokens: int,
        blocks: Sequence[int] = (),
        pulled: int = 0,
    ) -> Job:
        def prompt(now: float) -> None:
            self.prompts[name] = now

        def end(now: float) -> None:
            self.ends[name] = now

        return Job(prompt_tokens, blocks, tokens, prompt, end, pulled)

    def send(self, *jobs: Job, at: float = 0.0, after_s: float = 0.0) -> None:
        self.clock.at(at, lambda now: self.engine.send(jobs, now, after_s))


def prefill(tokens: float, offset: float = 0.0) -> float:
    return 0.1 * tokens + 0.001 * tokens * (offset + tokens / 2)


def decode(context: int, steps: int, sequences: int = 1) -> float:
    """Steps of sequences that have so much context together before the first of them."""
    return sum(1.0 + 0.5 * sequences + 0.01 * (context + i * sequences) for i in range(steps))


def test_one_sequence_alone() -> None:
    bench = Bench()
    bench.send(bench.job("a", 10, 5))
    bench.clock.run()
    # The first token comes with the prompt, which the step's constant part is paid for, too.
    begun = 1.0 + prefill(10)
    assert bench.prompts["a"] == pytest.approx(begun)
    assert bench.ends["a"] == pytest.approx(begun + decode(11, 4))
    assert bench.engine.spent.fixed == pytest.approx(5.0)
    assert bench.engine.spent.prefill == pytest.approx(prefill(10))
    assert bench.engine.spent.total == pytest.approx(bench.ends["a"])
    assert bench.engine.best_token_s == pytest.approx(1.61)


def test_one_token_ends_with_the_prompt() -> None:
    bench = Bench()
    bench.send(bench.job("a", 10, 1), bench.job("only the prompt", 5, 0))
    bench.clock.run()
    end = 1.0 + prefill(10) + prefill(5)
    assert bench.ends == pytest.approx({"a": end, "only the prompt": end})


def test_a_batch_shares_the_constant_part_of_a_step() -> None:
    bench = Bench()
    bench.send(bench.job("a", 10, 4), bench.job("b", 20, 3))
    bench.clock.run()
    begun = 1.0 + prefill(10) + prefill(20)
    both = begun + decode(11 + 21, 2, sequences=2)
    assert bench.ends["b"] == pytest.approx(both)
    assert bench.ends["a"] == pytest.approx(both + decode(13, 1))


def test_a_long_prompt_is_computed_in_chunks_beside_those_that_decode() -> None:
    bench = Bench(batch_tokens=8)
    bench.send(bench.job("a", 4, 9))
    bench.send(bench.job("b", 10, 2), at=1.0)
    bench.clock.run()
    first = 1.0 + prefill(4)
    # Of the budget of 8, one goes to "a": 7 tokens, then 3 that attend to these.
    second = first + decode(5, 1) + prefill(7)
    third = second + decode(6, 1) + prefill(3, 7)
    assert bench.prompts["b"] == pytest.approx(third)
    fourth = third + decode(7 + 11, 1, sequences=2)
    assert bench.ends["b"] == pytest.approx(fourth)
    assert bench.ends["a"] == pytest.approx(fourth + decode(8, 5))


def test_a_request_that_comes_during_a_step_waits_for_the_next() -> None:
    bench = Bench()
    bench.send(bench.job("a", 10, 50))
    begun = 1.0 + prefill(10)
    bench.send(bench.job("b", 5, 2), at=begun + decode(11, 7) + 0.01)
    bench.clock.run()
    joined = begun + decode(11, 8)
    assert bench.prompts["b"] == pytest.approx(joined + decode(19, 1) + prefill(5))
    assert bench.ends["b"] == pytest.approx(bench.prompts["b"] + decode(20 + 6, 1, sequences=2))
    assert bench.ends["a"] == pytest.approx(bench.ends["b"] + decode(21, 49 - 10))


def test_a_request_that_comes_at_a_step_s_end_is_in_the_next() -> None:
    bench = Bench(StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
    bench.send(bench.job("a", 10, 50))
    bench.send(bench.job("b", 5, 1), at=8.0)
    bench.clock.run()
    assert bench.ends == pytest.approx({"b": 9.0, "a": 50.0})


def test_who_finds_no_seat_waits_for_one() -> None:
    bench = Bench(StepCost(1.0, 0.0, 0.0, 0.0, 0.0), seats=2)
    tokens = {"a": 3, "b": 5, "c": 2, "d": 2}
    bench.send(*(bench.job(name, 4, count) for name, count in tokens.items()))
    bench.clock.run()
    assert bench.ends == pytest.approx({"a": 3.0, "b": 5.0, "c": 5.0, "d": 7.0})


def test_a_prompt_s_full_blocks_are_computed_once() -> None:
    bench = Bench(block_size=4)
    blocks = (1, 2)
    bench.send(bench.job("a", 10, 1, blocks), bench.job("b", 10, 1, blocks))
    bench.send(bench.job("whole blocks", 8, 1, blocks), at=50.0)
    bench.clock.run()
    assert bench.ends["b"] == pytest.approx(1.0 + prefill(10) + prefill(2, 8))
    # The last token is computed in any case, and with it its block.
    assert bench.ends["whole blocks"] == pytest.approx(50.0 + 1.0 + prefill(4, 4))
    assert bench.engine.hits == 8 + 4


def test_a_cache_that_is_full_forgets_what_was_used_least_recently() -> None:
    bench = Bench(block_size=4, num_blocks=2)
    for index, blocks in enumerate(((1,), (2,), (1,), (3,), (1,), (2,))):
        bench.send(bench.job(str(index), 6, 1, blocks), at=10.0 * index)
    bench.clock.run()
    took = [round(bench.ends[str(i)] - 10.0 * i - 1.0, 6) for i in range(6)]
    miss, hit = round(prefill(6), 6), round(prefill(2, 4), 6)
    assert took == [miss, miss, hit, miss, hit, miss]


def test_a_pulled_prompt_costs_its_last_token() -> None:
    bench = Bench(latency_s=0.25)
    bench.send(bench.job("a", 10, 2, pulled=10), after_s=3.0)
    bench.clock.run()
    prompt = 0.25 + 3.0 + 1.0 + prefill(1, 9)
    assert bench.prompts["a"] == pytest.approx(prompt + 0.25)
    assert bench.ends["a"] == pytest.approx(prompt + decode(11, 1) + 0.25)


def test_a_segment_goes_on_from_its_full_blocks() -> None:
    bench = Bench(block_size=4)
    bench.send(bench.job("a", 6, 4, (1,)))
    bench.clock.run()
    # Prompt and all but the last token have KV: 9 tokens, two full blocks.
    bench.engine.keep((1, 2))
    bench.send(bench.job("rest", 10, 3, (1, 2)), at=bench.clock.now)
    bench.clock.run()
    expected = 1.0 + prefill(2, 8) + decode(11, 2)
    assert bench.ends["rest"] - bench.ends["a"] == pytest.approx(expected)


def test_an_engine_that_becomes_slower_does_so_with_its_next_step() -> None:
    bench = Bench(StepCost(1.0, 0.0, 0.0, 0.0, 0.0))
    bench.send(bench.job("a", 4, 10))
    slow = StepCost(3.0, 0.0, 0.0, 0.0, 0.0)
    bench.clock.at(4.5, lambda now: bench.engine.set_cost(slow, now))
    bench.clock.run()
    assert bench.ends["a"] == pytest.approx(5 + 3 * 5)


def test_it_reports_steps_that_the_cost_model_explains() -> None:
    bench = Bench()
    bench.send(bench.job("a", 10, 12), bench.job("b", 7, 5))
    bench.clock.run()
    for step in bench.engine.observed:
        decoding = COST.decode_step(step.sequences, step.context_tokens)
        prompt = COST.token * step.prefill_tokens + COST.pair * step.prefill_pairs
        assert step.seconds == pytest.approx(decoding + prompt, rel=0.01)
