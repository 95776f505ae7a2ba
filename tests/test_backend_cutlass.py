"""The cutlass backend: conformance, quality, errors; the way into the CUDA kernel; and its build where nvcc is."""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_engines import (
    DAMAGES,
    HALF,
    converted_demo,
    damaged,
    decode_by_replays,
    golden_rate,
    run_without_compiler,
    serve_refuses,
)

from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import StartError
from rwkv_lightning.core.interfaces import Backend, LoadOptions
from rwkv_lightning.core.testing.backends import BackendSuite
from rwkv_lightning.kernels.cuda import build, mixed
from rwkv_lightning.kernels.quantisation import QuantisedWeight, quantise_int4, quantise_int8
from rwkv_lightning.plugins.backends.cutlass import CutlassBackend, gpu_operators
from rwkv_lightning.plugins.backends.precision import Precision
from rwkv_lightning.plugins.backends.quantised_backend import Operators


@pytest.fixture(scope="module")
def w8a16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted_demo(tmp_path_factory.mktemp("models"), "cutlass-w8a16")


class TestConformance(BackendSuite):
    """The package's own suite, without `--deterministic`: on a CPU the engine holds it all the same."""

    options = LoadOptions(dtype="bfloat16", state_dtype="float32")

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _convert(cls, w8a16: Path) -> None:
        cls.model_file = w8a16

    def backend(self) -> Backend:
        return CutlassBackend()


class TestModel:
    def test_it_answers_like_the_original(self, w8a16: Path) -> None:
        model = CutlassBackend().load(w8a16, LoadOptions(dtype="bfloat16"))
        assert golden_rate(model) >= 0.99
        for part in ("w8a16 weights, bfloat16", "16-bit activations"):
            assert part in model.description

    def test_without_a_compiler_pytorch_serves_and_the_log_says_so_once(self, w8a16: Path, tmp_path: Path) -> None:
        printed, logged = run_without_compiler("cutlass", "CutlassBackend", w8a16, tmp_path)
        assert "PyTorch reference over" in printed
        assert printed.splitlines()[-1] == "1"
        assert logged.count("no C++ compiler found") == 1


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As far as probing sees; CUTLASS's headers and nvcc are there too."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (8, 0))
    monkeypatch.setattr(build, "headers", lambda: Path("/include"))
    monkeypatch.setattr(build, "nvcc", lambda: "nvcc")
    return monkeypatch


