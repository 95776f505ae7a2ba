"""The keys of stored states.

A session's key is its id, a branch's `<id>:<number>`. A state that began from an initial-state file is another state
than one that did not, so `:<initial>` follows: `<id>::<initial>` and `<id>:<number>:<initial>`. A prefix has no name;
its key is `:` and a hash of what it stands for. An id holds no `:` and is not empty, so no two of these are alike.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from rwkv_lightning.core.errors import InvalidField

SEPARATOR = ":"
BRANCH_DIGITS = 15  # that a client may name or bring; stores hold 64-bit numbers


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Which session or branch a state belongs to, and what its sequence began from.

    Args:
        session: the id that the client chose.
        branch: the number of a branch of /multi_state, 1 and up; 0 for the session of /state itself.
        initial: id of the initial-state file; empty for the zero state.
    """

    session: str
    branch: int = 0
    initial: str = ""

    def __str__(self) -> str:
        """The key in a store."""
        if self.initial:
            return SEPARATOR.join((self.session, str(self.branch or ""), self.initial))
        return self.shown

    @property
    def shown(self) -> str:
        """What clients see and name: `<session>` or `<session>:<branch>`."""
        return f"{self.session}{SEPARATOR}{self.branch}" if self.branch else self.session

    @classmethod
    def parse(cls, key: str) -> SessionKey:
        """The inverse of `str`. Raises ValueError for what is no session's key."""
        session, _, rest = key.partition(SEPARATOR)
        branch, _, initial = rest.partition(SEPARATOR)
        parsed = cls(session, int(branch or 0), initial)
        if not session or parsed.branch < 0 or str(parsed) != key:
            raise ValueError(f"{key!r} is not the key of a session")
        return parsed


def check_session_id(session: str) -> str:
    """The id itself. Raises InvalidField when it cannot be one."""
    if not session:
        raise InvalidField("session_id must not be empty", param="session_id")
    if SEPARATOR in session or "\0" in session:
        raise InvalidField("session_id must not contain ':' or a null character", param="session_id")
    if not _is_unicode(session):
        raise InvalidField("session_id is not valid Unicode: it holds half a surrogate pair", param="session_id")
    return session


def parse_name(name: str, initial: str = "") -> SessionKey:
    """`<session>` or `<session>:<number>`, as clients see and write it. Raises InvalidField."""
    session, _, number = name.partition(SEPARATOR)
    is_branch = number.isascii() and number.isdigit() and len(number) <= BRANCH_DIGITS and int(number) > 0
    if SEPARATOR in name and not is_branch:
        raise InvalidField(f"session_id: {name[:60]!r} is neither a session nor a branch", param="session_id")
    return SessionKey(check_session_id(session), int(number or 0), initial)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def prefix_key(model: str, initial: str, tokens: bytes) -> str:
    """The key of a prefix: the same for the same model, beginning and tokens (`prefix.pack`)."""
    parts = f"{model}\n{initial}\n".encode() + tokens
    return SEPARATOR + hashlib.blake2b(parts, digest_size=16).hexdigest()


def is_prefix_key(key: str) -> bool:
    """Whether a key is a prefix's; any other key is a session's or branch's."""
    return key.startswith(SEPARATOR)
