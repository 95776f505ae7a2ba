"""The linear operator: against float64, with the same bits in any batch, group, thread count and row position."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import torch

from rwkv_lightning.kernels import linear as module
from rwkv_lightning.kernels.cpu import build
from rwkv_lightning.kernels.cpu.memory import HUGE_PAGE, SLAB_BYTES, Slabs
from rwkv_lightning.kernels.linear import (
    Activation,
    KernelLinear,
    Kernels,
    LinearGroup,
    PackedLinear,
    ReferenceLinear,
    grouped,
    make_linear,
)

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 1), (3, 2), (16, 5), (17, 64), (31, 63), (32, 32), (33, 7), (48, 128), (64, 64), (100, 129), (768, 768)]
ROWS = [*range(1, 14), 24, 25, 64, 200]
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu2": lambda y: y.relu().square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}


@functools.cache
def compiled(march: str) -> Kernels:
    """linear.cpp alone, for a processor that need not be this one's best."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "linear.so")
        flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
        compiler = build.compiler()
        assert compiler is not None
        command = [compiler, *flags, f"-march={march}", "-shared", str(build.SOURCES / "linear.cpp"), "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return Kernels(ctypes.CDLL(str(path)))


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def exact(x: torch.Tensor, weight: torch.Tensor, activation: Activation = "none") -> torch.Tensor:
    return ACTIVATIONS[activation](x.double() @ weight.double().T)


def bound(x: torch.Tensor, weight: torch.Tensor, exact_value: torch.Tensor, activation: Activation) -> torch.Tensor:
    """How far float32 sums may be off, element by element: rounding errors of K terms, then of the activation."""
    terms = x.double().abs() @ weight.double().abs().T
    error: torch.Tensor = 2.0**-23 * (x.shape[1] ** 0.5 + 2) * terms
    slope = 2 * exact_value.sqrt() + error if activation == "relu2" else 1.0
    return error * slope + 2e-6 * exact_value.abs() + 1e-30


def packed(weight: torch.Tensor, dtype: torch.dtype) -> PackedLinear:
    linear = make_linear(weight, dtype)
    assert isinstance(linear, PackedLinear), linear.why
    return linear


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_products_are_right(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random(n, k, dtype=dtype, seed=1)
    linear = packed(weight, dtype)
    for rows in ROWS:
        x = random(rows, k, dtype=dtype, seed=rows)
        want = exact(x, weight)
        y = linear(x, dtype=F32)
        assert y.dtype == F32
        assert ((y - want).abs() <= bound(x, weight, want, "none")).all(), rows


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_are_right(activation: Activation, dtype: torch.dtype) -> None:
    weight = random(70, 65, dtype=dtype, seed=1) / 8
    linear, x = packed(weight, dtype), random(13, 65, dtype=dtype, seed=2)
    want = exact(x, weight, activation)
    assert ((linear(x, activation, F32) - want).abs() <= bound(x, weight, want, activation)).all()


@pytest.mark.parametrize("activation", ["tanh", "sigmoid"])
def test_activations_keep_their_relative_accuracy(activation: Activation) -> None:
    """Over the whole range, where y is x itself: a weight of one."""
    tiny = torch.logspace(-30, 0, 4001)
    x = torch.cat([torch.linspace(-80, 80, 20001), tiny, -tiny, torch.zeros(1)]).unsqueeze(1)
    y = packed(torch.ones(1, 1), F32)(x, activation)
    want = ACTIVATIONS[activation](x.double())
    assert ((y - want).abs() <= 1e-6 * want.abs()).all()


@pytest.mark.parametrize(
    ("activation", "ends"),
    [("none", [-torch.inf, torch.inf]), ("relu2", [0, torch.inf]), ("tanh", [-1, 1]), ("sigmoid", [0, 1])],
)
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_infinities_and_nan_pass_through(activation: Activation, ends: list[float], dtype: torch.dtype) -> None:
    x = torch.tensor([[-torch.inf], [torch.inf], [torch.nan]], dtype=dtype)
    y = packed(torch.ones(1, 1), dtype)(x, activation).float()
    torch.testing.assert_close(y, torch.tensor([[ends[0]], [ends[1]], [torch.nan]]), equal_nan=True, rtol=0, atol=1e-30)


def test_a_neighbouring_rows_nan_stays_there() -> None:
    """With an odd depth, rows of bf16 are read in pairs."""
    x = random(3, 7, dtype=BF16)
    x[1] = torch.nan
    y = packed(random(5, 7), BF16)(x)
    assert y[1].isnan().all()
    assert not y[[0, 2]].isnan().any()


def test_a_neighbouring_columns_nan_stays_there() -> None:
    weight = random(3, 7)
    weight[1] = torch.nan
    y = packed(weight, BF16)(random(2, 7, dtype=BF16))
    assert y[:, 1].isnan().all()
    assert not y[:, [0, 2]].isnan().any()


def test_bf16_results_are_rounded_to_the_nearest_even() -> None:
    weight, x = random(67, 130, dtype=BF16, seed=1), random(9, 130, dtype=BF16, seed=2)
    linear = packed(weight, BF16)
    for activation in ACTIVATIONS:
        assert torch.equal(linear(x, activation), linear(x, activation, F32).to(BF16))
    ties = torch.tensor([[1 + 2.0**-8], [1 + 3 * 2.0**-8], [-(1 + 2.0**-8)], [3.4e38]])
    assert packed(torch.ones(1, 1), F32)(ties, dtype=BF16).tolist() == ties.to(BF16).tolist()
    every_bit = torch.tensor([[0x7FFFFFFF], [-1]], dtype=torch.int32).view(F32)  # rounding up would make it a number
    assert packed(torch.ones(1, 1), F32)(every_bit, dtype=BF16).isnan().all()


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(100, 129), (64, 64), (40, 1024), (33, 2048)])  # 4096 bytes apart: smaller blocks
def test_a_rows_bits_do_not_depend_on_its_batch(n: int, k: int, dtype: torch.dtype) -> None:
    linear, x = packed(random(n, k, seed=1), dtype), random(200, k, dtype=dtype, seed=2)
    whole = linear(x, "tanh", F32)
    for rows in ROWS:
        for first in {0, 1, 200 - rows}:
            part = x[first : first + rows].clone()
            assert torch.equal(linear(part, "tanh", F32), whole[first : first + rows]), (rows, first)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_bits_do_not_depend_on_the_number_of_threads(dtype: torch.dtype, torch_threads: Callable[[int], None]) -> None:
    weights = [random(*shape, seed=1) for shape in [(300, 700), (5, 700), (129, 700)]]
    results = []
    for threads in (1, 2, 3):
        torch_threads(threads)
        linears = [packed(weight, dtype) for weight in weights]
        x = [random(rows, 700, dtype=dtype, seed=rows) for rows in (1, 7, 30)]
        results.append([linear(one) for linear in linears for one in x] + grouped(linears, x))
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
def test_a_group_has_the_bits_of_separate_calls(threads: int, torch_threads: Callable[[int], None]) -> None:
    torch_threads(threads)
    linears = [packed(random(n, k, seed=n), dtype) for n, k, dtype in [(768, 768, BF16), (33, 768, BF16), (70, 9, F32)]]
    group = LinearGroup(linears)
    for rows in (1, 5, 40):
        xs = [random(rows, one.in_features, dtype=one.dtype) for one in linears]
        outs = [None, torch.empty(rows, 33), None]
        together = group(xs, ["none", "tanh", "relu2"], outs=outs)
        assert together[1] is outs[1]
        alone = [linears[0](xs[0]), linears[1](xs[1], "tanh", F32), linears[2](xs[2], "relu2")]
        assert all(torch.equal(a, b) for a, b in zip(together, alone, strict=True))