class TestErrors:
    """One sentence with the way out, exit code 1, before a port is opened."""

    engine = ("--inference-engine", "cutlass")

    def test_an_original(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = serve_refuses(capsys, *self.engine, "--model-path", str(demo_model_path()))
        assert "is not converted for the cutlass engine" in message
        assert "--to cutlass-w8a16" in message

    def test_a_file_for_gemlite(self, w8a16: Path, capsys: pytest.CaptureFixture[str]) -> None:
        for target in ("gemlite-int8", "gemlite-int4"):
            path = converted_demo(w8a16.parent, target)
            message = serve_refuses(capsys, *self.engine, "--model-path", str(path))
            assert "was converted for the gemlite engine: choose --inference-engine gemlite" in message
            assert "--to cutlass-w8a16" in message

    def test_its_file_given_to_fp16(self, w8a16: Path, capsys: pytest.CaptureFixture[str]) -> None:
        message = serve_refuses(capsys, "--inference-engine", "fp16", "--model-path", str(w8a16))
        assert "is quantised: choose --inference-engine cutlass" in message

    @pytest.mark.parametrize("how", DAMAGES)
    def test_a_damaged_file(self, w8a16: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
        path, expected = damaged(w8a16, tmp_path, how)
        assert expected in serve_refuses(capsys, *self.engine, "--model-path", str(path))

    def test_no_gpu(self, w8a16: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        message = serve_refuses(capsys, *self.engine, "--model-path", str(w8a16), "--device", "cuda")
        assert "choose --device cpu" in message

    @pytest.mark.parametrize(
        ("missing", "expected"),
        [("headers", "pip install 'rwkv-lightning[cutlass]'"), ("nvcc", "install nvcc or set CUDACXX")],
    )
    def test_what_building_needs(
        self,
        w8a16: Path,
        capsys: pytest.CaptureFixture[str],
        with_a_gpu: pytest.MonkeyPatch,
        missing: str,
        expected: str,
    ) -> None:
        with_a_gpu.setattr(build, missing, lambda: None)
        message = serve_refuses(capsys, *self.engine, "--model-path", str(w8a16), "--device", "cuda")
        assert expected in message
        assert "--device cpu" in message

    def test_amd_cards(self, with_a_gpu: pytest.MonkeyPatch) -> None:
        with_a_gpu.setattr(torch.version, "hip", "6.0")
        assert "choose --inference-engine gemlite" in str(CutlassBackend().probe("cuda"))

    def test_a_type_that_the_kernel_lacks(self) -> None:
        with pytest.raises(StartError, match="computes in float16 on a GPU"):
            gpu_operators(LoadOptions(device="cuda"), Precision(torch.bfloat16, torch.float16, ""))

    def test_cards_that_are_too_old(self, with_a_gpu: pytest.MonkeyPatch) -> None:
        with_a_gpu.setattr(torch.cuda, "get_device_capability", lambda *args: (7, 5))
        mixed.kernels.cache_clear()
        with pytest.raises(StartError, match=r"compute capability 7\.5 .*choose --inference-engine gemlite"):
            gpu_operators(LoadOptions(device="cuda"), HALF)

    def test_a_compiler_that_fails(
        self, w8a16: Path, capsys: pytest.CaptureFixture[str], with_a_gpu: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        include = tmp_path / "include" / "cutlass"
        include.mkdir(parents=True)
        (include / "version.h").touch()
        broken = tmp_path / "nvcc"
        broken.write_text("#!/bin/sh\necho 'w8a16.cu(1): error: planted' >&2\n[ $1 = --version ]\n")
        broken.chmod(0o755)
        with_a_gpu.setattr(build, "headers", lambda: include.parent)
        with_a_gpu.setattr(build, "nvcc", lambda: str(broken))
        with_a_gpu.setattr(build, "cache_dir", lambda: tmp_path / "cache")
        mixed.kernels.cache_clear()
        message = serve_refuses(capsys, *self.engine, "--model-path", str(w8a16), "--device", "cuda")
        assert "failed (w8a16.cu(1): error: planted): choose --device cpu" in message
        assert (tmp_path / "cache" / "cuda").is_dir()
        assert [path for path in (tmp_path / "cache").rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(("capability", "name"), [((8, 0), "80"), ((8, 9), "89"), ((9, 0), "90a"), ((12, 0), "120")])
def test_architectures(capability: tuple[int, int], name: str) -> None:
    assert build.arch(capability) == name


class HostKernels:
    """`w8a16_run` on host memory: what the CUDA kernel does with the same arguments."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.many: list[int] = []
        self.written: list[int] = []  # addresses

    def run(self, x: int, w: int, scales: int, y: int, rows: int, columns: int, depth: int, many: int, at: Any) -> int:
        self.many.append(many)
        self.written.append(y)
        assert depth % 16 == columns % 8 == 0

        def view(address: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            count = torch.Size(shape).numel() * dtype.itemsize
            return torch.frombuffer((ctypes.c_char * count).from_address(address), dtype=dtype).view(shape)

        product = view(x, torch.float16, rows, depth).float() @ view(w, torch.int8, columns, depth).float().T
        view(y, torch.float16, rows, columns).copy_(product * view(scales, torch.float32, columns))
        return self.status

    def message(self, status: int) -> str:
        return f"status {status}"


class TestTheWayIntoTheKernel:
    @pytest.fixture(autouse=True)
    def _stream(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: types.SimpleNamespace(cuda_stream=0))

    def linear(self, n: int, functions: HostKernels, **options: bool) -> tuple[mixed.MixedLinear, QuantisedWeight]:
        weight = quantise_int8(torch.randn(n, 64, generator=torch.Generator().manual_seed(1)) / 8)
        return mixed.MixedLinear(weight, "cpu", functions, **options), weight  # type: ignore[arg-type]

    @pytest.mark.parametrize("n", [8, 37, 320])
    def test_products(self, n: int) -> None:
        functions = HostKernels()
        linear, weight = self.linear(n, functions)
        for rows in (1, 7, 63, 64):
            x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(2)).half()
            want = x.float() @ weight.dequantise().T
            assert linear(x).shape == (rows, n)
            torch.testing.assert_close(linear(x).float(), want, rtol=1e-2, atol=1e-2)
            torch.testing.assert_close(linear(x, "tanh", torch.float32), want.tanh(), rtol=1e-2, atol=1e-2)
        assert functions.many == [0] * 9 + [1] * 3
        assert linear(torch.empty(0, 64).half()).shape == (0, n)

    def test_deterministic_keeps_to_one_kind_of_tile(self) -> None:
        functions = HostKernels()
        self.linear(8, functions, one_tile=True)[0](torch.zeros(100, 64).half())
        assert functions.many == [0]

    def test_it_writes_where_it_is_told(self) -> None:
        """Straight from the kernel where that can write there: nothing is allocated then."""
        functions = HostKernels()
        linear, weight = self.linear(16, functions)
        x = torch.randn(3, 64, generator=torch.Generator().manual_seed(2)).half()
        want = x.float() @ weight.dequantise().T
        places = {
            "own": (torch.empty(3, 16).half(), True),
            "float32": (torch.empty(3, 16), False),
            "apart": (torch.empty(3, 24).half()[:, :16], False),
            "odd": (torch.empty(3 * 16 + 1).half()[1:].view(3, 16), False),
        }
        for name, (out, straight) in places.items():
            for activation, form in (("none", lambda y: y), ("relu2", lambda y: y.relu().square())):
                assert linear(x, activation, out=out) is out, name
                torch.testing.assert_close(out.float(), form(want), rtol=1e-2, atol=1e-2)
                assert (functions.written[-1] == out.data_ptr()) == straight, name
        with pytest.raises(ValueError, match=r"needed is \[3, 16\]"):
            linear(x, out=torch.empty(1, 16).half())

    def test_rows_that_lie_apart(self) -> None:
        linear, weight = self.linear(8, HostKernels())
        x = torch.randn(3, 80, generator=torch.Generator().manual_seed(2)).half()[:, :64]
        torch.testing.assert_close(linear(x).float(), x.float() @ weight.dequantise().T, rtol=1e-2, atol=1e-2)

    def test_steps_of_decoding_are_captured(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        functions = HostKernels()

        def operators(one_tile: bool) -> Operators:
            return Operators(
                lambda weight: mixed.MixedLinear(weight, "cpu", functions, one_tile=one_tile),  # type: ignore[arg-type]
                "CUTLASS",
            )

        assert decode_by_replays("cutlass-w8a16", tmp_path, operators(False), monkeypatch).captured == [6, 3]
        deterministic = decode_by_replays("cutlass-w8a16", tmp_path, operators(True), monkeypatch, True)
        assert deterministic.captured == []

    def test_refusals(self) -> None:
        linear, _ = self.linear(8, HostKernels(status=7))
        with pytest.raises(RuntimeError, match="the W8A16 product failed: status 7"):
            linear(torch.zeros(1, 64).half())
        for x, complaint in (
            (torch.zeros(1, 64), r"computes in torch\.float16"),
            (torch.zeros(1, 32).half(), r"takes \[T, 64\]"),
            (torch.zeros(64).half(), r"takes \[T, 64\]"),
        ):
            with pytest.raises(ValueError, match=complaint):
                linear(x)
        for weight in (quantise_int4(torch.zeros(4, 64), 64), quantise_int8(torch.zeros(4, 24))):
            with pytest.raises(ValueError, match="MixedLinear takes int8"):
                mixed.MixedLinear(weight, "cpu", HostKernels())  # type: ignore[arg-type]


@pytest.mark.skipif(build.problem() is not None, reason=f"the CUDA kernels cannot be built here: {build.problem()}")
class TestBuild:
    """nvcc compiles without a card; the code is in the library and the library loads."""

    def compiled(self, architecture: str, folder: Path) -> tuple[str, bytes, list[str], bool]:
        """What the library says of itself, its bytes, the files beside it, and whether it is built only once."""
        path = build.build(architecture, folder)
        message = mixed.Kernels(ctypes.CDLL(str(path))).message(0)
        first = path.stat().st_mtime_ns
        once = build.build(architecture, folder).stat().st_mtime_ns == first
        return message, path.read_bytes(), [each.name for each in path.parent.iterdir()], once

    def test_ampere(self, tmp_path: Path) -> None:
        message, content, files, once = self.compiled("80", tmp_path)
        assert (message, files, once) == ("Success", ["w8a16.so"], True)
        assert b"sm_80" in content

    @pytest.mark.nightly
    @pytest.mark.parametrize("architecture", ["90a", "120"])
    def test_later_cards(self, tmp_path: Path, architecture: str) -> None:
        message, content, files, once = self.compiled(architecture, tmp_path)
        assert (message, files, once) == ("Success", ["w8a16.so"], True)
        assert f"sm_{architecture}".encode() in content
