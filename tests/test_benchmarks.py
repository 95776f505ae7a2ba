"""The benchmarks: what they compute is right, what they read and write fits, and a small comparison runs."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import ceilings, compare, scaling, simulate
from benchmarks.comparison import FLOORS, Run, Verdict, agree, floors, render
from benchmarks.peers import CONTENDERS, PREFILL, gguf_writer, llama
from benchmarks.scaling import MACHINES, Machine, Model
from benchmarks.simulate import Simulation, Site, Workload
from benchmarks.worker import Worker, WorkerFailed
from rwkv_lightning.core.random_checkpoint import SHAPES, ModelShape, make, random_weights

ROOT = Path(__file__).parents[1]
TINY = ModelShape(3, 128, 16, 16, 8, 32, vocab_size=320)


class TestScaling:
    def test_the_document_holds_the_tables_that_the_script_makes(self) -> None:
        text = (ROOT / "docs" / "scaling.md").read_text()
        assert scaling.with_tables(text) == text, "python -m benchmarks.scaling --write docs/scaling.md"

    def test_a_document_without_marks_is_refused(self) -> None:
        with pytest.raises(ValueError, match="marks of the table of sizes"):
            scaling.with_tables("nothing")

    @pytest.mark.parametrize("state_dtype", ["float32", "float16"])
    def test_states_are_as_large_as_the_models(self, state_dtype: str, tmp_path: Path) -> None:
        from rwkv_lightning.core.interfaces import LoadOptions
        from rwkv_lightning.plugins.backends.fp16 import Fp16Backend

        path = make(tmp_path / "tiny.pth", TINY)
        model = Fp16Backend().load(path, LoadOptions(dtype="float32", state_dtype=state_dtype))
        bytes_each = 4 if state_dtype == "float32" else 2
        assert Model(TINY, state_bytes=bytes_each).state() == model.state_nbytes()

    def test_every_matrix_is_counted_once(self) -> None:
        shape = SHAPES["0.1b"]
        matrices = Model(shape).matrices()
        assert matrices.count((65536, 768)) == 1
        vectors = shape.parameters() - sum(n * k for n, k in matrices) - 65536 * 768
        assert 0 < vectors < 0.002 * shape.parameters()

    def test_one_row_is_bound_by_memory_and_many_by_arithmetic(self) -> None:
        model = Model(SHAPES["1.5b"])
        machine = Machine("m", 1e12, 100e9, 1e12)
        elements = sum(n * k for n, k in model.matrices())
        assert model.step(machine, 1) == pytest.approx((2 * elements + 2 * model.state()) / 100e9)
        assert model.step(machine, 960) == pytest.approx(960 * (2 * elements / 1e12 + 2 * model.state() / 100e9))

    def test_a_prompt_needs_the_head_and_most_of_the_last_layer_once(self) -> None:
        model = Model(SHAPES["0.1b"])
        machine = Machine("m", 1e12, 1e18, 1e12)
        body, late = model.matrices()[:-7], model.matrices()[-7:]
        square, gate, feed = 768 * 768, 768 * 128, 3072 * 768
        assert sum(n * k for n, k in late) == 2 * square + 2 * gate + 2 * feed + 65536 * 768
        expected = 512 / (2 * 512 * sum(n * k for n, k in body) / 1e12)
        assert model.prefill(machine, 512) == pytest.approx(expected, rel=0.01)

    def test_slots_are_what_the_weights_leave(self) -> None:
        model = Model(SHAPES["0.1b"])
        room = model.weights() + 10.5 * model.state()
        assert model.slots(Machine("m", room / scaling.DEVICE_SHARE, 1, 1)) == 10
        assert model.slots(Machine("m", model.weights() / 2, 1, 1)) == 0


class TestSimulation:
    SITE = Site(Model(SHAPES["0.1b"]), MACHINES["core"], 16)

    def outcome(self, load: float, sessions: int = 150) -> Any:
        return Simulation(self.SITE, Workload(sessions, load, prompt=20, answer=10)).run()

    def test_everybody_is_answered(self) -> None:
        work = Workload(150, 0.7, prompt=20, answer=10)
        simulation = Simulation(self.SITE, work)
        outcome = simulation.run()
        assert len(outcome.first) == work.sessions
        assert min(outcome.first) > 0
        assert outcome.tokens == sum(answer for _, _, answer in simulate.arrivals(work, 1.0))
        assert outcome.row_steps >= outcome.tokens - work.sessions
        simulation.scheduler.check_integrity()

    def test_more_load_means_longer_waits_and_no_more_than_the_capacity(self) -> None:
        calm, busy = self.outcome(0.2), self.outcome(3.0)
        assert busy.percentile(0.5) > 2 * calm.percentile(0.5)
        assert busy.most_waiting > calm.most_waiting
        capacity = self.SITE.capacity(Workload(1, 1, 20, 10))
        assert 0.3 * capacity < len(busy.first) / busy.seconds < 1.3 * capacity

    def test_arrivals_are_random_and_repeatable(self) -> None:
        work = Workload(2000, 1.0, prompt=50, answer=30, seed=3)
        drawn = list(simulate.arrivals(work, 10.0))
        assert drawn == list(simulate.arrivals(work, 10.0))
        times, prompts, answers = map(np.array, zip(*drawn, strict=True))
        gaps = np.diff(times)
        assert 0.09 < gaps.mean() < 0.11
        assert 0.9 < gaps.std() / gaps.mean() < 1.1  # exponential
        assert 45 < prompts.mean() < 56
        assert 27 < answers.mean() < 34
        assert min(*prompts, *answers) >= 1

    def test_the_command_prints_a_line_per_load(self, capsys: pytest.CaptureFixture[str]) -> None:
        line = "--sessions 30 --loads 0.5 1.1 --shape 0.1b --machine core --slots 8 --no-cost"
        assert simulate.main(line.split()) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0] == "0.1b on CPU, 1 core, 8 slots, 30 sessions per load"
        assert [line.split(" | ")[0] for line in lines[-2:]] == ["| 50%", "| 110%"]
        assert {line.count("|") for line in lines[2:]} == {6}
        assert "scheduler" not in "".join(lines[1:])


class TestCeilings:
    def test_every_byte_is_read(self) -> None:
        library = ceilings.native()
        assert library is not None
        data = torch.randint(-(1 << 60), 1 << 60, (32 * 6,))
        for threads in (1, 2, 3):
            total = library.rl_read_all(data.numpy().ctypes.data, data.nbytes, threads)
            assert total == int(data.sum()) % (1 << 64)

    def test_a_sample_has_all_four(self) -> None:
        sample = ceilings.Ceilings(1, quick=True).sample()
        assert list(sample) == ["memory", "bf16", "int8", "instruction"]
        assert min(sample["memory"], sample["bf16"], sample["int8"]) > 0


class TestGguf:
    weights = random_weights(TINY, dtype=torch.float32)

    def entries(self) -> dict[tuple[str, str, int], torch.Tensor]:
        return {(label, suffix, layer): tensor for label, suffix, layer, tensor in gguf_writer.entries(self.weights)}

    def test_every_weight_is_written(self) -> None:
        entries = self.entries()
        written = sum(tensor.numel() for tensor in entries.values())
        first = sum(entries[f"TIME_MIX_V{i}", "weight", 0].numel() for i in range(3))
        assert written - first == TINY.parameters()

    def test_low_rank_pairs_are_turned_and_mixes_stacked(self) -> None:
        entries = self.entries()
        assert torch.equal(entries["TIME_MIX_W1", "weight", 1], self.weights["blocks.1.att.w1"].T)
        assert torch.equal(entries["TIME_MIX_G2", "weight", 2], self.weights["blocks.2.att.g2"].T)
        assert torch.equal(entries["TIME_MIX_KEY", "weight", 1], self.weights["blocks.1.att.key.weight"])
        fused = entries["TIME_MIX_LERP_FUSED", "weight", 1]
        assert fused.shape == (6, 1, 1, 128)
        for row, letter in zip(fused, "rwkvag", strict=True):
            assert torch.equal(row.flatten(), self.weights[f"blocks.1.att.x_{letter}"].flatten())

    def test_the_first_layers_value_mix_takes_the_learning_rates_values(self) -> None:
        entries = self.entries()
        for i in range(3):
            assert torch.equal(entries[f"TIME_MIX_V{i}", "weight", 0], entries[f"TIME_MIX_A{i}", "weight", 0])
        assert not torch.equal(entries["TIME_MIX_V0", "weight", 1], entries["TIME_MIX_A0", "weight", 1])


if importlib.util.find_spec("gguf"):  # of the extra [bench]

    @pytest.mark.parametrize(("kind", "bound"), [("f32", 0.0), ("bf16", 0.005), ("q8_0", 0.02)])
    def test_a_gguf_file_reads_back(kind: str, bound: float, tmp_path: Path) -> None:
        import gguf

        weights = TestGguf.weights
        path = gguf_writer.write(weights, tmp_path / "m.gguf", kind, [b"", *(bytes([i]) for i in range(256))])
        reader = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        assert reader.fields["general.architecture"].contents() == "rwkv7"
        assert reader.fields["rwkv7.block_count"].contents() == 3
        assert reader.fields["rwkv7.attention.value_residual_mix_lora_rank"].contents() == 8
        tokens = reader.fields["tokenizer.ggml.tokens"].contents()
        assert len(tokens) == 320
        assert (tokens[0], tokens[66], tokens[1], tokens[319]) == ("<s>", "A", "\\x00", "[PAD319]")
        for name, official in (
            ("blk.1.channel_mix_key.weight", "blocks.1.ffn.key.weight"),
            ("output.weight", "head.weight"),
        ):
            read = gguf.quants.dequantize(tensors[name].data, tensors[name].tensor_type)
            wanted = weights[official].numpy()
            assert np.abs(read - wanted).max() <= bound * np.abs(wanted).max()


class TestLlamaOutput:
    def test_the_result_line_is_found(self) -> None:
        output = 'load: x\n{"pp": 1, "tg": 8, "pl": 4, "speed_pp": 10.5, "speed_tg": 20.25}\nllama_perf: y\n'
        assert llama.parse(output)["speed_tg"] == 20.25

    def test_no_result_is_an_error_with_what_it_said(self) -> None:
        with pytest.raises(RuntimeError, match="unknown architecture"):
            llama.parse("error: unknown architecture\n")


class TestComparison:
    def test_tokens_are_compared_up_to_the_first_difference_of_each_prompt(self) -> None:
        expected = [[(5, 1.0), (6, 0.2), (7, 3.0)], [(1, 1.0), (2, 1.0), (3, 1.0)]]
        verdict = agree(expected, [[5, 9, 9], [1, 2, 3]])
        assert verdict == Verdict(4, 6, 0.2)
        assert not verdict.exact
        assert "near ties" in str(verdict)
        assert "not only near ties" in str(agree(expected, [[5, 6, 9], [1, 2, 3]]))
        assert str(agree(expected, [[5, 6, 7], [1, 2, 3]])) == "all 6 tokens equal"

    def run(self, threads: int = 1, scale: float = 1.0) -> Run:
        run = Run(threads)
        for number, factor in enumerate((1.0, 0.5, 0.9)):  # a slow moment hits both contenders of a round
            run.add_ceilings({"memory": 30.0, "bf16": 200.0, "int8": 400.0, "instruction": 220.0})
            for column, rate in (("1", 80.0), ("64", 600.0), (PREFILL, 900.0)):
                run.add("ours bf16", column, number, scale * rate * factor)
                run.add("llama.cpp bf16", column, number, rate * factor / 1.5)
        return run

    def test_ratios_are_taken_within_a_round(self) -> None:
        run = self.run()
        del run.figures["llama.cpp bf16", "1"][0]  # it failed once
        assert run.ratio("ours bf16", "llama.cpp bf16", "1") == pytest.approx(1.5)
        assert run.ratio("ours bf16", "llama.cpp bf16", "256") is None
        assert run.median("ours bf16", "1") == pytest.approx(72)

    def test_the_roofline_is_that_of_the_measured_ceilings(self) -> None:
        expected = Model(SHAPES["0.1b"]).decode(Machine("", 0, 30e9, 200e9), 64)
        assert self.run().roofline("0.1b", "bf16", "64") == pytest.approx(expected)
        assert self.run().roofline("0.1b", "int8", "64") > 1.5 * expected

    def test_floors_are_met_or_missed(self) -> None:
        found = {(f.what, f.column): (f.floor, f.value) for f in floors("0.1b", [self.run()])}
        pair = "ours bf16 / llama.cpp bf16"
        assert found[pair, "1"] == (FLOORS["ours bf16", "llama.cpp bf16"]["1"], pytest.approx(1.5))
        assert found[pair, "64"][0] > found[pair, "64"][1]
        assert ("two threads / one", "64") not in found
        both = list(floors("0.1b", [self.run(), self.run(2, 1.9)]))
        two = next(f for f in both if f.what == "two threads / one" and f.column == "64")
        assert (two.floor, two.value, two.best) == (1.7, pytest.approx(1.9), pytest.approx(1.9))

    def test_the_fastest_rounds_are_judged_too(self) -> None:
        run = self.run()
        run.figures["ours bf16", "1"][2] = 160.0
        floor = next(f for f in floors("0.1b", [run]) if f.column == "1" and "llama" in f.what)
        assert (floor.value, floor.best) == (pytest.approx(1.5), pytest.approx(3.0))

    def test_the_report_has_a_cell_for_every_figure(self) -> None:
        run = self.run()
        run.memory = {"weights": 380e6, "loading": 400e6, "rows": 2.6e9}
        verdicts = {"ours bf16": Verdict(64, 64, 0.0)}
        text = render("0.1b", CONTENDERS, ["1", "64", PREFILL], [run], verdicts)
        line = next(line for line in text.splitlines() if line.startswith("| ours bf16 | 72"))
        assert line.count("%") == 3
        assert "| ours HTTP" not in text
        assert "all 64 tokens equal" in text
        assert "| ours bf16 / llama.cpp bf16 | 1 | 1.00 | 1.50 | met | 1.50 | met |" in text
        assert "400 MB more at most while loading, 1.05 times\nthe weights (met: at most 1.25)" in text
        assert "2,600 MB more with all rows running\n(missed: at most 2,500)" in text

    def test_a_report_goes_between_the_marks_of_a_document(self) -> None:
        document = "# A\n<!-- compare -->\nold\n<!-- end of compare -->\nend\n"
        new = compare.with_report(document, "# T\n\n## U\n")
        assert new == "# A\n<!-- compare -->\n### T\n\n#### U\n<!-- end of compare -->\nend\n"
        with pytest.raises(ValueError, match="marks"):
            compare.with_report("# A\n", "# T\n")


class TestCommandLines:
    @pytest.mark.parametrize(
        ("main", "line", "message"),
        [
            (simulate.main, "--sessions 0", "argument --sessions: '0' is not a whole number from 1"),
            (simulate.main, "--loads 0", "argument --loads: '0' is not a number above 0"),
            (simulate.main, "--loads -1", "argument --loads: '-1' is not a number above 0"),
            (simulate.main, "--loads nan", "argument --loads: 'nan' is not a number above 0"),
            (simulate.main, "--chart /no/folder/x.png", "argument --chart: there is no folder '/no/folder'"),
            (scaling.main, "--write /no/nope.md", "argument --write: there is no file at '/no/nope.md'"),
            (scaling.main, f"--write {ROOT / 'README.md'}", "needs the marks of the table of sizes once"),
            (compare.main, "--rounds 0", "argument --rounds: '0' is not a whole number from 1"),
            (compare.main, "--rows 1 0", "argument --rows: '0' is not a whole number from 1"),
            (compare.main, "--threads 9999", "argument --threads: there are only"),
            (compare.main, f"--write {ROOT / 'README.md'}", "needs the marks <!-- compare -->"),
        ],
    )
    def test_a_mistake_names_the_option_before_anything_runs(
        self, main: Any, line: str, message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as left:
            main(line.split())
        assert left.value.code == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert message in err

    def test_every_contender_is_listed_on_a_line_of_its_own(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            compare.main(["--help"])
        lines = capsys.readouterr().out.splitlines()
        assert all(f"  '{name}'" in lines for name in CONTENDERS)

    def test_without_the_test_extra_help_works_and_the_rest_says_what_to_install(self) -> None:
        done = subprocess.run([sys.executable, "-c", WITHOUT_HTTPX], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        for name in ("http", "serving", "states"):
            assert f"{name} --help 0" in done.stdout
            assert f"{name}  this benchmark uses the clients of the tests: pip install -e '.[test]'" in done.stdout


WITHOUT_HTTPX = """
import runpy, sys
sys.modules["httpx"] = None
for name in ("http", "serving", "states"):
    for arguments in (["--help"], []):
        sys.argv = [name, *arguments]
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        except SystemExit as left:
            print(name, *arguments, left.code if arguments else f" {left.code}")
