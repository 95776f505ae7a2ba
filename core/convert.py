"""`rwkv-lightning convert`: quantise a model file for an engine, layer by layer.

Memory: the source is mapped, and a matrix is worked on in slices of rows, so that besides the mapping only some tens
of megabytes are taken.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_lightning.core.byte_bar import byte_bar
from rwkv_lightning.core.checkpoint import Checkpoint, fingerprint
from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.layout import official_names
from rwkv_lightning.core.manifest import TARGETS, Manifest, Source
from rwkv_lightning.core.quantised_checkpoint import misfit, scale_name, scheme_of, value_name
from rwkv_lightning.core.tensor_file import open_tensors
from rwkv_lightning.core.tensor_writer import Entry, TensorWriter

if TYPE_CHECKING:
    import torch

    from rwkv_lightning.kernels.quantisation import QuantisedWeight

SLICE = 1 << 20  # numbers of a matrix that are worked on at a time
SUFFIX = ".safetensors"


def convert(
    source: Path,
    target: str,
    out: Path,
    *,
    group_size: int = 64,
    overwrite: bool = False,
    on_progress: Callable[[int], None] = lambda nbytes: None,
) -> Manifest:
    """Write `source` for a target of `manifest.TARGETS` to `out`, whole or not at all.

    Args:
        group_size: neighbours of a row that share a scale; for int4 only.
        overwrite: replace a file that is there already.
        on_progress: told the bytes of the source that were dealt with since the last call.

    Raises:
        CheckpointError: the source cannot be converted so, or `out` cannot be written; says the way out.
    """
    _check_out(source, out, overwrite)
    checkpoint = Checkpoint.open(source)
    manifest = _plan(checkpoint, target, group_size if TARGETS[target].bits == 4 else 0)
    with TensorWriter(out, _entries(checkpoint, manifest), manifest.metadata()) as writer:
        for name in _wanted(checkpoint):
            checkpoint.verify(name)
            tensor = checkpoint.tensor(name)
            if name in manifest.layers:
                _write_matrix(writer, name, tensor, manifest, checkpoint.path, on_progress)
            else:
                writer.write(name, tensor)
                on_progress(tensor.nbytes)
        manifest = dataclasses.replace(manifest, content=fingerprint(open_tensors(writer.flush()).tensors))
        writer.set_metadata(manifest.metadata())
    _copy_vocabulary(source, out)
    return manifest


def _check_out(source: Path, out: Path, overwrite: bool) -> None:
    if out.suffix != SUFFIX:
        raise CheckpointError(f"'{out}' must end in {SUFFIX}: that is the format of converted files")
    if out.exists() and out.samefile(source):
        raise CheckpointError(f"'{out}' is the model itself: name another file")
    if out.exists() and not overwrite:
        raise CheckpointError(f"there is a file at '{out}' already: name another one, or give --overwrite")


def _plan(checkpoint: Checkpoint, target: str, group_size: int) -> Manifest:
    """The manifest, its content still to come. Raises CheckpointError for a model that does not fit the target."""
    shapes = {name: checkpoint.tensor(name).shape for name in _wanted(checkpoint)}
    matrices = [name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(".weight")]
    for name in matrices:
        problem = misfit(name, shapes[name][1], target, group_size)
        if problem:
            raise CheckpointError(f"'{checkpoint.path}' {problem}")
    kind = TARGETS[target]
    return Manifest(
        engine=kind.engine,
        scheme=kind.scheme,
        group_size=group_size,
        config=checkpoint.config,
        layers={name: scheme_of(name, kind, group_size) for name in matrices},
        source=Source(
            checkpoint.path.name,
            checkpoint.fingerprint,
            checkpoint.nbytes,
            str(checkpoint.dtype).removeprefix("torch."),
        ),
        tool=f"rwkv-lightning {version('rwkv-lightning')}",
    )


def _wanted(checkpoint: Checkpoint) -> list[str]:
    """The tensors that the model uses, layer by layer."""
    return [name for name, _ in official_names(checkpoint.config.n_layer)]


def _entries(checkpoint: Checkpoint, manifest: Manifest) -> dict[str, Entry]:
    import torch

    entries = {}
    for name in _wanted(checkpoint):
        tensor = checkpoint.tensor(name)
        if name not in manifest.layers:
            entries[name] = Entry(tensor.dtype, tuple(tensor.shape))
            continue
        n, k = tensor.shape
        int4 = manifest.layers[name].startswith("int4")
        groups = k // manifest.group_size if int4 else 1
        entries[value_name(name)] = Entry(torch.uint8, (n, k // 2)) if int4 else Entry(torch.int8, (n, k))
        entries[scale_name(name)] = Entry(torch.float16 if int4 else torch.float32, (n, groups))
    return entries


def _write_matrix(
    writer: TensorWriter,
    name: str,
    tensor: torch.Tensor,
    manifest: Manifest,
    path: Path,
    on_progress: Callable[[int], None],
) -> None:
    for row, rows in _slices(tensor):
        if not bool(rows.float().sum().isfinite()) and not bool(rows.isfinite().all()):  # the sum is the faster test
            raise CheckpointError(f"'{path}' holds NaN or infinity in {name}: it is damaged, get a sound copy")
        try:
            quantised = _quantise(rows, manifest.layers[name], manifest.group_size)
        except ValueError as error:
            raise CheckpointError(f"'{path}' cannot be kept in int4 ({name}: {error}): choose gemlite-int8") from None
        writer.write(value_name(name), quantised.values, row)
        writer.write(scale_name(name), quantised.scales, row)
        on_progress(rows.nbytes)


def _slices(tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    step = max(1, SLICE // tensor.shape[1])
    for row in range(0, tensor.shape[0], step):
        yield row, tensor[row : row + step]


def _quantise(rows: torch.Tensor, scheme: str, group_size: int) -> QuantisedWeight:
    from rwkv_lightning.kernels.quantisation import quantise_int4, quantise_int8

    return quantise_int4(rows, group_size) if scheme.startswith("int4") else quantise_int8(rows)


def _copy_vocabulary(source: Path, out: Path) -> None:
    """A model with a vocabulary of its own beside it keeps it."""
    own, copy = (path.with_name(f"{path.stem}.vocab.txt") for path in (source, out))
    if own.is_file() and not copy.exists():
        shutil.copyfile(own, copy)


def conversion_bar(source: Path) -> AbstractContextManager[Callable[[int], None]]:
    """A progress bar, whatever the size; the function that it gives takes the bytes that were dealt with."""
    return byte_bar(f"converting {source.name}", source.stat().st_size, least=0)
