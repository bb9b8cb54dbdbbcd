"""Episodes: each goes on by itself, token-exact, within its budget; n come back or none do."""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_engines import VOCAB, FakeEngines, place
from splitroll.dispatch.assembly import GroupWork
from splitroll.environment import Answer, Episode, EpisodeGroup, collect
from splitroll.episodes import EpisodeLimits, run_episodes
from splitroll.errors import FleetFenced, GroupFailed
from splitroll.types import (
    Group,
    Prompt,
    SamplingParams,
    derive_seed,
)


def work(n: int = 2, budget: int = 50, prompt: Sequence[int] = (1, 2, 3)) -> GroupWork:
    sampling = SamplingParams(max_tokens=budget, min_tokens=min(2, budget))
    return GroupWork(Prompt("p", tuple(prompt), metadata={"mine": 7}), n, sampling, seed=5)


def no_texts(text: str) -> Sequence[int]:
    raise AssertionError("no text is to be encoded")


async def play(
    environment: Any,
    engines: FakeEngines | None = None,
    asked: GroupWork | None = None,
    timeout_s: float = 10.0,
    max_turns: int | None = None,
    encode: Callable[[str], Sequence[int]] = no_texts,
) -> EpisodeGroup:
    run = (engines or FakeEngines()).run
    limits = EpisodeLimits(timeout_s, VOCAB, max_turns)
    return await run_episodes(run, asked or work(), environment, encode, limits)


class Plain:
    """A plain environment around a function."""

    def __init__(self, answer: Callable[[Episode], Any]) -> None:
        self._answer = answer

    def observe(self, episode: Episode) -> Any:
        return self._answer(episode)


class Async(Plain):
    async def observe(self, episode: Episode) -> Any:
        await asyncio.sleep(0)
        return self._answer(episode)


BOTH = pytest.mark.parametrize("kind", [Plain, Async])


def twice(episode: Episode) -> Any:
    return [9, 9] if len(episode.turns) == 1 else None


# --- whatever happens


@dataclass(frozen=True)
class Step:
    """What one turn is, and what is answered to it."""

    tokens: int
    answer: tuple[int, ...] | None
    reward: float
    abort: bool
    fail: bool
    delay: int


steps = st.builds(
    Step,
    tokens=st.integers(1, 9),
    answer=st.none() | st.lists(st.integers(0, VOCAB - 1), max_size=6).map(tuple),
    reward=st.floats(-1, 1),
    abort=st.integers(0, 19).map(lambda x: x == 0),
    fail=st.integers(0, 19).map(lambda x: x == 0),
    delay=st.integers(0, 3),
)
LAST = Step(1, None, 0.0, False, False, 0)


@dataclass
class Script:
    """Engines and an environment that do what a table of steps says, by sample and turn."""

    table: Sequence[Sequence[Step]]
    hurried: bool = False
    seen: dict[tuple[int, int], Episode] = field(default_factory=dict)
    engines: FakeEngines = field(init=False)

    def __post_init__(self) -> None:
        self.engines = FakeEngines(
            length=lambda *at: self.step(*at).tokens,
            aborted=lambda *at: self.step(*at).abort,
            before=self.wait,
        )

    def step(self, sample: int, turn: int) -> Step:
        row = self.table[sample]
        return row[turn] if turn < len(row) else LAST

    async def wait(self, sample: int, turn: int) -> None:
        for _ in range(0 if self.hurried else self.step(sample, turn).delay):
            await asyncio.sleep(0)

    def answer(self, episode: Episode) -> Any:
        at = episode.sample, len(episode.turns) - 1
        assert at not in self.seen, "asked twice"
        self.seen[at] = episode
        if self.step(*at).fail:
            raise ValueError("as planned")
        return Answer(self.step(*at).answer, self.step(*at).reward)


scripts = st.integers(1, 4).flatmap(
    lambda n: st.lists(st.lists(steps, max_size=6), min_size=n, max_size=n)
)


