"""The hook readiness_checks: what plugins say about being ready, and what GET /v1/health makes of it."""

from __future__ import annotations

from typing import Any

import pytest
from server_thread import ServerThread

from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.discovery import discover
from rwkv_lightning.core.host import PluginHost

CONTEXT: Any = object()
CHECK = """
    ANSWER = []

    @hookimpl
    def readiness_checks(context):
        return {answer}
"""


def answers_of(*plugins: str) -> list[str]:
    found = [plugin for plugin in discover() if not plugin.own]
    return PluginHost(load_settings({"plugin": list(plugins)}), found).readiness_checks(CONTEXT)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("None", []),
        ("[]", []),
        ("['the index is loading', 'so is the cache']", ["p: the index is loading", "p: so is the cache"]),
        ("'one sentence'", ["p: one sentence"]),
        ("(word for word in ['lazy'])", ["p: lazy"]),
        ("1 / 0", ["p: its readiness check failed; the log says how"]),
        ("5", ["p: its readiness check failed; the log says how"]),
    ],
)
def test_what_plugins_answer(
    install_plugin: Any, caplog: pytest.LogCaptureFixture, answer: str, expected: list[str]
) -> None:
    install_plugin("p", CHECK.format(answer=answer))
    assert answers_of("p") == expected
    assert ("plugin 'p' (acme-plugin 1.2) failed in readiness_checks" in caplog.text) == ("failed" in str(expected))


def test_every_plugin_is_asked(install_plugin: Any) -> None:
    install_plugin("one", CHECK.format(answer="1 / 0"), distribution="acme")
    install_plugin("two", CHECK.format(answer="['not yet']"), distribution="bolt")
    assert answers_of("one", "two") == ["one: its readiness check failed; the log says how", "two: not yet"]
    assert answers_of() == []


def test_health_shows_what_is_missing_and_recovers(install_plugin: Any) -> None:
    install_plugin("p", CHECK.format(answer="ANSWER"))
    with ServerThread(plugin=["p"]) as server:
        healthy = server.client.get("/v1/health")
        assert (healthy.status_code, healthy.json()["status"]) == (200, "ok")
        assert "not_ready" not in healthy.json()
        (plugin,) = (plugin for plugin in server.context.host.plugins if plugin.origin.plugin == "p")
        answer: list[str] = plugin.value.ANSWER  # type: ignore[attr-defined]
        answer.append("the index is loading")
        waiting = server.client.get("/v1/health")
        assert (waiting.status_code, waiting.json()["status"]) == (503, "not ready")
        assert waiting.json()["not_ready"] == ["p: the index is loading"]
        assert waiting.json()["model_loaded"] is True
        served = server.post("/v1/chat/completions", {"contents": ["User: Hi"], "max_tokens": 1})
        assert served.status_code == 200, "requests that come all the same are served"
        answer.clear()
        assert server.client.get("/v1/health").status_code == 200
