"""`ModelStates`: what the engine and the routes ask of a model's cache: where rows begin and where they end."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from rwkv_lightning.core.cache.coming import ComingPrefixes
from rwkv_lightning.core.cache.front import Sessions
from rwkv_lightning.core.cache.initial import InitialSource, InitialState, InitialStates
from rwkv_lightning.core.cache.kept import KeptSource
from rwkv_lightning.core.cache.prefix_cache import PrefixCache
from rwkv_lightning.core.request import GenerationRequest, Tokens

if TYPE_CHECKING:
    from rwkv_lightning.core.cache.hierarchy import StateCache
    from rwkv_lightning.core.errors import StoreError
    from rwkv_lightning.core.ledger import SlotLedger
    from rwkv_lightning.core.sequence import Sequence as Row
    from rwkv_lightning.core.sequence import Step


class RowStart(NamedTuple):
    """How a row begins, as `RowParts` takes it."""

    snapshot: Any
    cached: int
    logits: Any
    captures: tuple[int, ...]


class ModelStates:
    """Sessions, prefixes and initial states of one model.

    Args:
        chunk: prompt tokens between the prefixes that are kept: what a step reads of a prompt that is alone.
        failure: why the store that the settings name could not be opened; None when it could, or none is wanted.
    """

    def __init__(
        self, cache: StateCache, initial: InitialStates, chunk: int, failure: StoreError | None = None
    ) -> None:
        self.cache = cache
        self.sessions = Sessions(cache, initial.has)
        self.prefixes = PrefixCache(cache)
        self.coming = ComingPrefixes()
        self.initial = initial
        self._chunk = chunk
        self._failure = failure

    def initial_of(self, request: GenerationRequest) -> InitialState:
        """What a request's rows begin from where no kept state comes before."""
        source = request.source
        return source.initial if isinstance(source, InitialSource) else self.initial.default

    def begin(self, request: GenerationRequest, prompt: Tokens) -> RowStart:
        """Where a row begins: at a kept state, at the longest cached beginning of its prompt, or at its start."""
        if isinstance(request.source, KeptSource):
            return RowStart(request.source.kept, 0, None, ())
        initial = self.initial_of(request)
        if not request.use_prefix_cache or request.params.prompt_logprobs:
            return RowStart(initial.snapshot, 0, None, ())
        found = self.prefixes.find(prompt, initial.name)
        length = found.length if found else 0
        captures = self.prefixes.captures(
            prompt, initial.name, length, len(request.prompts), self._chunk, request.boundaries
        )
        if found is None:
            return RowStart(initial.snapshot, 0, None, captures)
        return RowStart(found.snapshot, length, found.logits, captures)

    def hold(self, request: GenerationRequest) -> bool:
        """Whether a request should wait, as another one is reading much of its prompt at the moment.

        It is among `released` when that has been read, or will not be.
        """
        if isinstance(request.source, KeptSource) or not request.use_prefix_cache or request.params.prompt_logprobs:
            return False
        name = self.initial_of(request).name
        return self.coming.hold(request, name, self.prefixes.length(request.prompts[0], name))

    def began(self, rows: Iterable[Row]) -> None:
        """Rows have lined up: what they read others need not read."""
        for row in rows:
            if row.captures:
                self.coming.watch(row, self.initial_of(row.request).name)

    def before_run(self) -> None:
        """Call between `schedule` and the run of the step."""
        self.cache.move_out()

    def after_run(self, step: Step) -> None:
        """Keep the prefixes that a step has captured."""
        for capture in step.captures:
            self.prefixes.put(capture, self.initial_of(capture.sequence.request).name)
        self.coming.note_read(chunk.sequence for chunk in step.chunks)

    def keeper(self, ledger: SlotLedger) -> Callable[[Row], bool]:
        """What the scheduler calls with each row that ended well."""
        return lambda row: self.cache.keep(row, ledger)

    @property
    def failure(self) -> str | None:
        """Why the state store cannot be used at the moment, in a word or two; None when all is well."""
        error = self._failure or self.cache.watch.failure
        return None if error is None else REASONS[error.reason]

    @property
    def store_state(self) -> str:
        """`ok`, `degraded` or `none`, as the health page says it."""
        if self.failure is not None:
            return "degraded"
        return "none" if self.cache.store is None else "ok"

    def shut_down(self) -> None:
        """Write what is not stored yet, then close the store."""
        self.cache.shut_down()


REASONS = {
    "full": "no space left",
    "readonly": "cannot be written",
    "locked": "locked by another program",
    "corrupt": "damaged",
    "version": "written by a newer version",
    "other": "failing",
}
