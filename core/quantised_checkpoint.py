"""Converted model files: open one for its engine, and name what is wrong with it.

A quantised matrix 'X.weight' [N, K] is kept as 'X.W_q', int8 [N, K] or two int4 a byte [N, K / 2], and 'X.scales'
[N, groups]; everything else is kept as the source stored it. How the numbers are packed: kernels/quantisation.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_lightning.core.checkpoint import Checkpoint, fingerprint
from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.layout import MANIFEST, LayoutError, engine_of, find_config, foreign
from rwkv_lightning.core.manifest import TARGETS, Manifest, ManifestError, Target, parse_manifest
from rwkv_lightning.core.tensor_file import TensorFile, open_tensors

if TYPE_CHECKING:
    import torch

    from rwkv_lightning.kernels.quantisation import QuantisedWeight


def value_name(matrix: str) -> str:
    """'blocks.0.att.key.weight' -> 'blocks.0.att.key.W_q'."""
    return f"{matrix.removesuffix('.weight')}.W_q"


def scale_name(matrix: str) -> str:
    """'blocks.0.att.key.weight' -> 'blocks.0.att.key.scales'."""
    return f"{matrix.removesuffix('.weight')}.scales"


def scheme_of(matrix: str, target: Target, group_size: int) -> str:
    """How a matrix is kept: embedding rows and matrices with a scale per row in int8, groups in int4."""
    if matrix == "emb.weight":
        return "int8-row"
    return "int8-channel" if target.bits == 8 else f"int4-group{group_size}"


def misfit(matrix: str, depth: int, target: str, group_size: int) -> str | None:
    """Why a matrix with `depth` inputs cannot be kept so: a clause with the way out, else None."""
    unit = TARGETS[target].depth_unit if group_size == 0 else group_size
    if matrix == "emb.weight" or depth % unit == 0:
        return None
    others = "--to gemlite-int8 or keep it for --inference-engine fp16" if group_size else "--inference-engine fp16"
    return f"has {depth} inputs in {matrix}, which {target} cannot divide into {unit}s: choose {others}"


class QuantisedCheckpoint(Checkpoint):
    """A converted file whose manifest, shapes and contents were checked; its tensors are mapped from the file."""

    def __init__(self, file: TensorFile, manifest: Manifest) -> None:
        super().__init__(file, manifest.config)
        self.manifest = manifest

    @classmethod
    def open(cls, path: Path, engine: str | None = None) -> QuantisedCheckpoint:
        """Open and check a file, and that it is for `engine`. Raises CheckpointError with the way out."""
        file = open_tensors(path)
        try:
            manifest = _manifest(file, engine)
            _check_tensors(file.tensors, manifest)
        except (ManifestError, LayoutError) as error:
            raise CheckpointError(f"'{path}' {error}") from None
        return cls(file, manifest)

    @property
    def parameters(self) -> int:
        """How many numbers the model holds, scales not among them."""
        return sum(math.prod(tensor.shape) for tensor in _as_official(self._tensors, self.manifest).values())

    def quantised(self, matrix: str) -> QuantisedWeight:
        """A quantised matrix by its official name, as stored."""
        from rwkv_lightning.kernels.quantisation import QuantisedWeight

        values, scales = self.tensor(value_name(matrix)), self.tensor(scale_name(matrix))
        return QuantisedWeight(values, scales, _bits(self.manifest.layers[matrix]))


def _bits(scheme: str) -> int:
    return 4 if scheme.startswith("int4") else 8


def _manifest(file: TensorFile, engine: str | None) -> Manifest:
    if MANIFEST not in file.metadata:
        raise ManifestError(_unconverted(file, engine or "gemlite"))
    found = engine_of(file.metadata)
    if engine is not None and found is not None and found != engine:
        raise ManifestError(
            f"was converted for the {found} engine: choose --inference-engine {found}, "
            f"or convert the original with --to {_choices(engine)}"
        )
    manifest = parse_manifest(file.metadata[MANIFEST])
    if manifest.target not in TARGETS:
        raise ManifestError(
            f"holds {manifest.scheme} weights, which the {manifest.engine} engine does not read: "
            f"convert the original with --to {_choices(manifest.engine)}"
        )
    return manifest


def _choices(engine: str) -> str:
    return " or ".join(name for name, target in TARGETS.items() if target.engine == engine) or " or ".join(TARGETS)


def _unconverted(file: TensorFile, engine: str) -> str:
    problem = foreign(file.tensors, file.metadata)
    if problem is None:
        target = next(name for name, target in TARGETS.items() if target.engine == engine)
        command = f"rwkv-lightning convert '{file.path}' --to {target} OUT.safetensors"
        return f"is not converted for the {engine} engine: run {command}, or choose --inference-engine fp16"
    return "is quantised by something else: convert the original model" if "quantised" in problem else problem


def _check_tensors(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> None:
    """Raises LayoutError or ManifestError when the file does not hold what the manifest says."""
    for matrix in manifest.layers:
        missing = [name for name in (value_name(matrix), scale_name(matrix)) if name not in tensors]
        if missing:
            raise LayoutError(f"lacks {missing[0]}: it is incomplete, convert the original again")
    if find_config(_as_official(tensors, manifest)) != manifest.config:
        raise LayoutError("has tensors of another shape than its manifest says: convert the original again")
    for matrix, scheme in manifest.layers.items():
        _check_matrix(matrix, tensors[value_name(matrix)], tensors[scale_name(matrix)], scheme, manifest)
    if fingerprint(tensors) != manifest.content:
        raise LayoutError("holds other weights than its manifest says: it is damaged, convert the original again")


def _as_official(tensors: Mapping[str, torch.Tensor], manifest: Manifest) -> dict[str, torch.Tensor]:
    """The tensors as the official layout has them; in place of a quantised matrix one without content."""
    import torch

    official = dict(tensors)
    for matrix, scheme in manifest.layers.items():
        values = official.pop(value_name(matrix))
        del official[scale_name(matrix)]
        shape = (*values.shape[:-1], values.shape[-1] * 8 // _bits(scheme))
        official[matrix] = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return official


def _check_matrix(matrix: str, values: torch.Tensor, scales: torch.Tensor, scheme: str, manifest: Manifest) -> None:
    import torch

    target, int4 = TARGETS[manifest.target], _bits(scheme) == 4
    group = manifest.group_size if int4 else 0
    depth = values.shape[1] * 8 // _bits(scheme)
    types = (torch.uint8, torch.float16) if int4 else (torch.int8, torch.float32)
    problem = misfit(matrix, depth, manifest.target, group)
    if problem:
        raise LayoutError(problem)
    expected = [values.shape[0], depth // (group or depth)]
    if (
        scheme != scheme_of(matrix, target, manifest.group_size)
        or (values.dtype, scales.dtype) != types
        or list(scales.shape) != expected
    ):
        raise LayoutError(f"does not hold {matrix} as {scheme}: convert the original again")
