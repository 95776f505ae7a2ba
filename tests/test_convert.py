"""Conversion: sizes, manifest, memory, atomic writing, what is refused; and what `inspect` says of the result."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import ModelShape, make, random_weights, save
from rwkv_lightning.core import cli
from rwkv_lightning.core import convert as module
from rwkv_lightning.core.checkpoint import Checkpoint
from rwkv_lightning.core.convert import conversion_bar, convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.inspection import facts, open_checkpoint
from rwkv_lightning.core.manifest import TARGETS, Manifest, parse_manifest
from rwkv_lightning.core.quantised_checkpoint import QuantisedCheckpoint
from rwkv_lightning.core.tensor_writer import Entry, TensorWriter

MATRICES = ("receptance", "key", "value", "output")
ODD = ModelShape(2, 96, 16, 16, 16, 32, vocab_size=320, head_size=32)  # 96 divides by 32, not by 64
NARROW = ModelShape(2, 72, 16, 16, 16, 32, vocab_size=320, head_size=24)  # 72 divides by 8 only


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("source") / "model.pth", "tiny", seed=3)


@pytest.fixture(scope="module", params=TARGETS)
def converted(request: pytest.FixtureRequest, source: Path) -> QuantisedCheckpoint:
    out = source.with_name(f"{request.param}.safetensors")
    convert(source, request.param, out)
    return QuantisedCheckpoint.open(out)


def in_folder(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


class TestContent:
    def test_matrices_are_quantised_and_the_rest_is_kept(self, source: Path, converted: QuantisedCheckpoint) -> None:
        original = Checkpoint.open(source)
        assert converted.config == original.config
        assert converted.parameters == original.parameters
        layers = converted.manifest.layers
        expected = {f"blocks.{i}.att.{name}.weight" for i in range(2) for name in MATRICES}
        expected |= {f"blocks.{i}.ffn.{name}.weight" for i in range(2) for name in ("key", "value")}
        assert set(layers) == expected | {"emb.weight", "head.weight"}
        for name in original.names:
            if name not in layers:
                assert torch.equal(converted.tensor(name), original.tensor(name)), name

    def test_matrices_come_back(self, source: Path, converted: QuantisedCheckpoint) -> None:
        """int8 within half a step of its row, int4 with a tenth of noise."""
        original = Checkpoint.open(source)
        for name, scheme in converted.manifest.layers.items():
            weight, back = original.tensor(name).float(), converted.quantised(name).dequantise()
            if scheme == "int4-group64":
                assert float((back - weight).norm() / weight.norm()) < 0.1, name
            else:
                assert ((back - weight).abs() <= weight.abs().amax(1, keepdim=True) / 127 * 0.5001).all(), name

    def test_the_manifest_says_what_it_is(self, source: Path, converted: QuantisedCheckpoint) -> None:
        manifest, original = converted.manifest, Checkpoint.open(source)
        assert manifest.target in TARGETS
        assert manifest.source.name == "model.pth"
        assert manifest.source.fingerprint == original.fingerprint
        assert (manifest.source.nbytes, manifest.source.dtype) == (original.nbytes, "bfloat16")
        assert manifest.tool.startswith("rwkv-lightning ")
        assert manifest.content == converted.fingerprint
        assert manifest.layers["emb.weight"] == "int8-row"
        wanted = {"int8": "int8-channel", "w8a16": "int8-channel", "int4": "int4-group64"}[manifest.scheme]
        assert manifest.layers["head.weight"] == wanted
        assert manifest.group_size == (64 if manifest.scheme == "int4" else 0)

    def test_any_reader_of_safetensors_opens_it(self, converted: QuantisedCheckpoint) -> None:
        with safe_open(converted.path, framework="pt") as file:
            assert json.loads(file.metadata()["rwkv_lightning"])["version"] == 1
        assert set(load_file(converted.path)) == set(converted.names)

    def test_slices_and_formats_do_not_change_a_bit(
        self, source: Path, converted: QuantisedCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(module, "SLICE", 700)  # five rows of 128
        again = tmp_path / "model.safetensors"
        save(torch.load(source), again)
        manifest = convert(again, converted.manifest.target, tmp_path / "again.safetensors")
        assert manifest.content == converted.manifest.content

    @pytest.mark.parametrize("group_size", [64, 128])
    def test_group_sizes(self, source: Path, tmp_path: Path, group_size: int) -> None:
        convert(source, "gemlite-int4", tmp_path / "q.safetensors", group_size=group_size)
        checkpoint = QuantisedCheckpoint.open(tmp_path / "q.safetensors")
        assert checkpoint.manifest.group_size == group_size
        assert checkpoint.quantised("head.weight").group == group_size

    def test_stored_types_are_kept(self, tmp_path: Path) -> None:
        weights = {name: t.float() if t.dim() != 2 else t for name, t in random_weights("tiny").items()}
        save(weights, tmp_path / "mixed.pth")
        convert(tmp_path / "mixed.pth", "gemlite-int8", tmp_path / "q.safetensors")
        checkpoint = QuantisedCheckpoint.open(tmp_path / "q.safetensors")
        assert checkpoint.tensor("ln_out.weight").dtype == torch.float32
        assert checkpoint.tensor("blocks.0.att.w1").dtype == torch.bfloat16

    def test_a_vocabulary_beside_the_model_goes_along(self, tmp_path: Path) -> None:
        convert(demo_model_path(), "gemlite-int8", tmp_path / "q.safetensors")
        copy = tmp_path / "q.vocab.txt"
        assert copy.read_bytes() == demo_model_path().with_name("rwkv7-demo.vocab.txt").read_bytes()

    def test_progress_counts_every_byte_once(self, source: Path, tmp_path: Path) -> None:
        seen: list[int] = []
        convert(source, "gemlite-int4", tmp_path / "q.safetensors", on_progress=seen.append)
        assert sum(seen) == Checkpoint.open(source).nbytes
        assert len(seen) > 60


def test_the_bar_goes_to_a_terminals_stderr_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with conversion_bar(demo_model_path()) as advance:
        advance(5)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    with conversion_bar(demo_model_path()) as advance:
        advance(5)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "converting rwkv7-demo.pth" in shown.err


SIZES = {"gemlite-int8": 0.55, "gemlite-int4": 0.35, "cutlass-w8a16": 0.55}


@pytest.mark.parametrize("target", TARGETS)
def test_files_of_the_smallest_released_shape_are_small(target: str) -> None:
    """From the announced entries alone, for they are what is written."""
    from benchmarks.checkpoints import SHAPES

    shapes = SHAPES["0.1b"].tensors()
    tensors = {name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()}
    original = sum(t.nbytes for t in tensors.values())

    class Announced(Checkpoint):
        def __init__(self) -> None:
            self.path, self._tensors = Path("model.pth"), tensors
            self.fingerprint = ""
            self.config = Checkpoint.open(demo_model_path()).config
            self.config = type(self.config)(12, 768, 12, 64, 3072, 65536)

    checkpoint = Announced()
    group_size = 64 if target == "gemlite-int4" else 0
    entries = module._entries(checkpoint, module._plan(checkpoint, target, group_size))
    assert sum(entry.nbytes for entry in entries.values()) + 200_000 < SIZES[target] * original


MEMORY = """
import resource, sys, threading, time
import psutil, torch
from pathlib import Path
from rwkv_lightning.core.convert import convert
from rwkv_lightning.kernels.quantisation import quantise_int4
torch.set_num_threads(1)
quantise_int4(torch.randn(64, 64), 64)
process, peak, done = psutil.Process(), 0, threading.Event()
def watch():
    global peak
    while not done.is_set():
        peak = max(peak, process.memory_info().rss)
        time.sleep(0.002)
