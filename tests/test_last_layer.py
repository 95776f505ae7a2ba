"""The last layer is followed to its end for some tokens only: that changes no bit of what anybody reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rwkv7 import PROMPTS, batch, demo, same_state

from benchmarks.checkpoints import ModelShape, make
from rwkv_lightning.core import last_layer
from rwkv_lightning.core.interfaces import LoadOptions, Model
from rwkv_lightning.core.last_layer import choose
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend

NEVER = 1_000_000
RAGGED = st.lists(st.lists(st.integers(1, 3000), min_size=1, max_size=30), min_size=1, max_size=5)


def both(model: Model, rows: list[list[int]], positions: list[int] | None) -> None:
    """Two steps of these rows, with every token followed and with the chosen ones: the same logits and states."""
    slots = range(len(rows))
    given = batch(rows, slots, positions)
    whole, chosen = model.new_states(len(rows)), model.new_states(len(rows))
    for _ in range(2):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(last_layer, "LEAST_SAVED", NEVER)
            assert choose(given) == ()
            expected = model.forward(given, whole).clone()
            patch.setattr(last_layer, "LEAST_SAVED", 0)
            assert len(choose(given)) == 3
            got = model.forward(given, chosen)
        assert torch.equal(got, expected)
        assert all(same_state(whole, slot, chosen, slot) for slot in slots)


@pytest.mark.parametrize(("dtype", "state_dtype"), [("float32", "float32"), ("bfloat16", "float16")])
@given(rows=RAGGED, data=st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_is_wanted(dtype: str, state_dtype: str, rows: list[list[int]], data: st.DataObject) -> None:
    rows = [*rows, [7, 8]]  # more than one token each: not a step of decoding
    position = st.integers(0, sum(map(len, rows)) - 1)
    both(demo(dtype, state_dtype), rows, data.draw(st.none() | st.lists(position, max_size=6)))


def test_a_model_of_one_layer(tmp_path: Path) -> None:
    path = make(tmp_path / "one.pth", ModelShape(1, 128, 16, 16, 16, 16, vocab_size=512), seed=1)
    model = Fp16Backend().load(path, LoadOptions(dtype="float32"))
    both(model, [[1, 2, 3], [4], [5, 6, 7, 8]], None)


def test_two_tokens_of_a_long_prompt_are_followed_and_every_row_that_decodes() -> None:
    prompt = PROMPTS[0] * 4
    tokens, offsets, positions = choose(batch([[5], prompt, [6]], [0, 1, 2]))
    last = len(prompt)
    assert tokens.tolist() == [0, last - 1, last, last + 1]
    assert (offsets.tolist(), positions.tolist()) == ([0, 1, 3, 4], [0, 2, 3])
    assert choose(batch([prompt], [0], []))[0].tolist() == [last - 1]


def test_short_steps_are_followed_whole() -> None:
    assert choose(batch([[5], [6, 7]], [0, 1])) == ()
    assert choose(batch([PROMPTS[0] * 4], [0], range(4 * len(PROMPTS[0])))) == ()
