"""`StoreWatch`: every call of the state store goes through it, so that its failures are counted and told once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from threading import Lock
from typing import ParamSpec, TypeVar

from rwkv_lightning.core.errors import StoreError

log = logging.getLogger(__name__)

READING = {"get", "info", "family", "listing", "prefixes"}
STORING = "put"  # on a full disk the small writes may still work: only this one shows that there is room again

P = ParamSpec("P")
T = TypeVar("T")


class StoreWatch:
    """What is known of a store's health. Thread-safe.

    Attributes:
        errors: how many calls have failed so far.
    """

    def __init__(self) -> None:
        self.errors = 0
        self._lock = Lock()
        self._failing: dict[str, StoreError] = {}  # what reading, storing, or another write, last failed with

    @property
    def failure(self) -> StoreError | None:
        """What reading, storing or another write last failed with, if that has not worked since; else None."""
        with self._lock:
            return next(iter(self._failing.values()), None)

    def run(self, call: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The call's result. Raises StoreError, whatever the store of a plugin may raise."""
        kind = _kind(getattr(call, "__name__", ""))
        try:
            result = call(*args, **options)
        except StoreError as error:
            self.note(kind, error)
            raise
        except Exception as error:
            log.exception("a fault in the state store")
            failure = StoreError(f"the state store failed unexpectedly ({type(error).__name__})", "other")
            self.note(kind, failure)
            raise failure from error
        self._works(kind)
        return result

    def note(self, kind: str, error: StoreError) -> None:
        """A call has failed: say what to do, but only once until the store works again."""
        with self._lock:
            self.errors += 1
            first = not self._failing
            self._failing[kind] = error
        if first:
            log.error("the state store fails: %s. Sessions go on from RAM and are lost at a restart", error)

    def _works(self, kind: str) -> None:
        with self._lock:
            failed = self._failing.pop(kind, None)
            if kind == STORING:
                failed = self._failing.pop("write", None) or failed
            well = failed is not None and not self._failing
        if well:
            log.warning("the state store works again")


def _kind(name: str) -> str:
    """What a call of the store counts as."""
    if name in READING:
        return "read"
    return STORING if name == STORING else "write"
