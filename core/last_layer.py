"""The last layer of a step over many prompt tokens: it is followed to its end only where somebody reads what it gives.

Nothing follows the last layer but logits, and what the next step finds in the states. Of time mixing, the wkv state
takes every token's keys, values, decays and learning rates; but receptances, gates and outputs serve only the tokens
after which logits are wanted, the last one of each row (its channel mixing leaves the token shift behind) and the one
before each logit (its token shift). In a prompt of 512 tokens these are 2. Each of them goes through the operations
that it goes through otherwise, unless an operator goes by the number of its rows (gemlite's `activations = auto`: few
rows keep 16 bits).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import torch

from rwkv_lightning.core.layer import Layer, Operators
from rwkv_lightning.kernels.reference import Projections, Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rwkv_lightning.core.interfaces import Batch, WeightSource
    from rwkv_lightning.core.layer import Join
    from rwkv_lightning.core.slots import LayerStates
    from rwkv_lightning.core.workspace import Buffers
    from rwkv_lightning.kernels import recurrent

Each = TypeVar("Each")

LEAST_SAVED = 64  # tokens; below that, choosing costs about as much as it saves


@dataclass(frozen=True, slots=True)
class Ends:
    """The N tokens of a step that the last layer is followed to its end for.

    Args:
        tokens: [N] int64, rising: where they stand among the step's tokens.
        rows: the same rows, each with its chosen tokens only. Chosen tokens stand next to each other where the token
            shift of the second one is read.
        positions: [S] int64, where logits are wanted, among the chosen.
    """

    tokens: torch.Tensor
    rows: Rows
    positions: torch.Tensor

    @classmethod
    def of(cls, chosen: Sequence[torch.Tensor], slots: torch.Tensor) -> Ends | None:
        """What `choose` gave, on the model's device; None when every token is followed."""
        if not chosen:
            return None
        tokens, offsets, positions = chosen
        return cls(tokens, Rows(offsets, slots, len(tokens)), positions)


def choose(batch: Batch) -> tuple[torch.Tensor, ...]:
    """What `Ends.of` takes (`tokens`, `rows.offsets`, `positions`), in host memory; nothing where it would not pay."""
    begins, ends, wanted = batch.offsets[:-1].long(), batch.offsets[1:].long(), batch.logit_positions
    if len(batch.tokens) < len(ends) + LEAST_SAVED:
        return ()
    before = wanted[~torch.isin(wanted, begins)] - 1
    tokens = torch.unique(torch.cat([ends - 1, wanted, before]))
    if len(batch.tokens) < len(tokens) + LEAST_SAVED:
        return ()
    return tokens, torch.searchsorted(tokens, batch.offsets.long(), out_int32=True), torch.searchsorted(tokens, wanted)


class LastLayer(Layer):
    """A layer whose time mixing can be followed to its end for some tokens only."""

    def __init__(self, source: WeightSource, kernels: recurrent.Kernels, index: int, join: Join | None) -> None:
        super().__init__(source, kernels, index, join)
        # r k v w a g v_mix: the state takes all of them but r and g
        self._moving = _Some(self.project, "project", [1, 2, 3, 4, 6])
        self._read = _Some(self.project, "read", [0, 5])
        self._expand_moving = _Some(self.expand, "expand", [0, 1, 3])
        self._expand_read = _Some(self.expand, "gate", [2])

    def time_mix_ends(
        self, delta: torch.Tensor | None, state: LayerStates, rows: Rows, ends: Ends, b: Buffers
    ) -> tuple[torch.Tensor, Buffers]:
        """`time_mix`, and the buffers that hold the residual stream of the chosen tokens alone, N of each."""
        self.mix_tokens(b.x, delta, state.time_shift, rows, b.time_in)
        self.wkv7(self._projections(ends, b), b.v_first, state.wkv, rows, b.y)
        x, y = b.x.index_select(0, ends.tokens), b.y.index_select(0, ends.tokens)
        chosen = b.workspace.buffers(len(ends.tokens))  # these begin where those of the whole step do
        chosen.x.copy_(x)
        return self.output((y,), chosen)[0], chosen

    def _projections(self, ends: Ends, b: Buffers) -> Projections:
        """What the recurrence takes; receptances and gates of the chosen tokens only, the others mean nothing."""
        xs = self.time_inputs(b)
        k, v, *low = self._moving(self._moving.of(xs), b)
        w, a, *v_mix = self._expand_moving(low, b)
        chosen = b.workspace.buffers(len(ends.tokens))
        r, low_gate = self._read([x.index_select(0, ends.tokens) for x in self._read.of(xs)], chosen)
        (g,) = self._expand_read((low_gate,), chosen)
        r, g = self._spread((r, g), ends, b)
        return Projections(r, k, v, w, a, g, v_mix[0] if v_mix else None)

    def _spread(self, values: Sequence[torch.Tensor], ends: Ends, b: Buffers) -> Sequence[torch.Tensor]:
        """Rows of the chosen tokens where those of all tokens would be."""
        wide = b.outputs("spread", tuple(value.shape[1] for value in values))
        return [to.index_copy_(0, ends.tokens, value) for to, value in zip(wide, values, strict=True)]


class _Some(Operators):
    """Those of some operators that there are, by their numbers, into buffers of another name."""

    def __init__(self, all_of_them: Operators, name: str, which: Sequence[int]) -> None:
        linears, activations = all_of_them.linears, all_of_them.activations
        self._which = [i for i in which if i < len(linears)]
        super().__init__(name, self.of(linears), self.of(activations), all_of_them.dtype)

    def of(self, each: Sequence[Each]) -> list[Each]:
        """What belongs to them, of what belongs to each of the operators."""
        return [each[i] for i in self._which]
