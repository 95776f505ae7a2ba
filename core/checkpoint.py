"""Model files: find one by name, read its shape, fingerprint it, and name what is wrong with it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.interfaces import ModelConfig
from rwkv_lightning.core.layout import UNUSED, LayoutError, find_config, foreign
from rwkv_lightning.core.mapped import MappedFile
from rwkv_lightning.core.tensor_file import AGAIN, TensorFile, open_tensors
from rwkv_lightning.core.zip_checksums import Checksum, DamagedStructure, checksums

if TYPE_CHECKING:
    import torch

SUFFIXES = (".pth", ".safetensors")
WHOLE = 65536  # bytes up to which a tensor is fingerprinted whole
SAMPLES = 16  # evenly spaced samples of a larger one, the first and the last bytes among them
SAMPLE = 4096  # bytes per sample


def resolve_model_path(text: str, option: str = "--model-path") -> Path:
    """The model file that `text` names: the path itself, or with .pth or .safetensors appended.

    Args:
        option: what the user gave it as.

    Raises CheckpointError listing what was tried.
    """
    if not text.strip():
        raise CheckpointError(f"the model path is empty: give {option} a .pth or .safetensors file")
    path = Path(text).expanduser()
    tried = [path, *(path.with_name(path.name + suffix) for suffix in SUFFIXES if path.name)]
    for candidate in tried:
        if candidate.is_file():
            return candidate
    if path.is_dir():
        raise CheckpointError(f"'{path}' is a directory: name the model file in it{_files_in(path)}")
    raise CheckpointError(f"there is no model file at '{path}' (tried {_quoted(tried)}): check {option}")


def _files_in(folder: Path) -> str:
    models = sorted(file for file in folder.iterdir() if file.suffix in SUFFIXES and file.is_file())[:3]
    return f", e.g. {_quoted(models)}" if models else " (it holds no .pth or .safetensors file)"


def _quoted(paths: Iterable[Path]) -> str:
    return ", ".join(f"'{path}'" for path in paths)


class Checkpoint:
    """An RWKV-7 model file in the official layout; its tensors are mapped from the file, not read into memory."""

    def __init__(self, file: TensorFile, config: ModelConfig) -> None:
        self.path = file.path
        self.config = config
        self.metadata: Mapping[str, str] = file.metadata
        self._tensors = file.tensors
        self._mapped = MappedFile(file.path)
        self._verified: set[int] = set()

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open and check a file. Raises CheckpointError naming what is wrong with it and what to do."""
        file = open_tensors(path)
        problem = foreign(file.tensors, file.metadata)
        if problem:
            raise CheckpointError(f"'{path}' {problem}")
        try:
            return cls(file, find_config(file.tensors))
        except LayoutError as error:
            raise CheckpointError(f"'{path}' {error}") from None

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' official names, in the file's order."""
        return tuple(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor as stored, on the CPU: its stored shape and type; not to be written to."""
        return self._tensors[name]

    def verify(self, name: str) -> None:
        """Compare a tensor's content with the checksum that the file holds for it, if it holds one.

        Raises CheckpointError naming the tensor.
        """
        known, tensor = self.checksums.get(name), self._tensors[name]
        storage = tensor.untyped_storage().data_ptr()  # many tensors may be views of one, which is compared whole
        if known is None or storage in self._verified:
            return
        if not known.fits(tensor):
            raise self._damaged(name)
        self._verified.add(storage)

    @cached_property
    def checksums(self) -> Mapping[str, Checksum]:
        """What the file itself says of its tensors' content; empty where its format has no checksums."""
        try:
            return checksums(self.path)
        except DamagedStructure:
            raise self._damaged("its list of tensors") from None

    def _damaged(self, what: str) -> CheckpointError:
        return CheckpointError(f"'{self.path}' is damaged: {what} differs from its checksum: {AGAIN}")

    def release(self, tensor: torch.Tensor) -> None:
        """A tensor of this file has been laid out elsewhere: its pages need not stay in memory."""
        self._mapped.release(tensor)

    @property
    def dtype(self) -> torch.dtype:
        """The type most of the weights are stored in."""
        sizes: dict[torch.dtype, int] = {}
        for tensor in self._tensors.values():
            sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel()
        return max(sizes, key=lambda dtype: sizes[dtype])

    @property
    def parameters(self) -> int:
        """How many numbers the model has; what a file carries besides, unused, is not among them."""
        return sum(tensor.numel() for name, tensor in self._tensors.items() if name not in UNUSED)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors.values())

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits that stand for this model: see `fingerprint`."""
        return fingerprint(self._tensors)


def fingerprint(tensors: Mapping[str, torch.Tensor]) -> str:
    """Hash of names, types, shapes and content; the file's format and order do not matter.

    Tensors up to 64 KiB count whole; of a larger one, 16 evenly spaced samples of 4 KiB, so that a model of many
    gigabytes takes well under a second. Fine-tuned weights differ nearly everywhere and so are told apart.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        tensor = tensors[name]
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        for sample in _samples(tensor):
            digest.update(sample)
    return digest.hexdigest()


def _samples(tensor: torch.Tensor) -> Iterable[memoryview]:
    import torch

    content = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
    if len(content) <= WHOLE:
        return [content]
    stride = (len(content) - SAMPLE) / (SAMPLES - 1)
    return [content[int(i * stride) : int(i * stride) + SAMPLE] for i in range(SAMPLES)]


def check_vocabulary(config: ModelConfig, size: int) -> None:
    """Raise CheckpointError when a vocabulary has ids that the model has no rows for.

    The other way round is fine: models pad their rows (65536) beyond the vocabulary's ids (65530).
    """
    if size > config.vocab_size:
        raise CheckpointError(
            f"the vocabulary has {size} ids but the model only {config.vocab_size} rows: "
            "give the vocabulary the model was trained with (--vocab, or <model>.vocab.txt beside the model)"
        )
