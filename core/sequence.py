"""One row being produced (`Sequence`), the rows of a request (`Group`), and one turn of the engine (`Step`)."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, NamedTuple, Protocol

from rwkv_lightning.core.interfaces import Sampler, SamplerRow
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest, StateTarget, TokenLogprob, Usage


class TextOutput(Protocol):
    """Turns a row's tokens into text as far as it is certain, and watches for its stop texts."""

    @property
    def stopped(self) -> bool:
        """A stop text has appeared; the text handed out ends before it."""

    @property
    def covered(self) -> int:
        """How many of the tokens lie wholly in the text handed out."""

    @property
    def pending(self) -> int:
        """How many of the latest tokens do not lie wholly in the text handed out."""

    @property
    def shown(self) -> int:
        """How many bytes of the first pending token do."""

    def push(self, token: int) -> str:
        """The text that has become certain with this token, perhaps none."""

    def flush(self) -> str:
        """The text held back so far, at the end of a row that did not stop on a stop text."""


class RowParts(NamedTuple):
    """What a row brings along besides its prompt.

    Args:
        snapshot: the initial state (from `SlotStates.export`), None for the zero state.
        cached: how many of the prompt's first tokens that snapshot has seen already; they are not fed again.
        logits: what the model said after the last prompt token, where `cached` is the whole prompt.
        captures: positions in the prompt, ascending, after which somebody wants the state.
    """

    sampler: Sampler
    sampler_row: SamplerRow
    output: TextOutput
    snapshot: Any = None
    cached: int = 0
    logits: Any = None
    captures: tuple[int, ...] = ()


class Backup(NamedTuple):
    """A row's state as it was after its first `seen` generated tokens, in host memory."""

    seen: int
    snapshot: Any


@dataclass(slots=True)
class Capture:
    """A state that somebody wants, after the first `position` tokens of a row's prompt.

    The runner fills in `snapshot`, and `logits` where the step computes those after the last of these tokens.
    """

    sequence: Sequence
    slot: int
    position: int
    logits_row: int | None
    snapshot: Any = None
    logits: Any = None


class Sampled(NamedTuple):
    """One row's draw: the token, or -1 where its logits held nothing to draw from."""

    token: int
    logprob: TokenLogprob | None = None


class State(IntEnum):
    """Where a row is. Only a RUNNING row holds a slot; a SWAPPED one has its state in `snapshot`."""

    WAITING = 0
    RUNNING = 1
    SWAPPED = 2
    FINISHED = 3


class Group:
    """The unfinished rows of one request, and which of them hold slots.

    Attributes:
        rows: every unfinished row by its index.
        line: rows that want a slot, first come first served; swapped rows stand before rows not yet begun.
        resident: rows holding a slot, oldest holder first.
        reading: those of the resident rows that have prompt left to feed.
    """

    __slots__ = ("line", "reading", "request", "resident", "rows")

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self.rows: dict[int, Sequence] = {}
        self.line: deque[Sequence] = deque()
        self.resident: OrderedDict[Sequence, None] = OrderedDict()
        self.reading: OrderedDict[Sequence, None] = OrderedDict()


