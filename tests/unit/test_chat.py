"""What stands between two turns comes from the model's own chat template."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_tokenizer import CHATML, chat_tokenizer
from splitroll.chat import ChatTemplate
from splitroll.errors import ConfigError

# The shapes of other models' templates: another end of a turn, roles of other names, a space
# around contents, a reasoning part that is written into the last turn only, no end at all.
HEADERS = (
    "<bos>{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>\n\n"
    "{{ m.content | trim }}<|eot|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
INSTRUCT = (
    "<bos>{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}<|eot|>{% endif %}{% endfor %}"
)
REASONING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ENDLESS = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

TEMPLATES = pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (HEADERS, "<|eot|>"), (INSTRUCT, "<|eot|>"),
     (REASONING, "<|im_end|>"), (ENDLESS, "")],
    ids=["chatml", "headers", "instruct", "reasoning", "endless"],
)  # fmt: skip

SAID = st.text(st.characters(codec="ascii", categories=["L", "N", "P"]), min_size=1, max_size=12)
TALK = st.lists(SAID, min_size=1, max_size=3)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


@TEMPLATES
@settings(deadline=None)
@given(question=SAID, answer=SAID, said=TALK, data=st.data())
def test_a_conversation_is_what_the_template_itself_would_write(
    template: str, end: str, question: str, answer: str, said: list[str], data: st.DataObject
) -> None:
    tokenizer = chat_tokenizer(template)
    chat = ChatTemplate(tokenizer)
    messages = [user(text) for text in said]
    opening = chat.opening([user(question)])
    # A turn that was sampled with its end, or was cut before it.
    turn = ids(tokenizer, answer + data.draw(st.sampled_from(["", end])))
    if template is INSTRUCT:
        turn = ids(tokenizer, " ") + turn  # the model writes that space itself
    whole = [user(question), {"role": "assistant", "content": answer}, *messages]
    text = tokenizer.apply_chat_template(whole, tokenize=False, add_generation_prompt=True)
    assert opening + turn + chat.between(turn, messages) == ids(tokenizer, text)


def test_only_the_end_of_the_turn_itself_is_left_out() -> None:
    tokenizer = chat_tokenizer()
    chat = ChatTemplate(tokenizer)
    after = ids(tokenizer, "<|im_end|>\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    assert chat.between(ids(tokenizer, "yes"), [user("more")]) == after
    assert chat.between(ids(tokenizer, "yes<|im_end|>"), [user("more")]) == after[1:]
    assert chat.between(ids(tokenizer, "yes<|im_end|>\n"), [user("more")]) == after[2:]
    # Another end-of-sequence token than the template's stays, and so does the template's.
    assert chat.between(ids(tokenizer, "yes<|eot|>"), [user("more")]) == after
    # A turn that happens to open like the message that follows is no part of it.
    assert chat.between(ids(tokenizer, "<|im_end|>\n<|im_start|>"), [user("more")]) == after


def test_without_messages_the_models_next_turn_is_opened() -> None:
    tokenizer = chat_tokenizer()
    expected = ids(tokenizer, "\n<|im_start|>assistant\n")
    assert ChatTemplate(tokenizer).between(ids(tokenizer, "a<|im_end|>"), []) == expected


def test_arguments_reach_the_template() -> None:
    tokenizer = chat_tokenizer()
    chat = ChatTemplate(tokenizer, {"prefix": "<think>"})
    assert chat.opening([user("a")])[-7:] == ids(tokenizer, "<think>")
    assert chat.between(ids(tokenizer, "b"), [user("a")])[-7:] == ids(tokenizer, "<think>")


def test_a_turn_is_decoded_without_its_markers() -> None:
    tokenizer = chat_tokenizer()
    turn = ids(tokenizer, "5 * 5 = 25 ✓<|im_end|>")
    assert ChatTemplate(tokenizer).decode(turn) == "5 * 5 = 25 ✓"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (None, "chat_template"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "once, as it stands"),
        ("{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}", "once, as it stands"),
        ("{{ raise_exception('only users') }}", "only users"),
    ],
)
def test_a_tokenizer_whose_template_cannot_be_used_is_refused(
    template: str | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        ChatTemplate(chat_tokenizer(template))
