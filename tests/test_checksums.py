"""A model file whose content was damaged is found out by the checksums that it holds: inspected, loaded, converted."""

from __future__ import annotations

import json
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints import random_weights, save
from rwkv_lightning.core import byte_bar, cli, inspection
from rwkv_lightning.core.checkpoint import Checkpoint
from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.interfaces import LoadOptions
from rwkv_lightning.core.zip_checksums import Checksum, checksums
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend


@pytest.fixture
def path(tmp_path: Path) -> Path:
    save(random_weights("tiny", seed=4), tmp_path / "model.pth")
    return tmp_path / "model.pth"


def flip(path: Path, place: int, bit: int = 0) -> Path:
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return path


def place_of(path: Path, name: str) -> int:
    """Where in the file the middle of a tensor lies."""
    content, tensor = path.read_bytes(), Checkpoint.open(path).tensor(name)
    return content.index(tensor.contiguous().view(torch.uint8).numpy().tobytes()) + tensor.nbytes // 2


def convert_it(path: Path) -> None:
    convert(path, "gemlite-int8", path.with_name("q.safetensors"))


def load_it(path: Path) -> None:
    Fp16Backend().load(path, LoadOptions(dtype="float32"))


@pytest.mark.parametrize("name", ["emb.weight", "blocks.1.ffn.key.weight", "blocks.0.att.w1", "ln_out.bias"])
@pytest.mark.parametrize("use", [inspection.facts, load_it, convert_it])
def test_a_flipped_bit_is_found_and_its_tensor_named(path: Path, name: str, use: Callable[[Path], object]) -> None:
    use(path)
    path.with_name("q.safetensors").unlink(missing_ok=True)
    flip(path, place_of(path, name))
    with pytest.raises(CheckpointError, match=rf"model\.pth' is damaged: {name} differs from its checksum: copy"):
        use(path)


def test_a_flipped_bit_in_the_middle_of_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.pth"
    copy.write_bytes(demo_model_path().read_bytes())
    flip(copy, copy.stat().st_size // 2)
    with zipfile.ZipFile(copy) as archive:
        assert archive.testzip() is not None
    assert cli.main(["inspect", str(copy)]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "copy.pth' is damaged: " in shown.err
    assert shown.err.count("\n") == 1


def test_the_list_of_tensors_is_checked_too(path: Path) -> None:
    """Two tensors of one shape that change places leave a file that opens."""
    content = path.read_bytes()
    first, second = b"blocks.0.att.x_r", b"blocks.0.att.x_w"
    swapped = content.replace(first, b"?" * len(first), 1).replace(second, first, 1).replace(b"?" * len(first), second)
    path.write_bytes(swapped)
    assert Checkpoint.open(path).config.n_layer == 2
    with pytest.raises(CheckpointError, match="its list of tensors differs from its checksum"):
        inspection.facts(path)


def test_every_tensor_of_the_demo_model_has_a_checksum() -> None:
    checkpoint = Checkpoint.open(demo_model_path())
    assert set(checkpoint.checksums) == set(checkpoint.names)
    assert inspection.facts(demo_model_path())["checksums"] == f"right, of {len(checkpoint.names)} tensors"


def test_tensors_of_one_storage_and_parameters_are_known(tmp_path: Path) -> None:
    whole = torch.randn(8, 4)
    tensors = OrderedDict(a=whole[2:4], b=whole.t(), c=torch.nn.Parameter(torch.ones(3)), d=torch.zeros(0))
    torch.save(tensors, tmp_path / "x.pth")
    found = checksums(tmp_path / "x.pth")
    assert found.keys() == tensors.keys()
    assert found["a"] == found["b"] != found["c"]
    assert all(found[name].fits(tensor.detach()) for name, tensor in tensors.items())
    assert not found["a"].fits(whole + 1)


def test_files_without_checksums_are_taken_as_they_are(path: Path, tmp_path: Path) -> None:
    weights = random_weights("tiny", seed=4)
    save(weights, tmp_path / "model.safetensors")
    torch.save(weights, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(weights, tmp_path / "bare.pth")
    finally:
        torch.serialization.set_crc32_options(True)
    for name in ("model.safetensors", "old.pth", "bare.pth"):
        assert checksums(tmp_path / name) == {}
        assert inspection.facts(tmp_path / name)["checksums"] == "none in the file"
    assert checksums(path) != {}


def test_bytes_of_another_order_are_not_compared(path: Path) -> None:
    """Reading turns them around, so that they are no longer those that were stored."""
    other = path.with_name("other.pth")
    with zipfile.ZipFile(path) as archive, zipfile.ZipFile(other, "w") as copy:
        for entry in archive.infolist():
            content = archive.read(entry)
            order = {"little": b"big", "big": b"little"}[sys.byteorder]
            copy.writestr(entry.filename, order if entry.filename.endswith("/byteorder") else content)
    assert checksums(other) == {}


class Explosive:
    """Unpickling one of these would call what it names."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return exec, ("raise SystemExit('it ran')",)


def test_what_a_file_names_is_never_called(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(2), "bomb": Explosive()}, tmp_path / "bomb.pth")
    assert "a" in checksums(tmp_path / "bomb.pth")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pth")
    assert checksums(tmp_path / "module.pth") == {}


def test_the_bar_goes_to_a_terminals_stderr_only(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(byte_bar, "BAR_FROM", 1)
    assert cli.main(["inspect", str(path), "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["file"] == str(path)
    assert shown.err == ""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    checkpoint = Checkpoint.open(path)
    inspection.check_content(checkpoint)
    assert "checking model.pth" in capsys.readouterr().err


def test_a_storage_that_tensors_share_is_compared_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, compared = torch.cat([each.flatten() for each in random_weights("tiny").values()]), []
    views, begun = {}, 0
    for name, weight in random_weights("tiny").items():
        views[name] = whole[begun : begun + weight.numel()].view(weight.shape)
        begun += weight.numel()
    torch.save(views, tmp_path / "views.pth")
    fits = Checksum.fits
    monkeypatch.setattr(Checksum, "fits", lambda known, tensor: compared.append(tensor) or fits(known, tensor))
    checkpoint = Checkpoint.open(tmp_path / "views.pth")
    inspection.check_content(checkpoint)
    assert len(checkpoint.checksums) == len(views)
    assert len(compared) == 1
