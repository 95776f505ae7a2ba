"""The fp16 backend: where it can run, which types it chooses, what it refuses, and the golden logits."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pluggy import PluginManager
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints import make, random_weights, save
from rwkv_lightning.core import byte_bar
from rwkv_lightning.core.checkpoint import Checkpoint
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import CheckpointError, StartError
from rwkv_lightning.core.hookspecs import NAMESPACE
from rwkv_lightning.core.interfaces import Backend, Batch, LoadOptions, Model
from rwkv_lightning.plugins.backends import fp16, precision
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend
from rwkv_lightning.plugins.backends.precision import bfloat16_gain, choose_precision
from rwkv_lightning.plugins.backends.weights import CheckpointSource, loading_bar

DATA = Path(__file__).parent / "data"
CPU = torch.device("cpu")
FLOAT32 = LoadOptions(dtype="float32")


def feed(model: Model, prompts: list[list[int]]) -> torch.Tensor:
    """Logits [len(prompts), V] after the last token of each prompt, all in one ragged step from the zero state."""
    states = model.new_states(len(prompts))
    states.reset(range(len(prompts)))
    offsets = torch.tensor([0, *map(len, prompts)]).cumsum(0)
    tokens = torch.tensor([token for prompt in prompts for token in prompt], dtype=torch.int32)
    slots = torch.arange(len(prompts), dtype=torch.int32)
    return model.forward(Batch(tokens, offsets.int(), slots, offsets[1:] - 1), states).clone()


class TestRegistration:
    def test_it_registers_under_its_name_without_importing_torch(self) -> None:
        code = (
            "import sys\n"
            "from rwkv_lightning.plugins.backends import fp16\n"
            "fp16.register_backends(lambda name, factory, description: (print(name), factory()))\n"
            "assert 'torch' not in sys.modules"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout.strip()) == (0, "fp16"), done.stderr

    def test_the_module_is_a_plugin(self) -> None:
        assert PluginManager(NAMESPACE).parse_hookimpl_opts(fp16, "register_backends") is not None
        factories: dict[str, object] = {}
        fp16.register_backends(lambda name, factory, description: factories.update({name: factory}))
        assert factories == {"fp16": Fp16Backend}


class TestProbe:
    backend: Backend = Fp16Backend()

    def test_a_cpu_is_always_usable(self) -> None:
        assert self.backend.probe("cpu") is None

    @pytest.mark.parametrize("device", ["gpu", "mps", "meta", "cuda:-2"])
    def test_other_devices_are_refused_with_the_way_out(self, device: str) -> None:
        reason = self.backend.probe(device)
        assert reason is not None
        assert device in reason
        assert "--device cpu" in reason

    def test_cuda_needs_a_build_that_has_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", None)
        monkeypatch.setattr(torch.version, "hip", None)
        assert "built without CUDA" in str(self.backend.probe("cuda"))

    @pytest.mark.parametrize("build", ["cuda", "hip"])
    def test_cuda_needs_a_device(self, monkeypatch: pytest.MonkeyPatch, build: str) -> None:
        monkeypatch.setattr(torch.version, build, "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert "no CUDA or ROCm device is visible" in str(self.backend.probe("cuda"))
        with pytest.raises(StartError, match="no CUDA or ROCm device is visible"):
            self.backend.load(demo_model_path(), LoadOptions(device="cuda"))

    def test_the_number_of_the_device_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert [self.backend.probe(device) for device in ("cuda", "cuda:0", "cuda:1")] == [None] * 3
        assert "the last one is cuda:1" in str(self.backend.probe("cuda:2"))


class TestPrecision:
    @pytest.mark.parametrize(
        ("gain", "dtype", "state_dtype"),
        [
            (2.0, torch.bfloat16, torch.float16),
            (1.0, torch.float32, torch.float32),
            (0.2, torch.float32, torch.float32),
        ],
    )
    def test_auto_on_a_cpu_takes_the_faster_type_and_says_why(
        self, monkeypatch: pytest.MonkeyPatch, gain: float, dtype: torch.dtype, state_dtype: torch.dtype
    ) -> None:
        monkeypatch.setattr(precision, "bfloat16_gain", lambda: gain)
        chosen = choose_precision(LoadOptions())
        assert (chosen.dtype, chosen.state_dtype) == (dtype, state_dtype)
        assert f"measured {gain:.1f} times as fast" in chosen.why

    def test_the_measurement_is_made_once(self) -> None:
        threads = torch.get_num_threads()
        first = bfloat16_gain()
        assert first > 0
        assert bfloat16_gain() == first
        assert torch.get_num_threads() == threads

    def test_auto_on_a_gpu_is_float16(self) -> None:
        chosen = choose_precision(LoadOptions(device="cuda"))
        assert (chosen.dtype, chosen.state_dtype) == (torch.float16, torch.float16)

    @pytest.mark.parametrize(
        ("options", "state_dtype"),
        [
            (LoadOptions(dtype="bfloat16"), torch.float16),
            (LoadOptions(dtype="bfloat16", deterministic=True), torch.float32),
            (LoadOptions(dtype="bfloat16", state_dtype="float32"), torch.float32),
            (LoadOptions(dtype="float32"), torch.float32),
            (LoadOptions(dtype="float32", state_dtype="float16"), torch.float16),
            (LoadOptions(device="cuda", dtype="float16", deterministic=True), torch.float32),
        ],
    )
    def test_states(self, options: LoadOptions, state_dtype: torch.dtype) -> None:
        assert choose_precision(options).state_dtype == state_dtype

    @pytest.mark.parametrize(
        ("options", "expected"),
        [
            (LoadOptions(dtype="float16"), "--dtype bfloat16 or --dtype float32"),
            (LoadOptions(dtype="int8"), "--dtype int8 is unknown: choose auto, float32, bfloat16, float16"),
            (LoadOptions(dtype="float32", state_dtype="int8"), "--state-dtype int8 is unknown"),
            (LoadOptions(dtype="float32", state_dtype="float16", deterministic=True), "choose --state-dtype float32"),
        ],
    )
    def test_choices_that_cannot_serve(self, options: LoadOptions, expected: str) -> None:
        with pytest.raises(StartError, match=expected):
            choose_precision(options)


class TestSource:
    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Checkpoint:
        return Checkpoint.open(make(tmp_path / "model.pth", "tiny", seed=3))

    def source(self, checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> CheckpointSource:
        return CheckpointSource(checkpoint, device=CPU, dtype=dtype)

    @pytest.mark.parametrize("name", ["blocks.1.att.key.weight", "blocks.0.ffn.value.weight", "head.weight"])
    def test_matrices_are_operators(self, checkpoint: Checkpoint, name: str) -> None:
        weight = checkpoint.tensor(name).float()
        x = torch.randn(3, weight.shape[1], generator=torch.Generator().manual_seed(0))
        linear = self.source(checkpoint).linear(name)
        assert (linear.in_features, linear.out_features) == (weight.shape[1], weight.shape[0])
        torch.testing.assert_close(linear(x), x @ weight.T, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"])
    def test_low_rank_pairs_are_transposed(self, checkpoint: Checkpoint, name: str) -> None:
        weight = checkpoint.tensor(f"blocks.1.att.{name}").float()
        x = torch.randn(3, weight.shape[0], generator=torch.Generator().manual_seed(0))
        linear = self.source(checkpoint).linear(f"blocks.1.att.{name}")
        torch.testing.assert_close(linear(x), x @ weight, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize("name", ["blocks.1.att.x_r", "blocks.1.att.r_k", "ln_out.bias"])
    def test_small_tensors_are_flat_float32(self, checkpoint: Checkpoint, name: str) -> None:
        tensor = self.source(checkpoint).tensor(name)
        assert (tensor.dtype, tensor.shape) == (torch.float32, (128,))
        assert torch.equal(tensor, checkpoint.tensor(name).float().flatten())

    def test_the_embedding_stays_in_the_file(self, checkpoint: Checkpoint) -> None:
        table, scales = self.source(checkpoint).table()
        assert scales is None
        assert table.data_ptr() == checkpoint.tensor("emb.weight").data_ptr()
        assert table.shape == checkpoint.tensor("emb.weight").shape

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("name", ["emb.weight", "blocks.1.ffn.key.weight", "blocks.0.att.w1", "ln_out.bias"])
    def test_damaged_weights_are_named(self, tmp_path: Path, name: str, value: float) -> None:
        damaged = random_weights("tiny")
        damaged[name].view(-1)[5] = value
        save(damaged, tmp_path / "damaged.pth")
        with pytest.raises(CheckpointError, match=rf"damaged\.pth' holds NaN or infinity in {name}"):
            Fp16Backend().load(tmp_path / "damaged.pth", FLOAT32)

    def test_weights_beyond_the_compute_type_are_named(self, tmp_path: Path) -> None:
        large = random_weights("tiny")
        large["head.weight"][1, 1] = 1e6
        save(large, tmp_path / "model.pth")
        source = self.source(Checkpoint.open(tmp_path / "model.pth"), torch.float16)
        with pytest.raises(CheckpointError, match=r"head\.weight holds values beyond float16.*--dtype bfloat16"):
            source.linear("head.weight")

    def test_large_finite_weights_are_fine(self, tmp_path: Path) -> None:
        """Their sum overflows float16; they do not."""
        large = random_weights("tiny", dtype=torch.float16)
        large["head.weight"].fill_(60000)
        save(large, tmp_path / "model.pth")
        linear = self.source(Checkpoint.open(tmp_path / "model.pth"), torch.float16).linear("head.weight")
        assert linear.out_features == 320


class TestLoading:
    backend: Backend = Fp16Backend()

    def test_every_byte_is_reported_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[int] = []

        def recorded(checkpoint: Checkpoint, **options: object) -> CheckpointSource:
            return CheckpointSource(checkpoint, **options | {"on_read": seen.append})  # type: ignore[arg-type]

        monkeypatch.setattr("rwkv_lightning.plugins.backends.weights.CheckpointSource", recorded)
        path = make(tmp_path / "model.pth", "tiny")
        self.backend.load(path, FLOAT32)
        assert sum(seen) == Checkpoint.open(path).nbytes

    def test_the_bar_is_silent_for_small_files(self, capsys: pytest.CaptureFixture[str]) -> None:
        with loading_bar(Checkpoint.open(demo_model_path())) as advance:
            advance(5)
        assert capsys.readouterr() == ("", "")

    def test_the_bar_names_a_large_file_on_a_terminal(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(byte_bar, "BAR_FROM", 0)
        monkeypatch.setenv("TTY_COMPATIBLE", "1")
        checkpoint = Checkpoint.open(demo_model_path())
        with loading_bar(checkpoint) as advance:
            advance(checkpoint.nbytes)
        output = capsys.readouterr()
        assert output.out == ""
        assert "loading rwkv7-demo.pth" in output.err

    def test_a_bad_file_is_refused_as_the_checkpoint_says(self, tmp_path: Path) -> None:
        (tmp_path / "empty.pth").touch()
        with pytest.raises(CheckpointError, match="is empty"):
            self.backend.load(tmp_path / "empty.pth", FLOAT32)

    def test_a_quantised_file_names_the_engine_for_it(self, tmp_path: Path) -> None:
        save_file(random_weights("tiny"), tmp_path / "q.safetensors", metadata={"rwkv_lightning": "{}"})
        with pytest.raises(CheckpointError, match="--inference-engine gemlite"):
            self.backend.load(tmp_path / "q.safetensors", FLOAT32)

    def test_the_description_names_type_states_and_kernels(self) -> None:
        model = self.backend.load(demo_model_path(), LoadOptions(dtype="bfloat16"))
        assert isinstance(model, Model)
        for part in ("bfloat16", "float16 states", "linears: "):
            assert part in model.description
        assert (model.dtype, model.device) == ("bfloat16", "cpu")

    def test_storage_and_format_do_not_change_a_bit_of_float32(self, tmp_path: Path) -> None:
        """bfloat16 weights are exact in float32, so every way to store them is the same model."""
        stored = random_weights("tiny", seed=4)
        save(stored, tmp_path / "bfloat16.pth")
        save(stored, tmp_path / "bfloat16.safetensors")
        save({name: tensor.float() for name, tensor in stored.items()}, tmp_path / "float32.pth")
        prompts = [[3, 1, 4, 1, 5], [9], [2, 6]]
        logits = [feed(self.backend.load(path, FLOAT32), prompts) for path in sorted(tmp_path.iterdir())]
        assert len(logits) == 3
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])

    def test_float16_storage_is_read(self, tmp_path: Path) -> None:
        stored = random_weights("tiny", seed=4, dtype=torch.float16)
        save(stored, tmp_path / "float16.pth")
        save({name: tensor.float() for name, tensor in stored.items()}, tmp_path / "float32.pth")
        half, whole = (
            feed(self.backend.load(tmp_path / name, FLOAT32), [[3, 1, 4]]) for name in ("float16.pth", "float32.pth")
        )
        assert torch.equal(half, whole)

    def test_random_checkpoints_stay_lively_over_many_tokens(self, tmp_path: Path) -> None:
        """Benchmarks run on them: finite logits that spread and differ between prompts, as a real model's do."""
        model = self.backend.load(make(tmp_path / "model.pth", "tiny"), FLOAT32)
        prompts = [[(seed + 7 * i) % 320 for i in range(400)] for seed in (1, 2)]
        logits = feed(model, prompts)
        assert logits.isfinite().all()
        assert 0.5 < float(logits.std()) < 20
        assert float((logits[0] - logits[1]).norm() / logits[0].norm()) > 0.1


