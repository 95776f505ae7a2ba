"""Server-sent events: the framing that every streaming route group shares."""

from __future__ import annotations

import json
from typing import Any

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"


def data(value: Any) -> bytes:
    """One event holding a JSON value."""
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n".encode()
