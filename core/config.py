"""`Settings`: every knob once, with the text that `--help` and the README's table show.

Precedence: defaults < `--config file.toml` < `RWKV_LIGHTNING_*` < command line. An unknown key stops the start in each
of the three, naming the nearest known one. Plugins have sections of their own: `[plugins.<name>]` in the file,
`RWKV_LIGHTNING_<NAME>__<KEY>` in the environment; the host checks them when the plugins are loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import psutil
from pydantic import (
    BeforeValidator,
    ByteSize,
    Field,
    SecretStr,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from rwkv_lightning.core.config_sources import (
    ALIASES,
    PREFIX,
    EnvironmentSource,
    FileSource,
    option_name,
    suggestion,
    variable_name,
)
from rwkv_lightning.core.errors import SettingsError

GROUPS = ("general", "model", "engine", "states", "limits", "server", "security", "plugins")
SHORT_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _lower(value: Any) -> Any:
    return value.lower() if isinstance(value, str) else value


def _dtype_name(value: Any) -> Any:
    return SHORT_DTYPES.get(_lower(value), _lower(value)) if isinstance(value, str) else value


def _split(value: Any) -> Any:
    """'a,b' or ['a', 'b,c'] -> a flat list of names."""
    parts = [value] if isinstance(value, str) else value
    if not isinstance(parts, list | tuple) or not all(isinstance(part, str) for part in parts):
        return value
    return [name for part in parts for name in (piece.strip() for piece in part.split(",")) if name]


Lower = BeforeValidator(_lower)
Names = Annotated[tuple[str, ...], BeforeValidator(_split)]
Count = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]


def available_cores() -> int:
    """Physical cores this process may use: affinity and container quota respected."""
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, min(cores, _quota()))


def _quota(file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    try:
        limit, period = file.read_text().split()
        return math.ceil(int(limit) / int(period))
    except (OSError, ValueError):  # no such file, or 'max': no quota
        return 1_000_000


def knob(group: str, description: str, default: Any = None, **field: Any) -> Any:
    """A setting's field; `shown` replaces the default in help texts."""
    shown = field.pop("shown", None)
    if "default_factory" not in field:
        field["default"] = default
    return Field(description=description, json_schema_extra={"group": group, "shown": shown}, **field)


