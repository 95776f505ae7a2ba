"""The GPU kernels: through Triton's interpreter where there is no GPU, and compiled down to machine code.

Both happen in processes of their own: Triton reads TRITON_INTERPRET as it is imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rwkv_lightning.kernels import linear, recurrent, sampling, sampling_reference, triton
from rwkv_lightning.kernels.sampling import Row, Rule
from rwkv_lightning.kernels.sampling_advance import _kernel, advance
from rwkv_lightning.kernels.triton.graphs import CudaCapture, capture_for
from rwkv_lightning.kernels.triton.low_rank import pairs_of

FOLDER = Path(__file__).parent / "gpu"
ROOT = FOLDER.parents[1]


def run(*command: str, **environment: str) -> None:
    """Run Python in a process of its own, which must succeed."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=plain | environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


def test_kernels_equal_their_references() -> None:
    interpreter = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    checks = sorted(str(file) for file in FOLDER.glob("check_*.py"))
    assert len(checks) == 6
    run("-m", "pytest", "-p", "no:cacheprovider", *checks, **interpreter)


ALL = pytest.param(["sm_80", "sm_120", "gfx1100"], marks=pytest.mark.nightly)


@pytest.mark.parametrize("targets", [["sm_90", "gfx942"], ALL], ids=" ".join)
def test_kernels_compile_for_nvidia_and_amd(targets: list[str]) -> None:
    """Triton keeps what it has compiled, by its source."""
    run(str(FOLDER / "compiled.py"), *targets, OMP_NUM_THREADS="1")


class TestChoice:
    def test_a_gpu_gets_the_triton_kernels(self) -> None:
        assert recurrent.select("cuda").why == "Triton kernels"
        assert recurrent.select("cuda:1").wkv7.__name__ == "TritonWkv7"
        function, why = sampling.select("cuda")
        assert (function.__module__, why) == ("rwkv_lightning.kernels.triton.sampling", "Triton kernel")
        assert isinstance(capture_for("cuda"), CudaCapture)
        assert triton.pairs_for("cuda") is pairs_of

    def test_a_cpu_does_not(self) -> None:
        assert recurrent.select("cpu").wkv7.__name__ != "TritonWkv7"
        assert capture_for("cpu") is None
        assert triton.pairs_for("cpu") is None

    @pytest.mark.parametrize(
        ("environment", "installed", "why"),
        [("reference", True, "RWKV_LIGHTNING_KERNELS=reference"), ("", False, "pip install 'rwkv-lightning[gpu]'")],
    )
    def test_without_them_the_reference_serves_and_says_why(
        self, environment: str, installed: bool, why: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RWKV_LIGHTNING_KERNELS", environment)
        monkeypatch.setattr(triton, "find_spec", lambda name: object() if installed else None)
        assert why in recurrent.select("cuda").why
        assert recurrent.select("cuda").wkv7 is recurrent.select("meta").wkv7
        function, reason = sampling.select("cuda")
        assert function is sampling_reference.sample
        assert why in reason
        assert capture_for("cuda") is None

    def test_a_cpu_weight_never_asks_for_triton(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton, "missing", lambda: pytest.fail("asked for Triton"))
        assert linear.make_linear(torch.ones(2, 2), torch.float32, sparse_input=True).in_features == 2


class TestAdvance:
    """Rows move on alike whether they are drawn by the C++ kernel or counted afterwards."""

    @pytest.mark.parametrize("kernel", [True, False], ids=["C++", "Python"])
    @pytest.mark.parametrize("rule", list(Rule))
    def test_counting_afterwards_changes_nothing(
        self, rule: Rule, kernel: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if not kernel:
            monkeypatch.setattr("rwkv_lightning.kernels.sampling_advance._kernel", lambda: None)
        assert not kernel or _kernel() is not None, "the tests need a C++ compiler"
        options = {"temperature": 1.0, "presence": 0.7, "frequency": 0.3, "decay": 0.9}
        drawn, counted = ([Row(3, i, **options) for i in range(4)] for _ in range(2))
        logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(1))
        for _ in range(50):
            tokens = sampling.sample(rule, logits, drawn, exempt=(1, 5))
            advance(rule, counted, tokens, exempt=(1, 5))
        for one, other in zip(drawn, counted, strict=True):
            assert one.state.position == other.state.position == 50
            assert [part.tolist() for part in one.penalties()] == [part.tolist() for part in other.penalties()]
            assert one.state.capacity == other.state.capacity

    def test_rows_without_a_token_stay(self) -> None:
        rows = [Row(3, i, temperature=1.0) for i in range(2)]
        advance(Rule.V1, rows, [-1, 7])
        assert [row.state.position for row in rows] == [0, 1]
        assert rows[1].penalties()[0].tolist() == [7]
        advance(Rule.V1, [], [])


@pytest.mark.timeout(700)
def test_the_script_for_gpus_runs_dry() -> None:
    script = FOLDER / "run.sh"
    environment = os.environ | {"PYTHON": sys.executable}
    done = subprocess.run(
        [str(script), "--cpu-dry-run"], env=environment, capture_output=True, text=True, timeout=660, check=False
    )
    assert done.returncode == 0, done.stdout
    table = done.stdout.partition("| what | result |")[2]
    for part in ("machine", "kernels", "speed", "streams"):
        assert f"| {part} | passed in" in table
    for row in ("memory, read", "matrix product", "tiny decode, 4 rows", "tiny prefill", "demo, 8 HTTP streams"):
        assert f"| {row}" in table


def test_the_script_goes_on_after_a_part_that_fails(tmp_path: Path) -> None:
    """With an interpreter that fails, every part is tried and the table says what happened."""
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho no such luck\nexit 3\n")
    broken.chmod(0o755)
    environment = os.environ | {"PYTHON": str(broken)}
    done = subprocess.run(
        [str(FOLDER / "run.sh"), "--cpu-dry-run"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert done.stdout.count("no such luck") == 4
    assert done.stdout.count("FAILED after 0 s: status 3 |") + done.stdout.count("FAILED after 1 s: status 3 |") == 4
    without_gpu = subprocess.run([str(FOLDER / "run.sh")], env=environment, capture_output=True, text=True, check=False)
    assert without_gpu.returncode == 2
    assert "--cpu-dry-run" in without_gpu.stderr
