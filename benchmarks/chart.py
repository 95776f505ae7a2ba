"""The chart of a comparison: tokens per second over the number of rows, one panel per number of threads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.comparison import Run
from benchmarks.peers import PREFILL, Contender

BESIDE = {"bare", "sampler"}  # options of contenders that lie on another one's line: the table has them


def draw(
    path: Path, shape: str, contenders: Mapping[str, Contender], columns: Sequence[str], runs: Sequence[Run]
) -> None:
    """Write a PNG. Raises ImportError without matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.5 * len(runs), 6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, run in zip(figure.subplots(1, len(runs), squeeze=False)[0], runs, strict=True):
        _panel(panel, shape, contenders, [column for column in columns if column != PREFILL], run)
    figure.legend(*panel.get_legend_handles_labels(), loc="outside lower center", ncols=5, fontsize=8)
    figure.savefig(path, dpi=120)


def _panel(panel: Any, shape: str, contenders: Mapping[str, Contender], columns: Sequence[str], run: Run) -> None:
    rows = list(map(int, columns))
    for kind, style in (("bf16", "--"), ("int8", ":")):
        if any(run.ceilings[kind]):
            panel.plot(
                rows, [run.roofline(shape, kind, c) for c in columns], style, color="gray", label=f"roofline {kind}"
            )
    drawn = [name for name, contender in contenders.items() if contender.options.keys().isdisjoint(BESIDE)]
    for name in drawn:
        points = [(int(c), value) for c in columns if (value := run.median(name, c)) is not None]
        if points:
            width = 2.5 if name.startswith("ours") else 1.2
            panel.plot(*zip(*points, strict=True), marker="o", linewidth=width, label=name)
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_xticks(rows, columns)
    panel.set_xlabel("sequences at once")
    panel.set_ylabel("tokens per second")
    panel.set_title(f"RWKV-7 {shape}, {run.threads} thread{'s' * (run.threads > 1)}")
    panel.grid(alpha=0.3)