class Settings(BaseSettings):
    """What the server was told. Unset fields come from the environment, the file (`config`) and the defaults."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    config: Path | None = knob("general", "TOML file of settings: the names below, with _ or -")
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Lower] = knob(
        "general", "debug, info, warning or error", "info"
    )

    model_path: str | None = knob(
        "model", "model file; tried as given, then with .pth, then with .safetensors", shown="the embedded demo model"
    )
    vocab: Path | None = knob(
        "model", "vocabulary file", shown="<model>.vocab.txt beside the model, else the World vocabulary"
    )
    served_model_name: str | None = knob("model", "name that clients see", shown="the file's name without its suffix")
    model_alias: Names = knob("model", "further name clients may ask for; repeatable", ())

    inference_engine: Annotated[str, Lower] = knob(
        "engine", "backend that loads and multiplies the weights, or 'auto'; see rwkv-lightning plugins", "fp16"
    )
    device: str = knob("engine", "'auto' (a GPU when there is one), or a torch device such as cpu or cuda:0", "auto")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(_dtype_name)] = knob(
        "engine", "compute type: auto, float32, bfloat16 or float16", "auto"
    )
    state_dtype: Annotated[Literal["auto", "float32", "float16"], BeforeValidator(_dtype_name)] = knob(
        "engine", "type of the resident states: auto, float32 or float16", "auto"
    )
    deterministic: bool = knob("engine", "a row's logits never depend on its neighbours, bit for bit; slower", False)
    threads: Count = knob(
        "engine", "CPU threads of the model", default_factory=available_cores, shown="the physical cores available"
    )
    max_batch: Count = knob("engine", "most rows resident at once; memory may allow fewer", 1024)
    prefill_budget: Count = knob("engine", "prompt tokens fed per step beside the running rows", 512)
    prefill_chunk: Count = knob("engine", "prompt tokens of one row per step, at most prefill-budget", 256)

    l1_slots: Annotated[int, Field(ge=0)] | None = knob(
        "states", "finished sessions' states that may stay in slots (L1)", shown="half of the slots"
    )
    l2_bytes: ByteSize = knob("states", "host memory for sessions and prefixes (L2), e.g. 512MiB", ByteSize(1 << 30))
    l3_bytes: ByteSize = knob("states", "what the state store may use (L3)", ByteSize(10 << 30))
    state_store: Annotated[str, Lower] = knob("states", "the state store: sqlite, a plugin's, or none", "sqlite")
    state_db: str | None = knob(
        "states", "where the state store keeps its data", shown="a database in the user's data folder"
    )
    state_flush_interval: Seconds = knob("states", "seconds after which an answered turn is in the store", 1.0)
    state_durability: Annotated[Literal["async", "sync"], Lower] = knob(
        "states", "sync: an answer waits until its turn is in the store", "async"
    )
    session_queue: Annotated[int, Field(ge=0)] = knob("states", "turns that may wait for one session; over it 409", 16)
    initial_state: Path | None = knob("states", "RWKV state-tuning file that every sequence begins from")
    state_dir: Path | None = knob("states", "folder of the state-tuning files that requests may name")

    max_waiting: Count = knob("limits", "rows that may wait before a request gets 503", 16384)
    max_rows: Count = knob("limits", "rows of one request", 4096)
    max_tokens_limit: Count = knob("limits", "highest max_tokens a request may ask for", 102400)
    max_body_bytes: Annotated[ByteSize, Field(ge=1024)] = knob(
        "limits", "largest request body, e.g. 1048576 or 64MiB; over it 413", ByteSize(16 << 20)
    )

    host: str = knob("server", "address to listen on; 127.0.0.1 keeps it to this machine", "0.0.0.0")
    port: Annotated[int, Field(ge=0, le=65535)] = knob("server", "port to listen on; 0 takes a free one", 8000)
    drain_timeout: Seconds = knob("server", "seconds a shutdown waits for running requests", 10.0)
    keepalive_ping: Seconds = knob("server", "seconds of silence before a stream gets a comment; 0 for none", 15.0)

    reasoning_field: Annotated[Literal["both", "reasoning_content", "reasoning", "inline"], Lower] = knob(
        "server", "where OpenAI answers put the thought: both, reasoning_content, reasoning, or inline", "both"
    )
    strict_model_names: bool = knob("server", "404 for OpenAI requests that name a model not loaded", False)

    password: SecretStr | None = knob("security", "clients must send it; better set in the environment than here")
    protect_all: bool = knob("security", "ask for the password on every path but /v1/health", False)
    cors_origins: Names = knob("security", "origin that browsers may call from, * for any; repeatable", ("*",))

    plugin: Names = knob("plugins", "installed plugin to load besides the built-in ones; repeatable", ())
    disable_plugin: Names = knob("plugins", "plugin not to load, built-in ones included; repeatable", ())
    trace_plugins: bool = knob("plugins", "print every hook call to stderr", False)
    plugins: dict[str, dict[str, Any]] = Field(default_factory=dict, repr=False)  # the plugins' own sections

    @field_validator("*", mode="before")
    @classmethod
    def _not_empty(cls, value: Any, info: ValidationInfo) -> Any:
        """`--password "$UNSET"` must not start an open server. An empty list is fine: it is how to say 'none'."""
        is_list = isinstance(cls.model_fields[info.field_name or ""].default, tuple)
        if isinstance(value, str | SecretStr) and len(value) == 0 and not is_list:
            raise ValueError("must not be empty; give it a value or leave it out")
        return value

    @model_validator(mode="after")
    def _chunk_fits(self) -> Settings:
        if self.prefill_chunk > self.prefill_budget:
            raise ValueError(
                f"prefill-chunk {self.prefill_chunk} exceeds prefill-budget {self.prefill_budget}; lower the one or "
                "raise the other"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, EnvironmentSource(settings_cls), FileSource(settings_cls)


def load_settings(options: Mapping[str, Any] | None = None) -> Settings:
    """The settings from all four sources; `options` are the command line's, by field name.

    Raises:
        SettingsError: one sentence naming the option, variable or file at fault.
    """
    options = dict(options or {})
    for name in options:
        if name not in Settings.model_fields:
            raise SettingsError(f"{name} is not a setting{suggestion(name, Settings.model_fields)}")
    try:
        return Settings(**options)
    except ValidationError as error:
        raise SettingsError(_explain(error, options)) from None


def origin(name: str, options: Mapping[str, Any], config: object = None) -> str:
    """Where a setting's value comes from, as the user wrote it: '--port', 'RWKV_LIGHTNING_PORT' or 'port in FILE'."""
    if name in options:
        return option_name(name)
    for key in (name, *(alias for alias, target in ALIASES.items() if target == name)):
        if variable_name(key) in os.environ:
            return variable_name(key)
    return f"{name} in {config}" if config else name


def _explain(error: ValidationError, options: Mapping[str, Any]) -> str:
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ")
    if not first["loc"]:
        return message
    name, *rest = (str(part) for part in first["loc"])
    where = origin(name, options, options.get("config") or os.environ.get(variable_name("config")))
    if first["type"] in ("byte_size", "byte_size_unit"):
        message = "not a number of bytes; give it like 1073741824, 512MiB or 1.5GB"
    inner = f" ({'.'.join(rest)})" if rest else ""
    shown = "" if name in ("password", "plugins") else f" {str(first['input'])[:80]!r}"
    return f"{where}{inner}{shown}: {message[0].lower()}{message[1:]}"
