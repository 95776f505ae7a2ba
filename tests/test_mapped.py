"""Pages of a mapped model file go back to the system, and nothing else does."""

from __future__ import annotations

import mmap
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rwkv_lightning.core.checkpoint import Checkpoint
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.mapped import MappedFile
from rwkv_lightning.core.tensor_file import open_tensors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists a process's mappings")


def resident(path: Path) -> int:
    """Bytes of a file's mappings that are in memory now."""
    text = Path("/proc/self/smaps").read_text(errors="replace")
    entries = re.findall(
        rf"^\S+-\S+ \S+ \S+ \S+ \d+ +{re.escape(str(path))}\n.*\nKernel.*\nMMU.*\nRss: +(\d+)", text, re.M
    )
    return 1024 * sum(map(int, entries))


def save_pth(tensors: dict[str, torch.Tensor], path: Path) -> None:
    torch.save(tensors, path)


@pytest.mark.parametrize("save", [save_pth, save_file])
def test_a_released_tensor_leaves_memory_and_comes_back_when_read(
    save: Callable[[dict[str, torch.Tensor], Path], None], tmp_path: Path
) -> None:
    weights = {name: torch.randn(1024, 1024) for name in "ab"}
    save(weights, path := tmp_path / "model")
    tensors = open_tensors(path).tensors
    for tensor in tensors.values():
        tensor.sum()
    assert resident(path) >= 8 << 20
    MappedFile(path).release(tensors["a"])
    assert resident(path) <= 4.1 * (1 << 20)
    assert all(torch.equal(tensors[name], weights[name]) for name in "ab")


def test_memory_that_is_not_the_files_is_left_alone(tmp_path: Path) -> None:
    save_file({"a": torch.randn(1024, 1024)}, path := tmp_path / "model.safetensors")
    kept = open_tensors(path)
    elsewhere = torch.ones(1024, 1024)
    MappedFile(path).release(elsewhere)
    assert bool((elsewhere == 1).all())
    assert kept.tensors["a"].shape == (1024, 1024)


def test_names_of_other_mappings_may_be_any_bytes(tmp_path: Path) -> None:
    other = os.path.join(os.fsencode(tmp_path), b"caf\xe9 (deleted)")
    with open(other, "w+b") as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE):
            save_file({"a": torch.randn(1024, 1024)}, path := tmp_path / "model.safetensors")
            tensor = open_tensors(path).tensors["a"]
            tensor.sum()
            MappedFile(path).release(tensor)
            assert resident(path) <= 0.1 * (1 << 20)


def test_a_tensor_read_into_memory_keeps_its_numbers(tmp_path: Path) -> None:
    """Files of PyTorch before 1.6 cannot be mapped."""
    weights = torch.load(demo_model_path(), weights_only=True)
    torch.save(weights, path := tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    checkpoint = Checkpoint.open(path)
    for name in checkpoint.names:
        checkpoint.release(checkpoint.tensor(name))
        assert torch.equal(checkpoint.tensor(name), weights[name])
