"""Model files: found by name, read alike from both formats, fingerprinted, and refused with a sentence that helps."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import save_file

from benchmarks.checkpoints import SHAPES, ModelShape, main, make, random_weights, save
from rwkv_lightning.core.checkpoint import Checkpoint, check_vocabulary, fingerprint, resolve_model_path
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import CheckpointError
from rwkv_lightning.core.interfaces import ModelConfig

Weights = dict[str, torch.Tensor]
FORMATS = (".pth", ".safetensors")


@pytest.fixture
def weights() -> Weights:
    return random_weights("tiny", seed=1)


def refusal(path: Path) -> str:
    """The message with which this file is refused; it always names the file."""
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    return message


def refusal_of(weights: Weights, folder: Path) -> str:
    path = folder / "model.pth"
    torch.save(weights, path)
    return refusal(path)


class TestResolve:
    def test_a_path_is_taken_as_it_is_then_with_each_suffix(self, tmp_path: Path) -> None:
        for name in ("whole.bin", "g1-1.5.pth", "other.safetensors", "both.pth", "both.safetensors"):
            (tmp_path / name).touch()
        for text, found in {
            "whole.bin": "whole.bin",
            "g1-1.5": "g1-1.5.pth",
            "other": "other.safetensors",
            "both": "both.pth",
        }.items():
            assert resolve_model_path(str(tmp_path / text)) == tmp_path / found

    def test_a_file_wins_over_a_directory_of_the_same_stem(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model.pth").touch()
        assert resolve_model_path(str(tmp_path / "model")) == tmp_path / "model.pth"

    def test_home_is_expanded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        (tmp_path / "model.pth").touch()
        assert resolve_model_path("~/model") == tmp_path / "model.pth"

    def test_an_unknown_path_lists_what_was_tried(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError) as caught:
            resolve_model_path(str(tmp_path / "gone"))
        for tried in ("gone'", "gone.pth'", "gone.safetensors'", "--model-path"):
            assert tried in str(caught.value)

    def test_a_directory_names_the_models_in_it(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match=r"is a directory.*holds no \.pth"):
            resolve_model_path(str(tmp_path))
        (tmp_path / "folder.pth").mkdir()
        with pytest.raises(CheckpointError, match=r"is a directory.*holds no \.pth"):
            resolve_model_path(str(tmp_path))
        (tmp_path / "inside.pth").touch()
        with pytest.raises(CheckpointError, match=r"is a directory.*inside\.pth"):
            resolve_model_path(str(tmp_path))

    @pytest.mark.parametrize("text", ["", "  "])
    def test_an_empty_path_is_refused(self, text: str) -> None:
        with pytest.raises(CheckpointError, match="empty"):
            resolve_model_path(text)


class TestReading:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_both_formats_give_the_same_model(self, tmp_path: Path, dtype: torch.dtype) -> None:
        weights = random_weights("tiny", seed=2, dtype=dtype)
        opened = []
        for suffix in FORMATS:
            save(weights, tmp_path / f"model{suffix}")
            opened.append(Checkpoint.open(tmp_path / f"model{suffix}"))
        for checkpoint in opened:
            assert checkpoint.dtype == dtype
            assert checkpoint.config == ModelConfig(2, 128, 2, 64, 512, 320)
            assert set(checkpoint.names) == set(weights)
            assert all(torch.equal(checkpoint.tensor(name), weight) for name, weight in weights.items())
        assert opened[0].fingerprint == opened[1].fingerprint

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_tensors_are_mapped_from_the_file(self, tmp_path: Path, weights: Weights, suffix: str) -> None:
        path = tmp_path / f"model{suffix}"
        save(weights, path)
        checkpoint = Checkpoint.open(path)
        mappings = [m.addr.split("-") for m in psutil.Process().memory_maps(grouped=False) if m.path == str(path)]
        for name in checkpoint.names:
            address = checkpoint.tensor(name).data_ptr()
            assert any(int(start, 16) <= address < int(stop, 16) for start, stop in mappings), name

    def test_the_format_is_found_by_content(self, tmp_path: Path, weights: Weights) -> None:
        save(weights, tmp_path / "model.pth")
        (tmp_path / "model.pth").rename(tmp_path / "model.bin")
        save(weights, tmp_path / "model.safetensors")
        (tmp_path / "model.safetensors").rename(tmp_path / "model.pth")
        first, second = (Checkpoint.open(tmp_path / name) for name in ("model.bin", "model.pth"))
        assert first.fingerprint == second.fingerprint

    def test_the_format_before_pytorch_1_6_is_read(self, tmp_path: Path, weights: Weights) -> None:
        torch.save(weights, tmp_path / "model.pth", _use_new_zipfile_serialization=False)
        assert Checkpoint.open(tmp_path / "model.pth").fingerprint == fingerprint(weights)

    def test_the_demo_model(self) -> None:
        checkpoint = Checkpoint.open(demo_model_path())
        assert checkpoint.config == ModelConfig(4, 256, 4, 64, 1024, 3660)
        assert checkpoint.parameters == 5_367_808 - 256 * (1 + 2 * 32)  # v0, v1 and v2 of the first layer are unused
        assert checkpoint.nbytes == 2 * 5_367_808
        assert checkpoint.dtype == torch.bfloat16
        assert checkpoint.metadata == {}

    def test_the_first_layers_unused_tensors_may_be_there_in_any_shape(self, tmp_path: Path, weights: Weights) -> None:
        weights.pop("blocks.0.att.v0", None)
        save(weights, tmp_path / "without.pth")
        weights |= {"blocks.0.att.v0": torch.ones(128), "blocks.0.att.v1": torch.ones(128, 7)}
        save(weights, tmp_path / "with.pth")
        assert Checkpoint.open(tmp_path / "without.pth").config == Checkpoint.open(tmp_path / "with.pth").config

    def test_vectors_may_be_stored_flat(self, tmp_path: Path, weights: Weights) -> None:
        flat = {name: tensor.flatten() if tensor.dim() == 3 else tensor for name, tensor in weights.items()}
        save(flat, tmp_path / "model.pth")
        assert Checkpoint.open(tmp_path / "model.pth").config.n_embd == 128

    def test_types_may_be_mixed(self, tmp_path: Path, weights: Weights) -> None:
        mixed = {name: tensor.float() if tensor.dim() != 2 else tensor for name, tensor in weights.items()}
        save(mixed, tmp_path / "model.pth")
        checkpoint = Checkpoint.open(tmp_path / "model.pth")
        assert checkpoint.dtype == torch.bfloat16
        assert checkpoint.tensor("ln_out.weight").dtype == torch.float32

    def test_a_safetensors_file_keeps_its_metadata(self, tmp_path: Path, weights: Weights) -> None:
        save_file(weights, tmp_path / "model.safetensors", metadata={"license": "Apache-2.0"})
        assert Checkpoint.open(tmp_path / "model.safetensors").metadata == {"license": "Apache-2.0"}


class TestFingerprint:
    def test_it_changes_with_any_weight_of_a_small_tensor(self, weights: Weights) -> None:
        before = fingerprint(weights)
        name = "blocks.1.att.x_w"
        seen = {before}
        for position in range(0, 128, 9):
            changed = weights[name].clone()
            changed.view(-1)[position] += 1
            seen.add(fingerprint(weights | {name: changed}))
        assert len(seen) == 1 + len(range(0, 128, 9))

    @pytest.mark.parametrize("position", [0, -1])
    def test_it_changes_with_the_first_and_last_weight_of_a_large_tensor(self, position: int) -> None:
        large = torch.zeros(1000, 1000)
        changed = large.clone()
        changed.view(-1)[position] = 1e-30
        assert fingerprint({"w": large}) != fingerprint({"w": changed})

    def test_it_changes_when_a_large_tensor_changes_nearly_everywhere(self) -> None:
        large = torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))
        assert fingerprint({"w": large}) != fingerprint({"w": large * 1.0001})

    def test_it_changes_with_names_types_and_shapes(self) -> None:
        zeros = torch.zeros(4, 2)
        prints = [{"a": zeros}, {"b": zeros}, {"a": zeros.half()}, {"a": zeros.view(2, 4)}, {"a": zeros, "b": zeros}]
        assert len({fingerprint(tensors) for tensors in prints}) == len(prints)

    def test_order_and_memory_layout_do_not_matter(self, weights: Weights) -> None:
        backwards = {
            name: tensor.t().contiguous().t() for name, tensor in reversed(weights.items()) if tensor.dim() == 2
        }
        forwards = {name: tensor for name, tensor in weights.items() if tensor.dim() == 2}
        assert fingerprint(backwards) == fingerprint(forwards)

    def test_it_is_the_same_in_every_process(self) -> None:
        code = (
            "from rwkv_lightning.core.checkpoint import Checkpoint\n"
            "from rwkv_lightning.core.demo import demo_model_path\n"
            "print(Checkpoint.open(demo_model_path()).fingerprint)"
        )
        environment = os.environ | {"PYTHONHASHSEED": "7"}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == Checkpoint.open(demo_model_path()).fingerprint


class Explosive:
    """Unpickling one of these would make a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, (str(self.folder),)


