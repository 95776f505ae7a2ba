"""What a finished row leaves: the state that covers the prompt and the tokens of the returned text."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, NamedTuple

from rwkv_lightning.core.cache.kept import Kept, SessionTarget
from rwkv_lightning.core.slots import Snapshot

if TYPE_CHECKING:
    from rwkv_lightning.core.sequence import Sequence


class Final(NamedTuple):
    """A row's final state: its numbers are in `snapshot`, or where that is None in the row's slot."""

    kept: Kept
    snapshot: Snapshot | None


def final_state(
    sequence: Sequence, target: SessionTarget, model: str, text_of: Callable[[Iterable[int]], str]
) -> Final:
    """The state that covers the prompt and the tokens of the returned text (native_api.md, "Stored states").

    The slot has seen all generated tokens but the last. Where a stop text or a cut character lies behind the covered
    ones, the row's backup from before them serves. Covered tokens that the state has not seen become its tail.
    """
    covered = sequence.output.covered
    seen, snapshot = len(sequence.generated) - 1, None
    if sequence.slot is None:  # it ended on its first token, and never needed a slot
        snapshot = sequence.snapshot
    elif seen > covered:
        assert sequence.backup is not None, "a row whose text may stop early has a backup"
        assert sequence.backup.seen <= covered, "a row's backup comes before its stop"
        seen, snapshot = sequence.backup
    answer = sequence.generated[:covered]
    base = target.base
    news = (*sequence.prompt[len(base.tail) if base else 0 :], *answer)
    kept = Kept(
        owner=target.key,
        model=model,
        parent=base.key if base and base.owner != target.key else "",  # a session goes on from itself
        base=base.header if base else None,
        news=news,
        tail=tuple(answer[seen:]),
        text=text_of(answer),
    )
    return Final(kept, snapshot)
