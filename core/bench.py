"""`rwkv-lightning bench`: how fast a model is here, in this process and through a server."""

from __future__ import annotations

import platform
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from rwkv_lightning.core.bench_options import Plan, take_plan
from rwkv_lightning.core.bench_report import Figure, Report, comparison, differing_facts, plural, table, unjudged
from rwkv_lightning.core.config import load_settings
from rwkv_lightning.core.config_sources import option_name
from rwkv_lightning.core.errors import SettingsError

if TYPE_CHECKING:
    from rwkv_lightning.core.bench_http import Server
    from rwkv_lightning.core.config import Settings
    from rwkv_lightning.core.models import LoadedModel

SAMPLED_ROWS = 64
NOT_FOR_THE_SERVER = frozenset({"model_path", "state_store", "max_batch", "plugins", "password", "host", "port"})

Measure = Callable[[], float]


class Bench:
    """One run over one model.

    Args:
        settings: the model and its engine.
        note: told what is measured now, once per round.
    """

    def __init__(self, settings: Settings, plan: Plan, model: LoadedModel, note: Callable[[str], None]) -> None:
        self.settings, self.plan, self.model, self.note = settings, plan, model, note
        self.report = Report(facts(settings, model))

    def run(self) -> Report:
        """Measure all parts. Raises SettingsError when none of the rows that were asked for fit."""
        for part in self.plan.parts:
            if part in ("decode", "prefill", "sampler"):
                getattr(self, part)()
        if served := [part for part in self.plan.parts if part in ("http", "ttft")]:
            self.through_a_server(served)
        if not self.report.figures:
            raise SettingsError(
                f"nothing was measured: there are {self.model.slots} slots, fewer than any of the rows asked for: "
                "name fewer, raise --max-batch, or free memory"
            )
        return self.report

    def decode(self) -> None:
        for rows in self.rows_that_fit(self.plan.rows, "decode"):
            self.decode_at(rows)

    def decode_at(self, rows: int) -> None:
        from rwkv_lightning.core.bench_loop import loop

        with loop(self.model, rows, temperature=0) as running:
            running.rate(1)
            self.measure("decode", plural(rows, "row"), "tokens/s", lambda: running.rate_for(self.plan.seconds))

    def prefill(self) -> None:
        from rwkv_lightning.core.bench_loop import prefill_rate

        prefill_rate(self.model, max(self.plan.prefill), 0)  # the first one makes the buffers
        seeds = count(1)
        for length in self.plan.prefill:
            run = partial(prefill_rate, self.model, length)
            self.measure("prefill", f"{length} tokens", "tokens/s", lambda run=run: run(next(seeds)))  # type: ignore[misc]

    def sampler(self) -> None:
        from rwkv_lightning.core.bench_loop import sampler_cost

        vocab = self.model.model.config.vocab_size
        for name, sampler in self.model.engine.samplers.items():
            run = sampler_cost(sampler, vocab, SAMPLED_ROWS)
            self.measure("sampler", f"{name}, defaults", "us per row", run, better="lower")

    def through_a_server(self, parts: list[str]) -> None:
        from rwkv_lightning.core.bench_http import serve

        streams = self.rows_that_fit(self.plan.connections, "http") if "http" in parts else []
        beside = self.rows_that_fit((self.plan.beside,), "ttft") if "ttft" in parts else []
        if not streams and not beside:
            return
        most = max(*streams, *beside, 0) + 1
        password = self.settings.password.get_secret_value() if self.settings.password else None
        self.note("starting a server")
        with serve(server_options(self.settings, str(self.model.path), most), password) as server:
            for number in streams:
                self.http_at(server, number)
            for rows in beside:
                self.ttft_beside(server, rows)

    def http_at(self, server: Server, streams: int) -> None:
        """Rounds of the engine's loop and of as many streams, in turns, so that their ratio holds."""
        from rwkv_lightning.core.bench_http import streaming_rate
        from rwkv_lightning.core.bench_loop import interleaved, loop

        with loop(self.model, streams, temperature=0) as running:
            ways: dict[str, Measure] = {
                "loop": lambda: running.rate_for(self.plan.seconds),
                "http": lambda: streaming_rate(server, streams, max(1.0, 2 * self.plan.seconds)),
            }
            rates = interleaved(ways, self.plan.rounds, lambda way: self.note(f"http: {streams} streams, {way}"))
        share = statistics.median(rates["http"]) / statistics.median(rates["loop"])
        self.add("http", plural(streams, "stream"), "tokens/s", rates["http"], note=share_note(share))

    def ttft_beside(self, server: Server, rows: int) -> None:
        from rwkv_lightning.core.bench_http import first_token_beside

        self.note(f"ttft: a chat beside {rows} rows")
        first = first_token_beside(server, rows, max(3, self.plan.rounds))
        note = f"{first.steps:.1f} steps"
        self.add("ttft", f"a chat beside {rows} rows", "s", first.seconds, note=note, better="lower")

    def rows_that_fit(self, wanted: tuple[int, ...], part: str) -> list[int]:
        """Those for which there are slots; the others are named on stderr."""
        for rows in wanted:
            if rows > self.model.slots:
                reason = f"there are {self.model.slots} slots: raise --max-batch, or free memory"
                print(f"{part} with {rows} rows is left out: {reason}", file=sys.stderr)
        return [rows for rows in wanted if rows <= self.model.slots]

    def measure(self, part: str, name: str, unit: str, run: Measure, *, better: str = "higher") -> None:
        values = []
        for _ in range(self.plan.rounds):
            self.note(f"{part}: {name}")
            values.append(run())
        self.add(part, name, unit, values, better=better)

    def add(
        self, part: str, name: str, unit: str, values: list[float], *, note: str = "", better: str = "higher"
    ) -> None:
        median = statistics.median(values)
        spread = (max(values) - min(values)) / 2 / median if median and len(values) > 1 else None
        self.report.figures.append(Figure(part, name, median, unit, spread, note, better))