@pytest.mark.parametrize("kind", [Plain, Async])
@settings(max_examples=150, deadline=None)
@given(
    table=scripts,
    budget=st.integers(1, 40),
    max_turns=st.none() | st.integers(1, 4),
    prompt=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=5),
)
def test_no_token_is_lost_invented_or_over_the_budget(
    kind: type[Plain],
    table: list[list[Step]],
    budget: int,
    max_turns: int | None,
    prompt: list[int],
) -> None:
    n = len(table)
    asked = work(n, budget, prompt)
    script = Script(table)
    playing = play(kind(script.answer), script.engines, asked, max_turns=max_turns)
    failed: GroupFailed | None = None
    try:
        group = asyncio.run(playing)
    except GroupFailed as exc:
        failed = exc
    if failed is not None:
        assert failed.group_id == "p"
        failing = [at for at in script.seen if script.step(*at).fail]
        named = [f"sample {sample}, turn {turn}: " for sample, turn in failing]
        assert any(failed.causes[0].startswith(name) for name in named)
        return
    assert not any(script.step(*at).fail for at in script.seen)
    assert group.prompt is asked.prompt
    assert [episode.sample for episode in group.episodes] == list(range(n))
    for episode in group.episodes:
        check(episode, script, asked, max_turns)
    # Every turn that was generated is in an episode, once.
    sent = [w.prompt.id for w in script.engines.works[1:]]
    kept = [turn.id for episode in group.episodes for turn in episode.turns[1:]]
    assert sorted(sent) == sorted(kept)
    assert len(set(sent)) == len(sent)
    # In another order of events the same is drawn.
    hurried = Script(table, hurried=True)
    again = asyncio.run(play(Async(hurried.answer), hurried.engines, asked, max_turns=max_turns))
    for one, other in zip(group.episodes, again.episodes, strict=True):
        assert one.token_ids == other.token_ids
        assert replace(one, environment_s=()) == replace(other, environment_s=())


def check(episode: Episode, script: Script, asked: GroupWork, max_turns: int | None) -> None:
    budget, prompt = asked.sampling.max_tokens, asked.prompt.token_ids
    tokens, mask, logprobs = episode.token_ids, episode.env_mask, episode.logprobs
    assert len(tokens) == len(mask) == len(logprobs) <= budget
    assert [value == 0.0 for value in logprobs] == [sampled == 0 for sampled in mask]
    assert mask[-1] == 1
    sampled = [token for turn in episode.turns for token in turn.token_ids]
    assert [token for token, one in zip(tokens, mask, strict=True) if one] == sampled
    # Every turn's prompt is exactly the tokens before it; what the environment saw is a prefix.
    before = list(prompt)
    for number, turn in enumerate(episode.turns):
        assert list(turn.prompt_token_ids) == before
        before += turn.token_ids
        seen = script.seen.get((episode.sample, number))
        if seen is not None:
            assert list(prompt) + list(seen.token_ids) == before
            assert seen.turns == episode.turns[: number + 1]
            assert seen.ended is None
        before += episode.observations[number] if number < len(episode.observations) else ()
        sent = next(w for w in script.engines.works if w.prompt.id == turn.id)
        assert sent.sampling.max_tokens == budget - (len(turn.prompt_token_ids) - len(prompt))
        assert sent.sampling.min_tokens <= sent.sampling.max_tokens
        seeds = (asked.seed, episode.sample)
        expected = (
            derive_seed(*seeds) if number == 0 else derive_seed(derive_seed(*seeds, number), 0)
        )
        assert turn.seed == expected
    given = [script.step(episode.sample, turn) for turn in range(len(episode.turns))]
    answered = given if episode.ended != "abort" else given[:-1]
    assert [step.answer for step in given[:-1]] == list(episode.observations)
    assert [step.reward for step in answered] == list(episode.rewards)
    assert len(episode.environment_s) == len(episode.rewards)
    assert [step.abort for step in given[:-1]] == [False] * (len(given) - 1)
    assert max_turns is None or len(episode.turns) <= max_turns
    last = given[-1]
    if episode.ended == "abort":
        assert last.abort
    elif episode.ended == "environment":
        assert last.answer is None
    elif episode.ended == "max_turns":
        assert len(episode.turns) == max_turns
    else:
        assert episode.ended == "budget"
        assert last.answer is not None
        assert len(tokens) + len(last.answer) >= budget