class TestDamagedFiles:
    def test_not_found(self, tmp_path: Path) -> None:
        assert "no model file" in refusal(tmp_path / "gone.pth")

    def test_a_directory(self, tmp_path: Path) -> None:
        assert "is a directory" in refusal(tmp_path)

    @pytest.mark.parametrize("suffix", FORMATS)
    def test_empty(self, tmp_path: Path, suffix: str) -> None:
        path = tmp_path / f"model{suffix}"
        path.touch()
        assert "is empty" in refusal(path)

    @pytest.mark.parametrize("suffix", FORMATS)
    @pytest.mark.parametrize("kept", [3, 30, 1000, 0.5, 0.9999])
    def test_truncated(self, tmp_path: Path, weights: Weights, suffix: str, kept: float) -> None:
        path = tmp_path / f"model{suffix}"
        save(weights, path)
        content = path.read_bytes()
        path.write_bytes(content[: int(kept * len(content)) if kept < 1 else int(kept)])
        message = refusal(path)
        assert "truncated or damaged" in message
        assert "again" in message

    def test_a_truncated_file_of_the_format_before_pytorch_1_6(self, tmp_path: Path, weights: Weights) -> None:
        path = tmp_path / "model.pth"
        torch.save(weights, path, _use_new_zipfile_serialization=False)
        path.write_bytes(path.read_bytes()[:-1000])
        assert "truncated or damaged" in refusal(path)

    @pytest.mark.parametrize("name", ["model.pth", "model.safetensors", "model"])
    def test_not_a_checkpoint(self, tmp_path: Path, name: str) -> None:
        path = tmp_path / name
        path.write_bytes(b"hello world, hello world, " * 100)
        assert "not a checkpoint" in refusal(path)

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            (b"GGUF\x03\x00\x00\x00" + bytes(100), "GGUF"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n", "git lfs pull"),
            (b"<!DOCTYPE html><html>", "web page"),
        ],
    )
    def test_what_people_take_for_a_checkpoint(self, tmp_path: Path, content: bytes, expected: str) -> None:
        (tmp_path / "model.pth").write_bytes(content)
        assert expected in refusal(tmp_path / "model.pth")

    def test_another_zip(self, tmp_path: Path) -> None:
        with zipfile.ZipFile(tmp_path / "model.pth", "w") as archive:
            archive.writestr("model/readme.txt", "x")
        assert "zip archive but not a PyTorch checkpoint" in refusal(tmp_path / "model.pth")

    def test_a_torchscript_program(self, tmp_path: Path) -> None:
        save(random_weights("tiny"), tmp_path / "model.pth")
        with zipfile.ZipFile(tmp_path / "model.pth", "a") as archive:
            archive.writestr("model/constants.pkl", b"")
        assert "TorchScript" in refusal(tmp_path / "model.pth")

    @pytest.mark.parametrize("zipped", [True, False])
    def test_pickled_code_is_refused_and_never_runs(self, tmp_path: Path, weights: Weights, zipped: bool) -> None:
        bomb = {**weights, "bomb": Explosive(tmp_path / "exploded")}
        torch.save(bomb, tmp_path / "model.pth", _use_new_zipfile_serialization=zipped)
        message = refusal(tmp_path / "model.pth")
        assert "posix.mkdir" in message or "nt.mkdir" in message
        assert "state_dict" in message
        assert not (tmp_path / "exploded").exists()

    def test_a_pickled_module_is_refused(self, tmp_path: Path) -> None:
        torch.save(torch.nn.Linear(2, 2), tmp_path / "model.pth")
        assert "torch.nn.modules.linear.Linear" in refusal(tmp_path / "model.pth")

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ([torch.zeros(1)], "holds a list"),
            ({"model": {"w": torch.zeros(1)}}, "under the key 'model'"),
            ({"w": torch.zeros(1), "step": 5}, "holds a int under the key 'step'"),
            ({0: torch.zeros(1)}, "under the key 0"),
            ({"w": torch.eye(3).to_sparse()}, "sparse"),
        ],
    )
    def test_anything_but_a_plain_dict_of_tensors(self, tmp_path: Path, content: object, expected: str) -> None:
        torch.save(content, tmp_path / "model.pth")
        message = refusal(tmp_path / "model.pth")
        assert expected in message
        assert "state_dict" in message


