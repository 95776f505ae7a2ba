"""What `rwkv-lightning bench` found: figures, their JSON file, a table, and two files side by side."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from rwkv_lightning.core.errors import SettingsError

FORMAT = 1
NOTABLE = 0.03  # a smaller change than this is noise on most machines


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure.

    Args:
        part: which measurement, e.g. 'decode'.
        name: what of it, e.g. '64 rows'; unique within the part.
        spread: half the distance between the lowest and the highest round, as a share of the value; None when there
            was one round only.
        note: a few words beside it.
        better: 'higher' or 'lower'.
    """

    part: str
    name: str
    value: float
    unit: str
    spread: float | None = None
    note: str = ""
    better: str = "higher"

    @property
    def one_round(self) -> bool:
        """Whether rounds' distance is unknown; files of earlier versions have 0 then."""
        return not self.spread

    @property
    def key(self) -> tuple[str, str]:
        return self.part, self.name


@dataclass(slots=True)
class Report:
    """A run: `facts` says of what and where."""

    facts: dict[str, str]
    figures: list[Figure] = field(default_factory=list)

    @staticmethod
    def check_place(path: Path) -> None:
        """Raise SettingsError when `save` could not write there: to be asked before anything is measured."""
        folder = path.parent
        if path.is_dir():
            raise SettingsError(f"--json: '{path}' is a directory: name a file in it")
        if not folder.is_dir():
            raise SettingsError(f"--json: '{path}' cannot be written: there is no directory '{folder}'")
        if not os.access(path if path.exists() else folder, os.W_OK):
            raise SettingsError(f"--json: '{path}' cannot be written: check its permissions")

    def save(self, path: Path) -> None:
        """Write the JSON file. Raises SettingsError when it cannot be written."""
        content = {"format": FORMAT, "facts": self.facts, "figures": [dataclasses.asdict(f) for f in self.figures]}
        try:
            path.write_text(json.dumps(content, indent=1) + "\n")
        except OSError as error:
            raise SettingsError(f"--json: '{path}' cannot be written: {error.strerror or error}") from None

    @classmethod
    def read(cls, path: Path) -> Report:
        """A file that `save` wrote. Raises SettingsError naming the file and what is wrong with it."""
        try:
            content = json.loads(path.read_text("utf-8"))
            return cls(_facts(content), [Figure(**figure) for figure in content["figures"]])
        except OSError as error:
            raise SettingsError(f"--compare: '{path}' cannot be read: {error.strerror or error}") from None
        except (ValueError, TypeError, KeyError) as error:
            raise SettingsError(
                f"--compare: '{path}' is no file of rwkv-lightning bench --json ({error}); measure again with --json"
            ) from None


def _facts(content: Any) -> dict[str, str]:
    if content["format"] != FORMAT:
        raise ValueError(f"format {content['format']}, this version reads {FORMAT}")
    return dict(content["facts"])


def plural(count: int, noun: str) -> str:
    """'1 row', '8 rows'"""
    return f"{count} {noun}{'s' * (count > 1)}"


def number(value: float) -> str:
    """Three significant digits below a thousand, whole numbers from there."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def table(report: Report) -> Table:
    """All figures, part by part."""
    grid = Table(box=None, pad_edge=False)
    for heading in ("what", "", "figure", "", "spread", ""):
        grid.add_column(heading, justify="right" if heading in ("figure", "spread") else "left", no_wrap=True)
    before = ""
    for figure in report.figures:
        part, before = ("" if figure.part == before else figure.part), figure.part
        spread = "-" if figure.one_round else f"{figure.spread:.0%}"
        grid.add_row(f"[bold]{part}[/]", figure.name, number(figure.value), figure.unit, spread, figure.note)
    return grid


def comparison(first: Report, then: Report, names: tuple[str, str]) -> Table:
    """Both runs' figures and how many times as good the second one is."""
    grid = Table(box=None, pad_edge=False)
    for heading in ("what", "", *names, "", "change"):
        grid.add_column(heading, justify="right" if heading in (*names, "change") else "left", overflow="fold")
    old, new = ({figure.key: figure for figure in report.figures} for report in (first, then))
    for key in dict.fromkeys([*old, *new]):
        grid.add_row(*key, *_pair(old.get(key), new.get(key)))
    return grid


def _pair(old: Figure | None, new: Figure | None) -> Iterable[str]:
    values = [number(figure.value) if figure else "-" for figure in (old, new)]
    unit = (old or new or Figure("", "", 0, "")).unit
    if old is None or new is None:
        return (*values, unit, f"only in the {'second' if old is None else 'first'}")
    return (*values, unit, _change(old, new))


def _change(old: Figure, new: Figure) -> str:
    """'1.25 x, better': above 1 is better, whichever way the figure counts. Not judged without both spreads."""
    pair = (new.value, old.value) if new.better == "higher" else (old.value, new.value)
    if not pair[1]:
        return ""
    ratio = pair[0] / pair[1]
    if old.one_round or new.one_round:
        return f"{ratio:.2f} x, one round"
    if abs(ratio - 1) <= max(NOTABLE, old.spread or 0, new.spread or 0):
        return f"{ratio:.2f} x"
    return f"[green]{ratio:.2f} x, better[/]" if ratio > 1 else f"[red]{ratio:.2f} x, worse[/]"


def unjudged(first: Report, then: Report) -> str:
    """A sentence on the figures that were measured in one round only; '' when there are none."""
    if not any(figure.one_round for report in (first, then) for figure in report.figures):
        return ""
    return "'one round': how far rounds differ is not known, so nothing is called a change; give --rounds 2 or more"


def differing_facts(first: Report, then: Report) -> list[str]:
    """Sentences about what else than the code differs between two runs."""
    known = dict.fromkeys([*first.facts, *then.facts])
    return [
        f"{name}: {first.facts.get(name, 'unknown')} against {then.facts.get(name, 'unknown')}"
        for name in known
        if first.facts.get(name) != then.facts.get(name)
    ]
