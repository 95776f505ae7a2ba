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
from rwkv_lightning.core.errors import StoreError
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

    on_device = not model.device.startswith("cpu")
    sessions = StateCache(
        cache_config(settings, slots.count), expected, open_store(settings, host), slots.export, text_of, pin=on_device
    )
    initial = InitialStates(model.config, slots.wkv.dtype, settings.state_dir, settings.initial_state)
    return ModelStates(sessions, initial, settings.prefill_chunk)


def cache_config(settings: Settings, slots: int) -> CacheConfig:
    return CacheConfig(
        l1_slots=slots // 2 if settings.l1_slots is None else min(settings.l1_slots, slots),
        l2_bytes=settings.l2_bytes,
        l3_bytes=settings.l3_bytes,
        flush_interval=settings.state_flush_interval,
        sync=settings.state_durability == "sync",
        waiting_turns=settings.session_queue,
    )


def open_store(settings: Settings, host: PluginHost) -> StateStore | None:
    """The store that the settings name, or None; one that cannot be used is left out, and the log says what to do."""
    if settings.state_store == NO_STORE:
        return None
    store = host.create_store(settings.state_store)
    try:
        store.open(settings.state_db)
    except StoreError as error:
        log.error("the state store cannot be used, so sessions are lost at a restart: %s", error)
        return None
    return store