class TestOtherModels:
    @pytest.mark.parametrize(
        ("version", "extra"),
        [
            ("RWKV-4", {"time_decay": (8,), "time_first": (8,)}),
            ("RWKV-5", {"time_decay": (8,), "time_first": (8,), "ln_x.weight": (8,)}),
            ("RWKV-5", {"time_decay": (2, 4), "time_faaaa": (2, 4)}),
            ("RWKV-6", {"time_decay": (1, 1, 8), "time_faaaa": (2, 4), "time_maa_x": (1, 1, 8)}),
        ],
    )
    def test_older_versions_are_named(self, tmp_path: Path, version: str, extra: dict[str, tuple[int, ...]]) -> None:
        old = {"emb.weight": torch.zeros(4, 8)}
        old |= {f"blocks.0.att.{name}": torch.zeros(shape) for name, shape in extra.items()}
        message = refusal_of(old, tmp_path)
        assert f"is an {version} model" in message
        assert "RWKV-7" in message

    @pytest.mark.parametrize(
        "name", ["model.layers.0.self_attn.q_proj.weight", "transformer.h.0.attn.c_attn.weight", "blk.0.attn_q.weight"]
    )
    def test_transformers(self, tmp_path: Path, name: str) -> None:
        message = refusal_of({name: torch.zeros(2, 2)}, tmp_path)
        assert "transformer" in message
        assert name in message

    @pytest.mark.parametrize(
        ("names", "expected"),
        [
            (["model.layers.0.attn.r_k", "model.embeddings.weight"], "Hugging Face"),
            (["blocks.0.att.time_state", "blocks.1.att.time_state"], "initial state"),
            (["conv1.weight"], "'conv1.weight'"),
            ([], "no tensors"),
        ],
    )
    def test_the_rest(self, tmp_path: Path, names: list[str], expected: str) -> None:
        assert expected in refusal_of({name: torch.zeros(2, 2) for name in names}, tmp_path)

    @pytest.mark.parametrize("key", ["blocks.0.att.key.W_q", "blocks.0.att.key.qweight", "head.scales"])
    def test_quantised_by_its_keys(self, tmp_path: Path, weights: Weights, key: str) -> None:
        weights[key] = torch.zeros(2, 2, dtype=torch.int8)
        assert "--inference-engine gemlite" in refusal_of(weights, tmp_path)

    def test_quantised_by_its_manifest(self, tmp_path: Path, weights: Weights) -> None:
        path = tmp_path / "model.safetensors"
        save_file(weights, path, metadata={"rwkv_lightning": "{}"})
        assert "--inference-engine gemlite" in refusal(path)