# --- no barrier


async def test_an_episode_goes_on_while_its_siblings_are_stuck() -> None:
    stuck, moved_on = asyncio.Event(), asyncio.Event()

    async def before(sample: int, turn: int) -> None:
        if (sample, turn) == (0, 1):
            await stuck.wait()

    def four_turns(episode: Episode) -> Any:
        if episode.sample == 1 and len(episode.turns) == 4:
            moved_on.set()
        return [9] if len(episode.turns) < 4 else None

    engines = FakeEngines(before=before)
    playing = asyncio.create_task(play(Async(four_turns), engines))
    await asyncio.wait_for(moved_on.wait(), 5)
    assert not playing.done()
    assert sorted(w.prompt.id for w in engines.works) == ["p", "p/0/1", "p/1/1", "p/1/2", "p/1/3"]
    stuck.set()
    group = await asyncio.wait_for(playing, 5)
    assert [len(episode.turns) for episode in group.episodes] == [4, 4]


async def test_a_plain_environment_blocks_neither_the_loop_nor_its_siblings() -> None:
    """All 48 are asked at once, and each waits for the others and for the event loop."""
    together = threading.Barrier(48)
    ticked = threading.Event()

    def answer(episode: Episode) -> None:
        together.wait(timeout=10)
        assert ticked.wait(timeout=10)

    async def tick() -> None:
        await asyncio.sleep(0.05)
        ticked.set()

    group, _ = await asyncio.gather(play(Plain(answer), asked=work(n=48)), tick())
    assert [episode.ended for episode in group.episodes] == ["environment"] * 48


async def test_turns_of_one_episode_share_an_id_that_no_other_has() -> None:
    def three_turns(episode: Episode) -> Any:
        return [9] if len(episode.turns) < 3 else None

    ids: dict[str, set[str | None]] = defaultdict(set)
    for call in range(2):
        engines = FakeEngines()
        await play(Async(three_turns), engines)
        first, *later = engines.works
        assert first.episode_id is None
        assert [w.n for w in later] == [1] * 4
        for w in later:
            ids[f"{call}/{place(w, 0)[0]}"].add(w.episode_id)
            assert w.prompt.metadata == {"mine": 7}
    assert [len(of_one) for of_one in ids.values()] == [1] * 4
    assert len(set.union(*ids.values())) == 4


# --- how it ends


@BOTH
async def test_the_last_turn_is_rewarded_although_nothing_may_follow(kind: type[Plain]) -> None:
    def answer(episode: Episode) -> Answer:
        return Answer([7] * 3, reward=len(episode.turns))

    group = await play(kind(answer), asked=work(n=1, budget=8))
    (episode,) = group.episodes
    assert (episode.ended, episode.rewards, len(episode.token_ids)) == ("budget", (1.0, 2.0), 7)
    (episode,) = (await play(kind(answer), asked=work(n=1), max_turns=1)).episodes
    assert (episode.ended, episode.rewards, episode.observations) == ("max_turns", (1.0,), ())


async def test_turns_that_an_update_ended_early_end_their_episode_only() -> None:
    engines = FakeEngines(aborted=lambda sample, turn: (sample, turn) in {(0, 0), (1, 1)})
    group = await play(Async(twice), engines, asked=work(n=3))
    assert [episode.ended for episode in group.episodes] == ["abort", "abort", "environment"]
    assert [len(episode.turns) for episode in group.episodes] == [1, 2, 2]
    assert [len(episode.rewards) for episode in group.episodes] == [0, 1, 2]
    assert not group.is_complete
    assert (await play(Async(twice))).is_complete


async def test_a_text_is_encoded_as_it_stands() -> None:
    def encode(text: str) -> list[int]:
        return [int(word) for word in text.split()]

    group = await play(
        Async(lambda e: "7 8" if len(e.turns) == 1 else None), asked=work(n=1), encode=encode
    )
    assert group.episodes[0].observations == ((7, 8),)
    with pytest.raises(GroupFailed, match="turn 0: encoding the observation failed: ValueError"):
        await play(Async(lambda e: "x"), encode=encode)