def test_a_group_of_mixed_forms_works_too() -> None:
    weight, x = random(8, 6), random(3, 6)
    forms: list[KernelLinear] = [
        packed(weight, F32),
        ReferenceLinear(weight, F32),
        PackedLinear(weight, F32, compiled("x86-64-v3")),
    ]
    for y in LinearGroup(forms)([x] * 3):
        torch.testing.assert_close(y, x @ weight.T)
    assert LinearGroup([])([]) == []
    with pytest.raises(ValueError, match="a group of 3 linears takes 3 inputs"):
        LinearGroup(forms)([x])


def test_out_is_filled_and_nothing_beside_it() -> None:
    linear, x = packed(random(37, 20, seed=1), BF16), random(13, 20, dtype=BF16)
    for dtype in (F32, BF16):
        wide = torch.full((15, 60), 7.0, dtype=dtype)
        out = wide[1:14, 11:48]
        assert linear(x, out=out) is out
        assert torch.equal(out, linear(x, dtype=dtype))
        assert int((wide == 7.0).sum()) == 15 * 60 - 13 * 37


@pytest.mark.parametrize("width", [32768, 32767, 32769])
@pytest.mark.parametrize("columns", [32767, 32750])
def test_large_results_are_complete(columns: int, width: int) -> None:
    """Beyond 8 MB results bypass the caches: whole lines only, where they are aligned."""
    weight, x = random(columns, 6, seed=1), random(65, 6, seed=2)
    out = torch.full((66, width), torch.nan)
    packed(weight, F32)(x, out=out[:65, :columns])
    torch.testing.assert_close(out[:65, :columns], x @ weight.T)
    assert out[65].isnan().all()
    assert out[:, columns:].isnan().all()