class TestWrongTensors:
    def test_missing_keys_are_named(self, tmp_path: Path, weights: Weights) -> None:
        del weights["blocks.1.att.g2"]
        message = refusal_of(weights, tmp_path)
        assert "lacks blocks.1.att.g2" in message

    def test_many_missing_keys_are_counted(self, tmp_path: Path, weights: Weights) -> None:
        kept = {name: tensor for name, tensor in weights.items() if "ffn" not in name}
        assert "blocks.0.ffn.x_k, blocks.0.ffn.key.weight, blocks.0.ffn.value.weight and 3 more" in refusal_of(
            kept, tmp_path
        )

    def test_a_missing_layer_in_the_middle(self, tmp_path: Path) -> None:
        weights = random_weights(ModelShape(3, 64, 8, 8, 8, 8, vocab_size=16))
        kept = {name: tensor for name, tensor in weights.items() if not name.startswith("blocks.1.")}
        message = refusal_of(kept, tmp_path)
        assert "blocks.1.att.r_k" in message
        assert "3 layers" in message

    def test_surplus_keys_mean_a_variant(self, tmp_path: Path, weights: Weights) -> None:
        weights["blocks.0.ffn.s_emb.weight"] = torch.zeros(2)
        assert "blocks.0.ffn.s_emb.weight" in refusal_of(weights, tmp_path)

    @pytest.mark.parametrize(
        ("name", "shape", "expected"),
        [
            ("blocks.1.att.w2", (16, 127), "expected [w=16, C=128]"),
            ("blocks.1.att.w2", (15, 128), "expected [w=16, C=128]"),
            ("blocks.1.att.x_k", (1, 1, 64), "expected [C=128]"),
            ("blocks.1.att.x_k", (2, 64), "expected [C=128]"),
            ("blocks.0.ffn.value.weight", (128, 500), "expected [C=128, F=512]"),
            ("head.weight", (319, 128), "expected [V=320, C=128]"),
            ("blocks.0.att.key.weight", (128,), "expected [C=128, C=128]"),
            ("emb.weight", (0, 128), "expected [V, C]"),
            ("ln_out.bias", (), "expected [C=128]"),
        ],
    )
    def test_wrong_shapes_name_tensor_and_expectation(
        self, tmp_path: Path, weights: Weights, name: str, shape: tuple[int, ...], expected: str
    ) -> None:
        message = refusal_of(weights | {name: torch.zeros(shape)}, tmp_path)
        assert f"{name} is {list(shape)}" in message
        assert expected in message

    def test_heads_that_do_not_fit_the_width(self, tmp_path: Path, weights: Weights) -> None:
        narrow = {f"blocks.{layer}.att.r_k": torch.zeros(2, 32) for layer in range(2)}
        message = refusal_of(weights | narrow, tmp_path)
        assert "2 heads of 32" in message
        assert "width of 128" in message

    @pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.float8_e4m3fn])
    def test_types_that_are_not_read(self, tmp_path: Path, weights: Weights, dtype: torch.dtype) -> None:
        message = refusal_of(weights | {"head.weight": weights["head.weight"].to(dtype)}, tmp_path)
        assert f"head.weight as {str(dtype).removeprefix('torch.')}" in message


