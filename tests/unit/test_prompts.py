"""Prompts in all their forms, and what is wrong with them told at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from splitroll.errors import InvalidRequest, Problem
from splitroll.groups import plan_groups
from splitroll.prompts import Tokenizer, read_prompt, read_prompt_file
from splitroll.types import Prompt, SamplingParams


class Characters(Tokenizer):
    """One token per character; chats are their contents joined."""

    def __init__(self) -> None:
        super().__init__("unused")

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(map(ord, text))

    def encode_chat(self, messages) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
        return self.encode("".join(message["content"] for message in messages))


TOKENIZER = Characters()


@pytest.mark.parametrize(
    ("given", "token_ids"),
    [
        ("ab", (97, 98)),
        ([1, 2], (1, 2)),
        ((1, 2), (1, 2)),
        ([{"role": "user", "content": "a"}], (97,)),
        ({"prompt": "a"}, (97,)),
        ({"messages": [{"role": "user", "content": "b"}]}, (98,)),
        ({"prompt_token_ids": [5]}, (5,)),
        (Prompt("3", (7,)), (7,)),
    ],
)
def test_every_form_becomes_token_ids(given: object, token_ids: tuple[int, ...]) -> None:
    prompt = read_prompt(given, 3, TOKENIZER)  # type: ignore[arg-type]
    assert (prompt.id, prompt.token_ids) == ("3", token_ids)


def test_ids_and_other_keys_are_kept() -> None:
    prompt = read_prompt({"id": 9, "prompt": "a", "answer": "42"}, 0, TOKENIZER)
    assert prompt.id == "9"
    assert prompt.metadata == {"answer": "42"}


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prompt": "a", "messages": []},
        {"prompt": 3},
        {"messages": []},
        {"messages": "hi"},
        {"messages": ["hi"]},
        {"messages": [{"content": "hi"}]},
        {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]},
        {"prompt_token_ids": ["x"]},
        {"prompt_token_ids": [-1]},
        {"prompt_token_ids": [True]},
        3.5,
        [1, "x"],
    ],
)
def test_what_is_no_prompt_is_told(given: object) -> None:
    with pytest.raises(InvalidRequest):
        read_prompt(given, 0, TOKENIZER)  # type: ignore[arg-type]


def test_all_prompts_that_cannot_be_served_are_told_before_anything_is_generated() -> None:
    prompts = ["ok", "x" * 90, "", {"id": "0", "prompt": "again"}, {"bad": 1}]
    with pytest.raises(InvalidRequest) as caught:
        plan_groups(
            prompts, n=0, sampling=SamplingParams(max_tokens=20), tokenizer=TOKENIZER,
            max_model_len=100, vocab_size=10**6
        )  # fmt: skip
    text = str(caught.value)
    assert len(caught.value.problems) == 5
    assert "90 tokens + max_tokens 20 = 110" in text
    assert "at most max_model_len, which is 100" in text


def test_token_ids_beyond_the_vocabulary_are_told() -> None:
    sampling = SamplingParams(stop_token_ids=(300,))
    with pytest.raises(InvalidRequest) as caught:
        plan_groups(
            [[1, 299], [1, 300]], n=1, sampling=sampling, tokenizer=TOKENIZER, max_model_len=100,
            vocab_size=300,
        )  # fmt: skip
    paths = [problem.path for problem in caught.value.problems]
    assert paths == ["sampling.stop_token_ids", "prompt 1"]


@pytest.mark.parametrize("prompts", ["a text", {"prompt": "a"}, Prompt("0", (1,)), 3])
def test_one_prompt_instead_of_a_list_is_told(prompts: object) -> None:
    with pytest.raises(InvalidRequest, match="a list of prompts"):
        plan_groups(
            prompts,
            n=1,
            sampling=SamplingParams(),
            tokenizer=TOKENIZER,
            max_model_len=100,
            vocab_size=10**6,
        )  # type: ignore[arg-type]


def test_sampling_of_another_type_is_told() -> None:
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        plan_groups(
            ["a"],
            n=1,
            sampling={"max_tokens": 3},
            tokenizer=TOKENIZER,
            max_model_len=100,
            vocab_size=10**6,
        )  # type: ignore[arg-type]


def test_a_group_seed_depends_on_the_run_and_the_prompt_only() -> None:
    def seeds(seed: int) -> list[int]:
        sampling = SamplingParams(seed=seed)
        works = plan_groups(["a", "b"], n=2, sampling=sampling, tokenizer=TOKENIZER,
                            max_model_len=100, vocab_size=10**6)  # fmt: skip
        return [work.seed for work in works]

    assert seeds(1) == seeds(1)
    assert len({*seeds(1), *seeds(2)}) == 4


def test_without_a_seed_two_calls_differ() -> None:
    def seed() -> int:
        (work,) = plan_groups(["a"], n=1, sampling=SamplingParams(), tokenizer=TOKENIZER,
                              max_model_len=100, vocab_size=10**6)  # fmt: skip
        return work.seed

    assert seed() != seed()


def test_a_prompts_file_tells_every_bad_line(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n\n[1]\n{"prompt": \n')
    problems: list[Problem] = []
    assert read_prompt_file(path, problems) == [{"prompt": "a"}]
    assert [problem.path for problem in problems] == [f"{path}:3", f"{path}:4"]


def test_an_empty_or_missing_prompts_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "p").write_text("")
    problems: list[Problem] = []
    assert read_prompt_file(tmp_path / "p", problems) == []
    assert len(problems) == 1
    with pytest.raises(InvalidRequest):
        read_prompt_file(tmp_path / "missing", problems)


def test_each_prompt_may_be_sampled_in_its_own_way() -> None:
    samplings = [SamplingParams(max_tokens=m, seed=0) for m in (1, 2)]
    works = plan_groups(["a", "b"], n=1, sampling=samplings, tokenizer=TOKENIZER,
                        max_model_len=10, vocab_size=1000)  # fmt: skip
    assert [work.sampling.max_tokens for work in works] == [1, 2]
    with pytest.raises(InvalidRequest, match="2 for 1 prompts"):
        plan_groups(["a"], n=1, sampling=samplings, tokenizer=TOKENIZER,
                    max_model_len=10, vocab_size=1000)  # fmt: skip
