"""A model's own chat template, for conversations whose turns stay as they were sampled."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from splitroll.errors import ConfigError, Problem

Message = Mapping[str, Any]


class ChatTemplate:
    """Makes token ids of messages, never of the model's own turns.

    What stands between two turns of the model comes from the template itself: it renders a
    conversation whose only assistant turn is a mark, and what it writes after the mark is the end
    of that turn, the messages that follow, and the opening of the next turn.

    Args:
        tokenizer: the model's own, of transformers.
        arguments: further ones of the template, such as `enable_thinking`.

    Raises:
        ConfigError: when there is no template, or it does not write an assistant's turn once, as
            it stands.
    """

    def __init__(self, tokenizer: Any, arguments: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._arguments = dict(arguments or {})
        self._mark = f"turn{secrets.token_hex(8)}"
        try:
            end = self._after_mark([], opens=False)
        except Exception as exc:  # a wall: templates are programs of the model, they raise anything
            found, hint = f"{type(exc).__name__}: {exc}", "use a chat model's tokenizer"
            allowed = "a template that writes a user's and an assistant's message"
            raise ConfigError([Problem("chat_template", found, allowed, hint)]) from exc
        self._end_length = len(self._encode(end))

    def opening(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens of a conversation's first messages, ready for the model's turn."""
        return self._encode(self._render(messages, opens=True))

    def between(self, turn: Sequence[int], messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the tokens that follow a turn of the model, up to where its next one begins.

        What the turn has of its own end, such as the end-of-turn token that it was stopped by,
        is left out.

        Args:
            turn: as it was sampled.
            messages: what is said between the two turns.
        """
        tokens = self._encode(self._after_mark(messages, opens=True))
        for count in range(min(self._end_length, len(turn)), 0, -1):
            if tuple(turn[-count:]) == tokens[:count]:
                return tokens[count:]
        return tokens

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return what a turn says, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def _after_mark(self, messages: Sequence[Message], *, opens: bool) -> str:
        turns = [{"role": "user", "content": "-"}, {"role": "assistant", "content": self._mark}]
        text = self._render([*turns, *messages], opens=opens)
        _, mark, after = text.partition(self._mark)
        if not mark or self._mark in after:
            raise ValueError("it does not write an assistant's turn once, as it stands")
        return after

    def _render(self, messages: Sequence[Message], *, opens: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=opens, **self._arguments
        )
        return str(text)

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
