"""The manifest of a converted model file: what it is, for which engine, made from what.

It is JSON in the `.safetensors` header's entry `rwkv_lightning`, and carries its own checksum.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rwkv_lightning.core.interfaces import ModelConfig
from rwkv_lightning.core.layout import MANIFEST

FORMAT = "rwkv-lightning quantised"
VERSION = 1
UNSEALED = "0" * 32


@dataclass(frozen=True, slots=True)
class Target:
    """What a model can be converted to: the engine that reads it, and how its matrices are kept."""

    engine: str
    scheme: str
    bits: int
    depth_unit: int  # what the engine's kernels on a GPU want a matrix's input width to be a multiple of


TARGETS = {
    "gemlite-int8": Target("gemlite", "int8", 8, 32),
    "gemlite-int4": Target("gemlite", "int4", 4, 32),
    "cutlass-w8a16": Target("cutlass", "w8a16", 8, 16),
}
GROUP_SIZES = (64, 128)


class ManifestError(ValueError):
    """The manifest cannot be used; the message is a clause that follows the file's name."""


@dataclass(frozen=True, slots=True)
class Source:
    """The model file that was converted."""

    name: str
    fingerprint: str
    nbytes: int
    dtype: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known of a converted file.

    Args:
        engine: which engine reads it.
        scheme: 'int8', 'int4' or 'w8a16'.
        group_size: neighbours of a row that share a scale in int4; 0 for whole rows.
        config: the model's shape.
        layers: the official name of every quantised matrix -> e.g. 'int8-row' or 'int4-group64'.
        source: what it was made from.
        tool: name and version of what made it.
        content: fingerprint of the file's tensors.
    """

    engine: str
    scheme: str
    group_size: int
    config: ModelConfig
    layers: Mapping[str, str]
    source: Source
    tool: str
    content: str = UNSEALED

    @property
    def target(self) -> str:
        """What `convert --to` calls it."""
        return f"{self.engine}-{self.scheme}"

    def metadata(self) -> dict[str, str]:
        """The header's text entries."""
        fields = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}
        return {MANIFEST: json.dumps({**fields, "seal": _seal(fields)}, sort_keys=True)}


def _seal(fields: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=16).hexdigest()


def parse_manifest(text: str) -> Manifest:
    """Read a manifest. Raises ManifestError saying what is wrong and the way out."""
    fields = _fields(text)
    if fields.get("version") != VERSION:
        raise ManifestError(
            f"has version {fields.get('version')!r} of the converted format, but this server reads version {VERSION}: "
            "convert the original again with this version"
        )
    seal = fields.pop("seal", None)
    if seal != _seal(fields):
        raise ManifestError("has a manifest that was changed after the conversion: convert the original again")
    del fields["format"], fields["version"]
    config, source = ModelConfig(**fields.pop("config")), Source(**fields.pop("source"))
    return Manifest(config=config, source=source, **fields)


def _fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ManifestError("has a damaged manifest: convert the original again")
    return fields