@pytest.mark.parametrize("form", ["packed", "reference"])
def test_inputs_may_be_slices_or_transposed(form: str) -> None:
    weight = random(21, 12, seed=1)
    linear = packed(weight, F32) if form == "packed" else ReferenceLinear(weight, F32)
    wide = random(9, 40, seed=2)
    for x in (wide[:, 3:15], wide[::2, 3:15], random(12, 9, seed=3).T, wide[2:3, :12].expand(5, 12), wide[:0, :12]):
        torch.testing.assert_close(linear(x), x @ weight.T)
    assert linear(wide[:0, :12]).shape == (0, 21)


@pytest.mark.parametrize("form", ["packed", "reference"])
def test_wrong_calls_are_refused_before_they_run(form: str) -> None:
    weight = random(4, 6)
    linear = packed(weight, F32) if form == "packed" else ReferenceLinear(weight, F32)
    x, square = random(3, 6), random(4, 6)
    shared = torch.empty(6, 6)
    calls: list[tuple[str, Callable[[], object]]] = [
        (r"shape \[3, 5\].*takes \[T, 6\]", lambda: linear(random(3, 5))),
        (r"shape \[6\]", lambda: linear(random(6))),
        ("bfloat16.*computes in torch.float32", lambda: linear(x.to(BF16))),
        ("'gelu' is unknown; choose one of none, relu2", lambda: linear(x, "gelu")),  # type: ignore[arg-type]
        ("float16 is no output type", lambda: linear(x, dtype=torch.float16)),
        (r"out has the shape \[3, 5\]; needed is \[3, 4\]", lambda: linear(x, out=torch.empty(3, 5))),
        ("float64 is no output type", lambda: linear(x, out=torch.empty(3, 4, dtype=torch.float64))),
        ("out is torch.bfloat16, but dtype asks", lambda: linear(x, dtype=F32, out=torch.empty(3, 4, dtype=BF16))),
        ("columns next to each other", lambda: linear(x, out=torch.empty(4, 3).T)),
        ("must not share memory", lambda: linear(shared[:3], out=shared[:3, :4])),
        ("non-empty floating-point matrix", lambda: make_linear(torch.zeros(4, dtype=F32), F32)),
        ("non-empty floating-point matrix", lambda: make_linear(torch.zeros(4, 0), F32)),
        ("non-empty floating-point matrix.*int64", lambda: make_linear(torch.zeros(4, 6, dtype=torch.int64), F32)),
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()
    assert linear(square).shape == (4, 4)


def test_packed_takes_only_what_it_computes() -> None:
    with pytest.raises(ValueError, match=r"not torch\.float16 on cpu"):
        PackedLinear(random(2, 2), torch.float16, compiled("x86-64-v3"))
    assert isinstance(make_linear(random(2, 2), torch.float16), ReferenceLinear)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_reference_and_kernel_agree(activation: Activation, dtype: torch.dtype) -> None:
    weight, x = random(90, 200, seed=1) / 14, random(11, 200, dtype=dtype, seed=2)
    kernel, reference = packed(weight, dtype), ReferenceLinear(weight, dtype)
    rtol, atol = (1e-5, 1e-6) if dtype == F32 else (2e-2, 1e-3)
    torch.testing.assert_close(kernel(x, activation), reference(x, activation), rtol=rtol, atol=atol)


def test_without_kernels_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library", lambda: build.Library(None, "no C++ compiler found"))
    linear = make_linear(random(5, 3), F32)
    assert isinstance(linear, ReferenceLinear)
    assert linear.why == "PyTorch reference: no C++ compiler found"
    assert (linear.out_features, linear.in_features) == (5, 3)


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_a_deterministic_reference_row_does_not_depend_on_its_batch(dtype: torch.dtype) -> None:
    linear = ReferenceLinear(random(100, 129, seed=1), dtype, deterministic=True)
    x = random(40, 129, dtype=dtype, seed=2)
    whole = linear(x)
    for rows in (1, 2, 7, 39):
        assert torch.equal(linear(x[1 : 1 + rows]), whole[1 : 1 + rows])


@pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_the_kernel_for_older_processors_is_right(march: str, dtype: torch.dtype) -> None:
    for n, k in SHAPES:
        weight = random(n, k, dtype=dtype, seed=1)
        linear = PackedLinear(weight, dtype, compiled(march))
        x = random(64, k, dtype=dtype, seed=2)
        for activation in ACTIVATIONS:
            want = exact(x, weight, activation)
            y = linear(x, activation, F32)
            assert ((y - want).abs() <= bound(x, weight, want, activation)).all(), (n, k, activation)
            for rows in (1, 2, 5, 6, 7, 13):
                assert torch.equal(linear(x[:rows], activation, F32), y[:rows])


def test_many_threads_may_call_at_once() -> None:
    linear, x = packed(random(256, 256, seed=1), BF16), random(6, 256, dtype=BF16)
    want = linear(x)
    wrong: list[int] = []

    def work() -> None:
        wrong.extend(i for i in range(200) if not torch.equal(linear(x), want))

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wrong == []


def test_pieces_of_a_slab_are_aligned_zeroed_and_apart() -> None:
    slabs = Slabs()
    pieces = [slabs.take(nbytes) for nbytes in (1, 100, 64, SLAB_BYTES - 1000, 3 * SLAB_BYTES, 5)]
    for number, piece in enumerate(pieces, 1):
        assert piece.data_ptr() % 64 == 0
        assert not piece.any()
        piece.fill_(number)
    assert all((piece == number).all() for number, piece in enumerate(pieces, 1))
    assert pieces[0].data_ptr() % HUGE_PAGE == 0


def test_memory_goes_back_with_the_operator() -> None:
    def resident() -> int:
        return psutil.Process().memory_info().rss

    size = 64 << 20
    weight = torch.zeros(size // 4096, 1024)
    before = resident()
    linear = packed(weight, F32)
    assert resident() - before > size * 0.9
    alive = weakref.ref(linear)
    del linear
    assert alive() is None
    assert resident() - before < size * 0.1


@pytest.mark.nightly
@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("n", "k"), [(65536, 768), (768, 3072), (4096, 4096), (1000, 9001)])
def test_model_sized_products_are_right(n: int, k: int, dtype: torch.dtype) -> None:
    weight = random(n, k, dtype=dtype, seed=1)
    linear, x = packed(weight, dtype), random(130, k, dtype=dtype, seed=2)
    want = exact(x, weight)
    y = linear(x, dtype=F32)
    assert ((y - want).abs() <= bound(x, weight, want, "none")).all()
    for rows in (1, 7, 64, 129):
        assert torch.equal(linear(x[-rows:], dtype=F32), y[-rows:])
