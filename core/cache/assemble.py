"""From settings to a model's cache hierarchy."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_lightning.core.cache.hierarchy import CacheConfig, StateCache
from rwkv_lightning.core.cache.initial import InitialStates
from rwkv_lightning.core.cache.record import Expected
from rwkv_lightning.core.cache.states import ModelStates
from rwkv_lightning.core.checkpoint import fingerprint
from rwkv_lightning.core.errors import SettingsError, StoreError
from rwkv_lightning.core.slots import SlotPool
from rwkv_lightning.core.tensor_file import open_tensors
from rwkv_lightning.core.text.output import decode_text

if TYPE_CHECKING:
    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.host import PluginHost
    from rwkv_lightning.core.interfaces import Model, SlotStates, StateStore
    from rwkv_lightning.core.text.vocabulary import Vocabulary

log = logging.getLogger(__name__)

NO_STORE = "none"


def open_states(
    settings: Settings, host: PluginHost, model: Model, slots: SlotStates, path: Path | None, vocabulary: Vocabulary
) -> ModelStates | None:
    """The hierarchy over these slots; None for a model that keeps its states in a form of its own.

    Raises StartError when another server uses the same store, or a state file does not fit.
    """
    if not isinstance(slots, SlotPool) or path is None:
        return None
    expected = Expected(fingerprint(open_tensors(path).tensors), model.config, slots.wkv.dtype)

    def text_of(tokens: Iterable[int]) -> str:
        return decode_text(vocabulary.token_bytes, list(tokens))

    initial = InitialStates(model.config, slots.wkv.dtype, settings.state_dir, settings.initial_state)
    store, failure = open_store(settings, host)
    cache = StateCache(cache_config(settings, slots.count), expected, store, slots.export, text_of)
    return ModelStates(cache, initial, settings.prefill_budget, failure)


def cache_config(settings: Settings, slots: int) -> CacheConfig:
    return CacheConfig(
        l1_slots=slots // 2 if settings.l1_slots is None else min(settings.l1_slots, slots),
        l2_bytes=settings.l2_bytes,
        l3_bytes=settings.l3_bytes,
        flush_interval=settings.state_flush_interval,
        sync=settings.state_durability == "sync",
        waiting_turns=settings.session_queue,
    )


def make_store(settings: Settings, host: PluginHost) -> StateStore:
    """The store that the settings name, closed. Raises SettingsError, PluginError."""
    try:
        return host.create_store(settings.state_store)
    except SettingsError as error:
        raise SettingsError(f"{error}; {NO_STORE!r} goes without one") from None


def open_store(settings: Settings, host: PluginHost) -> tuple[StateStore | None, StoreError | None]:
    """The store that the settings name; one that cannot be used is left out, and the log says what to do.

    Raises StartError when another server uses it.
    """
    if settings.state_store == NO_STORE:
        return None, None
    store = make_store(settings, host)
    try:
        store.open(settings.state_db)
    except StoreError as error:
        log.error("the state store cannot be used, so sessions are in RAM only and lost at a restart: %s", error)
        return None, error
    return store, None
