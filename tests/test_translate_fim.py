"""Translation, fill in the middle and language detection (native_api.md, "Per endpoint")."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_lightning.core.text.fim import fim_prompt
from rwkv_lightning.core.text.language import detect_language
from rwkv_lightning.plugins.routes.native.translate import keep_placeholders, prompt
from server_process import ServerProcess, sse_events

TRANSLATE = "/translate/v1/batch-translate"
FIM = "/FIM/v1/batch-FIM"
EVAL = [json.loads(line) for line in (Path(__file__).parent / "data" / "eval.jsonl").open()]
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--max-batch", "32", "--max-rows", "100") as running:
        yield running
        running.wait_idle()


# Translation


def translations(server: ServerProcess, **body: Any) -> list[dict[str, str]]:
    response = server.post(TRANSLATE, body)
    assert response.status_code == 200, response.text
    answer = response.json()
    assert set(answer) == {"translations"}
    assert all(set(entry) == {"detected_source_lang", "text"} for entry in answer["translations"])
    entries: list[dict[str, str]] = answer["translations"]
    return entries


CODES = {"Chinese": "zh-CN", "English": "en", "Japanese": "ja", "French": "fr", "German": "de", "Spanish": "es"}


@pytest.mark.parametrize("target", ["Chinese", "English", "French", "German", "Spanish", "Japanese"])
def test_translations_come_back_by_position(server: ServerProcess, target: str) -> None:
    """The model's held-out items, one request for each pair of languages; the source given, or found by its script."""
    items: dict[str, list[tuple[str, str]]] = {}
    for item in EVAL:
        if item["kind"].startswith("translate") and item["prompt"].endswith(f"\n\n{target}:"):
            source, _, text = item["prompt"].partition("\n\n")[0].partition(": ")
            items.setdefault(source, []).append((text, item["expected"].strip()))
    assert items
    for source, pairs in items.items():
        if source not in CODES:
            continue
        for code in (CODES[source], "auto") if source in ("Chinese", "Japanese") else (CODES[source],):
            got = translations(
                server, source_lang=code, target_lang=CODES[target], text_list=[text for text, _ in pairs]
            )
            assert [entry["text"] for entry in got] == [expected for _, expected in pairs]
            assert {entry["detected_source_lang"] for entry in got} == {CODES[source]}


def test_each_text_has_its_own_language(server: ServerProcess) -> None:
    got = translations(server, target_lang="en", text_list=["你有六只狗。", "The cat is small.", ""])
    assert [entry["detected_source_lang"] for entry in got] == ["zh-CN", "en", "en"]
    assert got[0]["text"] == "You have six dogs."
    assert got[2]["text"] == ""


def test_the_prompt_has_the_documented_form() -> None:
    assert prompt("Hi", "en", "zh-TW") == "English: Hi\n\nChinese:"
    assert prompt("Hi", "EN", "zh-cn") == "English: Hi\n\nChinese:"
    assert prompt("Hi", "xx", "Klingon") == "xx: Hi\n\nKlingon:"
    names = {prompt("a", "en", code).rpartition("\n")[2] for code in ("ja", "fr", "de", "es", "ru")}
    assert names == {"Japanese:", "French:", "German:", "Spanish:", "Russian:"}


def test_a_text_cannot_end_its_own_line(server: ServerProcess) -> None:
    """A blank line in the text would end the translation before it begins."""
    [one] = translations(server, source_lang="en", target_lang="zh-CN", text_list=["You have\r\n\r\n  six dogs.\n"])
    assert one["text"]
    assert "\n\n" not in one["text"]


def test_placeholders_come_back(server: ServerProcess) -> None:
    text = "The cat {{1}} is small. <b0>"
    [entry] = translations(server, target_lang="zh-CN", text_list=[text], placeholders=["{{1}}", "<b0>", "{{2}}"])
    assert entry["text"].count("{{1}}") == entry["text"].count("<b0>") == 1
    assert "{{2}}" not in entry["text"]


WORDS = st.lists(st.sampled_from(["a", "word", "{1}", "{2}", "<b 0>", "</b>", "你好", "{1}{2}"]), max_size=8)


