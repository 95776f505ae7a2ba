"""The command line, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rwkv_lightning.core import cli
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.discovery import discover
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.listing import listings
from rwkv_lightning.core.options import options
from rwkv_lightning.core.server import password_row

ROOT = Path(__file__).parents[1]
TRIED = "'/no/model', '/no/model.pth', '/no/model.safetensors'"
INSTALLED = ", ".join(sorted(plugin.name for plugin in discover()))


def run(*arguments: str, program: tuple[str, ...] = ("-m", "rwkv_lightning.core.cli"), **variables: Any) -> Any:
    """The finished process; its environment holds no settings but those given."""
    kept = {k: v for k, v in os.environ.items() if k not in {option.variable for option in options()}}
    environment = {**kept, "COLUMNS": "100", **{name: str(value) for name, value in variables.items()}}
    command = [sys.executable, *program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """What `serve` was called with, instead of a running server."""
    calls: list[Settings] = []
    server = ModuleType("rwkv_lightning.core.server")
    server.serve = calls.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rwkv_lightning.core.server", server)
    monkeypatch.setattr("rwkv_lightning.core.server", server, raising=False)
    for option in options():
        monkeypatch.delenv(option.variable, raising=False)
    return calls


def test_options_alone_mean_serve(served: list[Settings]) -> None:
    line = "--model-path m.pth --backend FP16 --port 8123 --password pw --plugin a --plugin b --deterministic"
    assert cli.main(line.split()) == 0
    assert cli.main(["serve", *line.split()]) == 0
    assert served[0] == served[1]
    settings = served[0]
    assert (settings.model_path, settings.inference_engine, settings.port) == ("m.pth", "fp16", 8123)
    assert settings.password is not None
    assert settings.password.get_secret_value() == "pw"
    assert (settings.plugin, settings.deterministic) == (("a", "b"), True)


def test_a_flag_can_be_taken_back(served: list[Settings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_LIGHTNING_PROTECT_ALL", "1")
    cli.main(["serve"])
    cli.main(["--no-protect-all"])
    assert [settings.protect_all for settings in served] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--prot 80", "unknown option --prot; did you mean --port?"),
        ("--por 80", "unknown option --por; did you mean --port?"),
        ("serve --no-deterministc", "unknown option --no-deterministc; did you mean --no-deterministic?"),
        ("serve foo", "unexpected argument 'foo'; see rwkv-lightning serve --help"),
        ("serv", "unknown command 'serv'; did you mean serve?"),
        ("frobnicate", f"unknown command 'frobnicate'; there are {', '.join(cli.COMMANDS)}"),
        ("--port", "--port: expected one argument"),
        ("--port x", "--port 'x': input should be a valid integer, unable to parse string as an integer"),
        ("--password=", "--password: must not be empty; give it a value or leave it out"),
        ("inspect", "the following arguments are required: FILE"),
        ("inspect /no/model", f"there is no model file at '/no/model' (tried {TRIED}): check FILE"),
        (
            "convert /no/model --to gemlite-int8 q.safetensors",
            f"there is no model file at '/no/model' (tried {TRIED}): check MODEL",
        ),
        ("plugins --plugin nope", f"--plugin nope: no such plugin is installed; installed: {INSTALLED}"),
        ("plugins --plugin fp61", "--plugin fp61: no such plugin is installed; did you mean fp16?"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_1(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments.split()) == 1
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"rwkv-lightning: error: {message}\n")


def test_exit_codes_of_a_real_process(tmp_path: Path) -> None:
    wrong = run("--port", "99999")
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.count("\n") == 1
    wrong = run("serve", RWKV_LIGHTNING_PROT=1)
    assert wrong.returncode == 1
    assert "RWKV_LIGHTNING_PROT is not a setting; did you mean RWKV_LIGHTNING_PORT?" in wrong.stderr
    missing = run("inspect", str(tmp_path / "none"))
    assert missing.returncode == 1
    assert missing.stderr.startswith("rwkv-lightning: error: ")
    assert "Traceback" not in missing.stderr


def test_app_py_is_the_same_program() -> None:
    wrong = run("--model-path", "x", "--prot", "1", program=(str(ROOT / "app.py"),))
    assert (wrong.returncode, wrong.stderr) == (
        1,
        "rwkv-lightning: error: unknown option --prot; did you mean --port?\n",
    )


def test_a_named_plugin_that_fails_shows_its_traceback(install_plugin: Any) -> None:
    folder = install_plugin("bomb", "def fuse(): raise RuntimeError('boom')\nfuse()")
    own = ",".join(plugin.name for plugin in discover() if plugin.own)
    failed = run("plugins", "--plugin", "bomb", "--disable-plugin", own, PYTHONPATH=folder)
    assert failed.returncode == 1
    assert "in fuse" in failed.stderr
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith(
        "rwkv-lightning: error: plugin 'bomb' (acme-plugin 1.2) cannot be loaded: RuntimeError: boom"
    )


def test_plugins_lists_what_is_registered_and_what_is_available(install_plugin: Any) -> None:
    folder = install_plugin("bomb", "raise RuntimeError('boom')")
    listed = run("plugins", "--json", PYTHONPATH=folder)
    assert listed.returncode == 0, listed.stderr
    lines = {(line["kind"], line["name"]): line for line in json.loads(listed.stdout)}
    assert lines["backend", "fp16"]["status"] == "ready"
    assert lines["sampler", "v1"]["distribution"] == "rwkv-lightning"
    assert lines["plugin", "bomb"]["reason"] == "--plugin bomb loads it"


def test_paths_are_listed_with_the_names_of_their_parameters() -> None:
    host = PluginHost(Settings())
    paths = {line.name: line.description for line in listings(host, "cpu") if line.kind == host.routes.kind}
    assert "/v1/models/{model_id}" in paths["openai"]
    assert not any(":path" in text or "{:" in text or "{}" in text for text in paths.values())


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("command", ["serve", "convert", "inspect", "bench"])
def test_help_has_examples_that_parse(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = help_of(command, capsys).partition("examples:\n")[2].splitlines()
    commands = [line.split("rwkv-lightning ")[1].split() for line in lines if "rwkv-lightning " in line[:60]]
    mine = [words for words in commands if words[0] == command]
    assert len(mine) >= 2
    for words in mine:
        cli.parse(cli.build_parsers()[1][command], words[1:])  # raises for an option that it lacks


def test_help_says_what_each_command_is_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert help_of("inspect", capsys).startswith("usage: rwkv-lightning inspect FILE [OPTIONS]")
    assert "the same as --inference-engine" in " ".join(help_of("bench", capsys).split())
    plugins = help_of("plugins", capsys)
    assert "--plugin" in plugins
    assert "--device" in plugins
    assert "--prefill" not in plugins
    parsed = cli.parse(cli.build_parsers()[1]["plugins"], ["--prefill-chunk", "8"])
    assert parsed["prefill_chunk"] == "8", "it is taken all the same"


@pytest.mark.parametrize(
    ("settings", "row"),
    [
        ({"password": "pw"}, "required"),
        ({"host": "127.0.0.1"}, "none (--password sets one)"),
        ({"host": "0.0.0.0"}, "none: whoever reaches this port may use it"),
    ],
)
def test_the_banner_says_who_may_use_the_server(settings: dict[str, Any], row: str) -> None:
    assert password_row(Settings(**settings)).startswith(row)


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["serve", "--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    for option in options():
        assert option.flags[0] in text
        assert f"[{option.variable}]" in text
        assert f"{option.group}:" in text
    assert "[default: the embedded demo model]" in text
    assert "examples:" in text
    assert "RWKV_LIGHTNING_KERNELS" in text


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 0
    overview = capsys.readouterr().out
    assert all(f"\n  {command} " in overview for command in cli.COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    assert capsys.readouterr().out == overview


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("rwkv-lightning 0.")


def test_inspect(capsys: pytest.CaptureFixture[str]) -> None:
    path = demo_model_path()
    assert cli.main(["inspect", "--json", str(path.with_suffix(""))]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["size"] == path.stat().st_size
    assert (facts["n_layer"], facts["n_embd"], facts["vocab_size"], facts["dtype"]) == (4, 256, 3660, "bfloat16")
    assert len(facts["fingerprint"]) == 32
    assert cli.main(["inspect", str(path)]) == 0
    shown = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert shown.keys() == facts.keys()
    assert shown["fingerprint"] == facts["fingerprint"]


def test_inspect_refuses_what_is_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.pth").write_bytes(b"not a model")
    assert cli.main(["inspect", str(tmp_path / "x")]) == 1
    assert "x.pth" in capsys.readouterr().err
