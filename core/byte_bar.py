"""A progress bar over bytes, for long work on model files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

BAR_FROM = 1_000_000_000  # bytes from which reading a file is long work


@contextmanager
def byte_bar(what: str, total: int, *, least: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, when stderr is a terminal. Gives the function that moves it on by so many bytes.

    Args:
        what: said before the bar, e.g. "loading model.pth".
        least: bytes below which there is no bar; None for `BAR_FROM`.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    hidden = total < (BAR_FROM if least is None else least) or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(what, total=total)
        yield lambda nbytes: progress.advance(task, nbytes)