@given(WORDS, WORDS)
@settings(deadline=None)
def test_lost_placeholders_are_put_back(source: list[str], translation: list[str]) -> None:
    placeholders = ["{1}", "{2}", "<b 0>", "</b>", ""]
    before, after = " ".join(source), keep_placeholders(" ".join(source), " ".join(translation), placeholders)
    for placeholder in filter(None, placeholders):
        wanted = max(before.count(placeholder), " ".join(translation).count(placeholder))
        assert after.count(placeholder) == wanted
    kept = after
    for placeholder in filter(None, placeholders):
        kept = kept.replace(placeholder, "")
    stripped = " ".join(translation)
    for placeholder in filter(None, placeholders):
        stripped = stripped.replace(placeholder, "")
    assert "".join(kept.split()) == "".join(stripped.split()), "nothing but placeholders is added"


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("target_lang", {"text_list": ["a"]}),
        ("target_lang", {"text_list": ["a"], "target_lang": " \n"}),
        ("target_lang", {"text_list": ["a"], "target_lang": 5}),
        ("source_lang", {"text_list": ["a"], "target_lang": "en", "source_lang": ""}),
        ("text_list", {"target_lang": "en"}),
        ("text_list", {"target_lang": "en", "text_list": []}),
        ("text_list", {"target_lang": "en", "text_list": "a"}),
        ("text_list", {"target_lang": "en", "text_list": [1]}),
        ("text_list", {"target_lang": "en", "text_list": ["\ud800"]}),
        ("placeholders", {"target_lang": "en", "text_list": ["a"], "placeholders": "x"}),
        ("seed", {"target_lang": "en", "text_list": ["a"], "seed": "x"}),
    ],
)
def test_translation_fields_at_fault(server: ServerProcess, field: str, body: dict[str, Any]) -> None:
    response = server.client.post(TRANSLATE, content=json.dumps(body))
    assert response.status_code == 422, response.text
    assert response.json()["detail"][0]["loc"][:2] == ["body", field]


def test_translation_limits_and_unknown_fields(server: ServerProcess) -> None:
    many = server.post(TRANSLATE, {"target_lang": "en", "text_list": ["a"] * 101})
    assert (many.status_code, many.json()["request_bsz"], many.json()["max_bsz"]) == (400, 101, 100)
    named = server.post(TRANSLATE, {"target_lang": "en", "text_list": [""], "glossary": {}, "temperature": 1})
    assert named.headers["x-ignored-fields"] == "glossary, temperature"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("The cat is on the table.", "en"),
        ("OK", "en"),
        ("1234 !?", "en"),
        ("", "en"),
        ("https://example.org/a?b=c", "en"),
        ("Bonjour tout le monde, comment allez-vous ?", "fr"),
        ("Der Hund schläft unter dem Tisch.", "de"),
        ("¿Dónde está la estación?", "es"),
        ("Доброе утро, как дела?", "ru"),
        ("今天天气很好。", "zh"),
        ("今天我买了 iPhone 15", "zh"),
        ("The Beijing office (北京) is closed today", "en"),
        ("今日は天気がいいです。", "ja"),
        ("カタカナ", "ja"),
        ("안녕하세요", "ko"),
        ("مرحبا بالعالم", "ar"),
        ("Καλημέρα", "el"),
        ("שלום", "he"),
        ("नमस्ते", "hi"),
        ("สวัสดี", "th"),
    ],
)
def test_detection(text: str, code: str) -> None:
    assert detect_language(text) == code


@given(st.text(max_size=80))
@settings(deadline=None, max_examples=60)
def test_detection_never_fails(text: str) -> None:
    assert len(detect_language(text)) == 2


# Fill in the middle


def pairs() -> list[tuple[str, str, str]]:
    """Prefix, suffix and the expected middle of the model's held-out items."""
    result = []
    for item in EVAL:
        if item["kind"] == "fim":
            suffix, _, prefix = item["prompt"].removeprefix("✿prefix✿✿suffix✿").partition("✿middle✿")
            assert fim_prompt(prefix, suffix) == item["prompt"]
            result.append((prefix, suffix, item["expected"]))
    return result


