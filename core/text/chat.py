"""The chat prompt: one function for every chat-style route, and the split of an answer into reasoning and content."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

Role = Literal["system", "developer", "user", "assistant"]
Kind = Literal["reasoning", "content"]

# Whatever str.splitlines takes for the end of a line: CRLF, LF, CR, VT, FF, FS, GS, RS, NEL, LS, PS.
_LINE_END = re.compile("\r\n|[\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029]")
_BLANK_LINES = re.compile(r"\n(?:[^\S\n]*+\n)++")
_END_TAG = "</think>"


class ThinkMode(StrEnum):
    """How the prompt ends, and so whether the model thinks first."""

    OFF = "off"  # an empty thought: the answer follows at once
    ON = "on"  # an open tag: the model writes `>thought</think>`, then the answer
    PLAIN = "plain"  # only the assistant's name: the model decides, its answer begins with a space


_ENDINGS = {ThinkMode.OFF: " <think>\n</think>\n", ThinkMode.ON: " <think", ThinkMode.PLAIN: ""}


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; `developer` is another name for `system`."""

    role: Role
    text: str


def clean(text: str) -> str:
    """A text that cannot forge a turn, whose separator is a blank line.

    Everything that reads as the end of a line becomes a newline, runs of newlines (also with white space between
    them) become one, and outer white space goes. The indentation of a line stays.
    """
    return _BLANK_LINES.sub("\n", _LINE_END.sub("\n", text)).strip()


def chat_prompt(
    messages: Sequence[ChatMessage],
    *,
    think: bool | ThinkMode = False,
    names: tuple[str, str, str] = ("System", "User", "Assistant"),
) -> str:
    """The prompt of a conversation: system texts first, then the turns, then the assistant's name to continue.

    Args:
        messages: in order. All system texts become one first part, a line each; empty ones are left out.
        think: False and True mean ThinkMode.OFF and ThinkMode.ON.
        names: what the roles system, user and assistant are called in the prompt.
    """
    system, user, assistant = (clean(name) for name in names)
    instructions = "\n".join(filter(None, (clean(message.text) for message in messages if _is_system(message))))
    parts = [_turn(system, instructions)] if instructions else []
    speakers = {"user": user, "assistant": assistant}
    parts += [_turn(speakers[message.role], clean(message.text)) for message in messages if not _is_system(message)]
    return "\n\n".join([*parts, f"{assistant}:{_ENDINGS[_mode(think)]}"])


def turn_ends(tokens: Sequence[int], token_bytes: Sequence[bytes]) -> tuple[int, ...]:
    """Where the turns of a chat prompt end: positions in its tokens, ascending, each at a blank line.

    A turn ends behind the blank line after it where a token does, else before it. Turns whose end lies inside a token
    are left out. A later prompt of the same conversation begins with the same tokens up to such a position.
    """
    text = b"".join(token_bytes[token] for token in tokens)
    offsets = list(itertools.accumulate((len(token_bytes[token]) for token in tokens), initial=0))
    position_of = {offset: position for position, offset in enumerate(offsets)}
    ends: list[int] = []
    for blank in re.finditer(rb"\n\n", text):
        position = position_of.get(blank.end(), position_of.get(blank.start()))
        if position and (not ends or position > ends[-1]):
            ends.append(position)
    return tuple(ends)


def _is_system(message: ChatMessage) -> bool:
    return message.role in ("system", "developer")


def _mode(think: bool | ThinkMode) -> ThinkMode:
    if isinstance(think, ThinkMode):
        return think
    return ThinkMode.ON if think else ThinkMode.OFF


def _turn(name: str, text: str) -> str:
    return f"{name}: {text}" if text else f"{name}:"


class ThinkSplitter:
    """Splits what follows a prompt of ThinkMode.ON into reasoning and content as it comes.

    The generated text goes on with the opening tag's `>`. Without an end tag all of it is reasoning. Newlines right
    after either tag belong to the tag; the tags themselves are in neither part.
    """

    def __init__(self) -> None:
        self._kind: Kind = "reasoning"
        self._held = ""  # what may be the beginning of the end tag
        self._opened = False  # the opening tag's `>` was seen, or something else in its place
        self._fresh = True  # nothing of the current part was given out

    def push(self, text: str) -> list[tuple[Kind, str]]:
        """The pieces that have become certain with this text, in order, none of them empty."""
        if not self._opened and text:
            text = text.removeprefix(">")
            self._opened = True
        self._held += text
        pieces: list[tuple[Kind, str]] = []
        if self._kind == "reasoning":
            thought, tag, answer = self._held.partition(_END_TAG)
            if not tag:
                return self._give(pieces, len(thought) - _overlap(thought))
            self._give(pieces, len(thought))
            self._kind, self._fresh, self._held = "content", True, answer
        return self._give(pieces, len(self._held))

    def flush(self) -> list[tuple[Kind, str]]:
        """The text has ended: the piece that was held back, if any."""
        return self._give([], len(self._held))

    def _give(self, pieces: list[tuple[Kind, str]], count: int) -> list[tuple[Kind, str]]:
        piece, self._held = self._held[:count], self._held[count:]
        if self._fresh:
            piece = piece.lstrip("\n")
        if piece:
            self._fresh = False
            pieces.append((self._kind, piece))
        return pieces


def _overlap(text: str) -> int:
    """How many of the last characters may be the beginning of the end tag."""
    return next((n for n in range(len(_END_TAG) - 1, 0, -1) if text.endswith(_END_TAG[:n])), 0)
