"""SkyRL-Gym's own environments, and small ones in its registry, as environments of episodes."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("skyrl_gym")

import skyrl_gym
from skyrl_gym.envs import deregister, register
from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_gym.envs.sql.env import Text2SQLEnvConfig

from chat_tokenizer import VOCAB_SIZE, chat_tokenizer
from fake_engines import FakeEngines
from splitroll.dispatch.assembly import GroupWork
from splitroll.environment import EpisodeGroup
from splitroll.episodes import EpisodeLimits, run_episodes
from splitroll.errors import ConfigError, GroupFailed, InvalidRequest
from splitroll.integrations.skyrl_gym import SkyRLGym
from splitroll.types import Prompt, SamplingParams

TOKENIZER = chat_tokenizer()
END = "<|im_end|>"
QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
GSM8K = {
    "prompt": QUESTION,
    "env_class": "gsm8k_multi_turn",
    "reward_spec": {"ground_truth": "42"},
    "max_turns": 3,
}
ASKED_AGAIN = (
    "Please provide your step-by-step reasoning, and also include a tentative numeric answer "
    "at the end in the exact format: '#### ANSWER'."
)


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


def follow_up(text: str) -> tuple[int, ...]:
    """What stands between two turns, of which the first has sampled its end."""
    return ids(f"\n<|im_start|>user\n{text}{END}\n<|im_start|>assistant\n")


def says(*turns: list[str]) -> FakeEngines:
    """Engines that say these texts, by sample and turn."""
    return FakeEngines(says=lambda sample, turn: ids(turns[sample][turn]))


async def play(
    gym: SkyRLGym, prompt: Prompt, engines: FakeEngines, n: int, budget: int = 2000
) -> EpisodeGroup:
    work = GroupWork(prompt, n, SamplingParams(max_tokens=budget), seed=1)
    limits = EpisodeLimits(10.0, VOCAB_SIZE)
    return await run_episodes(engines.run, work, gym, lambda text: ids(text), limits)


async def test_gsm8k_over_several_turns() -> None:
    gym = SkyRLGym(TOKENIZER)
    prompt = gym.prompt(GSM8K, "a")
    assert prompt.token_ids == ids(
        f"<|im_start|>user\nWhat is 6 * 7?{END}\n<|im_start|>assistant\n"
    )
    engines = says(
        [f"It is 36. #### 36{END}", f"Again: #### 42{END}"],
        [f"#### 42{END}"],
        [f"I do not know{END}", f"#### 41{END}", f"#### 43{END}"],
    )
    right_later, right, wrong = (await play(gym, prompt, engines, n=3)).episodes
    assert right_later.rewards == pytest.approx((0.2 / 3, 1.0))
    assert right_later.observations == (follow_up(ASKED_AGAIN),)
    assert right_later.token_ids == (
        *ids(f"It is 36. #### 36{END}"), *follow_up(ASKED_AGAIN), *ids(f"Again: #### 42{END}"),
    )  # fmt: skip
    assert sum(right_later.env_mask) == len(ids(f"It is 36. #### 36{END}Again: #### 42{END}"))
    assert (right.rewards, right.observations) == ((1.0,), ())
    assert wrong.rewards == pytest.approx((0.0, 0.2 / 3, 0.2 / 3))
    assert len(wrong.turns) == 3
    assert {e.ended for e in (right_later, right, wrong)} == {"environment"}
    assert GSM8K["reward_spec"] == {"ground_truth": "42"}


async def test_text2sql_runs_the_models_queries(tmp_path: Path) -> None:
    folder = tmp_path / "spider" / "database" / "zoo"
    folder.mkdir(parents=True)
    with contextlib.closing(sqlite3.connect(folder / "zoo.sqlite")) as database:
        database.execute("CREATE TABLE animals (name TEXT)")
        database.execute("INSERT INTO animals VALUES ('ibis'), ('lynx')")
        database.commit()
    count = "SELECT count(*) FROM animals"
    row = {"prompt": QUESTION, "env_class": "text2sql", "db_id": "zoo", "data": "spider",
           "reward_spec": {"ground_truth": count}}  # fmt: skip
    gym = SkyRLGym(TOKENIZER, configs={"text2sql": Text2SQLEnvConfig(db_path=str(tmp_path))})
    look = f"<think>Look.</think><sql>SELECT name FROM animals WHERE name < 'k'</sql>{END}"
    answer = f"<think>Count.</think><solution>{count}</solution>{END}"
    nonsense = f"<think>Done.</think><solution>SELECT 7</solution>{END}"
    engines = says([look, answer], [look, nonsense])
    right, wrong = (await play(gym, gym.prompt(row, "a"), engines, n=2)).episodes
    assert (right.rewards, wrong.rewards) == ((0.0, 1.0), (0.0, 0.0))
    (seen,) = right.observations
    assert TOKENIZER.decode(seen).startswith("\n<|im_start|>user\n\n\n<observation>")
    assert "ibis" in TOKENIZER.decode(seen)
    assert "lynx" not in TOKENIZER.decode(seen)
    assert TOKENIZER.decode(seen).endswith(f"{END}\n<|im_start|>assistant\n")


async def test_a_turn_that_was_cut_is_rewarded_and_ends_the_episode() -> None:
    gym = SkyRLGym(TOKENIZER)
    engines = says(["#### 36 and more"])
    (episode,) = (await play(gym, gym.prompt(GSM8K, "a"), engines, 1, budget=7)).episodes
    assert (episode.ended, episode.turns[0].finish_reason) == ("budget", "length")
    assert episode.rewards == pytest.approx((0.2 / 3,))


async def test_a_turn_without_its_end_gets_one_from_the_template() -> None:
    """A stop string ends a turn before the model has written its end."""
    gym = SkyRLGym(TOKENIZER)
    engines = says(["<answer>1</answer>", f"#### 42{END}"])
    (episode,) = (await play(gym, gym.prompt(GSM8K, "a"), engines, 1)).episodes
    assert episode.observations == (ids(END) + follow_up(ASKED_AGAIN),)


class Counting(BaseTextEnv):  # type: ignore[misc]
    """Begins with messages of its own, and notes what is done to it."""

    made: list[Counting] = []  # noqa: RUF012

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.config = env_config
        self.extras = extras
        self.actions: list[str] = []
        self.closed = 0
        self.made.append(self)

    def init(self, prompt: list[dict[str, str]]) -> Any:
        prompt.insert(0, {"role": "system", "content": self.extras.pop("rules")})
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        assert not self.closed
        self.actions.append(action)
        return self.answer(len(self.actions))

    def answer(self, turn: int) -> Any:
        return {
            "observations": [{"role": "user", "content": f"turn {turn}"}],
            "reward": None if turn == 1 else 0.5,
            "done": turn == 2,
            "metadata": {},
        }

    def close(self) -> None:
        self.closed += 1


class Rewriting(Counting):
    def answer(self, turn: int) -> Any:
        return {**super().answer(turn), "postprocessed_action": "shorter"}


class Keeping(Counting):
    def answer(self, turn: int) -> Any:
        return {**super().answer(turn), "postprocessed_action": self.actions[-1]}


class Broken(Counting):
    def answer(self, turn: int) -> Any:
        raise OSError("no sandbox")


class Unready(Counting):
    def init(self, prompt: Any) -> Any:
        raise OSError("no database")


@pytest.fixture
def registered() -> Iterator[Callable[[type], str]]:
    names: list[str] = []
    Counting.made.clear()

    def add(kind: type) -> str:
        register(id=kind.__name__, entry_point=kind)
        names.append(kind.__name__)
        return names[-1]

    yield add
    for name in names:
        deregister(name)


@pytest.mark.parametrize("kind", [Counting, Keeping])
async def test_each_episode_has_an_environment_and_extras_of_its_own(
    registered: Any, kind: type
) -> None:
    row = {"prompt": QUESTION, "env_class": registered(kind), "rules": "Be brief.", "x": [1]}
    gym = SkyRLGym(TOKENIZER, configs={kind.__name__: {"url": "mine"}})
    prompt = gym.prompt(row, "a")
    system = ids(f"<|im_start|>system\nBe brief.{END}\n<|im_start|>user\n")
    assert prompt.token_ids[: len(system)] == system
    assert prompt.metadata is row
    engines = says([f"one{END}", f"two{END}"], [f"three{END}", f"four{END}"])
    group = await play(gym, prompt, engines, n=2)
    first, *others = Counting.made
    assert (first.actions, first.closed) == ([], 1)  # made for the prompt
    assert sorted(env.actions for env in others) == [["one", "two"], ["three", "four"]]
    assert [env.closed for env in others] == [1, 1]
    assert others[0].extras["x"] is not others[1].extras["x"] is not row["x"]
    assert others[0].config == {"url": "mine"}
    assert row["rules"] == "Be brief."
    assert len(QUESTION) == 1
    for episode in group.episodes:
        assert episode.rewards == (0.0, 0.5)
        # What it says along with `done` follows no turn.
        assert episode.observations == (follow_up("turn 1"),)


async def test_without_a_config_an_environment_gets_an_empty_one(registered: Any) -> None:
    row = {"prompt": QUESTION, "env_class": registered(Counting), "rules": ""}
    SkyRLGym(TOKENIZER).prompt(row, "a")
    assert Counting.made[0].config == {}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Rewriting, "ValueError: it rewrites the model's turn"),
        (Broken, "OSError: no sandbox"),
    ],
)
async def test_an_environment_that_fails_fails_its_prompt_and_is_closed(
    registered: Any, kind: type, message: str
) -> None:
    gym = SkyRLGym(TOKENIZER)
    prompt = gym.prompt({"prompt": QUESTION, "env_class": registered(kind), "rules": ""}, "a")
    with pytest.raises(GroupFailed, match=f"sample 0, turn 0: the environment failed: {message}"):
        await play(gym, prompt, says([f"one{END}"]), n=1)
    assert [env.closed for env in Counting.made] == [1, 1]


async def test_rows_are_found_for_prompts_that_were_made_elsewhere() -> None:
    """As in TRL, which tokenises the prompts and hands on nothing but their messages."""
    rows = {QUESTION[0]["content"]: GSM8K}
    gym = SkyRLGym(TOKENIZER, row=lambda prompt: rows[prompt.metadata["prompt"][-1]["content"]])
    token_ids = SkyRLGym(TOKENIZER).prompt(GSM8K, "a").token_ids
    prompt = Prompt("train-0-0-0", token_ids, metadata={"prompt": QUESTION})
    group = await play(gym, prompt, says([f"#### 42{END}"]), n=1)
    assert group.episodes[0].rewards == (1.0,)


async def test_a_prompt_that_is_not_the_environments_beginning_is_refused(registered: Any) -> None:
    row = {"prompt": QUESTION, "env_class": registered(Counting), "rules": "Be brief."}
    elsewhere = Prompt("a", ids("<|im_start|>user\nWhat is 6 * 7?"), metadata=row)
    with pytest.raises(GroupFailed, match="its first messages are not the prompt"):
        await play(SkyRLGym(TOKENIZER), elsewhere, says([f"one{END}"]), n=1)
    assert [env.closed for env in Counting.made] == [1]


def test_rows_that_no_environment_can_begin_with_are_refused(registered: Any) -> None:
    gym = SkyRLGym(TOKENIZER)
    with pytest.raises(InvalidRequest, match="a row without prompt and env_class"):
        gym.prompt({"reward_spec": {}}, "a")
    with pytest.raises(skyrl_gym.error.Error, match="No registered env"):
        gym.prompt({"prompt": QUESTION, "env_class": "gsm9k"}, "a")
    with pytest.raises(OSError, match="no database"):
        gym.prompt({"prompt": QUESTION, "env_class": registered(Unready)}, "a")
    assert [env.closed for env in Counting.made] == [1]


def test_a_tokenizer_without_a_template_is_refused() -> None:
    with pytest.raises(ConfigError, match="chat_template"):
        SkyRLGym(chat_tokenizer(None))
