"""GemLite's operators on a GPU: what of them can be seen without one, and GemLite's own code in an interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantised_engines import HALF, decode_by_replays

from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.interfaces import Linear, LoadOptions
from rwkv_lightning.kernels.linear import ReferenceLinear
from rwkv_lightning.kernels.quantisation import QuantisedWeight
from rwkv_lightning.plugins.backends import gemlite, gemlite_gpu
from rwkv_lightning.plugins.backends.precision import Precision
from rwkv_lightning.plugins.backends.quantised_backend import Operators

FLOAT32 = LoadOptions(dtype="float32")


@pytest.mark.parametrize(
    ("options", "precision", "scheme", "activations", "expected"),
    [
        (LoadOptions(device="cuda", deterministic=True), HALF, "int8", "auto", "add up in no fixed order"),
        (FLOAT32, Precision(torch.float32, torch.float32, ""), "int8", "auto", "choose --dtype float16"),
        (LoadOptions(device="cuda"), HALF, "int4", "8", "int4 weights take 16-bit activations on a GPU"),
    ],
)
def test_choices_that_cannot_serve(
    options: LoadOptions, precision: Precision, scheme: str, activations: str, expected: str
) -> None:
    with pytest.raises(StartError, match=expected):
        gemlite_gpu.gpu_operators(options, precision, scheme, activations)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operator_activates_and_writes_where_it_is_told(dtype: torch.dtype) -> None:
    layer = ReferenceLinear(torch.randn(6, 32), dtype)
    linear = gemlite_gpu.GemliteLinear(layer, (6, 32), dtype)
    x = torch.randn(3, 32).to(dtype)
    assert (linear.in_features, linear.out_features) == (32, 6)
    for activation in ("none", "relu2", "tanh", "sigmoid"):
        for result in (dtype, torch.float32):
            out = torch.full((3, 6), torch.nan, dtype=result)
            assert linear(x, activation, out=out) is out
            assert torch.equal(out, layer(x, activation, result))
            assert torch.equal(linear(x, activation, result), out)
    assert linear(x[:0]).shape == (0, 6)
    with pytest.raises(ValueError, match=r"needed is \[3, 6\]"):
        linear(x, out=torch.empty(1, 6, dtype=dtype))


@pytest.mark.parametrize("target", ["gemlite-int8", "gemlite-int4"])
def test_steps_of_decoding_are_captured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    def make(weight: QuantisedWeight) -> Linear:
        layer = ReferenceLinear(weight.dequantise(), torch.float16)
        return gemlite_gpu.GemliteLinear(layer, weight.shape, torch.float16)

    recorder = decode_by_replays(target, tmp_path, Operators(make, "GemLite"), monkeypatch)
    assert recorder.captured == [6, 3]


def test_what_gemlite_reads_beyond_its_scales_is_zero() -> None:
    for groups in (1, 3, 12, 40, 64):
        rows = torch.ones(groups, 5)
        found = gemlite_gpu.with_zeros_behind(rows)
        assert torch.equal(found, rows)
        memory = torch.tensor(found.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(-1, 5)
        for parts in (1, 2, 4, 8, 16):
            needed = (groups + parts - 1) // parts * parts + 1
            assert not memory[groups:needed].any()
            assert len(memory) >= needed


def test_what_the_autotuner_found_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []

    def cache_config(path: str) -> None:
        Path(path).write_text('{"GEMM": 1}')

    fake = types.SimpleNamespace(load_config=lambda path, print_error: loaded.append(path), cache_config=cache_config)
    monkeypatch.setitem(sys.modules, "gemlite", fake)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A/B 100")
    monkeypatch.setattr(gemlite_gpu, "_tuned", [])
    monkeypatch.setenv("RWKV_LIGHTNING_CACHE_DIR", str(tmp_path))
    gemlite_gpu.load_tuning("cuda")
    assert loaded == []
    gemlite.shutdown()
    kept = tmp_path / "gemlite" / "NVIDIA-A-B-100.json"
    assert json.loads(kept.read_text()) == {"GEMM": 1}
    assert [path.name for path in kept.parent.iterdir()] == [kept.name]
    gemlite_gpu.load_tuning("cuda")
    assert loaded == [str(kept)]


def test_a_cache_that_cannot_be_written_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setitem(sys.modules, "gemlite", types.SimpleNamespace())
    monkeypatch.setattr(gemlite_gpu, "_tuned", [tmp_path / "file" / "x.json"])
    gemlite_gpu.save_tuning()
    assert "tuning was not kept" in caplog.text


@pytest.mark.skipif(find_spec("gemlite") is None, reason=f"GemLite is not installed: {gemlite.EXTRA}")
def test_gemlite_packs_and_multiplies_what_the_file_holds() -> None:
    """GemLite's own code in Triton's interpreter, under a pretended device."""
    script = Path(__file__).with_name("gemlite_without_gpu.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr[-3000:]
    assert [line.split(",")[0] for line in done.stdout.splitlines()] == ["A16W8", "A16W4", "A8W8", "A8W8"] * 2
