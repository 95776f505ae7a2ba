"""The sampling fields' checks (ranges of defaults.md) and the sampler that V1, V2 and temperature are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, cast

from rwkv_lightning.core.errors import InvalidField
from rwkv_lightning.kernels.sampling import Row, Rule, sample

if TYPE_CHECKING:
    import torch

    from rwkv_lightning.core.interfaces import SamplerRow

Check = Callable[[str, Any], Any]


def number(low: float, high: float) -> Check:
    """A check for a finite number from low to high; it returns a float."""
    bounded = math.isfinite(low) and math.isfinite(high)
    expected = f"a number from {low:g} to {high:g}" if bounded else "a finite number"

    def check(name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise _invalid(name, expected, value)
        try:
            result = float(value)
        except OverflowError:
            raise _invalid(name, expected, value) from None
        if not (math.isfinite(result) and low <= result <= high):
            raise _invalid(name, expected, value)
        return result

    return check


def integer(name: str, value: Any) -> int:
    """A check for any integer."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise _invalid(name, "an integer (0 or less: no bound)", value)
    return value


def _invalid(name: str, expected: str, value: Any) -> InvalidField:
    if isinstance(value, float) or (type(value) is int and abs(value) < 10**18):
        got = f"{value}"
    else:
        got = "an integer too large" if type(value) is int else f"a value of type {type(value).__name__}"
    return InvalidField(f"{name} must be {expected}, not {got}", param=name)


CHECKS: Mapping[str, Check] = {
    "temperature": number(0, 1000),
    "top_k": integer,
    "top_p": number(0, 1),
    "alpha_presence": number(-math.inf, math.inf),
    "alpha_frequency": number(-math.inf, math.inf),
    "alpha_decay": number(0, 1),
}


@dataclass(frozen=True, slots=True)
class TemperatureOptions:
    """Options of the temperature-only sampler."""

    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class PenaltyOptions:
    """Options of V1 and V2; top_k at most 0 is no bound, alpha_decay is per drawn token."""

    temperature: float
    top_k: int
    top_p: float
    alpha_presence: float
    alpha_frequency: float
    alpha_decay: float


class RuleSampler:
    """A sampler that follows one rule of the kernels; a subclass says which, and how a row begins.

    Args:
        defaults: the options of a request that names none; their fields are the ones it reads.
        exempt: ids of tokens whose V2 count never grows.
    """

    rule: Rule

    def __init__(self, defaults: TemperatureOptions | PenaltyOptions, exempt: Sequence[int] = ()) -> None:
        self.defaults = defaults
        self.exempt = tuple(exempt)

    def validate(self, values: Mapping[str, Any]) -> TemperatureOptions | PenaltyOptions:
        """The options that these values make, over the defaults; other names are ignored.

        Raises:
            InvalidField: a value has the wrong type or lies out of range; None is a wrong type.
        """
        names = [field.name for field in fields(self.defaults)]
        given = {name: CHECKS[name](name, values[name]) for name in names if name in values}
        return type(self.defaults)(**{name: getattr(self.defaults, name) for name in names} | given)

    def open(self, options: TemperatureOptions | PenaltyOptions, seed: int, row: int) -> Row:
        """A fresh row with the random stream (seed, row)."""
        if isinstance(options, TemperatureOptions):
            return Row(seed, row, temperature=options.temperature)
        return Row(
            seed,
            row,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            presence=options.alpha_presence,
            frequency=options.alpha_frequency,
            decay=options.alpha_decay,
        )

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplerRow]) -> list[int]:
        """One token per row from float32 logits [len(rows), V]; -1 for a row without a largest finite logit.

        The rows come from `open`. The logits are left as they were.
        """
        return sample(self.rule, logits, cast("Sequence[Row]", rows), self.exempt)