class TestGolden:
    """The demo model against float64 logits, stored with it."""

    @pytest.mark.parametrize(
        ("options", "bound"),
        [
            (LoadOptions(dtype="float32"), 1e-4),
            (LoadOptions(dtype="float32", deterministic=True), 1e-4),
            (LoadOptions(dtype="bfloat16"), 2e-2),
            (LoadOptions(dtype="bfloat16", state_dtype="float32"), 2e-2),
        ],
    )
    def test_logits_after_every_prompt(self, options: LoadOptions, bound: float) -> None:
        prompts = [item["prompt_ids"] for item in json.loads((DATA / "golden.json").read_text())["items"]]
        golden = load_file(DATA / "golden.safetensors")
        expected = torch.stack([golden[f"{i:02}"] for i in range(len(prompts))])
        logits = feed(Fp16Backend().load(demo_model_path(), options), prompts)
        errors = (logits - expected).norm(dim=1) / expected.norm(dim=1)
        assert float(errors.max()) < bound

    def test_deterministic_rows_do_not_depend_on_neighbours(self) -> None:
        model = Fp16Backend().load(demo_model_path(), LoadOptions(dtype="bfloat16", deterministic=True))
        prompts = [[5, 6, 7, 8], [100, 200], [3000] * 9]
        together = feed(model, prompts)
        for prompt, logits in zip(prompts, together, strict=True):
            assert torch.equal(feed(model, [prompt])[0], logits)
