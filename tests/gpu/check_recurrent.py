"""Token shift, the recurrence and norms in Triton, against the formulas and the reference."""

from __future__ import annotations

import itertools

import pytest
import torch
from cases import FORMS, INTERPRETED
from test_recurrent import REFERENCE, Shift, TestNormRows, TestShiftMix, TestWkv7, TimeMix, noise, relative, rows_of

ROUNDING = {torch.float32: 4e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
SIZES = [64, 20, 16] if INTERPRETED else [64, 128, 20, 16]
FORMULAS, SHIFTS, NORMS = TestWkv7(), TestShiftMix(), TestNormRows()
del TestNormRows, TestShiftMix, TestWkv7  # they would be collected here too


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("first", [True, False])
def test_wkv7_equals_the_formulas(size: int, first: bool) -> None:
    FORMULAS.test_it_equals_the_formulas(FORMS, size, first)


def test_the_first_layer_hands_on_its_values() -> None:
    FORMULAS.test_the_first_layer_hands_on_its_values(FORMS)
    FORMULAS.test_other_layers_leave_the_first_values_alone(FORMS)


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_wkv7_agrees_with_the_reference_in_every_type(dtype: torch.dtype, state_dtype: torch.dtype) -> None:
    case = TimeMix.make(6, 3, size=16, dtype=dtype, state_dtype=state_dtype)
    cases = [case.part(0, 6) for _ in range(2)]
    outs = [one.run(form, rows_of([4, 1, 1], [2, 0, 1])) for one, form in zip(cases, (FORMS, REFERENCE), strict=True)]
    assert relative(outs[0], outs[1]) < ROUNDING[dtype]
    assert relative(cases[0].state, cases[1].state) < ROUNDING[state_dtype]


def test_states_saturate_and_do_not_hide_nan() -> None:
    FORMULAS.test_float16_states_saturate(FORMS)
    FORMULAS.test_nan_stays_in_its_row_and_is_not_hidden(FORMS, torch.float16)


def test_chunk_boundaries_change_no_bit() -> None:
    FORMULAS.test_chunk_boundaries_change_no_bit_of_float32(FORMS, 16)
    SHIFTS.test_chunk_boundaries_change_no_bit(FORMS)


def test_a_ragged_batch_is_its_rows() -> None:
    lengths, slots = [3, 1, 2], [4, 0, 2]
    case = TimeMix.make(6, 5, size=16, dtype=torch.float16, state_dtype=torch.float16)
    shift = Shift.make(6, 5, 6, 80, torch.float16)
    together, mixed = case.part(0, 6), shift.part(0, 6)
    out, mixed_out = together.run(FORMS, rows_of(lengths, slots)), mixed.run(FORMS, rows_of(lengths, slots), torch.half)
    for length, slot, end in zip(lengths, slots, itertools.accumulate(lengths), strict=True):
        alone, rows = case.part(end - length, end), rows_of([length], [slot])
        assert torch.equal(alone.run(FORMS, rows), out[end - length : end])
        assert torch.equal(alone.state[slot], together.state[slot])
        alone_shift = shift.part(end - length, end)
        assert torch.equal(alone_shift.run(FORMS, rows, torch.half), mixed_out[:, end - length : end])
        assert torch.equal(alone_shift.shift[slot], mixed.shift[slot])


def test_rows_that_only_fill_touch_no_state() -> None:
    case, shift = TimeMix.make(4, 3, size=16), Shift.make(4, 3, 6, 80, torch.float16)
    filled, short = case.part(0, 4), case.part(0, 2)
    filled_shift, short_shift = shift.part(0, 4), shift.part(0, 2)
    fill, rows = rows_of([1] * 4, [2, 0, -1, -1]), rows_of([1, 1], [2, 0])
    assert torch.equal(filled.run(FORMS, fill)[:2], short.run(FORMS, rows))
    assert torch.equal(filled.state, short.state)
    assert torch.equal(filled_shift.run(FORMS, fill, torch.half)[:, :2], short_shift.run(FORMS, rows, torch.half))
    assert torch.equal(filled_shift.shift, short_shift.shift)


@pytest.mark.parametrize("width", [128, 36])
@pytest.mark.parametrize(("count", "delta"), [(6, True), (1, False)])
def test_token_shift_equals_the_formulas(width: int, count: int, delta: bool) -> None:
    SHIFTS.test_it_equals_the_formulas(FORMS, width, count, delta)


@pytest.mark.parametrize("lengths", [[1, 1, 1], [2, 1]])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_token_shift_agrees_with_the_reference_in_reduced_types(dtype: torch.dtype, lengths: list[int]) -> None:
    case, rows = Shift.make(3, 3, 6, 128, dtype), rows_of(lengths, [2, 0, 1][: len(lengths)])
    cases = [case.part(0, 3) for _ in range(2)]
    outs = [one.run(form, rows, dtype) for one, form in zip(cases, (FORMS, REFERENCE), strict=True)]
    assert relative(outs[0], outs[1]) < torch.finfo(dtype).eps
    assert relative(cases[0].shift, cases[1].shift) < 1e-6
    assert torch.equal(cases[0].x, cases[1].x)


def test_norms() -> None:
    for width in (128, 36):
        NORMS.test_it_equals_the_formulas(FORMS, width)
    NORMS.test_the_output_may_have_the_compute_type(FORMS)
    nothing = torch.empty(0, 64)
    FORMS.norm_rows(torch.ones(64), torch.zeros(64))(noise(1, 2, 64), torch.empty(0, dtype=torch.int64), None, nothing)


def test_what_a_kernel_would_misread_is_refused() -> None:
    case = TimeMix.make(2, 2, size=16)
    strided = case.state.transpose(2, 3)
    with pytest.raises(ValueError, match="state must be contiguous"):
        FORMS.wkv7(case.weights, 2)(case.given, case.v_first, strided, rows_of([2], [0]), torch.empty(2, 32))
    with pytest.raises(ValueError, match="out must be contiguous"):
        FORMS.wkv7(case.weights, 2)(case.given, case.v_first, case.state, rows_of([2], [0]), torch.empty(3, 32))
    given = case.given._replace(v_mix=None)
    with pytest.raises(ValueError, match="v_mix is None in the first layer"):
        FORMS.wkv7(case.weights, 2)(given, case.v_first, case.state, rows_of([2], [0]), torch.empty(2, 32))
