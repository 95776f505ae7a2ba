"""What `rwkv-lightning inspect` says of a model file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from rwkv_lightning.core.byte_bar import byte_bar
from rwkv_lightning.core.checkpoint import Checkpoint
from rwkv_lightning.core.layout import MANIFEST
from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
from rwkv_lightning.core.tensor_file import open_tensors


def open_checkpoint(path: Path) -> Checkpoint:
    """A model file, converted or not, checked. Raises CheckpointError saying what is wrong with it."""
    is_converted = MANIFEST in open_tensors(path).metadata
    return QuantisedCheckpoint.open(path) if is_converted else Checkpoint.open(path)


def facts(path: Path) -> dict[str, Any]:
    """Name -> value, in the order to show. Raises CheckpointError saying what is wrong with the file."""
    checkpoint = open_checkpoint(path)
    check_content(checkpoint)
    return {
        "file": str(checkpoint.path),
        "size": checkpoint.path.stat().st_size,
        "architecture": "RWKV-7",
        **_engine(checkpoint),
        **dataclasses.asdict(checkpoint.config),
        "parameters": checkpoint.parameters,
        **_origin(checkpoint),
        "fingerprint": checkpoint.fingerprint,
        "checksums": _checksums(checkpoint),
    }


def _checksums(checkpoint: Checkpoint) -> str:
    """What was compared; what differed has raised. Of a converted file the fingerprint in its manifest was."""
    if isinstance(checkpoint, QuantisedCheckpoint):
        return "right, of samples of each tensor"
    return f"right, of {len(checkpoint.checksums)} tensors" if checkpoint.checksums else "none in the file"


def check_content(checkpoint: Checkpoint) -> None:
    """Compare every tensor with the file's own checksum. Raises CheckpointError naming the first that differs."""
    with byte_bar(f"checking {checkpoint.path.name}", checkpoint.nbytes) as on_checked:
        for name in checkpoint.names if checkpoint.checksums else ():
            tensor = checkpoint.tensor(name)
            checkpoint.verify(name)
            checkpoint.release(tensor)
            on_checked(tensor.nbytes)


def _engine(checkpoint: Checkpoint) -> dict[str, Any]:
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return {"engine": "fp16"}
    manifest = checkpoint.manifest
    group = {"group_size": manifest.group_size} if manifest.group_size else {}
    return {"engine": manifest.engine, "scheme": manifest.scheme, **group}


def _origin(checkpoint: Checkpoint) -> dict[str, Any]:
    """The stored type; of a converted file the source and what converted it."""
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return {"dtype": str(checkpoint.dtype).removeprefix("torch.")}
    manifest = checkpoint.manifest
    source = {f"source_{name}": value for name, value in dataclasses.asdict(manifest.source).items()}
    return {**source, "converted_by": manifest.tool}