def fim_body(items: list[tuple[str, str, str]], **fields: Any) -> dict[str, Any]:
    return {"prefix": [item[0] for item in items], "suffix": [item[1] for item in items], **GREEDY, **fields}


def test_middles_come_back_by_position(server: ServerProcess) -> None:
    items = pairs()
    answer = server.post(FIM, fim_body(items, model="label")).json()
    assert (answer["id"], answer["object"], answer["model"]) == ("rwkv7-batch", "FIM.completion", "label")
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(items)))
    assert [choice["message"]["content"] for choice in answer["choices"]] == [item[2] for item in items]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"stop"}
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("chunk_size", [1, 4])
def test_a_stream_of_middles(server: ServerProcess, chunk_size: int) -> None:
    items = pairs()[:12]
    response = server.post(FIM, fim_body(items, stream=True, chunk_size=chunk_size))
    *events, done = sse_events(response)
    texts = dict.fromkeys(range(len(items)), "")
    for event in map(json.loads, events):
        assert event["object"] == "chat.completion.chunk"
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"]["content"]
    assert done == "[DONE]"
    assert list(texts.values()) == [item[2] for item in items]


def test_stop_texts_do_not_apply_and_are_named(server: ServerProcess) -> None:
    items = pairs()[:3]
    plain = server.post(FIM, fim_body(items))
    stopped = server.post(FIM, fim_body(items, stop_tokens=[",", " "]))
    assert stopped.json()["choices"] == plain.json()["choices"]
    assert stopped.headers["x-ignored-fields"] == "stop_tokens"
    assert "x-ignored-fields" not in plain.headers


def test_empty_sides_are_fine(server: ServerProcess) -> None:
    answer = server.post(FIM, {"prefix": ["", "a"], "suffix": ["", ""], **GREEDY, "max_tokens": 2})
    assert answer.status_code == 200
    assert len(answer.json()["choices"]) == 2


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("suffix", {"prefix": ["a", "b"], "suffix": ["c"]}),
        ("suffix", {"prefix": ["a"], "suffix": ["c", "d", "e"]}),
        ("prefix", {"suffix": ["a"]}),
        ("suffix", {"prefix": ["a"]}),
        ("prefix", {"prefix": [], "suffix": []}),
        ("prefix", {"prefix": "a", "suffix": ["a"]}),
        ("prefix", {"prefix": [1], "suffix": ["a"]}),
        ("prefix", {"prefix": ["\ud800"], "suffix": ["a"]}),
        ("suffix", {"prefix": ["a"], "suffix": ["\udfff"]}),
        ("max_tokens", {"prefix": ["a"], "suffix": ["a"], "max_tokens": 0}),
    ],
)
def test_fim_fields_at_fault(server: ServerProcess, field: str, body: dict[str, Any]) -> None:
    response = server.client.post(FIM, content=json.dumps(body))
    assert response.status_code == 422, response.text
    fault = response.json()["detail"][0]
    assert fault["loc"][:2] == ["body", field]
    if len(body.get("prefix", [])) != len(body.get("suffix", [])) and "prefix" in body and "suffix" in body:
        assert f"{len(body['prefix'])} prefixes" in fault["msg"]
        assert f"{len(body['suffix'])} suffixes" in fault["msg"]


def test_fim_limit(server: ServerProcess) -> None:
    many = server.post(FIM, {"prefix": ["a"] * 101, "suffix": ["b"] * 101})
    assert (many.status_code, many.json()["request_bsz"]) == (400, 101)


def test_many_threads_may_detect_a_language_at_once() -> None:
    """The first use loads the classifier: here eight threads come first, in a process of their own."""
    script = (
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from rwkv_lightning.core.text.language import detect_language\n"
        "texts = ['Bonjour tout le monde', 'Guten Morgen', 'Where is the station?', 'El perro es negro'] * 8\n"
        "with ThreadPoolExecutor(8) as pool:\n"
        "    found = list(pool.map(detect_language, texts))\n"
        "assert found == ['fr', 'de', 'en', 'es'] * 8, found\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
