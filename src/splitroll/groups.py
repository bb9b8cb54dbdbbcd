"""From prompts to groups, checked against the fleet's limits before anything is generated. Pure."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from splitroll.dispatch.assembly import GroupWork
from splitroll.errors import InvalidRequest, Problem
from splitroll.prompts import PromptLike, Tokenizer, read_prompt
from splitroll.types import Group, Prompt, Sample, SamplingParams, derive_seed


def plan_groups(
    prompts: Iterable[PromptLike],
    *,
    n: int,
    sampling: SamplingParams | Sequence[SamplingParams],
    tokenizer: Tokenizer,
    max_model_len: int,
    vocab_size: int,
) -> list[GroupWork]:
    """Turn prompts into groups; needs no fleet.

    Raises:
        InvalidRequest: with every problem: n, prompts that are empty or too long, ids used twice.
    """
    problems: list[Problem] = []
    if isinstance(prompts, str | Mapping | Prompt) or not isinstance(prompts, Iterable):
        found, hint = type(prompts).__name__, "wrap it: [prompt]"
        raise InvalidRequest([Problem("prompts", found, "a list of prompts", hint)])
    if not isinstance(n, int) or n < 1:
        problems.append(Problem("n", repr(n), "a whole number from 1", "ask for 1 or more"))
    asked = list(prompts)
    samplings = _sampling_of_each(sampling, len(asked))
    drawn = secrets.randbits(62)
    for one in dict.fromkeys(samplings):
        problems += _vocabulary_problems("sampling.stop_token_ids", one.stop_token_ids, vocab_size)
    works = []
    for index, (given, one) in enumerate(zip(asked, samplings, strict=True)):
        try:
            prompt = read_prompt(given, index, tokenizer)
        except InvalidRequest as exc:
            problems += exc.problems
            continue
        if (problem := _length_problem(prompt, one, max_model_len)) is not None:
            problems.append(problem)
        problems += _vocabulary_problems(f"prompt {prompt.id}", prompt.token_ids, vocab_size)
        begun: Mapping[int, Sample] = {}
        if isinstance(given, Group):
            begun = {sample.sample: sample for sample in given.samples}
            problems += _continuation_problems(given, one)
        seed = drawn if one.seed is None else one.seed
        works.append(GroupWork(prompt, len(begun) or n, one, derive_seed(seed, prompt.id), begun))
    for prompt_id, count in Counter(work.prompt.id for work in works).items():
        if count > 1:
            hint = "samples are told apart by it: give each prompt its own"
            problems.append(Problem("id", f"{prompt_id!r}, {count} times", "an id used once", hint))
    if problems:
        raise InvalidRequest(problems)
    return works


def _continuation_problems(group: Group, sampling: SamplingParams) -> list[Problem]:
    unfinished = [s for s in group.samples if s.finish_reason == "abort"]
    path = f"prompt {group.id}"
    if not unfinished:
        hint = "leave it out, or give its prompt to generate it anew"
        return [Problem(path, "a group that is complete", "one with unfinished samples", hint)]
    longest = max(len(sample.token_ids) for sample in unfinished)
    if longest < sampling.max_tokens:
        return []
    found = f"a sample of {longest} tokens to be continued"
    allowed = f"fewer than max_tokens, which is {sampling.max_tokens}"
    return [Problem(path, found, allowed, "raise max_tokens")]


def _sampling_of_each(sampling: Any, count: int) -> list[SamplingParams]:
    """Return the sampling of each prompt, given one for all of them or one for each."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    hint = "write SamplingParams(max_tokens=...)"
    if not isinstance(sampling, Sequence):
        found = type(sampling).__name__
        raise InvalidRequest([Problem("sampling", found, "a SamplingParams", hint)])
    if wrong := [one for one in sampling if not isinstance(one, SamplingParams)]:
        found = f"a list with {type(wrong[0]).__name__}"
        raise InvalidRequest([Problem("sampling", found, "a list of SamplingParams", hint)])
    if len(sampling) != count:
        found, hint = f"{len(sampling)} for {count} prompts", "give one for each prompt, or one"
        raise InvalidRequest([Problem("sampling", found, str(count), hint)])
    return list(sampling)


def _length_problem(prompt: Prompt, sampling: SamplingParams, max_model_len: int) -> Problem | None:
    length = len(prompt.token_ids)
    if length == 0:
        return Problem(f"prompt {prompt.id}", "no tokens", "one token or more", "fill it")
    if length + sampling.max_tokens <= max_model_len:
        return None
    return Problem(
        f"prompt {prompt.id}",
        f"{length} tokens + max_tokens {sampling.max_tokens} = {length + sampling.max_tokens}",
        f"at most max_model_len, which is {max_model_len}",
        "lower max_tokens, shorten the prompt, or raise engine.max_model_len",
    )


def _vocabulary_problems(path: str, token_ids: Sequence[int], size: int) -> list[Problem]:
    beyond = [token for token in token_ids if not 0 <= token < size]
    if not beyond:
        return []
    return [Problem(path, f"token id {beyond[0]}", f"0 to {size - 1}", "use the model's own ids")]
