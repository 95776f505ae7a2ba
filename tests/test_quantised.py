"""Quantised weights and their linear operator: error bounds, and the same bits in any batch, group and thread count."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_lightning.kernels import quantised as module
from rwkv_lightning.kernels.cpu import build
from rwkv_lightning.kernels.linear import Activation, LinearGroup, ReferenceLinear, make_linear
from rwkv_lightning.kernels.quantisation import (
    QuantisedWeight,
    pack_int4,
    quantise_int4,
    quantise_int8,
    unpack_int4,
)
from rwkv_lightning.kernels.quantised import ALWAYS, Kernels, QuantisedLinear, make_quantised

F32, BF16 = torch.float32, torch.bfloat16
SHAPES = [(1, 32), (33, 64), (48, 128), (100, 192), (31, 96), (256, 256), (5, 1024)]
ROWS = [*range(1, 14), 24, 25, 64]
ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda y: y,
    "relu2": lambda y: y.relu().square(),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
}
LEVELS = {ALWAYS: 32639, 0: 127}  # of a row, by wide_rows


@functools.cache
def compiled(march: str) -> Kernels:
    """quantised.cpp alone, for a processor that need not be this one's best."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "quantised.so")
        flags = [flag for flag in build.FLAGS if not flag.startswith("-march")]
        compiler = build.compiler()
        assert compiler is not None
        source = str(build.SOURCES / "quantised.cpp")
        command = [compiler, *flags, f"-march={march}", "-shared", source, "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        return Kernels(ctypes.CDLL(str(path)))


@pytest.fixture
def torch_threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def random(*shape: int, dtype: torch.dtype = F32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def quantise(n: int, k: int, bits: int, group: int = 32) -> QuantisedWeight:
    weight = random(n, k, seed=1) / 8
    return quantise_int8(weight) if bits == 8 else quantise_int4(weight, group)


def linear_of(weight: QuantisedWeight, dtype: torch.dtype = F32, wide_rows: int = ALWAYS) -> QuantisedLinear:
    linear = make_quantised(weight, dtype, wide_rows=wide_rows)
    assert isinstance(linear, QuantisedLinear), linear.why
    return linear


def bound(x: torch.Tensor, weight: torch.Tensor, levels: int) -> torch.Tensor:
    """How far a product may be off: half a step of the row at every element, and float32's own rounding."""
    x, sizes = x.double().abs(), weight.double().abs()
    step: torch.Tensor = x.amax(1, keepdim=True) / levels
    return step * 0.5001 * sizes.sum(1) + 1e-6 * (x @ sizes.T) + 1e-30


class TestQuantisation:
    def test_int8_is_off_by_half_a_step_at_most(self) -> None:
        weight = random(40, 96, dtype=BF16)
        quantised = quantise_int8(weight)
        assert (quantised.values.dtype, quantised.scales.shape) == (torch.int8, (40, 1))
        assert (quantised.shape, quantised.group, quantised.bits) == ((40, 96), 96, 8)
        step = weight.float().abs().amax(1, keepdim=True) / 127
        assert ((quantised.dequantise() - weight.float()).abs() <= step * 0.5001).all()
        assert (quantised.values.abs().amax(1) == 127).all()

    @pytest.mark.parametrize("group", [32, 64, 128])
    def test_int4_loses_less_than_rounding_by_the_largest(self, group: int) -> None:
        weight = random(30, 256)
        quantised = quantise_int4(weight, group)
        assert (quantised.values.dtype, quantised.values.shape) == (torch.uint8, (30, 128))
        assert (quantised.scales.dtype, quantised.scales.shape) == (torch.float16, (30, 256 // group))
        assert (quantised.shape, quantised.group) == ((30, 256), group)
        groups = weight.view(30, -1, group)
        step = groups.abs().amax(2, keepdim=True) / 7
        plain = (groups / step).round() * step
        ours = (quantised.dequantise().view_as(groups) - groups).square().sum(2)
        assert (ours <= (plain - groups).square().sum(2) * 1.001).all()
        assert float(ours.sum()) < 0.9 * float((plain - groups).square().sum())

    @pytest.mark.parametrize("bits", [8, 4])
    def test_rows_do_not_depend_on_each_other(self, bits: int) -> None:
        """So that a matrix may be quantised in slices."""
        weight = random(17, 128)
        whole = quantise_int8(weight) if bits == 8 else quantise_int4(weight, 64)
        part = quantise_int8(weight[5:9]) if bits == 8 else quantise_int4(weight[5:9], 64)
        assert torch.equal(whole.values[5:9], part.values)
        assert torch.equal(whole.scales[5:9], part.scales)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_what_is_representable_comes_back(self, bits: int) -> None:
        levels = torch.randint(-7, 8, (6, 64), generator=torch.Generator().manual_seed(0)).float()
        levels[:, 0] = 7
        weight = levels * 0.25 if bits == 4 else levels * 127 / 7
        quantised = quantise_int8(weight) if bits == 8 else quantise_int4(weight, 64)
        torch.testing.assert_close(quantised.dequantise(), weight, rtol=1e-3 if bits == 4 else 0.02, atol=0.51)

    @pytest.mark.parametrize("bits", [8, 4])
    def test_zeros_stay_zero(self, bits: int) -> None:
        weight = torch.zeros(3, 64)
        weight[1, 5] = 1.0
        quantised = quantise_int8(weight) if bits == 8 else quantise_int4(weight, 64)
        assert not quantised.dequantise()[[0, 2]].any()
        assert int(quantised.dequantise()[1].count_nonzero()) == 1

    def test_int4_refuses_what_it_cannot_hold(self) -> None:
        with pytest.raises(ValueError, match="rows of 96 do not divide into groups of 64"):
            quantise_int4(torch.zeros(2, 96), 64)
        with pytest.raises(ValueError, match="too large for int4's float16 scales"):
            quantise_int4(torch.full((2, 64), 1e7), 64)

    @given(st.integers(1, 5), st.integers(1, 20), st.integers(0, 2**32 - 1))
    @settings(deadline=None, max_examples=30)
    def test_packing_comes_back(self, n: int, half: int, seed: int) -> None:
        levels = torch.randint(0, 16, (n, 2 * half), generator=torch.Generator().manual_seed(seed)).to(torch.uint8)
        assert torch.equal(unpack_int4(pack_int4(levels)), levels)

    def test_a_word_holds_eight_neighbours_from_its_low_bits_up(self) -> None:
        word = int(pack_int4(torch.arange(8, dtype=torch.uint8).unsqueeze(0)).view(torch.int32))
        assert [word >> 4 * i & 15 for i in range(8)] == list(range(8))


@pytest.mark.parametrize("wide_rows", [ALWAYS, 0], ids=["16 bits", "8 bits"])
@pytest.mark.parametrize("bits", [8, 4])
class TestKernel:
    @pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
    def test_products_are_within_their_bounds(self, bits: int, wide_rows: int, dtype: torch.dtype) -> None:
        for n, k in SHAPES:
            weight = quantise(n, k, bits)
            meant, linear = weight.dequantise(), linear_of(weight, dtype, wide_rows)
            for rows in ROWS:
                x = random(rows, k, dtype=dtype, seed=rows)
                off = linear(x, dtype=F32).double() - x.double() @ meant.double().T
                assert (off.abs() <= bound(x, meant, LEVELS[wide_rows])).all(), (n, k, rows)

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, bits: int, wide_rows: int, activation: Activation) -> None:
        linear, x = linear_of(quantise(70, 64, bits), F32, wide_rows), random(13, 64, seed=2)
        want = ACTIVATIONS[activation](linear(x))
        torch.testing.assert_close(linear(x, activation), want, rtol=1e-5, atol=1e-6)

    def test_a_row_has_the_same_bits_in_any_batch(self, bits: int, wide_rows: int) -> None:
        for n, k in SHAPES:
            linear, x = linear_of(quantise(n, k, bits), F32, wide_rows), random(64, k, seed=2)
            y = linear(x)
            for rows in ROWS:
                assert torch.equal(linear(x[:rows]), y[:rows]), (n, k, rows)
                assert torch.equal(linear(x[-rows:]), y[-rows:]), (n, k, rows)

    def test_threads_do_not_matter(self, bits: int, wide_rows: int, torch_threads: Callable[[int], None]) -> None:
        for n, k in ((100, 192), (256, 256)):
            linear, x = linear_of(quantise(n, k, bits), F32, wide_rows), random(50, k, seed=2)
            torch_threads(1)
            y, one = linear(x), linear(x[:1])
            for threads in (2, 3, 5):
                torch_threads(threads)
                assert torch.equal(linear(x), y)
                assert torch.equal(linear(x[:1]), one)

    @pytest.mark.parametrize("march", ["x86-64", "x86-64-v3"])
    def test_older_processors_differ_in_the_rounding_of_rows_only(self, bits: int, wide_rows: int, march: str) -> None:
        for n, k in SHAPES:
            weight, x = quantise(n, k, bits), random(14, k, seed=2)
            native = linear_of(weight, F32, wide_rows)(x)
            old = QuantisedLinear(weight, F32, wide_rows, compiled(march))
            step = x.abs().amax(1, keepdim=True) / LEVELS[wide_rows]  # a multiply-add may round a tie the other way
            largest = weight.dequantise().abs().amax(1)
            assert ((old(x) - native).abs() <= 2 * step * largest + 1e-6).all(), (n, k)
            for rows in (1, 5, 6, 7):
                assert torch.equal(old(x[:rows]), old(x)[:rows])

    def test_groups_give_the_bits_of_separate_calls(self, bits: int, wide_rows: int) -> None:
        weights = [quantise(n, 64, bits) for n in (33, 48, 5)]
        linears = [linear_of(weight, BF16, wide_rows) for weight in weights]
        plain = make_linear(random(20, 64, seed=3), BF16)
        group = LinearGroup([linears[0], plain, *linears[1:]])
        xs = [random(7, 64, dtype=BF16, seed=i) for i in range(4)]
        separate = [one(x, "tanh") for one, x in zip(group.linears, xs, strict=True)]
        outs = [torch.empty_like(y) for y in separate]
        for buffers in (None, outs):
            together = group(xs, ["tanh"] * 4, outs=buffers)
            assert all(map(torch.equal, together, separate))

    def test_buffers_used_again_hold_what_is_in_them_now(self, bits: int, wide_rows: int) -> None:
        linear = linear_of(quantise(33, 64, bits), F32, wide_rows)
        group, x, out = LinearGroup([linear]), random(3, 64), torch.empty(3, 33)
        for seed in range(3):
            x.copy_(random(3, 64, seed=seed))
            assert torch.equal(group([x], outs=[out])[0], linear(x))

    def test_slices_of_wider_buffers(self, bits: int, wide_rows: int) -> None:
        linear, wide = linear_of(quantise(37, 64, bits), F32, wide_rows), random(13, 200, seed=2)
        for x in (wide[:, 3:67], wide[::2, 3:67], random(64, 9, seed=3).T, wide[2:3, :64].expand(5, 64), wide[:0, :64]):
            assert torch.equal(linear(x), linear(x.contiguous()))
        for dtype in (F32, BF16):
            frame = torch.full((15, 60), 7.0, dtype=dtype)
            out = frame[1:14, 11:48]
            assert linear(wide[:, :64], out=out) is out
            assert torch.equal(out, linear(wide[:, :64], dtype=dtype))
            assert int((frame == 7.0).sum()) == 15 * 60 - 13 * 37

    def test_rows_that_are_not_finite_spoil_only_themselves(self, bits: int, wide_rows: int) -> None:
        linear, x = linear_of(quantise(40, 64, bits), F32, wide_rows), random(15, 64, seed=2)
        clean = linear(x)
        for value in (float("nan"), float("inf"), -float("inf")):
            spoilt = x.clone()
            spoilt[4, 63] = value
            y = linear(spoilt)
            assert y[4].isnan().all()
            others = [i for i in range(15) if i != 4]
            assert torch.equal(y[others], clean[others])

    def test_rows_of_any_size(self, bits: int, wide_rows: int) -> None:
        linear, x = linear_of(quantise(40, 64, bits), F32, wide_rows), random(3, 64, seed=2)
        y = linear(x)
        for scale in (1e-20, 1e-5, 1e10, 1e30):
            torch.testing.assert_close(linear(x * scale) / scale, y, rtol=1e-3, atol=1e-2)
        assert not linear(torch.zeros(2, 64)).any()
        assert not linear(torch.full((2, 64), 1e-40)).any()


def test_few_rows_take_16_bits_and_many_8() -> None:
    weight, x = quantise(50, 64, 8), random(9, 64, seed=2)
    mixed, fine, coarse = (linear_of(weight, F32, rows) for rows in (4, ALWAYS, 0))
    for rows in range(1, 10):
        assert torch.equal(mixed(x[:rows]), (fine if rows <= 4 else coarse)(x[:rows]))
    assert not torch.equal(fine(x), coarse(x))
    deterministic = make_quantised(weight, F32, wide_rows=4, deterministic=True)
    assert torch.equal(deterministic(x), fine(x))


@pytest.mark.parametrize("columns", [32767, 32750])
def test_large_results_are_complete(columns: int) -> None:
    """Beyond 8 MB results bypass the caches: whole lines only, where they are aligned."""
    weight, x = quantise(columns, 32, 8), random(65, 32, seed=2)
    out = torch.full((66, 32768), torch.nan)
    linear_of(weight)(x, out=out[:65, :columns])
    torch.testing.assert_close(out[:65, :columns], x @ weight.dequantise().T, rtol=1e-3, atol=1e-3)
    assert out[65].isnan().all()
    assert out[:, columns:].isnan().all()


def test_without_kernels_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "library", lambda: build.Library(None, "no C++ compiler found"))
    for bits in (8, 4):
        weight, x = quantise(20, 64, bits), random(6, 64, seed=2)
        linear = make_quantised(weight, F32, deterministic=True)
        assert isinstance(linear, ReferenceLinear)
        assert "no C++ compiler found" in linear.why
        assert f"int{bits}" in linear.why
        torch.testing.assert_close(linear(x), x @ weight.dequantise().T, rtol=1e-4, atol=1e-4)


def test_wrong_calls_are_refused() -> None:
    weight = quantise(4, 64, 8)
    linear, x = linear_of(weight), random(3, 64)
    calls: list[tuple[str, Callable[[], object]]] = [
        (r"shape \[3, 5\].*takes \[T, 64\]", lambda: linear(random(3, 5))),
        ("bfloat16.*computes in torch.float32", lambda: linear(x.to(BF16))),
        ("'gelu' is unknown", lambda: linear(x, "gelu")),  # type: ignore[arg-type]
        ("float16 is no output type", lambda: linear(x, dtype=torch.float16)),
        (r"needed is \[3, 4\]", lambda: linear(x, out=torch.empty(3, 5))),
        ("takes float32 or bfloat16", lambda: QuantisedLinear(weight, torch.float16, 0, linear.kernels)),  # type: ignore[arg-type]
    ]
    for message, call in calls:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.nightly
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("n", "k"), [(65536, 768), (768, 3072), (4096, 16384)])
def test_model_sized_products_are_within_their_bounds(n: int, k: int, bits: int) -> None:
    weight = quantise(n, k, bits, 64)
    meant = weight.dequantise()
    for wide_rows, levels in LEVELS.items():
        linear, x = linear_of(weight, BF16, wide_rows), random(30, k, dtype=BF16, seed=2)
        y = linear(x, dtype=F32)
        assert ((y.double() - x.double() @ meant.double().T).abs() <= bound(x, meant, levels)).all()
        assert torch.equal(linear(x[-7:], dtype=F32), y[-7:])
