"""Where settings come from besides the command line: the environment and a TOML file. Both refuse unknown names."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo
from pydantic_settings import PydanticBaseSettingsSource

from rwkv_lightning.core.errors import SettingsError

PREFIX = "RWKV_LIGHTNING_"
ALIASES = {"backend": "inference_engine"}
# Read where they are used, before any settings exist; listed here so that they are not taken for misspelt ones.
ENVIRONMENT_ONLY = {
    "CACHE_DIR": "folder of the compiled kernels (default: the user's cache folder)",
    "KERNELS": "'reference' turns the compiled kernels off",
}
# A Kubernetes service named rwkv-lightning puts such variables into every pod.
KUBERNETES = re.compile(r"SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP)(_\w+)?")


def option_name(name: str) -> str:
    """max_batch -> --max-batch"""
    return "--" + name.replace("_", "-")


def variable_name(name: str) -> str:
    """max_batch -> RWKV_LIGHTNING_MAX_BATCH"""
    return PREFIX + name.upper()


def section_name(plugin: str) -> str:
    """What a plugin's section is called, in the file and in the environment: Min-P -> min_p"""
    return re.sub(r"[^a-z0-9]+", "_", plugin.lower())


NEAR = 0.7  # likeness from which a name is suggested: two letters of four exchanged are 0.75, 'nope' and 'openai' 0.6


def suggestion(
    name: str,
    known: Iterable[str],
    spell: Callable[[str], str] = str,
    otherwise: str = "; see rwkv-lightning serve --help",
) -> str:
    """'; did you mean X?', or `otherwise` when nothing known is near."""
    near = difflib.get_close_matches(name.lower(), list(known), n=1, cutoff=NEAR)
    return f"; did you mean {spell(near[0])}?" if near else otherwise


class _Source(PydanticBaseSettingsSource):
    def get_field_value(self, field: FieldInfo, field_name: str) -> tuple[Any, str, bool]:
        return self().get(field_name), field_name, False

    def put(self, values: dict[str, Any], key: str, value: Any, where: str, spell: Callable[[str], str]) -> None:
        """Store a value under its setting's name. Raises SettingsError for an unknown or twice-given key."""
        fields = self.settings_cls.model_fields
        name = ALIASES.get(key, key)
        if name not in fields:
            raise SettingsError(f"{where} is not a setting{suggestion(key, [*fields, *ALIASES], spell)}")
        if name in values:
            raise SettingsError(f"{where} sets {name} a second time; keep one of the two names")
        values[name] = value


class EnvironmentSource(_Source):
    """`RWKV_LIGHTNING_*`; `RWKV_LIGHTNING_<PLUGIN>__<KEY>` goes to that plugin's section."""

    def __call__(self) -> dict[str, Any]:
        values: dict[str, Any] = {}
        sections: dict[str, dict[str, Any]] = {}
        for variable, text in sorted(os.environ.items()):
            key = variable.removeprefix(PREFIX)
            if key == variable or key in ENVIRONMENT_ONLY or _from_kubernetes(key, text):
                continue
            name, nested, rest = key.lower().partition("__")
            if nested:
                sections.setdefault(name, {})[rest] = text
            else:
                self.put(values, name, text, variable, variable_name)
        return {**values, "plugins": sections}


class FileSource(_Source):
    """The TOML file that the command line or the environment names; `[plugins.<name>]` are the plugins' sections."""

    def __call__(self) -> dict[str, Any]:
        path = self.current_state.get("config")
        values: dict[str, Any] = {}
        for key, value in (_read_toml(Path(path)) if path else {}).items():
            if key == "config":
                raise SettingsError(f"config in {path}: a settings file cannot name another one")
            self.put(values, key.replace("-", "_"), value, f"{key} in {path}", str)
        sections = values.get("plugins")
        if isinstance(sections, dict):
            values["plugins"] = {section_name(name): section for name, section in sections.items()}
        return values


def _from_kubernetes(key: str, text: str) -> bool:
    return bool(KUBERNETES.fullmatch(key)) or (key == "PORT" and "://" in text)


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SettingsError(f"settings file {path} cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"settings file {path} is not valid TOML: {error}") from None