"""


@dataclass
class Counter:
    """A thing to host in a worker."""

    value: int

    def add(self, number: int) -> int:
        self.value += number
        return self.value

    def fail(self) -> None:
        raise KeyError("gone")

    def die(self) -> None:
        os._exit(3)

    def processors(self) -> int:
        return len(os.sched_getaffinity(0))


def broken() -> None:
    raise ValueError("cannot be made")


class TestWorker:
    def test_it_hosts_an_object_and_tells_of_its_errors(self) -> None:
        worker = Worker(Counter, 1, 5)
        assert worker.call("add", 2) == 7
        with pytest.raises(WorkerFailed, match="KeyError: 'gone'"):
            worker.call("fail")
        assert worker.call("add", 1) == 8
        assert worker.call("processors") == 1
        with pytest.raises(WorkerFailed, match="ended with code 3"):
            worker.call("die")
        worker.close()

    def test_one_that_cannot_be_made_says_why(self) -> None:
        with pytest.raises(WorkerFailed, match="ValueError: cannot be made"):
            Worker(broken, 1)


@pytest.fixture
def tiny_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of its own, kernels aside."""
    kernels = ceilings.cache_dir() / "kernels"
    monkeypatch.setenv("RWKV_LIGHTNING_CACHE_DIR", str(tmp_path))
    if kernels.is_dir():
        (tmp_path / "kernels").symlink_to(kernels)
    return tmp_path


def test_a_small_comparison_from_end_to_end(tiny_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tiny_folder / "out"
    line = ["--shape", "tiny", "--quick", "--rows", "1", "4", "--only"]
    assert compare.main([*line, "ours bf16", "--out", str(out)]) == 0
    text = (out / "compare.md").read_text()
    assert capsys.readouterr().out.strip() == text.strip()
    assert "| ours bf16 | all 64 tokens equal |" in text or "near ties (lead" in text
    assert "not only" not in text
    assert "| ours bf16 / roofline | 1 |" in text
    assert (out / "compare.json").is_file()
    assert (out / "compare.png").is_file() == bool(importlib.util.find_spec("matplotlib"))


def test_what_is_not_installed_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert list(compare.available(["llama.cpp bf16", "ours HTTP"])) == ["ours HTTP"]
    assert "left out: llama.cpp bf16; pip install -e '.[bench]'" in capsys.readouterr().err
