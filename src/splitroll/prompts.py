"""Prompts in the forms that people have them in, turned into token ids once."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from splitroll.errors import InvalidRequest, Problem
from splitroll.types import Group, Prompt

PromptLike = str | Sequence[int] | Sequence[Mapping[str, Any]] | Prompt | Group | Mapping[str, Any]
"""A text, token ids, chat messages, a Prompt, a mapping as in a prompts file, or a Group to go on
with."""

_FORMS = ("prompt", "messages", "prompt_token_ids")


class Tokenizer:
    """The model's own tokenizer, loaded when first needed."""

    def __init__(self, path: str) -> None:
        self._path = path

    @functools.cached_property
    def _inner(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self._path)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._inner.encode(text))

    def encode_part(self, text: str) -> tuple[int, ...]:
        """Encode what continues a prompt, without special tokens of the tokenizer's own."""
        return tuple(self._inner.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return what tokens say, without special ones."""
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Apply the model's chat template, ready for the assistant's turn."""
        text = self._inner.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=True
        )
        return tuple(self._inner.encode(text, add_special_tokens=False))


def read_prompt(given: PromptLike, index: int, tokenizer: Tokenizer) -> Prompt:
    """Return a prompt with its token ids; `index` becomes its id if it has none.

    Raises:
        InvalidRequest: when it has none of the forms, or more than one.
    """
    if isinstance(given, Prompt):
        return given
    if isinstance(given, Group):
        return given.prompt
    if isinstance(given, str):
        return Prompt(str(index), tokenizer.encode(given), text=given)
    if isinstance(given, Mapping):
        return _read_mapping(given, index, tokenizer)
    if not isinstance(given, Sequence):
        raise _unreadable(f"prompt {index}", type(given).__name__)
    if all(isinstance(item, Mapping) for item in given) and given:
        return _read_mapping({"messages": given}, index, tokenizer)
    return Prompt(str(index), _token_ids(given, f"prompt {index}"))


def read_prompt_file(path: Path, problems: list[Problem]) -> list[Mapping[str, Any]]:
    """Return the rows of a JSON-lines file of prompts; lines that are none become problems.

    Raises:
        InvalidRequest: when the file cannot be read.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as exc:
        problem = Problem("--prompts", f"{path} ({exc})", "a readable JSON-lines file", "check it")
        raise InvalidRequest([problem]) from exc
    prompts: list[Mapping[str, Any]] = []
    before = len(problems)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as exc:
            row = f"no JSON ({exc.msg}, column {exc.colno})"
        if isinstance(row, dict):
            prompts.append(row)
        else:
            problems.append(_unreadable(f"{path}:{number}", str(row)[:60]).problems[0])
    if not prompts and len(problems) == before:
        problems.append(Problem("--prompts", f"{path}: empty", "one prompt or more", "fill it"))
    return prompts


def _read_mapping(row: Mapping[str, Any], index: int, tokenizer: Tokenizer) -> Prompt:
    where = f"prompt {row.get('id', index)}"
    forms = [form for form in _FORMS if form in row]
    if len(forms) != 1:
        raise _unreadable(where, f"{' and '.join(forms) or 'none'} of them")
    prompt_id = str(row.get("id", index))
    rest = {k: v for k, v in row.items() if k not in (*_FORMS, "id")}
    value = row[forms[0]]
    match forms[0]:
        case "prompt":
            if not isinstance(value, str):
                raise _unreadable(where, f"prompt: {type(value).__name__}")
            return Prompt(prompt_id, tokenizer.encode(value), value, rest)
        case "messages":
            return Prompt(prompt_id, _encode_chat(value, where, tokenizer), None, rest)
        case _:
            return Prompt(prompt_id, _token_ids(value, where), None, rest)


def _encode_chat(messages: Any, where: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    allowed = 'a list of {"role": ..., "content": ...}'
    good = isinstance(messages, Sequence) and not isinstance(messages, str) and messages
    if not good or not all(isinstance(m, Mapping) and "role" in m for m in messages):
        raise InvalidRequest(
            [Problem(where, f"messages: {str(messages)[:60]}", allowed, "correct it")]
        )
    try:
        return tokenizer.encode_chat(messages)
    except (
        Exception
    ) as exc:  # a wall: chat templates are programs of the model, they raise anything
        found = f"messages that the model's chat template refuses ({exc})"
        hint = 'check roles and contents, or give "prompt" instead'
        raise InvalidRequest([Problem(where, found, allowed, hint)]) from exc


def _token_ids(value: Any, where: str) -> tuple[int, ...]:
    good = isinstance(value, Sequence) and all(type(token) is int and token >= 0 for token in value)
    if not good:
        problem = Problem(where, f"{str(value)[:60]}", "a list of token ids from 0", "correct it")
        raise InvalidRequest([problem])
    return tuple(value)


def _unreadable(where: str, found: str) -> InvalidRequest:
    allowed = 'one of "prompt" (a text), "messages" (a chat) and "prompt_token_ids" (a list)'
    return InvalidRequest([Problem(where, found, allowed, "give exactly one")])
