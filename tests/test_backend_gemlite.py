"""The gemlite backend: conformance, quality, choices, errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from quantised_engines import (
    DAMAGES,
    converted_demo,
    damaged,
    feed,
    golden_rate,
    run_without_compiler,
    serve_refuses,
)

from benchmarks.checkpoints import make
from rwkv_lightning.core import cli
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import CheckpointError, StartError
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.interfaces import Backend, LoadOptions, Model
from rwkv_lightning.core.testing.backends import BackendSuite
from rwkv_lightning.plugins.backends import gemlite
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend
from rwkv_lightning.plugins.backends.gemlite import GemliteBackend, GemliteSettings
from server_process import ServerProcess

FLOAT32 = LoadOptions(dtype="float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def int8(folder: Path) -> Path:
    return converted_demo(folder, "gemlite-int8")


@pytest.fixture(scope="module")
def int4(folder: Path) -> Path:
    return converted_demo(folder, "gemlite-int4")


def backend(activations: str) -> GemliteBackend:
    return GemliteBackend(GemliteSettings.model_validate({"activations": activations}))


class _Conformance(BackendSuite):
    """The package's own suite, with `--deterministic`: the same bits in any batch."""

    target: ClassVar[str]
    options = LoadOptions(deterministic=True, dtype="bfloat16")

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _convert(cls, folder: Path) -> None:
        cls.model_file = converted_demo(folder, cls.target)

    def backend(self) -> Backend:
        return GemliteBackend()


class TestInt8Conformance(_Conformance):
    target = "gemlite-int8"


class TestInt4Conformance(_Conformance):
    target = "gemlite-int4"


class TestQuality:
    def test_int8_answers_like_the_original(self, int8: Path) -> None:
        for activations in ("16", "8", "auto"):
            model = backend(activations).load(int8, LoadOptions(dtype="bfloat16"))
            assert golden_rate(model) >= 0.99, activations

    def test_int4_answers_nearly_like_the_original(self, int4: Path) -> None:
        for activations in ("16", "8"):
            model = backend(activations).load(int4, LoadOptions(dtype="bfloat16"))
            assert golden_rate(model) >= 0.9, activations

    def test_int8_logits_are_near(self, int8: Path) -> None:
        prompts = [[5, 7, 9, 11], [13] * 30]
        original = feed(Fp16Backend().load(demo_model_path(), FLOAT32), prompts)
        ours = feed(backend("16").load(int8, FLOAT32), prompts)
        assert float((ours - original).norm() / original.norm()) < 0.05


