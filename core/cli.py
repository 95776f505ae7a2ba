"""The command line: `rwkv-lightning serve | convert | inspect | bench | plugins | config`.

`serve` is meant when the first argument is an option. Whatever stops a command is one sentence on stderr and exit
code 1; a plugin's failure shows its traceback too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import traceback
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NoReturn

from rwkv_lightning.core.bench_options import GROUPS, add_bench_options
from rwkv_lightning.core.config import Settings, load_settings
from rwkv_lightning.core.config_sources import ENVIRONMENT_ONLY, PREFIX, suggestion
from rwkv_lightning.core.errors import PluginError, SettingsError, StartError
from rwkv_lightning.core.manifest import GROUP_SIZES, TARGETS
from rwkv_lightning.core.options import add_options

PROGRAM = "rwkv-lightning"

ABOUT = (
    "An inference server for RWKV-7: one shared batch, one state hierarchy, pluggable backends, samplers and routes."
)

EXAMPLES = """\
examples:
  rwkv-lightning serve
      the embedded demo model on port 8000
  rwkv-lightning serve --model-path rwkv7-g1-0.4b --threads 8
      a model of yours: .pth or .safetensors
  RWKV_LIGHTNING_PASSWORD=secret rwkv-lightning serve --config server.toml --port 9000
      settings from a file, the password from the environment; the command line wins
  rwkv-lightning serve --plugin min-p
      with an installed plugin; rwkv-lightning plugins lists them"""

CONVERT_EXAMPLES = """\
examples:
  rwkv-lightning convert rwkv7-g1-0.4b --to gemlite-int8 g1-0.4b-int8.safetensors
      half the size; then: rwkv-lightning serve --inference-engine gemlite --model-path g1-0.4b-int8
  rwkv-lightning convert rwkv7-g1-0.4b --to gemlite-int4 g1-0.4b-int4.safetensors --group-size 128
      a third of the size"""

INSPECT_NOTE = """\
A .pth holds a checksum of each tensor: all of them are compared, and the first tensor that differs is named (exit code
1). serve compares each as it loads it. An original .safetensors file holds none.

examples:
  rwkv-lightning inspect rwkv7-g1-0.4b
      a model of yours: .pth or .safetensors
  rwkv-lightning inspect g1-0.4b-int8.safetensors --json
      a converted file, for scripts"""

BENCH_EXAMPLES = """\
examples:
  rwkv-lightning bench --shape 0.4b --threads 2 --json before.json
      a random model of that shape: no download
  rwkv-lightning bench --model-path rwkv7-g1-0.4b --only decode,http
      some of the measurements of a model of yours
  rwkv-lightning bench --compare before.json after.json
      two runs side by side"""

SERVE_NOTE = f"""\
Each option may stand in a TOML file (--config) under its name, e.g. max-batch = 64, or in the environment under the
name in brackets; lists take commas there. The command line wins over the environment, the environment over the file.
A plugin's own settings: [plugins.NAME] in the file, {PREFIX}NAME__KEY in the environment.

other environment variables:
""" + "\n".join(f"  {PREFIX}{name}\n      {text}" for name, text in ENVIRONMENT_ONLY.items())


class Parser(argparse.ArgumentParser):
    """argparse whose complaints are SettingsErrors and whose unknown options get a suggestion."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(
            formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False, exit_on_error=False, **kwargs
        )

    def error(self, message: str) -> NoReturn:
        raise SettingsError(message)

    def refuse(self, unknown: str) -> NoReturn:
        """Raise SettingsError for an argument that nobody takes."""
        name = unknown.partition("=")[0]
        if not name.startswith("-"):
            raise SettingsError(f"unexpected argument {name!r}; see {self.prog} --help")
        raise SettingsError(f"unknown option {name}{suggestion(name, self._option_string_actions)}")


