"""`ModelManager`: models by name and alias; each loaded model has its own engine and vocabulary."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from rwkv_lightning.core.cache.assemble import open_states
from rwkv_lightning.core.cache.initial import InitialSource
from rwkv_lightning.core.cache.metrics import StateMetrics
from rwkv_lightning.core.cache.states import ModelStates
from rwkv_lightning.core.checkpoint import check_vocabulary, resolve_model_path
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.engine import Engine, RequestSummary
from rwkv_lightning.core.errors import ModelNotFound, StartError, UnsupportedField
from rwkv_lightning.core.interfaces import LoadOptions, SamplerContext
from rwkv_lightning.core.ledger import SlotLedger
from rwkv_lightning.core.request import Tokens
from rwkv_lightning.core.runner import ModelRunner
from rwkv_lightning.core.scheduler import Scheduler
from rwkv_lightning.core.text.vocabulary import Vocabulary, find_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.host import PluginHost
    from rwkv_lightning.core.interfaces import Model
    from rwkv_lightning.core.metrics import Metrics
    from rwkv_lightning.core.request import GenerationRequest

log = logging.getLogger(__name__)

STATE_MEMORY_SHARE = 0.5  # of the memory that is free after loading
LONG_TEXT = 20_000  # characters; longer prompts are encoded beside the event loop


@dataclass(slots=True)
class LoadedModel:
    """A model that can serve: `name` is its file's name without the suffix, `created` the file's Unix time."""

    name: str
    path: Path
    created: int
    model: Model
    vocabulary: Vocabulary
    engine: Engine
    slots: int
    engine_name: str
    aliases: list[str] = field(default_factory=list)

    @property
    def fingerprint(self) -> str:
        """`system_fingerprint` of answers: changes with the model file or the engine."""
        return f"fp_{zlib.crc32(f'{self.name} {self.created} {self.engine_name}'.encode()):08x}"

    def cards(self) -> list[dict[str, Any]]:
        """The model as GET /v1/models lists it, once per name."""
        return [self.card(name) for name in [self.name, *self.aliases]]

    def card(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": self.created, "owned_by": "rwkv_lightning"}

    @property
    def states(self) -> ModelStates:
        """Sessions, prefixes and initial states. Raises UnsupportedField when this model has none."""
        if self.engine.states is None:
            raise UnsupportedField(f"engine {self.engine_name} keeps no states, so there are no sessions here")
        return self.engine.states

    async def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """Token ids of each text."""
        if sum(map(len, texts)) < LONG_TEXT:
            return [tuple(self.vocabulary.encode(text)) for text in texts]
        return await asyncio.to_thread(lambda: [tuple(self.vocabulary.encode(text)) for text in texts])

    async def prepare(
        self, request: GenerationRequest, *, state: str | None = None, use_prefix_cache: bool = True
    ) -> GenerationRequest:
        """Let a request begin where its body says; the stored beginnings of its prompts come into memory.

        Args:
            state: a file among the server's state files; None for the default. Raises InvalidField.
        """
        if state is not None:
            request.source = InitialSource(await self.states.initial.find(state))
        request.use_prefix_cache = use_prefix_cache
        states = self.engine.states
        if states is not None and use_prefix_cache and not request.params.prompt_logprobs:
            await states.prefixes.fetch(request.prompts, states.initial_of(request).name)
        return request


class ModelManager:
    """The loaded models; the first one is the default."""

    def __init__(self, settings: Settings, host: PluginHost, metrics: Metrics) -> None:
        self._settings = settings
        self._host = host
        self._metrics = metrics
        self._models: dict[str, LoadedModel] = {}

    @property
    def default(self) -> LoadedModel:
        return next(iter(self._models.values()))

    def all(self) -> list[LoadedModel]:
        return list(self._models.values())

    def cards(self) -> list[dict[str, Any]]:
        return [card for model in self.all() for card in model.cards()]

    def get(self, name: str) -> LoadedModel:
        """By name or alias. Raises ModelNotFound naming what there is."""
        for model in self._models.values():
            if name == model.name or name in model.aliases:
                return model
        known = ", ".join(self._models)
        raise ModelNotFound(f"model {name!r} is not loaded here; loaded: {known}", param="model")

    def load(self, on_finished: Callable[[RequestSummary], None]) -> LoadedModel:
        """Load the model that the settings name. Raises StartError."""
        settings = self._settings
        path = resolve_model_path(settings.model_path) if settings.model_path else demo_model_path()
        vocabulary = Vocabulary.load(find_for(path, settings.vocab))
        engine_name = self._engine_name(path)
        options = load_options(settings)
        backend = self._host.create_backend(engine_name)
        if reason := backend.probe(options.device):
            raise StartError(f"engine {engine_name} cannot run on {options.device}: {reason}")
        model = backend.load(path, options)
        check_vocabulary(model.config, vocabulary.size)
        loaded = self._assemble(path, model, vocabulary, engine_name, on_finished)
        self._models[loaded.name] = loaded
        return loaded

    def _engine_name(self, path: Path) -> str:
        name = self._settings.inference_engine
        return self._host.choose_backend(self._settings, path) if name == "auto" else name

    def _assemble(
        self,
        path: Path,
        model: Model,
        vocabulary: Vocabulary,
        engine_name: str,
        on_finished: Callable[[RequestSummary], None],
    ) -> LoadedModel:
        settings = self._settings
        slots = count_slots(model, settings.max_batch)
        pool = model.new_states(slots)
        states = open_states(settings, self._host, model, pool, path, vocabulary)
        if states is not None:
            self._metrics.registry.register(StateMetrics(states))
        context = SamplerContext(vocab_size=model.config.vocab_size, token_bytes=vocabulary.token_bytes)
        engine = Engine(
            ModelRunner(model, pool),
            new_scheduler(settings, slots, states),
            self._host.create_samplers(context),
            vocabulary,
            self._metrics,
            max_waiting=settings.max_waiting,
            states=states,
            on_finished=on_finished,
        )
        return LoadedModel(
            name=settings.served_model_name or path.stem,
            path=path,
            created=int(path.stat().st_mtime),
            model=model,
            vocabulary=vocabulary,
            engine=engine,
            slots=slots,
            engine_name=engine_name,
            aliases=list(settings.model_alias),
        )


def new_scheduler(settings: Settings, slots: int, states: ModelStates | None) -> Scheduler:
    """The scheduler over `slots` slots, some of which the model's finished states may keep."""
    budget, chunk = settings.prefill_budget, settings.prefill_chunk
    if states is None:
        return Scheduler(SlotLedger(slots), prefill_budget=budget, chunk=chunk)
    ledger = SlotLedger(slots, reclaim=states.cache.reclaim)
    return Scheduler(ledger, prefill_budget=budget, chunk=chunk, keeper=states.keeper(ledger))


def load_options(settings: Settings) -> LoadOptions:
    """The settings that concern loading, with the device decided."""
    device = settings.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return LoadOptions(device, settings.dtype, settings.state_dtype, settings.deterministic)


def count_slots(model: Model, limit: int) -> int:
    """How many states may stay resident: half of the free memory, at most `limit` (--max-batch), at least one."""
    if model.device.startswith("cpu"):
        free = psutil.virtual_memory().available
    else:
        import torch

        free = torch.cuda.mem_get_info(model.device)[0]
    return max(1, min(limit, int(free * STATE_MEMORY_SHARE) // model.state_nbytes()))
