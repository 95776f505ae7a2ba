"""`rwkv-lightning bench`: its options, its report, and whole runs on the demo model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from rwkv_lightning.core import bench_http, bench_loop, bench_options, cli, random_checkpoint
from rwkv_lightning.core.bench import server_options, share_note
from rwkv_lightning.core.bench_options import PARTS, Plan
from rwkv_lightning.core.bench_report import Figure, Report, comparison, differing_facts, number, table, unjudged
from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.errors import SettingsError, StartError


def shown(grid: Any) -> str:
    console = Console(width=200, record=True, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(grid)
    return console.export_text()


class TestReport:
    REPORT = Report(
        {"model": "m", "threads": "1"},
        [Figure("decode", "1 row", 100.0, "tokens/s", 0.01), Figure("ttft", "a chat", 0.5, "s", better="lower")],
    )

    def test_a_file_says_what_was_measured(self, tmp_path: Path) -> None:
        file = tmp_path / "a.json"
        self.REPORT.save(file)
        assert Report.read(file) == self.REPORT

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            ("{", "is no file of rwkv-lightning bench --json"),
            ("[]", "is no file of rwkv-lightning bench --json"),
            ('{"format": 2, "facts": {}, "figures": []}', "format 2, this version reads 1"),
            ('{"format": 1, "facts": {}, "figures": [{"part": "x"}]}', "is no file of"),
            ('{"format": 1, "facts": {}}', "is no file of"),
        ],
    )
    def test_another_file_is_refused_by_name(self, content: str, message: str, tmp_path: Path) -> None:
        file = tmp_path / "b.json"
        file.write_text(content)
        with pytest.raises(SettingsError, match=r"b\.json") as raised:
            Report.read(file)
        assert message in str(raised.value)

    def test_files_that_cannot_be_opened_are_named(self, tmp_path: Path) -> None:
        with pytest.raises(SettingsError, match=r"none\.json' cannot be read"):
            Report.read(tmp_path / "none.json")
        with pytest.raises(SettingsError, match="cannot be written"):
            self.REPORT.save(tmp_path / "missing" / "c.json")

    @pytest.mark.parametrize(
        ("better", "values", "expected"),
        [
            ("higher", (100, 125), "1.25 x, better"),
            ("higher", (100, 50), "0.50 x, worse"),
            ("lower", (100, 50), "2.00 x, better"),
            ("lower", (100, 125), "0.80 x, worse"),
            ("higher", (100, 101), "1.01 x"),
        ],
    )
    def test_a_change_counts_in_the_figures_own_direction(
        self, better: str, values: tuple[float, float], expected: str
    ) -> None:
        reports = [Report({}, [Figure("p", "n", value, "u", 0.001, better=better)]) for value in values]
        line = shown(comparison(*reports, ("a", "b"))).splitlines()[1]
        assert line.rstrip().endswith(expected)

    def test_a_change_within_the_rounds_spread_is_no_change(self) -> None:
        reports = [Report({}, [Figure("p", "n", value, "u", 0.2)]) for value in (100, 85)]
        assert "worse" not in shown(comparison(*reports, ("a", "b")))

    @pytest.mark.parametrize("spread", [None, 0.0])
    def test_what_was_measured_once_is_not_called_a_change(self, spread: float | None) -> None:
        once, often = (Report({}, [Figure("p", "n", 100, "u", s)]) for s in (spread, 0.01))
        twice = Report({}, [Figure("p", "n", 300, "u", spread)])
        for pair in ((once, twice), (often, twice)):
            text = shown(comparison(*pair, ("a", "b")))
            assert "3.00 x, one round" in text
            assert "better" not in text
            assert "give --rounds 2 or more" in unjudged(*pair)
        assert unjudged(often, often) == ""
        assert shown(table(once)).splitlines()[1].split()[-1] == "-"

    def test_a_place_that_cannot_be_written_is_named_before_measuring(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(*args: object) -> None:
            raise AssertionError("it measured")

        monkeypatch.setattr("rwkv_lightning.core.bench.measured", never)
        for place, message in (("no/x.json", "there is no directory"), (".", "is a directory")):
            assert cli.main(["bench", "--quick", "--json", str(tmp_path / place)]) == 1
            assert message in capsys.readouterr().err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(("share", "doubted"), [(0.93, False), (1.0, False), (1.02, True)])
    def test_more_over_http_than_the_loop_gives_is_doubted(self, share: float, doubted: bool) -> None:
        assert share_note(share).startswith(f"{share:.0%} of the engine's loop")
        assert share_note(share).endswith("the machine was busy: measure again") == doubted

    def test_figures_of_one_run_only_are_shown_as_such(self) -> None:
        one, other = (Report({}, [Figure("p", name, 1, "u")]) for name in "ab")
        text = shown(comparison(one, other, ("x", "y")))
        assert "only in the first" in text
        assert "only in the second" in text

    def test_what_else_differs_is_said(self) -> None:
        other = Report({**self.REPORT.facts, "threads": "2"})
        assert differing_facts(self.REPORT, other) == ["threads: 1 against 2"]
        assert differing_facts(self.REPORT, self.REPORT) == []

    def test_the_table_has_every_figure(self) -> None:
        lines = shown(table(self.REPORT)).splitlines()
        assert [line.split()[0] for line in lines[1:]] == ["decode", "ttft"]
        assert "100 tokens/s" in " ".join(lines[1].split())

    @pytest.mark.parametrize(("value", "text"), [(0.01234, "0.0123"), (12.345, "12.3"), (1234.5, "1,234")])
    def test_numbers_have_three_digits(self, value: float, text: str) -> None:
        assert number(value) == text


class TestOptions:
    def plan(self, line: str) -> Plan:
        _, commands = cli.build_parsers()
        return bench_options.take_plan(cli.parse(commands["bench"], line.split()))

    def test_defaults_and_choices(self) -> None:
        assert self.plan("") == Plan()
        plan = self.plan("--only http,decode --rows 2,4 --connections 8 --beside 16 --rounds 2 --prefill 32")
        assert plan == Plan(("http", "decode"), (2, 4), (32,), (8,), 16, 2)

    def test_what_is_given_wins_over_quick(self) -> None:
        assert self.plan("--quick --rows 3").rows == (3,)
        assert self.plan("--quick").rounds < Plan().rounds

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("--only decode,speed", "--only: 'speed' is none of decode, prefill, sampler, http, ttft"),
            ("--rows 1,0", "--rows: '0' is not a whole number from 1"),
            ("--rows x", "--rows: 'x' is not a whole number from 1"),
            (
                "--shape 0.1b --model-path m",
                "--shape makes a random model, --model-path names one: give one of the two",
            ),
            ("--shap 0.1b", "unknown option --shap; did you mean --shape?"),
        ],
    )
    def test_a_mistake_is_one_sentence(self, line: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert cli.main(["bench", *line.split()]) == 1
        assert capsys.readouterr().err == f"rwkv-lightning: error: {message}\n"

    def test_the_shapes_are_those_of_the_checkpoints(self) -> None:
        assert set(bench_options.SHAPES) == set(random_checkpoint.SHAPES) - {"tiny"}

    def test_the_bar_counts_what_will_be_measured(self) -> None:
        assert Plan(parts=("decode", "prefill"), rows=(1, 2), prefill=(8,), rounds=3).rounds_in_all(3) == 9
        assert Plan(parts=("sampler",), rounds=2).rounds_in_all(3) == 6
        assert Plan(parts=("ttft",)).rounds_in_all(3) == 2

    def test_the_server_gets_the_same_settings(self) -> None:
        settings = Settings(
            threads=3, deterministic=True, plugin=("a", "b"), max_batch=7, port=1, password="pw", vocab=None
        )
        options = server_options(settings, "m.pth", 99)
        assert options[:6] == ["--model-path", "m.pth", "--state-store", "none", "--max-batch", "99"]
        rest = " ".join(options[6:])
        assert rest == "--deterministic --plugin a,b --threads 3"
        assert cli.parse(cli.build_parsers()[1]["serve"], options)["threads"] == "3"
        assert "--no-deterministic" in server_options(Settings(deterministic=False), "m.pth", 1)


class TestKeptCheckpoint:
    def test_it_is_made_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("RWKV_LIGHTNING_CACHE_DIR", str(tmp_path))
        path = random_checkpoint.kept("tiny")
        made = path.stat().st_mtime_ns
        assert random_checkpoint.kept("tiny") == path
        assert path.stat().st_mtime_ns == made
        assert sorted(path.parent.iterdir()) == [path, path.with_suffix(".vocab.txt")]


@pytest.fixture(scope="module")
def model() -> Any:
    return bench_loop.load(Settings(threads=1, state_store="none", max_batch=16))


class TestLoop:
    def test_a_loop_decodes_as_many_rows_and_leaves_an_idle_engine(self, model: Any) -> None:
        with bench_loop.loop(model, 5, temperature=0) as running:
            before = [len(row.generated) for row in running._unfinished()]
            assert running.rate(3) > 0
            assert [len(row.generated) for row in running._unfinished()] == [count + 3 for count in before]
        assert model.engine.scheduler.idle
        model.engine.scheduler.check_integrity()

    def test_greedy_answers_do_not_depend_on_the_crowd(self, model: Any) -> None:
        prompts = [bench_loop.prompt(model, length, 1) for length in (3, 40, 7)]
        together = bench_loop.generate(model, prompts, 6)
        assert [len(answer) for answer in together] == [6, 6, 6]
        assert together == [bench_loop.generate(model, [prompt], 6)[0] for prompt in prompts]

    def test_rounds_go_in_turns(self) -> None:
        calls: list[str] = []
        ways = {name: lambda name=name: calls.append(name) or float(len(calls)) for name in "ab"}  # type: ignore[misc]
        results = bench_loop.interleaved(ways, 3)
        assert calls == list("ababab")
        assert bench_loop.medians(results) == {"a": 3.0, "b": 4.0}

    def test_a_samplers_cost_is_that_of_drawing(self, model: Any) -> None:
        class Counting:
            drawn = 0

            def validate(self, values: Any) -> None:
                return None

            def open(self, options: None, seed: int, row: int) -> int:
                return row

            def sample(self, logits: torch.Tensor, rows: list[int]) -> None:
                assert logits.shape == (4, 32)
                self.drawn += len(rows)
                logits.zero_()

        sampler = Counting()
        run = bench_loop.sampler_cost(sampler, 32, 4)  # type: ignore[arg-type]
        drawn = sampler.drawn
        assert run() > 0
        assert sampler.drawn == drawn + 4


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


class TestStream:
    def stream(self) -> tuple[bench_http.Stream, Transport]:
        stream, transport = bench_http.Stream(b"ask"), Transport()
        stream._transport = transport  # type: ignore[assignment]
        return stream, transport

    def test_the_first_text_counts_and_an_empty_one_does_not(self) -> None:
        stream, _ = self.stream()
        stream.data_received(b"HTTP/1.1 200 OK\r\n\r\n")
        stream.data_received(b'data: {"delta": {"role": "assistant", "content": ""}}')
        assert stream.first is None
        stream.data_received(b'data: {"delta":{"content":"H"}}')
        assert stream.first is not None
        assert not stream.failure

    def test_an_answer_that_ends_is_asked_for_again_however_it_is_cut(self) -> None:
        for cut in range(6):
            stream, transport = self.stream()
            whole = b"x0\r\n\r\n"
            stream.data_received(whole[:cut])
            stream.data_received(whole[cut:])
            assert transport.written == [b"ask"], cut
            stream.data_received(b"more")
            assert transport.written == [b"ask"]

    def test_a_refusal_is_kept(self) -> None:
        stream, _ = self.stream()
        stream.data_received(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert "503" in stream.failure


def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(StartError, match="--threads '0'"), bench_http.serve(["--threads", "0"]):
        raise AssertionError("it started")


def test_a_run_in_this_process(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.json"
    line = "bench --quick --only decode,prefill,sampler --rows 1,4,64 --prefill 16 --max-batch 8 --threads 1"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    out, err = capsys.readouterr()
    report = Report.read(file)
    assert [figure.name for figure in report.figures] == [
        "1 row",
        "4 rows",
        "16 tokens",
        *(f"{name}, defaults" for name in ("temperature", "v1", "v2")),
    ]
    assert all(figure.value > 0 for figure in report.figures)
    assert report.facts["threads"] == "1"
    assert "decode with 64 rows is left out: there are 8 slots: raise --max-batch" in err
    assert "4 rows" in out
    assert cli.main(["bench", "--compare", str(file), str(file)]) == 0
    assert "1.00 x" in capsys.readouterr().out


@pytest.mark.parametrize("line", ["--only decode --rows 99999", "--only http,ttft --connections 77 --beside 99999"])
def test_rows_that_do_not_fit_are_an_error(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--quick", *line.split(), "--max-batch", "8", "--threads", "1"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "nothing was measured: there are 8 slots" in err
    assert "raise --max-batch" in err.splitlines()[-1]


def test_a_run_through_a_server(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    line = "bench --quick --only http,ttft --connections 4 --beside 8 --rounds 1 --threads 1 --max-batch 16"
    assert cli.main([*line.split(), "--json", str(file)]) == 0
    figures = {figure["part"]: figure for figure in json.loads(file.read_text())["figures"]}
    assert set(figures) == set(PARTS[3:])
    assert figures["http"]["value"] > 0
    assert "of the engine's loop" in figures["http"]["note"]
    assert figures["http"]["spread"] is None, "one round has no spread"
    assert figures["ttft"]["spread"] > 0
    assert 0 < figures["ttft"]["value"] < 60