# --- failures


def raising(error: BaseException) -> Callable[[Episode], Any]:
    def answer(episode: Episode) -> Any:
        raise error

    return answer


@BOTH
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (raising(ValueError("mine")), "the environment failed: ValueError: mine"),
        (raising(TimeoutError("its own")), "the environment failed: TimeoutError: its own"),
        (raising(StopIteration()), "the environment failed: RuntimeError"),
        (raising(SystemExit(3)), "RuntimeError: it raised SystemExit"),
        (raising(asyncio.CancelledError()), "RuntimeError: it raised CancelledError"),
        (lambda e: {"role": "user"}, "answered with a dict"),
        (lambda e: b"ab", "answered with a bytes"),
        (lambda e: 3, "answered with a int"),
        (lambda e: [5, VOCAB], "wrote 1000, which is no token id from 0 to 999"),
        (lambda e: [-1], "wrote -1"),
        (lambda e: [True], "wrote True"),
        (lambda e: [1.0], "wrote 1.0"),
        (lambda e: Answer([5], reward="much"), "gave 'much', which is no reward"),  # type: ignore[arg-type]
    ],
)
async def test_what_is_no_answer_fails_the_prompt_by_name(
    kind: type[Plain], answer: Callable[[Episode], Any], message: str
) -> None:
    def later(episode: Episode) -> Any:
        if episode.sample == 0:
            return [9] if len(episode.turns) < 50 else None
        return [9] if len(episode.turns) == 1 else answer(episode)

    with pytest.raises(GroupFailed) as error:
        await asyncio.wait_for(play(kind(later), asked=work(budget=5000)), 10)
    assert error.value.group_id == "p"
    (cause,) = error.value.causes
    assert cause.startswith("sample 1, turn 1: ")
    assert message in cause


@pytest.mark.parametrize("kind", ["plain", "async"])
async def test_an_answer_has_a_time_limit_and_siblings_are_cancelled(kind: str) -> None:
    release, cancelled = threading.Event(), asyncio.Event()

    class Slow:
        def observe(self, episode: Episode) -> Any:
            release.wait(10)

    class SlowAsync:
        async def observe(self, episode: Episode) -> Any:
            await asyncio.sleep(10)

    async def before(sample: int, turn: int) -> None:
        if turn == 1:
            try:
                await asyncio.sleep(10)
            except asyncio.CancelledError:
                cancelled.set()
                raise

    class SlowForTheSecond:
        slow: Any = Slow() if kind == "plain" else SlowAsync()

        def observe(self, episode: Episode) -> Any:
            return [9] if episode.sample == 0 else self.slow.observe(episode)

    limit = r"sample 1, turn 0: the environment took longer than 0\.5 s"
    with pytest.raises(GroupFailed, match=limit):
        await asyncio.wait_for(
            play(SlowForTheSecond(), FakeEngines(before=before), timeout_s=0.5), 5
        )
    assert cancelled.is_set()
    release.set()


async def test_a_turn_that_no_route_completes_names_prompt_sample_and_turn() -> None:
    engines = FakeEngines()

    async def run(asked: GroupWork) -> Group:
        if asked.prompt.id == "p/1/1":
            raise GroupFailed(asked.prompt.id, ["decode-0 died", "decode-1 died"])
        return await engines.run(asked)

    with pytest.raises(GroupFailed) as error:
        await run_episodes(run, work(), Async(twice), no_texts, EpisodeLimits(5.0, VOCAB))
    assert error.value.group_id == "p"
    assert error.value.causes == (
        "sample 1, turn 1: decode-0 died",
        "sample 1, turn 1: decode-1 died",
    )