def share_note(share: float) -> str:
    """What a rate over HTTP is of the loop's. The server runs that very loop, so it cannot be faster."""
    doubt = "; the machine was busy: measure again" if share > 1 else ""
    return f"{share:.0%} of the engine's loop{doubt}"


def facts(settings: Settings, model: LoadedModel) -> dict[str, str]:
    """What was measured, and where."""
    import torch

    return {
        "model": model.path.stem,
        "engine": f"{model.engine_name}, {model.model.dtype}",
        "kernels": model.model.description,
        "threads": str(settings.threads),
        "version": version("rwkv-lightning"),
        "torch": torch.__version__,
        "processor": _processor(),
        "python": platform.python_version(),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def server_options(settings: Settings, model_path: str, most: int) -> list[str]:
    """The command line of a server that runs the same model in the same way, with room for `most` rows."""
    room = str(max(most, settings.max_batch))
    options = ["--model-path", model_path, "--state-store", "none", "--max-batch", room]
    for name in sorted(settings.model_fields_set - NOT_FOR_THE_SERVER):
        options += _option(option_name(name), getattr(settings, name))
    return options


def _option(flag: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag if value else flag.replace("--", "--no-", 1)]
    return [] if value is None else [flag, ",".join(value) if isinstance(value, tuple) else str(value)]


def run(options: dict[str, Any]) -> None:
    """The command: measure and print, or compare two files."""
    compare: list[Path] | None = options.pop("compare")
    if compare:
        print_comparison(*compare)
        return
    plan, json_file, shape = take_plan(options), options.pop("json"), options.pop("shape")
    if json_file:
        Report.check_place(json_file)
    settings = load_settings(with_model(options, shape))
    report = measured(settings, plan)
    console = wide_console()
    for name, value in report.facts.items():
        console.print(f"[bold]{name:9}[/] {value}", soft_wrap=True)
    console.print(table(report))
    if json_file:
        report.save(json_file)


def with_model(options: Mapping[str, Any], shape: str | None) -> dict[str, Any]:
    """The settings' options, with the random checkpoint where a shape is named. Raises SettingsError for both."""
    if shape and "model_path" in options:
        raise SettingsError("--shape makes a random model, --model-path names one: give one of the two")
    chosen = {"state_store": "none", **options}
    if shape:
        from rwkv_lightning.core.random_checkpoint import kept

        chosen["model_path"] = str(kept(shape))
    return chosen


def measured(settings: Settings, plan: Plan) -> Report:
    """Load the model and measure it, with a progress bar on stderr."""
    from rwkv_lightning.core.bench_loop import load

    model = load(settings)
    with progress(plan.rounds_in_all(len(model.engine.samplers))) as note:
        return Bench(settings, plan, model, note).run()


@contextmanager
def progress(total: int) -> Iterator[Callable[[str], None]]:
    """A bar that moves on with each note."""
    columns = (TextColumn("{task.description:36}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)

        def note(text: str) -> None:
            bar.update(task, advance=1, description=text)

        yield note


def wide_console() -> Console:
    """Standard output; a pipe takes lines of any length."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=160)


def print_comparison(first: Path, then: Path) -> None:
    reports = Report.read(first), Report.read(then)
    console = wide_console()
    for sentence in differing_facts(*reports):
        console.print(f"differs in {sentence}", soft_wrap=True)
    console.print(comparison(*reports, (str(first), str(then))))
    if sentence := unjudged(*reports):
        console.print(sentence, soft_wrap=True)
