"""Chat prompts: the exact form, and that no content forges a turn; the split into reasoning and content."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_lightning.core.text.chat import ChatMessage, Role, ThinkMode, ThinkSplitter, chat_prompt, clean

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())
LINE_ENDS = ["\r\n", "\n", "\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]

PIECES = st.one_of(
    st.sampled_from([*LINE_ENDS, " ", "\t", "\xa0", "\u3000", "\x1f", "User:", "Assistant:", "<think>", "a"]), st.text()
)
CONTENT = st.lists(PIECES, max_size=8).map("".join)
MESSAGES = st.lists(st.builds(ChatMessage, st.sampled_from(get_args(Role)), CONTENT), max_size=6)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


@pytest.mark.parametrize("end", LINE_ENDS)
def test_every_line_end_becomes_a_newline(end: str) -> None:
    assert clean(f"a{end}b") == "a\nb"
    assert clean(f"{end}a{end}{end}b{end} \t{end}c{end}") == "a\nb\nc"


def test_indentation_and_inner_spaces_stay() -> None:
    assert clean("def f():\n\n    return  1\n") == "def f():\n    return  1"
    assert clean(" a  \n \n \u3000\n   b ") == "a  \n   b"


@given(CONTENT)
@settings(deadline=None, max_examples=300)
def test_cleaning_leaves_no_blank_line_and_does_so_at_once(text: str) -> None:
    cleaned = clean(text)
    assert "\n\n" not in cleaned
    assert all(line.strip() for line in cleaned.splitlines())
    assert cleaned == cleaned.strip()
    assert clean(cleaned) == cleaned
    assert "".join(cleaned.split()) == "".join(text.split())


def test_cleaning_takes_linear_time() -> None:
    """A pattern that goes back over white space would need hours for these."""
    size = 300_000
    assert clean("a" + "\n " * size + "b") == "a\n b"
    assert clean("a\n" + " " * size + "b") == "a\n" + " " * size + "b"
    assert clean(" " * size + "\n" * size) == ""


def test_the_form_of_a_conversation() -> None:
    messages = [
        ChatMessage("system", "Be kind.\n\nBe brief. "),
        user(" Hi\r\n\r\nthere "),
        ChatMessage("assistant", "Hello!"),
        ChatMessage("developer", "Speak French."),
        user("Why?"),
    ]
    turns = "System: Be kind.\nBe brief.\nSpeak French.\n\nUser: Hi\nthere\n\nAssistant: Hello!\n\nUser: Why?\n\n"
    assert chat_prompt(messages, think=False) == turns + "Assistant: <think>\n</think>\n"
    assert chat_prompt(messages, think=True) == turns + "Assistant: <think"
    assert chat_prompt(messages, think=ThinkMode.PLAIN) == turns + "Assistant:"
    assert chat_prompt(messages, think=ThinkMode.OFF) == chat_prompt(messages)
    assert chat_prompt(messages, think=ThinkMode.ON) == chat_prompt(messages, think=True)


def test_the_form_the_model_was_trained_on() -> None:
    prompt = "User: What is the capital of France?\n\nAssistant: <think>\n</think>\n"
    assert prompt in [item["prompt"] for item in GOLDEN["items"]]
    assert chat_prompt([user("What is the capital of France?")]) == prompt


def test_other_names() -> None:
    messages = [ChatMessage("system", "s"), user("q")]
    assert chat_prompt(messages, names=("Rules", "小明", "Bot\n\nUser"), think=True) == (
        "Rules: s\n\n小明: q\n\nBot\nUser: <think"
    )


def test_empty_texts() -> None:
    assert chat_prompt([ChatMessage("system", " \n"), user(""), ChatMessage("assistant", "\n")]) == (
        "User:\n\nAssistant:\n\nAssistant: <think>\n</think>\n"
    )


@settings(deadline=None, max_examples=500)
@given(MESSAGES, st.sampled_from([False, True, *ThinkMode]))
def test_content_never_forges_a_turn(messages: list[ChatMessage], think: bool | ThinkMode) -> None:
    parts = chat_prompt(messages, think=think).split("\n\n")
    systems = [message for message in messages if message.role in ("system", "developer")]
    said = [message for message in messages if message not in systems]
    head = ["System"] if any(message.text.strip() for message in systems) else []
    expected = [*head, *(message.role.capitalize() for message in said), "Assistant"]
    assert [part.split(":")[0] for part in parts] == expected


# --- reasoning and content ---


def split_pushes(pushes: list[str]) -> tuple[str, str]:
    splitter = ThinkSplitter()
    pieces = [piece for push in pushes for piece in splitter.push(push)] + splitter.flush()
    assert all(text for _, text in pieces)
    kinds = [kind for kind, _ in pieces]
    assert kinds == sorted(kinds, reverse=True)  # reasoning first
    reasoning, content = (
        "".join(text for kind, text in pieces if kind == wanted) for wanted in ("reasoning", "content")
    )
    return reasoning, content


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        (">thought</think>\nanswer", "thought", "answer"),
        (">\nthought\n</think>\n\nanswer\n", "thought\n", "answer\n"),
        (">cut short", "cut short", ""),
        (">cut inside the tag</thi", "cut inside the tag</thi", ""),
        ("></think>answer", "", "answer"),
        (">a < b </ c</think>d", "a < b </ c", "d"),
        (">a</think>b</think>c", "a", "b</think>c"),
        ("no bracket</think>answer", "no bracket", "answer"),
        (">>a</think>\n", ">a", ""),
        ("", "", ""),
        (">", "", ""),
    ],
)
def test_reasoning_and_content(text: str, reasoning: str, content: str) -> None:
    assert split_pushes([text]) == (reasoning, content)
    assert split_pushes(list(text)) == (reasoning, content)
    assert split_pushes(["", *(push for letter in text for push in (letter, ""))]) == (reasoning, content)


THOUGHT = st.lists(st.sampled_from([">", "<", "</", "</think>", "</thin", "k>", "think", "\n", "a"]), max_size=10)


@settings(deadline=None, max_examples=500)
@given(THOUGHT.map("".join), st.lists(st.integers(0, 40), max_size=8))
def test_every_cut_splits_alike(text: str, cuts: list[int]) -> None:
    edges = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pushes = [text[a:b] for a, b in pairwise(edges)]
    thought, _, answer = text.removeprefix(">").partition("</think>")
    assert split_pushes(pushes) == (thought.lstrip("\n"), answer.lstrip("\n"))


def test_only_the_beginning_of_the_tag_is_held_back() -> None:
    splitter = ThinkSplitter()
    assert splitter.push(">so a <") == [("reasoning", "so a ")]
    assert splitter.push("/think") == []
    assert splitter.push("ing") == [("reasoning", "</thinking")]
    assert splitter.push("</think>\nyes") == [("content", "yes")]
    assert splitter.push(" </thi") == [("content", " </thi")]
    assert splitter.flush() == []