async def test_other_errors_come_through_as_they_are() -> None:
    engines = FakeEngines()

    async def run(asked: GroupWork) -> Group:
        if asked.episode_id is not None:
            raise FleetFenced("decode-0 kept the old weights")
        return await engines.run(asked)

    with pytest.raises(FleetFenced, match="kept the old weights"):
        await run_episodes(run, work(), Async(twice), no_texts, EpisodeLimits(5.0, VOCAB))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g: replace(g, samples=()), "it has 0 samples, and 1 were asked for"),
        (lambda g: replace(g, samples=g.samples * 2), "it has 2 samples"),
        (lambda g: each(g, token_ids=(), logprobs=()), "has no tokens"),
        (lambda g: each(g, logprobs=(0.1,)), "has 1 log-probabilities for 2 tokens"),
        (lambda g: each(g, prompt_token_ids=(1, 2, 3)), "is of another prompt"),
    ],
)
async def test_a_turn_that_is_not_whole_is_an_error(
    spoil: Callable[[Group], Group], message: str
) -> None:
    engines = FakeEngines()

    async def run(asked: GroupWork) -> Group:
        group = await engines.run(asked)
        return group if asked.episode_id is None else spoil(group)

    with pytest.raises(GroupFailed, match=f"group p failed: sample 0, turn 1: .*{message}"):
        await run_episodes(run, work(n=1), Async(twice), no_texts, EpisodeLimits(5.0, VOCAB))


def each(group: Group, **changes: Any) -> Group:
    return replace(group, samples=tuple(replace(s, **changes) for s in group.samples))


# --- environments that are made for each episode


class Gym:
    """Makes environments, and notes what becomes of them."""

    def __init__(self, answer: Callable[[Episode], Any] = twice, kind: type[Plain] = Plain) -> None:
        self.answer = answer
        self.kind = kind
        self.events: list[tuple[str, int]] = []
        self.close_error: Exception | None = None

    def make(self, prompt: Prompt, sample: int) -> Any:
        assert prompt.metadata == {"mine": 7}
        self.events.append(("make", sample))
        gym = self

        class Made(self.kind):  # type: ignore[name-defined, misc]
            def close(self) -> None:
                gym.events.append(("close", sample))
                if gym.close_error is not None:
                    raise gym.close_error

        class MadeAsync(Made):
            async def close(self) -> None:
                await asyncio.sleep(0)
                Made.close(self)

        return (Made if self.kind is Plain else MadeAsync)(self._answer)

    def _answer(self, episode: Episode) -> Any:
        self.events.append(("observe", episode.sample))
        return self.answer(episode)

    def of(self, sample: int) -> list[str]:
        return [name for name, one in self.events if one == sample]


@BOTH
async def test_each_episode_has_an_environment_of_its_own(kind: type[Plain]) -> None:
    gym = Gym(kind=kind)
    group = await play(gym, asked=work(n=3))
    assert [episode.ended for episode in group.episodes] == ["environment"] * 3
    for sample in range(3):
        assert gym.of(sample) == ["make", "observe", "observe", "close"]


async def test_an_episode_that_is_never_answered_has_no_environment() -> None:
    gym = Gym()
    await play(gym, FakeEngines(aborted=lambda *at: True))
    assert gym.events == []


@BOTH
async def test_environments_are_closed_when_a_sibling_fails(kind: type[Plain]) -> None:
    def answer(episode: Episode) -> Any:
        if episode.sample == 1 and len(episode.turns) == 3:
            raise ValueError("mine")
        return [9]

    gym = Gym(answer, kind)
    with pytest.raises(GroupFailed, match="sample 1, turn 2"):
        await play(gym, asked=work(n=3, budget=5000))
    for sample in range(3):
        assert gym.of(sample)[-1] == "close"
        assert gym.of(sample).count("close") == 1


@BOTH
async def test_environments_are_closed_when_the_call_is_cancelled(kind: type[Plain]) -> None:
    async def before(sample: int, turn: int) -> None:
        await asyncio.sleep(10 * turn)

    gym = Gym(kind=kind)
    playing = asyncio.create_task(play(gym, FakeEngines(before=before)))
    while len(gym.events) < 4:
        await asyncio.sleep(0.01)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asyncio.wait_for(playing, 5)
    assert gym.of(0) == gym.of(1) == ["make", "observe", "close"]


