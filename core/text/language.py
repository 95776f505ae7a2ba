"""Which language a text is in: by script where that decides, else by a statistical classifier."""

from __future__ import annotations

import functools
import re
from typing import Any

LANGUAGES = ("zh", "en", "ja", "fr", "de", "es", "ru")
# Short ASCII texts say little: English unless another language is clearly likelier (natural log).
ENGLISH_MARGIN = 2.0

_KANA = re.compile("[\u3040-\u30ff\uff66-\uff9f]")
_HAN = re.compile("[\u3400-\u9fff\uf900-\ufaff]")
_CYRILLIC = re.compile("[\u0400-\u04ff]")
_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")


def detect_language(text: str) -> str:
    """One of LANGUAGES; 'en' where there are no letters to tell by."""
    han, latin = len(_HAN.findall(text)), len(_LATIN.findall(text))
    if _KANA.search(text):
        return "ja"
    if han * 3 >= latin and han:
        return "zh"
    if len(_CYRILLIC.findall(text)) > latin:
        return "ru"
    return _classify(text) if latin else "en"


def _classify(text: str) -> str:
    ranked = dict(_classifier().rank(text))
    best = max(ranked, key=lambda language: float(ranked[language]))
    if text.isascii() and float(ranked[best]) - float(ranked["en"]) < ENGLISH_MARGIN:
        return "en"
    return str(best)


@functools.cache
def _classifier() -> Any:
    """Loaded at the first use: its model takes more than a second."""
    import py3langid

    py3langid.set_languages(list(LANGUAGES))
    return py3langid
