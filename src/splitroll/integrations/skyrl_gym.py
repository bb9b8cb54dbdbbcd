"""Environments of SkyRL-Gym: `SkyRLGym`.

The contract with skyrl-gym 0.4, read in its source and in SkyRL's generator: an environment is
made by `skyrl_gym.make(env_class, env_config=..., extras=...)`; `init` gets the row's messages and
returns those that the model sees first; `step` gets the text of a turn and returns `observations`
(messages), `reward`, `done` and, in some environments, `postprocessed_action`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import skyrl_gym

from splitroll.chat import ChatTemplate
from splitroll.environment import Answer, Episode
from splitroll.errors import InvalidRequest, Problem
from splitroll.types import Prompt

_NEEDED = ("prompt", "env_class")


class SkyRLGym:
    """Makes an environment of SkyRL-Gym for each episode; an `EnvironmentFactory`.

        environment = SkyRLGym(tokenizer)
        prompts = [environment.prompt(row, str(i)) for i, row in enumerate(rows)]
        rollout.generate(prompts, n=8, sampling=sampling, environment=environment)

    A row is one of SkyRL's datasets: "prompt" (messages), "env_class" (a registered id), and what
    the environment gets as its extras ("reward_spec", "max_turns", ...), a copy for each episode.

    The model's turns are decoded for the environment alone. Its messages are made token ids by the
    tokenizer's own chat template (`ChatTemplate.between`). An environment that rewrites the model's
    turn (`postprocessed_action`) fails the prompt: turns stay as they were sampled.

    Args:
        tokenizer: the model's own, of transformers.
        configs: `env_config` by env_class; an empty one where there is none.
        row: finds the row of a prompt that was not made by `prompt`; its metadata if None.
        template_arguments: further ones of the chat template.

    Raises:
        ConfigError: when the tokenizer has no chat template that can be used.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        configs: Mapping[str, Any] | None = None,
        row: Callable[[Prompt], Mapping[str, Any]] = lambda prompt: prompt.metadata,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> None:
        self._template = ChatTemplate(tokenizer, template_arguments)
        self._configs = configs or {}
        self._row = row

    def prompt(self, row: Mapping[str, Any], id: str) -> Prompt:
        """Return a row's prompt: what an environment, made only for this, shows the model first.

        Raises:
            InvalidRequest: when the row lacks what every environment needs.
            Exception: what the environment raises.
        """
        gym, token_ids = self._begin(row, id)
        gym.close()
        return Prompt(id, token_ids, metadata=row)

    def make(self, prompt: Prompt, sample: int) -> _Gym:
        """Return an environment that stands where the prompt ends."""
        gym, token_ids = self._begin(self._row(prompt), prompt.id)
        if token_ids != prompt.token_ids:
            gym.close()
            raise ValueError(
                "its first messages are not the prompt: make that with SkyRLGym.prompt"
            )
        return _Gym(gym, self._template)

    def _begin(self, row: Mapping[str, Any], id: str) -> tuple[Any, tuple[int, ...]]:
        """Return a new environment and the tokens that it begins with."""
        if missing := [name for name in _NEEDED if name not in row]:
            found = f"a row without {' and '.join(missing)}"
            hint = "give a row of SkyRL's datasets"
            raise InvalidRequest([Problem(f"prompt {id}", found, " and ".join(_NEEDED), hint)])
        extras = {key: value for key, value in row.items() if key not in _NEEDED}
        config = self._configs.get(row["env_class"], {})
        gym = skyrl_gym.make(row["env_class"], env_config=config, extras=copy.deepcopy(extras))
        try:
            messages, _ = gym.init(copy.deepcopy(row["prompt"]))
            return gym, self._template.opening(messages)
        except BaseException:
            gym.close()
            raise


class _Gym:
    """One episode's environment."""

    def __init__(self, gym: Any, template: ChatTemplate) -> None:
        self._gym = gym
        self._template = template

    def observe(self, episode: Episode) -> Answer:
        turn = episode.turns[-1].token_ids
        text = self._template.decode(turn)
        step = self._gym.step(text)
        if step.get("postprocessed_action") not in (None, text):
            raise ValueError("it rewrites the model's turn, which stays as it was sampled")
        reward = 0.0 if step["reward"] is None else float(step["reward"])
        if step["done"]:
            return Answer(None, reward)
        return Answer(self._template.between(turn, step["observations"]), reward)

    def close(self) -> None:
        self._gym.close()