async def test_a_call_that_is_left_behind_is_not_overtaken_by_close() -> None:
    release = threading.Event()

    def hangs(episode: Episode) -> None:
        assert release.wait(10)
        gym.events.append(("answered", episode.sample))

    gym = Gym(hangs)
    with pytest.raises(GroupFailed, match="took longer"):
        await asyncio.wait_for(play(gym, asked=work(n=1), timeout_s=0.5), 5)
    assert gym.of(0) == ["make", "observe"]
    release.set()
    while len(gym.of(0)) < 4:
        await asyncio.sleep(0.01)
    assert gym.of(0) == ["make", "observe", "answered", "close"]


async def test_what_was_made_too_late_is_closed_too() -> None:
    release = threading.Event()

    class SlowGym(Gym):
        def make(self, prompt: Prompt, sample: int) -> Any:
            assert release.wait(10)
            return super().make(prompt, sample)

    gym = SlowGym()
    with pytest.raises(GroupFailed, match="sample 0, turn 0: the environment took longer"):
        await asyncio.wait_for(play(gym, asked=work(n=1), timeout_s=0.5), 5)
    release.set()
    while gym.of(0) != ["make", "close"]:
        await asyncio.sleep(0.01)


async def test_what_cannot_be_made_or_closed_fails_the_prompt() -> None:
    gym = Gym()
    gym.close_error = OSError("in use")
    with pytest.raises(
        GroupFailed, match=r"turn 1: closing the environment failed: OSError: in use"
    ):
        await play(gym)

    class NoGym:
        def make(self, prompt: Prompt, sample: int) -> Any:
            raise KeyError("env_class")

    with pytest.raises(GroupFailed, match="turn 0: the environment failed: KeyError: 'env_class'"):
        await play(NoGym())


async def test_a_failure_is_told_although_closing_fails_as_well(
    caplog: pytest.LogCaptureFixture,
) -> None:
    gym = Gym(raising(ValueError("first")))
    gym.close_error = OSError("second")
    with pytest.raises(GroupFailed, match="ValueError: first"):
        await play(gym, asked=work(n=1))
    assert "second" in caplog.text


# --- collected


async def episodes_of(n: int = 2) -> EpisodeGroup:
    return await play(Async(twice), asked=work(n))


async def test_episodes_are_collected_in_the_prompts_order() -> None:
    group = await episodes_of()
    other = replace(work().prompt, id="q")
    samples = tuple(
        replace(one, prompt_token_ids=other.token_ids)
        for e in group.episodes
        for one in e.turns[:1]
    )
    plain = Group(other, samples)
    done = collect([plain, group], [group.prompt, other], 2)
    assert done[:2] == list(group.episodes)
    assert [(e.prompt.id, e.sample, e.ended) for e in done[2:]] == [("q", 0, None), ("q", 1, None)]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda g: replace(g, episodes=g.episodes[:1]), "1 samples, and 2 were asked for"),
        (lambda g: replace(g, episodes=g.episodes[::-1]), "2 samples, and 2 were"),
        (
            lambda g: replace(g, episodes=tuple(early(e) for e in g.episodes)),
            "sample 0 was ended early, by a weight update",
        ),
        (
            lambda g: replace(
                g, episodes=tuple(replace(e, observations=((9,),)) for e in g.episodes)
            ),
            "sample 0 is of another prompt",
        ),
    ],
)
async def test_episodes_that_are_not_whole_are_refused(
    spoil: Callable[[EpisodeGroup], EpisodeGroup], message: str
) -> None:
    group = await episodes_of()
    with pytest.raises(GroupFailed, match=message):
        collect([spoil(group)], [group.prompt], 2)


def early(episode: Episode) -> Episode:
    *before, last = episode.turns
    return replace(episode, turns=(*before, replace(last, finish_reason="abort")), ended="abort")


async def test_missing_and_doubled_groups_are_refused() -> None:
    group = await episodes_of()
    for groups in ([], [group, group]):
        with pytest.raises(GroupFailed):
            collect(groups, [group.prompt], 2)