class Sequence:
    """One row of a request on its way from prompt to finish.

    Attributes:
        slot: where its state is while RUNNING, else None.
        snapshot: its state while it has no slot, in host memory or (a `KeptState`) perhaps in a slot of its own; the
            runner sets it when it carries out a save.
        prefilled: prompt tokens fed so far, cached ones included.
        generated: tokens drawn so far; the newest has not been fed.
        pending: the tokens to feed next while decoding (one), None until the first draw.
        followers: rows whose prompts begin alike, which will copy this row's state when it has read `fork_at` tokens.
        marks: positions in the prompt at which a step must stop reading, the next one last.
        ready: the logits after the prompt, of a row that needs no forward for its first token.
        kept: its final state is wanted by somebody.
        backup: the state from before the earliest generated token that may turn out not to belong to the text.
        wants_backup: the state in its slot is to become the backup before the next token is fed.
        prompt_logprobs: of the prompt's tokens read so far and of the next one, where the request asks for them.
        seated: the number of the step in which it got its slot.
        touched: the number of the last step that gave it a slot or prompt tokens, or took its slot away.
    """

    __slots__ = (
        "backup",
        "cached",
        "captures",
        "finish_reason",
        "followers",
        "fork_at",
        "generated",
        "group",
        "kept",
        "logprobs",
        "marks",
        "output",
        "params",
        "pending",
        "prefilled",
        "prompt",
        "prompt_logprobs",
        "ready",
        "reported",
        "request",
        "row",
        "sampler",
        "sampler_row",
        "seated",
        "slot",
        "snapshot",
        "state",
        "text",
        "touched",
        "wants_backup",
    )

    def __init__(self, group: Group, row: int, parts: RowParts) -> None:
        self.group = group
        self.request = group.request
        self.params = group.request.params
        self.row = row
        self.prompt = group.request.prompts[row]
        self.sampler, self.sampler_row, self.output, self.snapshot, self.cached, self.ready, captures = parts
        self.captures = set(captures)
        self.marks = [position for position in reversed(captures) if position > self.cached]
        self.state = State.WAITING
        self.finish_reason: FinishReason | None = None
        self.slot: int | None = None
        self.seated = self.touched = 0
        self.prefilled = self.cached
        self.pending: tuple[int, ...] | None = None
        self.followers: list[Sequence] = []
        self.fork_at = len(self.prompt)
        self.kept = type(self.request.target) is not StateTarget
        self.backup: Backup | None = None
        self.wants_backup = False
        self.generated: list[int] = []
        self.reported = 0  # generated tokens that events have told of
        self.text = ""  # certain, and not told yet
        self.logprobs: list[TokenLogprob] = []  # not told yet
        self.prompt_logprobs = [TokenLogprob(self.prompt[0], None)] if self.params.prompt_logprobs else []

    @property
    def unread(self) -> int:
        """Prompt tokens still to be fed."""
        return len(self.prompt) - self.prefilled

    @property
    def readable(self) -> int:
        """Prompt tokens that the step at hand may feed."""
        return (self.marks[-1] if self.marks else len(self.prompt)) - self.prefilled

    def capture_at(self, position: int) -> None:
        """Somebody wants the state after so many prompt tokens, which are not all read yet."""
        self.captures.add(position)
        self._mark(position)

    def _mark(self, position: int) -> None:
        if position not in self.marks:
            self.marks.append(position)
            self.marks.sort(reverse=True)

    def follow(self, leader: Sequence, position: int) -> None:
        """Let another row of the request read the first `position` tokens of this prompt."""
        self.fork_at = position
        leader.followers.append(self)
        if position < len(leader.prompt):
            leader._mark(position)

    def catch_up(self, leader: Sequence) -> None:
        """Take over what the leader has read, as far as this row follows it."""
        self.prefilled, self.snapshot, self.ready = self.fork_at, None, None
        self.prompt_logprobs = leader.prompt_logprobs  # the same list: the step at hand completes it
        while self.marks and self.marks[-1] <= self.fork_at:
            self.marks.pop()

    def watch_text(self) -> None:
        """Note whether the state must be saved before the latest token is fed.

        It must when the text held back begins in that token, or when no earlier backup exists.
        """
        pending = self.output.pending
        if not pending:
            self.backup, self.wants_backup = None, False
        elif pending == 1 or self.backup is None:
            self.wants_backup = True

    def accept(self, token: int, logprob: TokenLogprob | None) -> FinishReason | None:
        """Take a drawn token in; returns why the row ends with it, if it does."""
        if not self.generated:
            self.logprobs += self.prompt_logprobs
        self.generated.append(token)
        self.pending = (token,)
        if token == self.params.end_token:
            return FinishReason.STOP
        if logprob is not None:
            self.logprobs.append(logprob)
        self.text += self.output.push(token)
        if self.output.stopped:
            return FinishReason.STOP
        return FinishReason.LENGTH if len(self.generated) >= self.params.max_tokens else None

    def due(self) -> bool:
        """Whether enough has gathered for an event. Tokens without text yet wait for the text they belong to."""
        return self.text != "" and len(self.generated) - self.reported >= self.request.chunk_size

    def news(self) -> Event:
        """An event with everything since the last one, but the log-probabilities of text that is still held back."""
        ready = len(self.logprobs) - self.output.pending if self.logprobs else 0
        event = Event(self.request.id, self.row, self.text, self.generated[self.reported :], self.logprobs[:ready])
        self.text, self.logprobs, self.reported = "", self.logprobs[ready:], len(self.generated)
        return event

    def last_news(self, error: Exception | None = None) -> Event:
        """The terminal event. Text held back for a stop text that can no longer come is handed out."""
        if not self.output.stopped:
            self.text += self.output.flush()
        event = self.news()
        if self.logprobs and self.output.shown:
            event.logprobs.append(replace(self.logprobs[0], shown=self.output.shown))
        event.finish_reason = self.finish_reason
        event.usage = Usage(len(self.prompt), self.cached, len(self.generated))
        event.error = error
        return event


class Chunk(NamedTuple):
    """Feed `tokens` to the state in `slot`; with `wants_logits`, keep the logits after the last of them."""

    sequence: Sequence
    slot: int
    tokens: tuple[int, ...]
    wants_logits: bool


@dataclass(slots=True)
class Step:
    """What the runner does in one turn, in this order.

    1. `saves`: export the slot into the sequence's `snapshot`. 2. `copies`: slot to slot, one after the other.
    3. `restores`: put the sequence's snapshot into the slot. 4. `resets`: zero these slots. 5. `backups`: export the
    slot into the sequence's `backup`. 6. One forward over `chunks`: decoding rows first, then prompts; the k-th chunk
    that wants logits gives logits row k, and the rows of `ready` follow. 7. `captures`: export what somebody wants.
    8. `forks`: copy slot to slot; `fork_saves`: export the slot once, into the `snapshot` of every follower listed.
    9. `samples`: draw for each (sequence, logits row); followers share their leader's logits row.
    `forked` are the followers that take over a leader's state in this step, in 8.
    `Scheduler.update` takes one `Sampled` per entry, in the same order.
    """

    number: int
    saves: list[tuple[Sequence, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    restores: list[tuple[Sequence, int]] = field(default_factory=list)
    resets: list[int] = field(default_factory=list)
    backups: list[tuple[Sequence, int]] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    ready: list[Any] = field(default_factory=list)
    captures: list[Capture] = field(default_factory=list)
    forks: list[tuple[int, int]] = field(default_factory=list)
    fork_saves: list[tuple[int, list[Sequence]]] = field(default_factory=list)
    forked: list[Sequence] = field(default_factory=list)
    samples: list[tuple[Sequence, int]] = field(default_factory=list)