class TestVocabulary:
    CONFIG = ModelConfig(2, 128, 2, 64, 512, 320)

    def test_a_larger_one_is_refused_naming_both_sizes(self) -> None:
        with pytest.raises(CheckpointError, match=r"321 ids .* 320 rows.*--vocab"):
            check_vocabulary(self.CONFIG, 321)

    @pytest.mark.parametrize("size", [320, 300])
    def test_a_smaller_one_is_fine(self, size: int) -> None:
        check_vocabulary(self.CONFIG, size)


class TestRandomCheckpoints:
    def test_shape_and_seed_decide_every_weight(self) -> None:
        prints = [fingerprint(random_weights("tiny", seed)) for seed in (1, 1, 2)]
        assert prints[0] == prints[1] != prints[2]

    @pytest.mark.parametrize(
        ("name", "parameters"),
        [("0.1b", 191_034_624), ("0.4b", 450_767_872), ("1.5b", 1_527_404_544), ("2.9b", 2_947_735_040)],
    )
    def test_named_shapes_have_the_published_sizes(self, name: str, parameters: int) -> None:
        assert SHAPES[name].parameters() == parameters

    def test_the_demo_model_has_the_layout_that_is_made(self) -> None:
        demo = Checkpoint.open(demo_model_path())
        made = ModelShape(4, 256, 32, 32, 32, 64, vocab_size=3660).tensors()
        stored = {name: tuple(demo.tensor(name).shape) for name in demo.names}
        assert {name: stored[name] for name in made} == made
        assert set(stored) - set(made) == {f"blocks.0.att.{name}" for name in ("v0", "v1", "v2")}

    def test_the_command_line(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "model.safetensors"
        assert main(["tiny", str(path), "--seed", "5", "--dtype", "float16"]) == 0
        assert Checkpoint.open(path).fingerprint == fingerprint(random_weights("tiny", 5, torch.float16))
        assert "0.5 M parameters" in capsys.readouterr().out

    def test_another_suffix_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match=r"neither \.pth nor \.safetensors"):
            make(tmp_path / "model.bin", "tiny")
