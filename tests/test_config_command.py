"""`rwkv-lightning config`: every setting, its effective value and its source; never a secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rwkv_lightning.core import cli
from rwkv_lightning.core.options import options

SECTION = """
    from pydantic import BaseModel, SecretStr

    class Section(BaseModel):
        scale: float = 1.5
        token: SecretStr = SecretStr("")
        key_file: str = ""

    @hookimpl
    def plugin_settings():
        return Section

    @hookimpl
    def shutdown(): ...
"""
FILE = """
max-batch = 64
backend = "FP16"
password = "hunter2"
model-alias = ["a", "b"]

[plugins.acme]
token = "hunter3"
key-file = "/keys"
"""


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options():
        monkeypatch.delenv(option.variable, raising=False)


def config(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(["config", *arguments]) == 0
    return capsys.readouterr().out


def as_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(line["group"], line["name"]): line for line in json.loads(config(capsys, "--json", *arguments))}


def test_every_setting_is_there_once_under_its_heading(capsys: pytest.CaptureFixture[str]) -> None:
    lines = as_json(capsys)
    own = [(group, name) for group, name in lines if not group.startswith("plugins.")]
    assert own == [(option.group, option.name) for option in options()]
    assert {line["source"] for line in lines.values()} == {"default"}
    assert lines["server", "port"]["value"] == 8000
    assert lines["model", "model_path"]["value"] is None
    assert lines["limits", "max_body_bytes"]["value"] == 16 << 20
    assert lines["security", "cors_origins"]["value"] == ["*"]
    assert lines["engine", "threads"]["value"] >= 1


def test_each_source_is_named_as_the_user_wrote_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "server.toml"
    file.write_text(FILE.partition("[plugins")[0])
    monkeypatch.setenv("RWKV_LIGHTNING_PORT", "9000")
    monkeypatch.setenv("RWKV_LIGHTNING_MAX_BATCH", "32")
    monkeypatch.setenv("RWKV_LIGHTNING_BACKEND", "fp16")
    lines = as_json(capsys, "--config", str(file), "--max-rows", "7", "--max-batch", "16")
    found = {name: (line["value"], line["source"]) for (_, name), line in lines.items() if line["source"] != "default"}
    assert found == {
        "config": (str(file), "--config"),
        "model_alias": (["a", "b"], f"model_alias in {file}"),
        "inference_engine": ("fp16", "RWKV_LIGHTNING_BACKEND"),
        "max_batch": (16, "--max-batch"),
        "max_rows": (7, "--max-rows"),
        "port": (9000, "RWKV_LIGHTNING_PORT"),
        "password": ("**********", f"password in {file}"),
    }


def test_plugins_settings_are_shown_with_their_sources(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, install_plugin: Any
) -> None:
    install_plugin("acme", SECTION)
    file = tmp_path / "server.toml"
    file.write_text(FILE)
    monkeypatch.setenv("RWKV_LIGHTNING_ACME__TOKEN", "hunter4")
    lines = as_json(capsys, "--config", str(file), "--plugin", "acme")
    mine = {name: (line["value"], line["source"]) for (group, name), line in lines.items() if group == "plugins.acme"}
    assert mine == {
        "scale": (1.5, "default"),
        "token": ("**********", "RWKV_LIGHTNING_ACME__TOKEN"),
        "key_file": ("/keys", f"[plugins.acme] in {file}"),
    }


@pytest.mark.parametrize("form", [(), ("--json",)])
def test_secrets_are_never_printed(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    install_plugin: Any,
    form: tuple[str, ...],
) -> None:
    install_plugin("acme", SECTION)
    (tmp_path / "server.toml").write_text(FILE)
    monkeypatch.setenv("RWKV_LIGHTNING_ACME__TOKEN", "hunter4")
    arguments = ("--config", str(tmp_path / "server.toml"), "--plugin", "acme", *form)
    assert "hunter" not in config(capsys, *arguments)
    assert "hunter" not in config(capsys, *arguments, "--password", "hunter5")


def test_the_table_is_grouped_and_lines_up(capsys: pytest.CaptureFixture[str]) -> None:
    lines = config(capsys, "--max-batch", "64").splitlines()
    headings = [line for line in lines if line and not line.startswith(" ")]
    own = [heading for heading in headings if not heading.startswith("plugins.")]
    assert own == [f"{group}:" for group in dict.fromkeys(option.group for option in options())]
    (row,) = (line for line in lines if line.split()[:1] == ["max-batch"])
    assert row.split() == ["max-batch", "64", "--max-batch"]
    (other,) = (line for line in lines if line.split()[:1] == ["deterministic"])
    assert other.split() == ["deterministic", "off", "default"]
    assert row.index("--max-batch") == other.index("default")
    assert any("the embedded demo model" in line for line in lines), "unset values show what that means"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prot 80", "unknown option --prot; did you mean --port?"),
        ("--port x", "--port 'x': input should be a valid integer"),
        ("--plugin nobody", "--plugin nobody: no such plugin is installed"),
        ("--config nowhere.toml", "settings file nowhere.toml cannot be read"),
    ],
)
def test_what_would_stop_the_server_stops_it_too(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert cli.main(["config", *arguments.split()]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