# How long (in turns of a loop, well under a millisecond in all) torch's threads spin while they wait for work.
# Their default is a hundred times that: on a machine that does anything else they then take the cores from it, and from
# each other.
THREAD_PATIENCE = {"GOMP_SPINCOUNT": "10000"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the result is the exit code."""
    for name, value in THREAD_PATIENCE.items():  # read by torch's OpenMP when it is first imported
        os.environ.setdefault(name, value)
    try:
        return run(list(sys.argv[1:] if arguments is None else arguments))
    except StartError as error:
        if isinstance(error, PluginError) and error.__cause__ is not None:
            traceback.print_exception(error.__cause__)
        print(f"{PROGRAM}: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # rwkv-lightning plugins | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run(arguments: list[str]) -> int:
    parser, commands = build_parsers()
    if not arguments:
        parser.print_help()
        return 0
    if arguments[0] in ("-h", "--help", "--version"):
        parser.parse_args(arguments)
    command, rest = ("serve", arguments) if arguments[0].startswith("-") else (arguments[0], arguments[1:])
    if command not in commands:
        hint = suggestion(command, commands, otherwise=f"; there are {', '.join(commands)}")
        raise SettingsError(f"unknown command {command!r}{hint}")
    options = parse(commands[command], rest)
    COMMANDS[command](options)
    return 0


def parse(parser: Parser, arguments: list[str]) -> dict[str, Any]:
    """The options given, by the setting's name. Raises SettingsError."""
    try:
        known, unknown = parser.parse_known_args(arguments)
    except argparse.ArgumentError as error:
        name = error.argument_name
        raise SettingsError(f"{name}: {error.message}" if name else error.message) from None
    if unknown:
        parser.refuse(unknown[0])
    return vars(known)


def build_parsers() -> tuple[Parser, dict[str, Parser]]:
    """The parser that shows the overview, and the commands' own."""
    overview = "\n".join(f"  {name:8} {text}" for name, text in SUMMARIES.items())
    top = Parser(
        prog=PROGRAM,
        description=f"{ABOUT}\n\ncommands:\n{overview}\n\n{PROGRAM} COMMAND --help explains each.",
        usage=f"{PROGRAM} [COMMAND] [OPTIONS]",
        epilog=EXAMPLES,
    )
    top.add_argument("--version", action="version", version=f"{PROGRAM} {version(PROGRAM)}")
    serve, convert, inspect, bench, plugins, config = (_command(name) for name in SUMMARIES)
    add_options(serve)
    serve.epilog = f"{SERVE_NOTE}\n\n{EXAMPLES}"
    _add_convert_options(convert)
    _add_inspect_options(inspect)
    plugins.add_argument("--json", action="store_true", help="print a JSON list")
    add_options(plugins, ("general", "engine", "plugins"), only=FOR_PLUGINS)
    config.add_argument("--json", action="store_true", help="print a JSON list")
    add_options(config)
    add_bench_options(bench)
    add_options(bench, GROUPS)
    bench.epilog = BENCH_EXAMPLES
    return top, dict(zip(SUMMARIES, (serve, convert, inspect, bench, plugins, config), strict=True))


# Of the settings, those that decide what is registered and whether it works here.
FOR_PLUGINS = frozenset({"config", "log_level", "device", "plugin", "disable_plugin", "trace_plugins"})


def _add_inspect_options(parser: Parser) -> None:
    parser.usage = f"{PROGRAM} inspect FILE [OPTIONS]"
    parser.epilog = INSPECT_NOTE
    what = "the model file; tried as given, then with .pth, then with .safetensors"
    parser.add_argument("file", metavar="FILE", help=what)
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _add_convert_options(parser: Parser) -> None:
    parser.epilog = CONVERT_EXAMPLES
    parser.usage = f"{PROGRAM} convert MODEL --to TARGET OUT [OPTIONS]"
    parser.add_argument("model", metavar="MODEL", help="the model file: .pth or .safetensors, unquantised")
    parser.add_argument(
        "--to", required=True, choices=TARGETS, help="the engine that will read it, and how: %(choices)s"
    )
    parser.add_argument("out", metavar="OUT", help="the file to write; ends in .safetensors")
    parser.add_argument(
        "--group-size", type=int, choices=GROUP_SIZES, help="weights that share a scale, for gemlite-int4 (default 64)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace OUT when it is there already")


def _command(name: str) -> Parser:
    return Parser(prog=f"{PROGRAM} {name}", description=SUMMARIES[name], usage=f"{PROGRAM} {name} [OPTIONS]")


def serve(options: dict[str, Any]) -> None:
    settings = load_settings(options)
    from rwkv_lightning.core import server

    server.serve(settings)


def convert(options: dict[str, Any]) -> None:
    """Quantise a model file for an engine."""
    group_size = options["group_size"]
    if group_size and options["to"] != "gemlite-int4":
        raise SettingsError(f"--group-size is for --to gemlite-int4; {options['to']} has one scale per row")
    from pathlib import Path

    from rwkv_lightning.core import convert as conversion
    from rwkv_lightning.core.checkpoint import resolve_model_path

    source, out = resolve_model_path(options["model"], "MODEL"), Path(options["out"]).expanduser()
    with conversion.conversion_bar(source) as on_progress:
        manifest = conversion.convert(
            source,
            options["to"],
            out,
            group_size=group_size or 64,
            overwrite=options["overwrite"],
            on_progress=on_progress,
        )
    before, after = source.stat().st_size, out.stat().st_size
    print(f"{out}: {manifest.target}, {after / 1e6:,.1f} MB ({after / before:.2f} of {source.name})")


def inspect(options: dict[str, Any]) -> None:
    """Print what a model file is."""
    from rwkv_lightning.core.checkpoint import resolve_model_path
    from rwkv_lightning.core.inspection import facts

    found = facts(resolve_model_path(options["file"], "FILE"))
    width = max(map(len, found))
    print(json.dumps(found) if options["json"] else "\n".join(f"{k:{width}}  {_number(v)}" for k, v in found.items()))


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def bench(options: dict[str, Any]) -> None:
    """Measure a model, or compare two measurements."""
    from rwkv_lightning.core import bench as command

    command.run(options)


def plugins(options: dict[str, Any]) -> None:
    """Print what is registered and what is installed."""
    as_json = options.pop("json")
    settings: Settings = load_settings(options)
    from rwkv_lightning.core.host import PluginHost
    from rwkv_lightning.core.listing import as_table, listings
    from rwkv_lightning.core.models import load_options

    lines = listings(PluginHost(settings), load_options(settings).device)
    print(json.dumps([dataclasses.asdict(line) for line in lines], indent=2) if as_json else as_table(lines))


def config(options: dict[str, Any]) -> None:
    """Print what `serve` would run with under the same options, and where each setting came from."""
    as_json = options.pop("json")
    settings = load_settings(options)
    from rwkv_lightning.core import effective
    from rwkv_lightning.core.host import PluginHost

    lines = effective.effective(settings, options, PluginHost(settings))
    print(json.dumps(effective.as_json(lines), indent=2) if as_json else effective.as_table(lines))


SUMMARIES = {
    "serve": "serve a model over HTTP (the default when the first argument is an option)",
    "convert": "quantise a model file for the gemlite or the cutlass engine",
    "inspect": "say what a model file is (engine, shape, type, size, fingerprint) and check it for damage",
    "bench": "measure a model's speed here: decoding, prompts, samplers, HTTP; compare two measurements",
    "plugins": "list backends, samplers and route groups, where they come from and whether they work here",
    "config": "print the effective settings and where each came from; takes the options of serve",
}
COMMANDS = {
    "serve": serve,
    "convert": convert,
    "inspect": inspect,
    "bench": bench,
    "plugins": plugins,
    "config": config,
}

if __name__ == "__main__":
    sys.exit(main())
