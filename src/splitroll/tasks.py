"""Tasks with verifiable answers: the datasets of the `reasoning-gym` package, with its scoring."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from splitroll.errors import InvalidRequest, Problem

_INTEGER = re.compile(r"-?\d+")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts, as chat messages with ids, and how to score a completion of each."""

    name: str
    prompts: Sequence[Mapping[str, Any]]
    score: Callable[[str, str], float]
    """(prompt id, completion text) to a score in [0, 1]."""


def load_task(name: str, num: int, seed: int, settings: Sequence[str] = ()) -> Task:
    """Load `num` questions of a reasoning-gym dataset.

    Args:
        settings: "key=value" strings for the dataset's own configuration.

    Raises:
        InvalidRequest: unknown name, or settings that the dataset refuses.
    """
    if num < 1:
        raise InvalidRequest([Problem("--num", str(num), "1 or more", "ask for more")])
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as exc:
        hint = "pip install splitroll[tasks]"
        problem = Problem("--task", "no package reasoning-gym", "it installed", hint)
        raise InvalidRequest([problem]) from exc

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"did you mean {' or '.join(near)}?" if near else "see reasoning-gym's list"
        allowed = f"one of reasoning-gym's {len(DATASETS)} datasets"
        raise InvalidRequest([Problem("--task", repr(name), allowed, hint)])
    try:
        dataset = reasoning_gym.create_dataset(
            name, size=num, seed=seed, **_read_settings(settings)
        )
    except (AssertionError, TypeError, ValueError) as exc:
        found = ", ".join(settings) or "the defaults"
        problem = Problem("--task-set", f"{found} ({exc})", f"what {name} takes", "correct it")
        raise InvalidRequest([problem]) from exc

    entries = {f"{name}-{i}": dataset[i] for i in range(num)}

    def score(prompt_id: str, text: str) -> float:
        entry = entries[prompt_id]
        return float(dataset.score_answer(extract_answer(text, entry["answer"]), entry))

    prompts = [
        {"id": prompt_id, "messages": [{"role": "user", "content": entry["question"]}]}
        for prompt_id, entry in entries.items()
    ]
    return Task(name, prompts, score)


def extract_answer(text: str, expected: str) -> str:
    """Return the answer in a completion: in answer tags, else the last integer where an integer
    is expected, else the whole text."""
    if tagged := _ANSWER.findall(text):
        return str(tagged[-1]).strip()
    if _INTEGER.fullmatch(expected.strip()):
        numbers = _INTEGER.findall(text.replace(",", ""))
        return numbers[-1] if numbers else ""
    return text.strip()


def _read_settings(settings: Sequence[str]) -> dict[str, Any]:
    values = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        if not equals:
            hint = "for instance max_digits=1"
            raise InvalidRequest([Problem("--task-set", repr(setting), "key=value", hint)])
        values[key] = yaml.safe_load(text)
    return values