before = process.memory_info().rss
thread = threading.Thread(target=watch)
thread.start()
convert(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
done.set()
thread.join()
print(peak - before)
"""


@pytest.mark.parametrize("target", ["gemlite-int8", "gemlite-int4"])
def test_memory_stays_near_the_size_of_the_source(tmp_path: Path, target: str) -> None:
    shape = ModelShape(4, 1024, 64, 64, 32, 128, vocab_size=40000)
    source = make(tmp_path / "model.pth", shape)
    layer = 12 * 1024 * 1024 * 2
    command = [sys.executable, "-c", MEMORY, str(source), target, str(tmp_path / "q.safetensors")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1.3 * source.stat().st_size + layer


class TestAtomicity:
    def test_a_failure_half_way_leaves_nothing(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for error in (RuntimeError("planted"), KeyboardInterrupt()):
            calls = iter(range(9))

            def fail(*args: object, calls: Iterator[int] = calls, error: BaseException = error) -> None:
                if next(calls) == 7:
                    assert len(in_folder(tmp_path)) == 1
                    raise error

            monkeypatch.setattr(TensorWriter, "write", fail)
            with pytest.raises(type(error)):
                convert(source, "gemlite-int8", tmp_path / "q.safetensors")
            assert in_folder(tmp_path) == []

    def test_a_full_disk_is_named_and_an_older_file_survives(
        self, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        out = tmp_path / "q.safetensors"
        convert(source, "gemlite-int8", out)
        before = out.read_bytes()

        def full(*args: object) -> None:
            raise OSError(28, "No space left on device")

        for place in ("write", "set_metadata", "_finish"):
            with monkeypatch.context() as patch:
                patch.setattr(TensorWriter, place, full)
                message = refusal(lambda: convert(source, "gemlite-int4", out, overwrite=True))
            assert "No space left on device" in message
            assert str(out) in message
            assert in_folder(tmp_path) == ["q.safetensors"]
            assert out.read_bytes() == before

    def test_a_folder_that_is_not_there_is_named(self, source: Path, tmp_path: Path) -> None:
        message = refusal(lambda: convert(source, "gemlite-int8", tmp_path / "no" / "q.safetensors"))
        assert "No such file or directory" in message

    def test_the_writer_wants_exactly_what_was_announced(self, tmp_path: Path) -> None:
        entries = {"a": Entry(torch.float32, (3, 2))}

        def short() -> None:
            with TensorWriter(tmp_path / "x", entries, {}) as out:
                out.write("a", torch.zeros(2, 2))

        def other() -> None:
            with TensorWriter(tmp_path / "x", entries, {}) as out:
                out.write("a", torch.zeros(3, 2).half())

        def longer() -> None:
            with TensorWriter(tmp_path / "x", entries, {"k": "1"}) as out:
                out.set_metadata({"k": "1" * 20})

        for call, message in ((short, "not written whole"), (other, "was announced"), (longer, "another length")):
            with pytest.raises(ValueError, match=message):
                call()
        assert in_folder(tmp_path) == []

    def test_rows_land_where_they_belong(self, tmp_path: Path) -> None:
        tensors = {"b": torch.arange(6, dtype=torch.int8).view(3, 2), "a": torch.randn(5, 3), "c": torch.ones(1).half()}
        entries = {name: Entry(t.dtype, tuple(t.shape)) for name, t in tensors.items()}
        with TensorWriter(tmp_path / "x.safetensors", entries, {"k": "v"}) as out:
            for name, tensor in tensors.items():
                for row in reversed(range(tensor.shape[0])):
                    out.write(name, tensor[row : row + 1], row)
        back = load_file(tmp_path / "x.safetensors")
        assert back.keys() == tensors.keys()
        assert all(torch.equal(back[name], tensor) for name, tensor in tensors.items())


class TestRefusals:
    def test_names_and_existing_files(self, source: Path, tmp_path: Path) -> None:
        out = tmp_path / "q.safetensors"
        assert "must end in .safetensors" in refusal(lambda: convert(source, "gemlite-int8", tmp_path / "q.pth"))
        convert(source, "gemlite-int8", out)
        assert "give --overwrite" in refusal(lambda: convert(source, "gemlite-int8", out))
        copy = tmp_path / "model.safetensors"
        save(torch.load(source), copy)
        assert "is the model itself" in refusal(lambda: convert(copy, "gemlite-int8", copy, overwrite=True))
        convert(source, "gemlite-int4", out, overwrite=True)
        assert QuantisedCheckpoint.open(out).manifest.scheme == "int4"

    @pytest.mark.parametrize("name", ["emb.weight", "blocks.1.ffn.key.weight"])
    def test_damaged_sources(self, tmp_path: Path, name: str) -> None:
        weights = random_weights("tiny")
        weights[name][3, 5] = float("nan")
        save(weights, tmp_path / "damaged.pth")
        message = refusal(lambda: convert(tmp_path / "damaged.pth", "gemlite-int8", tmp_path / "q.safetensors"))
        assert f"holds NaN or infinity in {name}" in message
        assert in_folder(tmp_path) == ["damaged.pth"]

    def test_weights_too_large_for_int4(self, tmp_path: Path) -> None:
        weights = random_weights("tiny", dtype=torch.float32)
        weights["head.weight"][3, 5] = 1e9
        save(weights, tmp_path / "large.pth")
        message = refusal(lambda: convert(tmp_path / "large.pth", "gemlite-int4", tmp_path / "q.safetensors"))
        assert "head.weight" in message
        assert "choose gemlite-int8" in message

    @pytest.mark.parametrize(
        ("shape", "target", "expected"),
        [
            (
                ODD,
                "gemlite-int4",
                "96 inputs in .*, which gemlite-int4 cannot divide into 64s: choose --to gemlite-int8",
            ),
            (NARROW, "gemlite-int8", "72 inputs in .*, which gemlite-int8 cannot divide into 32s"),
            (NARROW, "cutlass-w8a16", "72 inputs in .*, which cutlass-w8a16 cannot divide into 16s"),
        ],
    )
    def test_shapes_that_do_not_divide(self, tmp_path: Path, shape: ModelShape, target: str, expected: str) -> None:
        path = make(tmp_path / "odd.pth", shape)
        with pytest.raises(CheckpointError, match=expected):
            convert(path, target, tmp_path / "q.safetensors")
        assert in_folder(tmp_path) == ["odd.pth"]

    def test_a_converted_file_is_not_converted_again(self, converted: QuantisedCheckpoint, tmp_path: Path) -> None:
        message = refusal(lambda: convert(converted.path, "gemlite-int8", tmp_path / "q.safetensors"))
        assert "give the unquantised file it was converted from" in message
        assert f"--inference-engine {converted.manifest.engine}" in message


def rewritten(converted: QuantisedCheckpoint, out: Path, change: Callable[[dict[str, object]], None]) -> Path:
    """The same tensors under a manifest that was changed by hand."""
    fields = json.loads(converted.metadata["rwkv_lightning"])
    change(fields)
    save_file(load_file(converted.path), out, metadata={"rwkv_lightning": json.dumps(fields)})
    return out


class TestOpening:
    @pytest.mark.parametrize(
        ("field", "value", "expected"),
        [
            ("version", 2, "has version 2 of the converted format, but this server reads version 1"),
            ("group_size", 128, "manifest that was changed after the conversion"),
            ("tool", "another", "manifest that was changed after the conversion"),
            ("seal", "0" * 32, "manifest that was changed after the conversion"),
            ("format", "other", "has a damaged manifest"),
        ],
    )
    def test_manifests_that_were_tampered_with(
        self, converted: QuantisedCheckpoint, tmp_path: Path, field: str, value: object, expected: str
    ) -> None:
        path = rewritten(converted, tmp_path / "q.safetensors", lambda fields: fields.update({field: value}))
        message = refusal(lambda: QuantisedCheckpoint.open(path))
        assert expected in message
        assert "convert the original" in message
        assert str(path) in message

    def resealed(self, converted: QuantisedCheckpoint, tensors: dict[str, torch.Tensor], out: Path) -> Path:
        save_file(tensors, out, metadata=converted.manifest.metadata())
        return out

    def test_other_weights_under_the_same_manifest(self, converted: QuantisedCheckpoint, tmp_path: Path) -> None:
        tensors = load_file(converted.path)
        tensors["head.scales"][0] *= 2
        path = self.resealed(converted, tensors, tmp_path / "q.safetensors")
        assert "holds other weights than its manifest says" in refusal(lambda: QuantisedCheckpoint.open(path))

    @pytest.mark.parametrize("name", ["head.W_q", "emb.scales", "blocks.1.ln1.weight"])
    def test_missing_tensors(self, converted: QuantisedCheckpoint, tmp_path: Path, name: str) -> None:
        tensors = load_file(converted.path)
        del tensors[name]
        path = self.resealed(converted, tensors, tmp_path / "q.safetensors")
        assert f"lacks {name}" in refusal(lambda: QuantisedCheckpoint.open(path))

    def test_surplus_and_misshapen_tensors(self, converted: QuantisedCheckpoint, tmp_path: Path) -> None:
        changes: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
            "blocks.0.extra": lambda tensors: tensors.update({"blocks.0.extra": torch.ones(3)}),
            "head.weight": lambda tensors: tensors.update({"head.W_q": tensors["head.W_q"][:, :32].contiguous()}),
            "as int": lambda tensors: tensors.update({"head.scales": tensors["head.scales"][:-1].contiguous()}),
        }
        for expected, change in changes.items():
            tensors = load_file(converted.path)
            change(tensors)
            path = self.resealed(converted, tensors, tmp_path / "q.safetensors")
            assert expected in refusal(partial(QuantisedCheckpoint.open, path))

    def test_truncated_files(self, converted: QuantisedCheckpoint, tmp_path: Path) -> None:
        content = converted.path.read_bytes()
        for length in (4, 500, len(content) // 2, len(content) - 1):
            path = tmp_path / "q.safetensors"
            path.write_bytes(content[:length])
            assert "truncated or damaged" in refusal(partial(QuantisedCheckpoint.open, path))

    def test_another_engines_file(self, converted: QuantisedCheckpoint) -> None:
        own = converted.manifest.engine
        other = {"gemlite": "cutlass", "cutlass": "gemlite"}[own]
        assert QuantisedCheckpoint.open(converted.path, own).config == converted.config
        message = refusal(lambda: QuantisedCheckpoint.open(converted.path, other))
        assert f"was converted for the {own} engine: choose --inference-engine {own}" in message
        assert f"--to {other}-" in message

    def test_a_scheme_that_the_engine_lacks(self, converted: QuantisedCheckpoint, tmp_path: Path) -> None:
        """int4 to an engine for int8: no such file is written, but one may be made by hand."""
        from dataclasses import replace

        manifest = replace(converted.manifest, engine="cutlass", scheme="int4")
        save_file(load_file(converted.path), tmp_path / "q.safetensors", metadata=manifest.metadata())
        message = refusal(lambda: QuantisedCheckpoint.open(tmp_path / "q.safetensors", "cutlass"))
        assert "holds int4 weights, which the cutlass engine does not read" in message
        assert "--to cutlass-w8a16" in message

    def test_files_that_are_not_converted(self, source: Path, tmp_path: Path) -> None:
        message = refusal(lambda: QuantisedCheckpoint.open(source, "cutlass"))
        assert f"rwkv-lightning convert '{source}' --to cutlass-w8a16" in message
        assert "--inference-engine fp16" in message
        save_file({"model.W_q": torch.ones(3)}, tmp_path / "x.safetensors")
        assert "quantised by something else" in refusal(lambda: QuantisedCheckpoint.open(tmp_path / "x.safetensors"))

    def test_manifests_survive_the_way_through_text(self, converted: QuantisedCheckpoint) -> None:
        manifest: Manifest = converted.manifest
        assert parse_manifest(manifest.metadata()["rwkv_lightning"]) == manifest


def test_a_model_and_its_converted_files_have_as_many_parameters(tmp_path: Path) -> None:
    """The demo model carries three tensors of the first layer that are never used; converting leaves them out."""
    convert(demo_model_path(), "gemlite-int4", tmp_path / "q.safetensors")
    original, converted = (facts(path)["parameters"] for path in (demo_model_path(), tmp_path / "q.safetensors"))
    assert original == converted == 5_351_168


class TestCommandLine:
    def test_convert_writes_and_says_what(
        self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        out = tmp_path / "q.safetensors"
        arguments = ["convert", str(source.with_suffix("")), "--to", "gemlite-int4", str(out), "--group-size", "128"]
        assert cli.main(arguments) == 0
        shown = capsys.readouterr()
        assert shown.out.startswith(f"{out}: gemlite-int4, 0.")
        assert "of model.pth)" in shown.out
        assert shown.err == ""
        assert QuantisedCheckpoint.open(out, "gemlite").manifest.group_size == 128

    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            (["{model}", "{out}"], "--to"),
            (["{model}", "--to", "int3", "{out}"], "invalid choice: 'int3'"),
            (
                ["{model}", "--to", "gemlite-int8", "{out}", "--group-size", "64"],
                "--group-size is for --to gemlite-int4",
            ),
            (["{model}", "--to", "gemlite-int4", "{out}", "--group-size", "48"], "invalid choice: 48"),
            (["{model}", "--to", "gemlite-int8"], "OUT"),
            (["/no/model", "--to", "gemlite-int8", "{out}"], "there is no model file at '/no/model'"),
            (["{model}", "--to", "gemlite-int8", "q.bin"], "must end in .safetensors"),
        ],
    )
    def test_mistakes_are_one_sentence_and_exit_1(
        self, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
    ) -> None:
        places = {"model": str(source), "out": str(tmp_path / "q.safetensors")}
        assert cli.main(["convert", *(text.format(**places) for text in arguments)]) == 1
        shown = capsys.readouterr()
        assert expected in shown.err
        assert shown.err.count("\n") == 1
        assert in_folder(tmp_path) == []

    def test_inspect_says_what_a_converted_file_is(
        self, converted: QuantisedCheckpoint, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert cli.main(["inspect", str(converted.path), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        manifest = converted.manifest
        assert found == facts(converted.path)
        assert (found["engine"], found["scheme"]) == (manifest.engine, manifest.scheme)
        assert found["size"] == converted.path.stat().st_size
        assert found["checksums"] == "right, of samples of each tensor"
        assert found["source_fingerprint"] == manifest.source.fingerprint
        assert (found["n_embd"], found["parameters"]) == (128, converted.parameters)
        assert found.get("group_size", 0) == manifest.group_size

    def test_inspect_still_says_what_an_original_is(self, source: Path) -> None:
        found = facts(source)
        assert (found["engine"], found["dtype"]) == ("fp16", "bfloat16")
        assert found["fingerprint"] == open_checkpoint(source).fingerprint
