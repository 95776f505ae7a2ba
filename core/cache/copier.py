"""`Copier`: the thread that copies kept states out of their slots before somebody needs these, beside the steps.

Not the writer's thread: that one stands still while the store is slow or locked, which is when copies in memory are
needed most, and there is none without a store.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

log = logging.getLogger(__name__)


class Copier:
    """Copies when it is woken, until there is nothing to copy.

    Args:
        copy_next: copies the state whose turn it is; False when there is none.
    """

    def __init__(self, copy_next: Callable[[], bool]) -> None:
        self._copy_next = copy_next
        self._news = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="state-copier", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be something to copy. Never blocks."""
        self._news.set()

    def close(self) -> None:
        """End after the copy under way."""
        self._closing = True
        self._news.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._news.wait()
            self._news.clear()
            while not self._closing and self._copied_one():
                pass

    def _copied_one(self) -> bool:
        try:
            return self._copy_next()
        except Exception:  # nothing is lost: the state is still in its slot, and is copied in a step if need be
            log.exception("a state could not be copied ahead")
            return True