class TestChoices:
    @pytest.mark.parametrize(
        ("activations", "options", "expected"),
        [
            ("auto", LoadOptions(dtype="bfloat16"), "16-bit up to 4 rows, then 8-bit activations"),
            ("auto", LoadOptions(dtype="bfloat16", deterministic=True), "16-bit activations"),
            ("16", LoadOptions(dtype="bfloat16"), "16-bit activations"),
            ("8", LoadOptions(dtype="float32"), "8-bit activations"),
        ],
    )
    def test_the_description_says_what_runs(
        self, int8: Path, activations: str, options: LoadOptions, expected: str
    ) -> None:
        model = backend(activations).load(int8, options)
        assert isinstance(model, Model)
        for part in ("int8 weights, ", options.dtype, "linears: ", f", {expected}; "):
            assert part in model.description

    def test_8_bits_and_deterministic_exclude_each_other(self, int8: Path) -> None:
        with pytest.raises(StartError, match="activations = 8 and --deterministic exclude each other"):
            backend("8").load(int8, LoadOptions(deterministic=True))

    def test_without_a_compiler_pytorch_serves_and_the_log_says_so_once(self, int4: Path, tmp_path: Path) -> None:
        printed, logged = run_without_compiler("gemlite", "GemliteBackend", int4, tmp_path)
        assert "PyTorch reference over" in printed
        assert printed.splitlines()[-1] == "1"
        assert logged.count("no C++ compiler found") == 1

    def test_the_setting_comes_from_the_plugins_section(self) -> None:
        host = PluginHost(Settings(plugins={"gemlite": {"activations": "16"}}))
        backend = host.create_backend("gemlite")
        assert isinstance(backend, GemliteBackend)
        assert backend.settings.activations == "16"

    def test_auto_takes_the_engine_that_a_file_is_for(self, folder: Path, int8: Path, tmp_path: Path) -> None:
        settings = Settings()
        host = PluginHost(settings)
        (tmp_path / "empty.pth").touch()
        cutlass = converted_demo(folder, "cutlass-w8a16")
        found = [host.choose_backend(settings, path) for path in (int8, cutlass, demo_model_path())]
        assert found == ["gemlite", "cutlass", "fp16"]
        assert host.choose_backend(settings, tmp_path / "empty.pth") == "fp16"

    def test_it_registers_without_importing_torch(self) -> None:
        code = (
            "import sys\n"
            "from rwkv_lightning.plugins.backends import cutlass, gemlite\n"
            "for each in (gemlite, cutlass):\n"
            "    each.register_backends(lambda name, factory, description: (print(name), factory()))\n"
            "assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.split()) == (0, ["gemlite", "cutlass"]), done.stderr


def test_a_server_answers_from_a_converted_file(int8: Path) -> None:
    """`--inference-engine auto` finds the engine, and the vocabulary came along."""
    prompt = "User: What is the capital of France?\n\nAssistant: <think>\n</think>\n"
    options = ("--inference-engine", "auto", "--model-path", str(int8), "--state-store", "none")
    with ServerProcess(*options) as server:
        body = {"contents": [prompt], "max_tokens": 40, "temperature": 0}
        answer = server.post("/v1/chat/completions", body)
        assert "int8 weights" in server.log()
    assert answer.status_code == 200
    assert "Paris" in answer.text


@pytest.fixture
def with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As far as probing sees."""
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    return monkeypatch


class TestErrors:
    """One sentence with the way out, exit code 1, before a port is opened."""

    engine = ("--inference-engine", "gemlite")

    def test_an_original(self, capsys: pytest.CaptureFixture[str]) -> None:
        message = serve_refuses(capsys, *self.engine, "--model-path", str(demo_model_path()))
        assert "is not converted for the gemlite engine: run rwkv-lightning convert" in message
        assert "--to gemlite-int8" in message
        assert "--inference-engine fp16" in message

    def test_a_file_for_cutlass(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = converted_demo(folder, "cutlass-w8a16")
        message = serve_refuses(capsys, *self.engine, "--model-path", str(path))
        assert "was converted for the cutlass engine: choose --inference-engine cutlass" in message

    def test_its_files_given_to_fp16(self, int8: Path, capsys: pytest.CaptureFixture[str]) -> None:
        message = serve_refuses(capsys, "--inference-engine", "fp16", "--model-path", str(int8))
        assert "is quantised: choose --inference-engine gemlite" in message

    @pytest.mark.parametrize("how", DAMAGES)
    def test_a_damaged_file(self, int4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str) -> None:
        path, expected = damaged(int4, tmp_path, how)
        assert expected in serve_refuses(capsys, *self.engine, "--model-path", str(path))

    @pytest.mark.parametrize("target", ["gemlite-int8", "cutlass-w8a16"])
    def test_int4_to_int8(self, int4: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str) -> None:
        out = tmp_path / "q.safetensors"
        assert cli.main(["convert", str(int4), "--to", target, str(out)]) == 1
        message = capsys.readouterr().err
        assert "is quantised" in message
        assert message.count("\n") == 1
        assert not out.exists()

    def test_no_gpu(self, int8: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        message = serve_refuses(capsys, *self.engine, "--model-path", str(int8), "--device", "cuda")
        assert "choose --device cpu" in message

    def test_a_missing_extra(
        self, int8: Path, capsys: pytest.CaptureFixture[str], with_a_gpu: pytest.MonkeyPatch
    ) -> None:
        with_a_gpu.setattr("importlib.util.find_spec", lambda name: None)
        message = serve_refuses(capsys, *self.engine, "--model-path", str(int8), "--device", "cuda")
        assert "pip install 'rwkv-lightning[gemlite]'" in message

    def test_no_c_compiler(
        self, int8: Path, capsys: pytest.CaptureFixture[str], with_a_gpu: pytest.MonkeyPatch
    ) -> None:
        with_a_gpu.setattr("importlib.util.find_spec", lambda name: name)
        with_a_gpu.setattr(gemlite, "c_compiler", lambda: None)
        message = serve_refuses(capsys, *self.engine, "--model-path", str(int8), "--device", "cuda")
        assert "install gcc or clang or set CC, or choose --device cpu" in message

    def test_which_compiler_triton_takes(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        assert gemlite.c_compiler() is None
        (tmp_path / "clang").touch(mode=0o755)
        assert gemlite.c_compiler() == str(tmp_path / "clang")
        monkeypatch.setenv("CC", "mycc")
        assert gemlite.c_compiler() == "mycc"

    def test_an_extra_that_cannot_be_imported(
        self, int8: Path, capsys: pytest.CaptureFixture[str], with_a_gpu: pytest.MonkeyPatch
    ) -> None:
        with_a_gpu.setattr("importlib.util.find_spec", lambda name: name)
        with_a_gpu.setattr(gemlite, "c_compiler", lambda: "cc")
        with_a_gpu.setattr(torch.cuda, "get_device_name", lambda device: "any")
        with_a_gpu.setitem(sys.modules, "gemlite", None)
        message = serve_refuses(capsys, *self.engine, "--model-path", str(int8), "--device", "cuda")
        assert "importing gemlite failed (import of gemlite halted" in message
        assert "choose --device cpu" in message

    @pytest.mark.parametrize(("target", "unit"), [("gemlite-int8", 32), ("gemlite-int4", 64), ("cutlass-w8a16", 16)])
    def test_a_shape_that_does_not_divide(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], target: str, unit: int
    ) -> None:
        """It is refused when converting; no such file is written, but one in int8 may be made by hand."""
        from benchmarks.checkpoints import ModelShape
        from rwkv_lightning.core import convert as conversion

        source = make(tmp_path / "odd.pth", ModelShape(1, 72, 16, 16, 16, 32, vocab_size=320, head_size=24))
        path = tmp_path / "odd.safetensors"
        expected = f"has 72 inputs in head.weight, which {target} cannot divide into {unit}s: choose"
        assert cli.main(["convert", str(source), "--to", target, str(path)]) == 1
        assert expected in capsys.readouterr().err
        if target == "gemlite-int4":
            return
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(conversion, "misfit", lambda *args: None)
            convert(source, target, path)
        vocabulary = demo_model_path().with_suffix(".vocab.txt")
        engine = ("--inference-engine", target.partition("-")[0], "--vocab", str(vocabulary))
        assert expected.partition(" in ")[0] in serve_refuses(capsys, *engine, "--model-path", str(path))

    def test_damaged_scales(self, int8: Path, tmp_path: Path) -> None:
        import dataclasses

        from safetensors.torch import load_file, save_file

        from rwkv_lightning.core.checkpoint import fingerprint
        from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint

        tensors = load_file(int8)
        tensors["blocks.0.att.key.scales"][3] = float("nan")
        manifest = dataclasses.replace(QuantisedCheckpoint.open(int8).manifest, content=fingerprint(tensors))
        save_file(tensors, tmp_path / "q.safetensors", metadata=manifest.metadata())
        with pytest.raises(CheckpointError, match=r"holds NaN or infinity in blocks\.0\.att\.key\.weight"):
            GemliteBackend().load(tmp_path / "q.safetensors", LoadOptions())
