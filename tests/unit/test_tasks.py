"""Tasks from reasoning-gym, with their own scoring."""

from __future__ import annotations

import pytest

from splitroll.errors import InvalidRequest
from splitroll.tasks import extract_answer, load_task


def test_a_task_has_prompts_with_ids_and_scores_answers() -> None:
    task = load_task("products", 3, 0, ["min_digits=1", "max_digits=1"])
    assert [prompt["id"] for prompt in task.prompts] == ["products-0", "products-1", "products-2"]
    question = task.prompts[0]["messages"][0]["content"]
    left, right = (int(part) for part in question.split(":")[1].split(".")[0].split("*"))
    assert task.score("products-0", f"It is {left * right}.") == 1.0
    assert task.score("products-0", f"It is {left * right + 1}.") < 1.0


def test_the_same_seed_gives_the_same_questions() -> None:
    assert load_task("products", 2, 5).prompts == load_task("products", 2, 5).prompts


@pytest.mark.parametrize(
    ("text", "expected", "answer"),
    [
        ("so 3 * 4 = 12.", "7", "12"),
        ("1,234", "1", "1234"),
        ("minus: -5", "3", "-5"),
        ("no number", "3", ""),
        ("<answer> x </answer> 5", "3", "x"),
        (" yes ", "no", "yes"),
    ],
)
def test_answers_are_found_in_completions(text: str, expected: str, answer: str) -> None:
    assert extract_answer(text, expected) == answer


@pytest.mark.parametrize(
    ("name", "num", "options"),
    [
        ("product", 1, []),
        ("products", 0, []),
        ("products", 1, ["bogus=1"]),
        ("products", 1, ["max_digits"]),
        ("products", 1, ["max_digits=0"]),
    ],
)
def test_bad_tasks_are_told(name: str, num: int, options: list[str]) -> None:
    with pytest.raises(InvalidRequest):
        load_task(name, num, 0, options)
