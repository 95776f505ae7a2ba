"""The recurrence kernels: both forms against the formulas in float64, and rows that cannot touch each other."""

from __future__ import annotations

import ctypes
import itertools
import platform
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rwkv_lightning.kernels import recurrent
from rwkv_lightning.kernels.cpu import build
from rwkv_lightning.kernels.cpu.build import Library, library
from rwkv_lightning.kernels.recurrent import Kernels, select
from rwkv_lightning.kernels.reference import HeadWeights, Projections, Rows

REFERENCE = select("meta")
FORMS = {"serving": select("cpu"), "reference": REFERENCE}
HEAD_SIZES = [64, 128, 16, 20]  # the fast path, whole vectors, one vector, a broken vector


@pytest.fixture(params=FORMS)
def kernels(request: pytest.FixtureRequest) -> Kernels:
    return FORMS[request.param]


def noise(seed: int, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def rows_of(lengths: list[int], slots: list[int]) -> Rows:
    offsets = list(itertools.accumulate(lengths, initial=0))
    return Rows(torch.tensor(offsets, dtype=torch.int32), torch.tensor(slots, dtype=torch.int32), offsets[-1])


@dataclass
class TimeMix:
    """Weights, inputs and states of one call of wkv7."""

    heads: int
    weights: HeadWeights
    given: Projections
    v_first: torch.Tensor
    state: torch.Tensor

    @classmethod
    def make(
        cls,
        tokens: int,
        slots: int,
        heads: int = 2,
        size: int = 64,
        first: bool = False,
        dtype: torch.dtype = torch.float32,
        state_dtype: torch.dtype = torch.float32,
    ) -> TimeMix:
        width = heads * size
        w0, a0, v0, k_k, k_a, r_k, weight, bias = (noise(seed, width, scale=0.5) for seed in range(8))
        weights = HeadWeights(w0, a0, None if first else v0, k_k, k_a, r_k, weight, bias)
        r, k, v, w, a, g, v_mix = (noise(20 + seed, tokens, width).to(dtype) for seed in range(7))
        given = Projections(r, k, v, w, a, g, None if first else v_mix)
        state = noise(40, slots, heads, size, size, scale=0.3).to(state_dtype)
        return cls(heads, weights, given, noise(41, tokens, width).to(dtype), state)

    def part(self, start: int, end: int) -> TimeMix:
        """The same with some of the tokens and a copy of the states."""
        cut = [None if t is None else t[start:end].clone() for t in self.given]
        given = Projections(*cut)  # type: ignore[arg-type]
        return TimeMix(self.heads, self.weights, given, self.v_first[start:end].clone(), self.state.clone())

    def run(self, kernels: Kernels, rows: Rows) -> torch.Tensor:
        out = torch.empty_like(self.given.r)
        kernels.wkv7(self.weights, self.heads)(self.given, self.v_first, self.state, rows, out)
        return out


def float64_wkv7(case: TimeMix, start: int, end: int, slot: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y [tokens, C], S [H, value, key]) of one row, token by token, from the formulas of the model."""
    p, heads = case.weights, case.heads
    size = p.k_k.numel() // heads
    state = case.state[slot].double().transpose(1, 2)
    outputs = []
    for t in range(start, end):
        x = {name: value[t].double() for name, value in case.given._asdict().items() if value is not None}
        v = x["v"]
        if p.v0 is not None:
            v = v + (case.v_first[t].double() - v) * torch.sigmoid(p.v0 + x["v_mix"])
        decay = torch.exp(-torch.exp(-torch.nn.functional.softplus(-(p.w0 + x["w"])) - 0.5))
        a = torch.sigmoid(p.a0 + x["a"])
        kk = (x["k"] * p.k_k).view(heads, size)
        kk = kk / kk.norm(dim=1, keepdim=True).clamp(min=1e-12)
        k = x["k"] * (1 + (a - 1) * p.k_a)
        r, k, v, a, decay = (part.view(heads, size) for part in (x["r"], k, v, a, decay))
        removed = torch.einsum("hvk,hk->hv", state, -kk)
        state = state * decay[:, None, :] + removed[:, :, None] * (kk * a)[:, None, :] + v[:, :, None] * k[:, None, :]
        y = torch.einsum("hvk,hk->hv", state, r)
        centred = y - y.mean(1, keepdim=True)
        y = centred / torch.sqrt(centred.square().mean(1, keepdim=True) + 64e-5)
        bonus = (r * k * p.r_k.view(heads, size)).sum(1, keepdim=True) * v
        outputs.append((y.flatten() * p.norm_weight + p.norm_bias + bonus.flatten()) * x["g"])
    return torch.stack(outputs), state


def relative(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


class TestWkv7:
    LENGTHS, SLOTS = (5, 1, 2), (3, 0, 2)

    @pytest.mark.parametrize("size", HEAD_SIZES)
    @pytest.mark.parametrize("first", [True, False])
    def test_it_equals_the_formulas(self, kernels: Kernels, size: int, first: bool) -> None:
        case = TimeMix.make(8, 4, size=size, first=first)
        ran = case.part(0, 8)
        out = ran.run(kernels, rows_of([*self.LENGTHS], [*self.SLOTS]))
        start = 0
        for length, slot in zip(self.LENGTHS, self.SLOTS, strict=True):
            y, state = float64_wkv7(case, start, start + length, slot)
            assert relative(out[start : start + length], y) < 2e-6
            assert relative(ran.state[slot].transpose(1, 2), state) < 1e-6
            start += length

    def test_the_first_layer_hands_on_its_values(self, kernels: Kernels) -> None:
        case = TimeMix.make(3, 1, first=True, dtype=torch.bfloat16)
        case.run(kernels, rows_of([3], [0]))
        assert torch.equal(case.v_first, case.given.v)

    def test_other_layers_leave_the_first_values_alone(self, kernels: Kernels) -> None:
        case = TimeMix.make(3, 1)
        before = case.v_first.clone()
        case.run(kernels, rows_of([3], [0]))
        assert torch.equal(case.v_first, before)

    @pytest.mark.parametrize("size", HEAD_SIZES)
    @pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_both_forms_agree_in_every_type(self, dtype: torch.dtype, state_dtype: torch.dtype, size: int) -> None:
        case = TimeMix.make(9, 3, size=size, dtype=dtype, state_dtype=state_dtype)
        rows = [rows_of([7, 1, 1], [2, 0, 1]) for _ in range(2)]
        cases = [case.part(0, 9) for _ in range(2)]
        outs = [one.run(form, row) for one, form, row in zip(cases, FORMS.values(), rows, strict=True)]
        rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
        assert relative(outs[0], outs[1]) < rounding[dtype]
        assert relative(cases[0].state, cases[1].state) < rounding[state_dtype]

    def test_slots_of_no_row_stay_as_they_are(self, kernels: Kernels) -> None:
        case = TimeMix.make(4, 6, state_dtype=torch.float16)
        before = case.state.clone()
        case.run(kernels, rows_of([3, 1], [4, 1]))
        others = [0, 2, 3, 5]
        assert torch.equal(case.state[others], before[others])
        assert not torch.equal(case.state[4], before[4])

    def test_float16_states_saturate(self, kernels: Kernels) -> None:
        case = TimeMix.make(1, 1, heads=1, state_dtype=torch.float16)
        for name, value in (("v", 1e4), ("k", 1e4), ("w", -50.0)):
            getattr(case.given, name).fill_(value)
        case.given.v[:, ::2] *= -1
        case.run(kernels, rows_of([1], [0]))
        assert case.state.isfinite().all()
        assert case.state.max() == 65504
        assert case.state.min() == -65504

    @pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
    def test_nan_stays_in_its_row_and_is_not_hidden(self, kernels: Kernels, state_dtype: torch.dtype) -> None:
        case = TimeMix.make(2, 2, state_dtype=state_dtype)
        case.given.v[0, 5] = float("nan")
        out = case.run(kernels, rows_of([1, 1], [0, 1]))
        assert out[0].isnan().any()
        assert case.state[0].isnan().any()
        assert out[1].isfinite().all()
        assert case.state[1].isfinite().all()

    @pytest.mark.parametrize("size", HEAD_SIZES)
    def test_chunk_boundaries_change_no_bit_of_float32(self, kernels: Kernels, size: int) -> None:
        case = TimeMix.make(6, 1, size=size, dtype=torch.bfloat16)
        whole = case.part(0, 6)
        expected = whole.run(kernels, rows_of([6], [0]))
        for cut in range(1, 6):
            head, tail = case.part(0, cut), case.part(cut, 6)
            first = head.run(kernels, rows_of([cut], [0]))
            tail.state.copy_(head.state)
            second = tail.run(kernels, rows_of([6 - cut], [0]))
            assert torch.equal(torch.cat((first, second)), expected)
            assert torch.equal(tail.state, whole.state)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms(use_true_random=False))
    def test_a_ragged_batch_is_its_rows(self, lengths: list[int], random: object) -> None:
        slots = list(range(7))
        random.shuffle(slots)  # type: ignore[attr-defined]
        for kernels, state_dtype in itertools.product(FORMS.values(), (torch.float32, torch.float16)):
            case = TimeMix.make(sum(lengths), 7, heads=1, dtype=torch.bfloat16, state_dtype=state_dtype)
            together = case.part(0, sum(lengths))
            out = together.run(kernels, rows_of(lengths, slots[: len(lengths)]))
            for i, end in enumerate(itertools.accumulate(lengths)):
                alone = case.part(end - lengths[i], end)
                assert torch.equal(alone.run(kernels, rows_of([lengths[i]], [slots[i]])), out[end - lengths[i] : end])
                assert torch.equal(alone.state[slots[i]], together.state[slots[i]])

    def test_the_first_layer_and_its_arguments_go_together(self) -> None:
        case = TimeMix.make(1, 1)
        case.given = case.given._replace(v_mix=None)
        with pytest.raises(ValueError, match="v_mix is None in the first layer"):
            case.run(select("cpu"), rows_of([1], [0]))


@dataclass
class Shift:
    """Weights, inputs and states of one call of shift_mix."""

    weight: torch.Tensor
    bias: torch.Tensor
    mix: torch.Tensor
    x: torch.Tensor
    delta: torch.Tensor | None
    shift: torch.Tensor

    @classmethod
    def make(cls, tokens: int, slots: int, count: int, width: int, dtype: torch.dtype, delta: bool = True) -> Shift:
        added = noise(5, tokens, width).to(dtype) if delta else None
        weights = 1 + noise(1, width, scale=0.1), noise(2, width, scale=0.1), noise(3, count, width).sigmoid()
        return cls(*weights, noise(4, tokens, width) * 3 + 1, added, noise(6, slots, width))

    def part(self, start: int, end: int) -> Shift:
        delta = None if self.delta is None else self.delta[start:end].clone()
        small = self.weight, self.bias, self.mix
        return Shift(*small, self.x[start:end].clone(), delta, self.shift.clone())

    def run(self, kernels: Kernels, rows: Rows, dtype: torch.dtype) -> torch.Tensor:
        out = torch.empty(len(self.mix), *self.x.shape, dtype=dtype)
        kernels.shift_mix(self.weight, self.bias, self.mix)(self.x, self.delta, self.shift, rows, out)
        return out


def float64_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    return centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + 1e-5) * weight + bias


class TestShiftMix:
    @pytest.mark.parametrize("width", [128, 36])
    @pytest.mark.parametrize("count", [6, 1])
    @pytest.mark.parametrize("delta", [True, False])
    def test_it_equals_the_formulas(self, kernels: Kernels, width: int, count: int, delta: bool) -> None:
        case = Shift.make(6, 4, count, width, torch.float32, delta)
        ran = case.part(0, 6)
        out = ran.run(kernels, rows_of([1, 3, 2], [2, 0, 3]), torch.float32)
        x = case.x if case.delta is None else case.x + case.delta
        h = float64_norm(x, case.weight, case.bias)
        before = torch.stack([case.shift[2], case.shift[0], h[1], h[2], case.shift[3], h[4]])
        assert torch.equal(ran.x, x)
        assert relative(out, h + (before - h) * case.mix[:, None, :]) < 1e-6
        assert relative(ran.shift[[2, 0, 3]], h[[0, 3, 5]]) < 1e-6
        assert torch.equal(ran.shift[1], case.shift[1])

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_both_forms_agree_in_reduced_types(self, dtype: torch.dtype) -> None:
        case = Shift.make(5, 2, 6, 128, dtype)
        outs = [case.part(0, 5).run(form, rows_of([4, 1], [1, 0]), dtype) for form in FORMS.values()]
        assert outs[0].dtype == dtype
        assert relative(outs[0], outs[1]) < torch.finfo(dtype).eps

    def test_chunk_boundaries_change_no_bit(self, kernels: Kernels) -> None:
        case = Shift.make(5, 1, 6, 128, torch.bfloat16)
        whole = case.part(0, 5)
        expected = whole.run(kernels, rows_of([5], [0]), torch.bfloat16)
        for cut in range(1, 5):
            head, tail = case.part(0, cut), case.part(cut, 5)
            first = head.run(kernels, rows_of([cut], [0]), torch.bfloat16)
            tail.shift.copy_(head.shift)
            second = tail.run(kernels, rows_of([5 - cut], [0]), torch.bfloat16)
            assert torch.equal(torch.cat((first, second), dim=1), expected)
            assert torch.equal(tail.shift, whole.shift)

    @settings(max_examples=25, deadline=None)
    @given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    def test_a_ragged_batch_is_its_rows(self, lengths: list[int]) -> None:
        for kernels in FORMS.values():
            case = Shift.make(sum(lengths), 6, 6, 80, torch.bfloat16)
            together = case.part(0, sum(lengths))
            out = together.run(kernels, rows_of(lengths, list(range(len(lengths)))), torch.bfloat16)
            for i, end in enumerate(itertools.accumulate(lengths)):
                alone = case.part(end - lengths[i], end)
                got = alone.run(kernels, rows_of([lengths[i]], [i]), torch.bfloat16)
                assert torch.equal(got, out[:, end - lengths[i] : end])
                assert torch.equal(alone.shift[i], together.shift[i])


class TestNormRows:
    @pytest.mark.parametrize("width", [128, 36])
    def test_it_equals_the_formulas(self, kernels: Kernels, width: int) -> None:
        x, delta = noise(1, 5, width) * 3 + 1, noise(2, 3, width).bfloat16()
        weight, bias = 1 + noise(3, width, scale=0.1), noise(4, width, scale=0.1)
        norm = kernels.norm_rows(weight, bias)
        positions = torch.tensor([4, 0, 4])
        out, everything, before = torch.empty(3, width), torch.empty(5, width), x.clone()
        norm(x, positions, delta, out)
        norm(x, None, None, everything)
        assert torch.equal(x, before)
        assert relative(out, float64_norm(x[positions] + delta, weight, bias)) < 1e-6
        assert relative(everything, float64_norm(x, weight, bias)) < 1e-6

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8])
    @pytest.mark.parametrize("width", [128, 36])
    def test_rows_may_have_other_types_and_scales(self, kernels: Kernels, dtype: torch.dtype, width: int) -> None:
        table, scales = (noise(1, 6, width) * 20).to(dtype), 0.1 + noise(2, 6, 1).abs()
        norm = kernels.norm_rows(torch.ones(width), torch.zeros(width))
        positions = torch.tensor([5, 0, 5, 2])
        for factors in (None, scales):
            out = torch.empty(4, width)
            norm(table, positions, None, out, factors)
            rows = table.float() if factors is None else table.float() * factors
            assert relative(out, float64_norm(rows[positions], torch.ones(width), torch.zeros(width))) < 1e-5

    def test_the_output_may_have_the_compute_type(self, kernels: Kernels) -> None:
        x, weight, bias = noise(1, 4, 64), torch.ones(64), torch.zeros(64)
        out = torch.empty(4, 64, dtype=torch.bfloat16)
        kernels.norm_rows(weight, bias)(x, None, None, out)
        assert relative(out, float64_norm(x, weight, bias)) < 2**-8


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_the_number_of_threads_changes_no_bit(kernels: Kernels) -> None:
    """Big enough that the C++ kernels do divide the work, in rows, heads and tokens."""
    lengths, slots = [90, 1, 1, 60, 1, 1], [5, 4, 3, 2, 1, 0]
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        mix, shift = TimeMix.make(154, 6, heads=4), Shift.make(154, 6, 6, 512, torch.bfloat16)
        y = mix.run(kernels, rows_of(lengths, slots))
        mixed = shift.run(kernels, rows_of(lengths, slots), torch.bfloat16)
        normed = torch.empty(154, 512)
        kernels.norm_rows(shift.weight, shift.bias)(shift.x, None, None, normed)
        results.append((y, mix.state, mixed, shift.x, shift.shift, normed))
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


class TestArguments:
    """Raw pointers go to the C++ code, so what it cannot take must be refused before."""

    @pytest.mark.parametrize("name", ["x", "delta", "shift", "out"])
    @pytest.mark.parametrize("change", ["size", "stride", "dtype"])
    def test_shift_mix_refuses_what_it_cannot_read(self, name: str, change: str) -> None:
        case = Shift.make(4, 2, 6, 64, torch.bfloat16)
        assert case.delta is not None
        tensors = {"x": case.x, "delta": case.delta, "shift": case.shift}
        tensors["out"] = torch.empty(6, 4, 64, dtype=torch.bfloat16)
        tensors[name] = spoilt(tensors[name], change)
        mix = select("cpu").shift_mix(case.weight, case.bias, case.mix)
        with pytest.raises((ValueError, KeyError)):
            mix(tensors["x"], tensors["delta"], tensors["shift"], rows_of([3, 1], [0, 1]), tensors["out"])

    @pytest.mark.parametrize("name", [*Projections._fields, "v_first", "state", "out"])
    @pytest.mark.parametrize("change", ["size", "stride", "dtype"])
    def test_wkv7_refuses_what_it_cannot_read(self, name: str, change: str) -> None:
        case = TimeMix.make(4, 2, dtype=torch.bfloat16)
        tensors = {**case.given._asdict(), "v_first": case.v_first, "state": case.state}
        tensors["out"] = torch.empty_like(case.v_first)
        tensors[name] = spoilt(tensors[name], change)
        given = Projections(*(tensors[field] for field in Projections._fields))
        with pytest.raises((ValueError, KeyError)):
            select("cpu").wkv7(case.weights, case.heads)(
                given, tensors["v_first"], tensors["state"], rows_of([3, 1], [0, 1]), tensors["out"]
            )

    def test_a_kept_call_is_not_used_for_other_rows(self) -> None:
        """The same tensors with more tokens than they hold."""
        case = TimeMix.make(4, 5)
        out, run = torch.empty_like(case.v_first), select("cpu").wkv7(case.weights, case.heads)
        run(case.given, case.v_first, case.state, rows_of([3, 1], [0, 1]), out)
        with pytest.raises(ValueError, match="contiguous"):
            run(case.given, case.v_first, case.state, rows_of([3, 2], [0, 1]), out)

    def test_a_kept_call_is_not_used_for_other_tensors(self) -> None:
        case = TimeMix.make(4, 5)
        run = select("cpu").wkv7(case.weights, case.heads)
        outs = []
        for _ in range(2):
            again = case.part(0, 4)
            outs.append(torch.empty_like(case.v_first))
            run(again.given, again.v_first, again.state, rows_of([4], [2]), outs[-1])
        assert torch.equal(*outs)


def spoilt(tensor: torch.Tensor, change: str) -> torch.Tensor:
    if change == "size":
        return tensor[..., 1:].contiguous()
    if change == "stride":
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    return tensor.double()


class TestChoice:
    def test_other_devices_get_the_reference(self) -> None:
        assert select("meta").why == "PyTorch reference on meta"
        assert select("meta").wkv7 is REFERENCE.wkv7

    def test_without_a_library_the_reference_serves_and_says_why(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(recurrent, "library", lambda: Library(None, "no C++ compiler found"))
        chosen = select("cpu")
        assert chosen.why == "PyTorch reference: no C++ compiler found"
        assert chosen.shift_mix is REFERENCE.shift_mix

    def test_with_a_library_the_kernels_name_their_instructions(self) -> None:
        assert library().lib is not None, "the tests need a C++ compiler"
        assert select("cpu").why.startswith("C++ kernels (")
        assert select("cpu").wkv7 is not REFERENCE.wkv7


X86 = platform.machine().lower() in ("x86_64", "amd64")
PLAIN = [pytest.param(["-march=x86-64"] if X86 else [], id="baseline")]
PLAIN += [pytest.param(["-march=x86-64-v3"], id="AVX2", marks=pytest.mark.nightly)] if X86 else []


@pytest.mark.parametrize("flags", PLAIN)
def test_the_portable_form_computes_the_same(flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a lesser processor runs: types, broken vectors, saturation, chunks."""
    target = tmp_path / "kernels.so"
    cxx = build.compiler()
    assert cxx is not None, "the tests need a C++ compiler"
    kept = [flag for flag in build.FLAGS if not flag.startswith("-march")]
    source = build.SOURCES / "recurrent.cpp"
    subprocess.run([cxx, *kept, *flags, "-O1", "-w", "-shared", str(source), "-o", str(target)], check=True)
    portable = Library(ctypes.CDLL(str(target)), "portable")
    monkeypatch.setattr(recurrent, "library", lambda: portable)
    plain = select("cpu")
    assert "AVX512" not in plain.why
    tests = TestWkv7()
    for size in HEAD_SIZES:
        tests.test_it_equals_the_formulas(plain, size, first=False)
    tests.test_chunk_boundaries_change_no_bit_of_float32(plain, 64)
    tests.test_float16_states_saturate(plain)
    tests.test_nan_stays_in_its_row_and_is_not_hidden(plain, torch.float16)
    types = (torch.float32, torch.bfloat16, torch.float16)
    for dtype, state_dtype in itertools.product(types, (torch.float32, torch.float16)):
        ran, expected = (TimeMix.make(9, 3, dtype=dtype, state_dtype=state_dtype) for _ in range(2))
        rows = [rows_of([7, 1, 1], [2, 0, 1]) for _ in range(2)]
        out = ran.run(plain, rows[0])
        assert relative(out, expected.run(REFERENCE, rows[1])) < 2**-8
        assert relative(ran.state, expected.state) < 2**-11
    TestShiftMix().test_it_equals_the_formulas(plain, 36, 6, delta=True)
    TestNormRows().test_it_equals_the_formulas(plain, 36)


def test_half_precision_is_converted_as_torch_does(tmp_path: Path) -> None:
    """Every float16 number goes through a state and back unchanged, and a state rounds to nearest even."""
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    finite = every[every.isfinite()]
    state = torch.zeros(16, 1, 64, 64, dtype=torch.float16)
    state.view(-1)[: finite.numel()] = finite
    case = TimeMix.make(16, 16, heads=1)
    for name, value in (("v", 0.0), ("k", 0.0), ("w", -200.0)):  # nothing is added, removed or forgotten
        getattr(case.given, name).fill_(value)
    case.weights.w0.fill_(-100.0)
    case.weights.v0.fill_(-100.0)  # type: ignore[union-attr]
    case.given.v_mix.fill_(-100.0)  # type: ignore[union-attr]
    for kernels in FORMS.values():
        case.state = state.clone()
        case.run(kernels, rows_of([1] * 16, list(range(16))))
        assert torch.equal(case.state, state)
