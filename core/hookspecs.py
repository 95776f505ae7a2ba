"""The hook specifications: the one page a plugin author reads.

A plugin is a module or an object with methods decorated by `hookimpl`, found through the entry-point group
`rwkv_lightning`. Every hook runs at start-up or once per request, never per token. A method that looks like a hook
but is not in this list stops the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import APIRouter

    from rwkv_lightning.core.interfaces import Backend, Sampler

NAMESPACE = "rwkv_lightning"

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)
