"""Which language a text is in: by script where that decides, else by a statistical classifier."""

from __future__ import annotations

import functools
import re
from threading import Lock
from typing import Any

CLASSIFIED = ("en", "fr", "de", "es")  # the languages in Latin script that are told apart
# Short ASCII texts say little: English unless another language is clearly likelier (natural log).
ENGLISH_MARGIN = 2.0

_LATIN = re.compile("[A-Za-z\u00c0-\u024f]")
_KANA = re.compile("[\u3040-\u30ff\uff66-\uff9f]")
_SCRIPTS = {
    "zh": re.compile("[\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"),
    "ru": re.compile("[\u0400-\u04ff]"),
    "ko": re.compile("[\u1100-\u11ff\u3130-\u318f\uac00-\ud7af]"),
    "ar": re.compile("[\u0600-\u06ff]"),
    "el": re.compile("[\u0370-\u03ff]"),
    "he": re.compile("[\u0590-\u05ff]"),
    "hi": re.compile("[\u0900-\u097f]"),
    "th": re.compile("[\u0e00-\u0e7f]"),
}
_WEIGHTS = {"zh": 3, "ko": 2}  # such a letter says as much as this many Latin ones


_ONE_AT_A_TIME = Lock()  # the classifier is loaded and set up at its first use, by whichever thread comes first


def detect_language(text: str) -> str:
    """An ISO 639-1 code; 'en' where there are no letters to tell by.

    Kana anywhere mean Japanese. Otherwise the script with the most letters decides, one language for each but Latin.
    """
    if _KANA.search(text):
        return "ja"
    counts = {code: _WEIGHTS.get(code, 1) * len(script.findall(text)) for code, script in _SCRIPTS.items()}
    code = max(counts, key=lambda name: counts[name])
    latin = len(_LATIN.findall(text))
    if counts[code] and counts[code] >= latin:
        return code
    return _classify(text) if latin else "en"


def _classify(text: str) -> str:
    with _ONE_AT_A_TIME:
        ranked = dict(_classifier().rank(text))
    best = max(ranked, key=lambda language: float(ranked[language]))
    if text.isascii() and float(ranked[best]) - float(ranked["en"]) < ENGLISH_MARGIN:
        return "en"
    return str(best)


@functools.cache
def _classifier() -> Any:
    """Loaded at the first use: its model takes more than a second."""
    import py3langid

    py3langid.set_languages(list(CLASSIFIED))
    return py3langid
