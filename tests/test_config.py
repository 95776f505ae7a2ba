"""Settings: precedence, unknown keys, names and aliases, messages, secrets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rwkv_lightning.core import config
from rwkv_lightning.core.config import GROUPS, Settings, available_cores, load_settings
from rwkv_lightning.core.errors import SettingsError
from rwkv_lightning.core.options import markdown_table, options

SECRET = "correct horse"


@pytest.fixture
def toml(tmp_path: Path) -> Any:
    def write(text: str) -> dict[str, str]:
        path = tmp_path / "server.toml"
        path.write_text(text)
        return {"config": str(path)}

    return write


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for option in options():
        monkeypatch.delenv(option.variable, raising=False)


KINDS = [
    ("port", 8000, ("port = 1", 1), ("2", 2), ("3", 3)),
    ("deterministic", False, ("deterministic = true", True), ("false", False), (True, True)),
    ("plugin", (), ('plugin = ["a", "b"]', ("a", "b")), ("c, d", ("c", "d")), (["e,f", "g"], ("e", "f", "g"))),
    ("dtype", "auto", ('dtype = "fp32"', "float32"), ("BF16", "bfloat16"), ("float16", "float16")),
    ("drain_timeout", 10.0, ("drain-timeout = 1.5", 1.5), ("2.5", 2.5), ("3.5", 3.5)),
]


@pytest.mark.parametrize(("name", "default", "file", "variable", "option"), KINDS, ids=[kind[0] for kind in KINDS])
def test_each_source_wins_over_those_before_it(
    name: str, default: Any, file: Any, variable: Any, option: Any, toml: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert getattr(load_settings(), name) == default
    given = toml(file[0])
    assert getattr(load_settings(given), name) == file[1]
    monkeypatch.setenv(f"RWKV_LIGHTNING_{name.upper()}", variable[0])
    assert getattr(load_settings(given), name) == variable[1]
    assert getattr(load_settings({**given, name: option[0]}), name) == option[1]


def test_a_source_changes_nothing_but_what_it_names(toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_LIGHTNING_MAX_ROWS", "7")
    settings = load_settings({**toml("port = 1\nmax-batch = 5"), "port": "9"})
    assert (settings.port, settings.max_batch, settings.max_rows, settings.max_waiting) == (9, 5, 7, 16384)


def test_the_environment_may_name_the_file(toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_LIGHTNING_CONFIG", toml("port = 1234")["config"])
    assert load_settings().port == 1234


@pytest.mark.parametrize("source", ["file", "environment"])
def test_backend_is_another_name_of_inference_engine(source: str, toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = toml('backend = "GemLite"') if source == "file" else {}
    if source == "environment":
        monkeypatch.setenv("RWKV_LIGHTNING_BACKEND", "GemLite")
    assert load_settings(given).inference_engine == "gemlite"


def test_both_names_at_once_are_refused(toml: Any) -> None:
    with pytest.raises(SettingsError, match="sets inference_engine a second time"):
        load_settings(toml('backend = "a"\ninference-engine = "b"'))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", r"prot in .*server\.toml is not a setting; did you mean port\?"),
        ("[server]\nport = 1", r"server in .*server\.toml is not a setting"),
        ("[plugins]\nminp = 3", r"plugins in .*server\.toml \(minp\): input should be a valid dictionary"),
        ("port = ", r"server\.toml is not valid TOML"),
        ("port = 'x'", r"port in .*server\.toml 'x': input should be a valid integer"),
        ("config = 'other.toml'", r"a settings file cannot name another one"),
    ],
)
def test_what_is_wrong_with_a_file(text: str, message: str, toml: Any) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(toml(text))


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.toml cannot be read: No such file"):
        load_settings({"config": str(tmp_path / "none.toml")})


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("PROT", "1", r"^RWKV_LIGHTNING_PROT is not a setting; did you mean RWKV_LIGHTNING_PORT\?$"),
        ("QQQQQ", "1", r"^RWKV_LIGHTNING_QQQQQ is not a setting; see rwkv-lightning serve --help$"),
        ("PORT", "x", r"^RWKV_LIGHTNING_PORT 'x': input should be a valid integer"),
        ("BACKEND", "", r"^RWKV_LIGHTNING_BACKEND '': must not be empty"),
        ("MODEL_PATH", "", r"^RWKV_LIGHTNING_MODEL_PATH '': must not be empty"),
        ("LOG_LEVEL", "loud", r"^RWKV_LIGHTNING_LOG_LEVEL 'loud': input should be 'debug', 'info'"),
    ],
)
def test_what_is_wrong_with_the_environment(
    variable: str, value: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RWKV_LIGHTNING_{variable}", value)
    with pytest.raises(SettingsError, match=message):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SERVICE_HOST", "10.0.0.1"),
        ("SERVICE_PORT_HTTP", "8000"),
        ("PORT", "tcp://10.0.0.1:8000"),
        ("PORT_8000_TCP_ADDR", "10.0.0.1"),
        ("CACHE_DIR", "/somewhere"),
        ("KERNELS", "reference"),
    ],
)
def test_variables_that_are_not_settings_but_rightly_there(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"RWKV_LIGHTNING_{name}", value)
    assert load_settings().port == 8000


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"port": "70000"}, r"^--port '70000': input should be less than or equal to 65535$"),
        ({"max_batch": "0"}, r"^--max-batch '0': input should be greater than or equal to 1$"),
        ({"drain_timeout": "nan"}, r"^--drain-timeout 'nan': input should be"),
        ({"max_body_bytes": "12 parsecs"}, r"^--max-body-bytes '12 parsecs': "),
        ({"dtype": "int3"}, r"^--dtype 'int3': input should be 'auto', 'float32', 'bfloat16' or 'float16'$"),
        ({"prefill_chunk": "1024"}, r"^prefill-chunk 1024 exceeds prefill-budget 512; lower the one or raise"),
        ({"prot": "1"}, r"^prot is not a setting; did you mean port\?$"),
        ({"password": ""}, r"^--password: must not be empty; give it a value or leave it out$"),
    ],
)
def test_what_is_wrong_with_the_command_line(given: dict[str, str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(given)


def test_the_password_shows_nowhere(toml: Any) -> None:
    settings = load_settings({"password": SECRET})
    assert settings.password is not None
    assert settings.password.get_secret_value() == SECRET
    assert SECRET not in f"{settings} {settings!r} {settings.model_dump_json()} {markdown_table()}"
    with pytest.raises(SettingsError) as caught:
        load_settings(toml(f"password = ['{SECRET}']"))
    assert SECRET not in str(caught.value)


def test_sections_of_plugins(toml: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given = toml("[plugins.Min-P]\nscale = 1\ncolour = 'red'")
    monkeypatch.setenv("RWKV_LIGHTNING_MIN_P__SCALE", "2")
    settings = load_settings(given)
    assert settings.plugins == {"min_p": {"scale": "2", "colour": "red"}}
    assert "red" not in repr(settings), "a plugin's section may hold secrets"


def test_an_empty_list_means_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RWKV_LIGHTNING_CORS_ORIGINS", "")
    assert load_settings().cors_origins == ()


def test_sizes_may_have_units() -> None:
    assert load_settings({"max_body_bytes": "64MiB"}).max_body_bytes == 64 << 20
    assert load_settings({"max_body_bytes": "5000"}).max_body_bytes == 5000


def test_settings_do_not_change_after_loading() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        load_settings().port = 1


def test_threads_respect_a_container_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.cpu_count", lambda logical: 64)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(48)), raising=False)
    quota = tmp_path / "cpu.max"
    read_quota = config._quota
    monkeypatch.setattr(config, "_quota", lambda: read_quota(quota))
    assert available_cores() == 48, "without a quota, the affinity counts"
    quota.write_text("max 100000\n")
    assert available_cores() == 48
    quota.write_text("250000 100000\n")
    assert available_cores() == 3
    assert load_settings().threads == 3


def test_every_setting_is_described_once() -> None:
    described = [option.name for option in options()]
    assert sorted(described) == sorted(set(Settings.model_fields) - {"plugins"})
    assert all(option.description and option.group in GROUPS for option in options())
    table = markdown_table()
    for option in options():
        assert table.count(f"| `{option.variable}` |") == 1
        assert f"`{option.flags[0]}`" in table
    assert "`--backend`" in table
