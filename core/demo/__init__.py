"""The embedded demo model: a tiny RWKV-7 that chats, for a first start and for tests."""

from __future__ import annotations

from pathlib import Path


def demo_model_path() -> Path:
    """The demo model's weights (official layout, bf16, 10.8 MB)."""
    return Path(__file__).with_name("rwkv7-demo.pth")


def demo_vocab_path() -> Path:
    """The demo model's own vocabulary, 3660 ids in the format of the RWKV World vocabulary file."""
    return Path(__file__).with_name("rwkv7-demo.vocab.txt")
