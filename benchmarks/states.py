"""What states cost: `python -m benchmarks.states [resume] [copies] [prefix] [disk] [types]`, by default all five.

- resume: from a session's last turn to its state in a row's slot, out of each tier, beside the time of one step;
- copies: what steps wait for copies out of slots, while sessions come and go over few slots;
- prefix: 100 requests at once that share a prompt of 4,000 tokens, with the prefix cache and without, in turns;
- disk: 10,000 sessions of the demo model in the database: a look-up, /state/status, the start of a server;
- types: what slots in fp16 and fp32 cost in bytes, speed and drift.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.common import (
    HAS_TEST_EXTRA,
    EngineLoop,
    checkpoint,
    count,
    interleaved,
    load,
    progress,
    require_test_extra,
)
from rwkv_lightning.core.bench_loop import prompt, sampling
from rwkv_lightning.core.cache.kept import SessionTarget
from rwkv_lightning.core.cache.keys import SessionKey
from rwkv_lightning.core.cache.record import Expected, StateHeader, StateRecord, hash_tokens
from rwkv_lightning.core.cache.sessions import Turn
from rwkv_lightning.core.checkpoint import fingerprint
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.interfaces import Batch
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.random_checkpoint import SHAPES
from rwkv_lightning.core.request import GenerationRequest
from rwkv_lightning.core.slots import Snapshot
from rwkv_lightning.core.tensor_file import open_tensors
from rwkv_lightning.plugins.stores.sqlite import SqliteStore

if TYPE_CHECKING or HAS_TEST_EXTRA:
    import httpx

    from tests.server_process import ServerProcess


def row(*cells: object) -> None:
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


def median_ms(run: Callable[[], object], times: int) -> float:
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return 1000 * statistics.median(seconds)


# resume


def resume(options: argparse.Namespace) -> None:
    """The three ways a state gets into a row's slot, and one step of a single row for comparison."""
    with tempfile.TemporaryDirectory() as folder:
        model = load(checkpoint(options.shape), threads=options.threads, max_batch=4, state_store="none")
        loop = EngineLoop(model, 1)
        step = 1000 / loop.rate(40)
        pool: Any = model.engine.runner.states
        record = record_of(model, pool.export(0))
        expected = Expected(record.header.model, model.model.config, pool.wkv.dtype, key="s")
        store = SqliteStore()
        store.open(f"{folder}/states.db")
        store.put([record.to_stored()])

        def from_store() -> None:
            data = store.get("s")
            assert data is not None
            pool.restore(1, StateRecord.from_bytes(data, expected).snapshot)

        size = f"{record.snapshot.nbytes / 1e6:.2f} MB"
        row(f"resume, {options.shape} shape, state {size}", "median", "bound by")
        row("---", "---", "---")
        row("one step of one row", f"{step:.2f} ms", "the weights' bytes")
        row("L1: slot to slot", f"{median_ms(lambda: pool.copy([(0, 1)]), 200):.2f} ms", "memory")
        row("L2: host memory to slot", f"{median_ms(lambda: pool.restore(1, record.snapshot), 200):.2f} ms", "memory")
        row("L3: database to slot", f"{median_ms(from_store, 60):.2f} ms", "SHA-256 and reading the record")
        store.close()
        loop.close()


def record_of(model: LoadedModel, snapshot: Snapshot) -> StateRecord:
    header = StateHeader(fingerprint(open_tensors(model.path).tensors), "", 4, hash_tokens([1, 2, 3, 4]), "s")
    return StateRecord(header, snapshot)


# copies

ROUNDS, TURNS, AT_ONCE, FEW_SLOTS = 4, 50, 3, 8


def copies(options: argparse.Namespace) -> None:
    """The same turns with the copier, and without it: then every state is copied when its slot is needed.

    The first round warms up: its copies count, its times do not.
    """
    turns = f"{ROUNDS * TURNS} turns, {options.shape} shape"
    row(turns, "copies in steps", "beside", "a step waits, mean", "at most", "a step")
    row("---", "---", "---", "---", "---", "---")
    models = [load(checkpoint(options.shape), threads=options.threads, max_batch=FEW_SLOTS, l1_slots=5) for _ in "01"]
    models[0].states.cache.moves.copier.close()
    times = [play_turns(model, round_) for round_ in range(ROUNDS) for model in models]
    for number, name in enumerate(("copied as slots are needed", "copied ahead")):
        copied = models[number].states.cache.moves.copies
        waits, steps = (list(itertools.chain(*part)) for part in zip(*times[2 + number :: 2], strict=True))
        seconds = statistics.mean(waits), max(waits), statistics.median(steps)
        row(name, copied["step"], copied["beside"], *(f"{1e3 * each:.3f} ms" for each in seconds))
        models[number].states.shut_down()


def play_turns(model: LoadedModel, round_: int) -> tuple[list[float], list[float]]:
    """Seconds of each step that were spent on moving states out of their slots, and of the whole step."""
    engine, cache = model.engine, model.states.cache
    waits: list[float] = []
    steps: list[float] = []
    step = timed(engine.step, steps)
    with mock.patch.object(model.states, "before_run", timed(model.states.before_run, waits)):
        for number in range(TURNS):
            name = SessionKey(f"s{round_} {number}")
            target = SessionTarget(name, cache.turns.begin(Turn(name.session)))
            request = GenerationRequest(name.session, [prompt(model, 8, number)], sampling(model, "temperature", 6),
                                        target=target, use_prefix_cache=False)  # fmt: skip
            engine._add(request)
            while engine.scheduler.num_running + engine.scheduler.num_waiting >= AT_ONCE:
                step()
        while not engine.scheduler.idle:
            step()
    return waits, steps


def timed(call: Callable[[], None], seconds: list[float]) -> Callable[[], None]:
    def run() -> None:
        begun = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begun)

    return run


# prefix


def prefix(options: argparse.Namespace) -> None:
    row(f"{options.requests} requests at once, {options.length} tokens shared", "tokens fed", "TTFT p50", "p95")
    row("---", "---", "---", "---")
    settings = ["--threads", str(options.threads), "--state-store", "none"]
    with ServerProcess(*settings) as server:
        without, with_cache = (asyncio.run(crowd(server, options, cached)) for cached in (False, True))
    for name, (fed, times) in {"without the cache": without, "with it": with_cache}.items():
        times.sort()
        row(name, fed, f"{statistics.median(times):.3f} s", f"{times[int(0.95 * len(times))]:.3f} s")
    fewer, faster = without[0] / with_cache[0], statistics.median(without[1]) / statistics.median(with_cache[1])
    row("ratio", f"{fewer:.1f}", f"{faster:.1f}", "")


async def crowd(server: ServerProcess, options: argparse.Namespace, cached: bool) -> tuple[int, list[float]]:
    """Prompt tokens that were fed, and each request's time to its first token."""
    words = [5 + 7 * i % 900 for i in range(options.length)]
    limits = httpx.Limits(max_connections=options.requests)
    async with httpx.AsyncClient(base_url=server.url, timeout=900, limits=limits) as client:
        bodies = [
            {"prompt": [*words, 17 + number, 8, 9], "max_tokens": 4, "stop": [], "temperature": 0, "stream": True,
             "stream_options": {"include_usage": True}, "use_prefix_cache": cached}
            for number in range(options.requests)
        ]  # fmt: skip
        progress("with the cache" if cached else "without the cache")
        answers = await asyncio.gather(*(first_token(client, body) for body in bodies))
        progress("")
    return sum(fed for fed, _ in answers), [seconds for _, seconds in answers]


async def first_token(client: httpx.AsyncClient, body: dict[str, Any]) -> tuple[int, float]:
    begun, first, usage = time.perf_counter(), 0.0, {}
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if not first and any(choice.get("text") or choice["finish_reason"] for choice in event["choices"]):
                    first = time.perf_counter() - begun
                usage = event.get("usage") or usage
    return usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"], first


# disk


def disk(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        empty, full = f"{folder}/empty.db", f"{folder}/full.db"
        size = fill(full, options.sessions, options.threads)
        starts = interleaved({name: lambda path=path: start(path) for name, path in
                              {"empty": empty, "full": full}.items()}, 3)  # type: ignore[misc]  # fmt: skip
        with ServerProcess("--state-db", full, "--threads", str(options.threads)) as server:
            names = iter(range(1, options.sessions, 37))
            lookup = median_ms(lambda: server.client.get(f"/state/s{next(names)}/export").raise_for_status(), 40)
            pages = {"100 of them": {"limit": 100, "offset": 5000}, "all": {}}
            listings = {name: median_ms(lambda page=page: server.post("/state/status", page), 11)
                        for name, page in pages.items()}  # type: ignore[misc]  # fmt: skip
    row(f"{options.sessions} sessions on disk, {size / 1e9:.2f} GB", "median")
    row("---", "---")
    row("a session out of the database over HTTP", f"{lookup:.1f} ms")
    for name, listing in listings.items():
        row(f"/state/status, {name}", f"{listing:.1f} ms")
    row("start of the server, empty database", f"{starts['empty']:.2f} s")
    row("start of the server, this database", f"{starts['full']:.2f} s")


def start(database: str) -> float:
    begun = time.perf_counter()
    with ServerProcess("--state-db", database):
        return time.perf_counter() - begun


def fill(path: str, sessions: int, threads: int) -> int:
    """A database of that many sessions; bytes in it."""
    model = load(demo_model_path(), threads=threads, max_batch=1, state_store="none")
    pool: Any = model.engine.runner.states
    record = record_of(model, pool.export(0))
    store = SqliteStore()
    store.open(path)
    for first in range(0, sessions, 200):
        progress(f"session {first}/{sessions}")
        records = (record.renamed(f"s{number}", created=1e9 + number) for number in range(first, first + 200))
        store.put([each.to_stored() for each in records])
    progress("")
    nbytes = store.usage().nbytes
    store.close()
    return nbytes


# types


def types(options: argparse.Namespace) -> None:
    names = {"float32": "fp32", "float16": "fp16"}
    models = {
        dtype: load(checkpoint(options.shape), threads=options.threads, state_dtype=dtype, max_batch=options.rows,
                    state_store="none")
        for dtype in names
    }  # fmt: skip
    loops = {dtype: EngineLoop(model, options.rows) for dtype, model in models.items()}
    rates = interleaved({dtype: lambda loop=loop: loop.rate(4) for dtype, loop in loops.items()}, 5)  # type: ignore[misc]
    drifts = {dtype: drift(dtype, options.threads) for dtype in names}
    row(f"slots, {options.shape} shape", "bytes", f"decode of {options.rows} rows", "drift of the demo's logits")
    row("---", "---", "---", "---")
    for dtype, short in names.items():
        size = models[dtype].model.state_nbytes()
        row(short, f"{size:,}", f"{rates[dtype]:.0f} tokens/s", drifts[dtype])


@torch.inference_mode()
def drift(dtype: str, threads: int, tokens: int = 2000) -> str:
    """How far the logits are from those with fp32 states, after each of many tokens fed one at a time."""
    both = [load(demo_model_path(), threads=threads, dtype="float32", state_dtype=name, max_batch=1, state_store="none")
            for name in ("float32", dtype)]  # fmt: skip
    generator = torch.Generator().manual_seed(1)
    fed = torch.randint(1, both[0].model.config.vocab_size, (tokens,), generator=generator, dtype=torch.int32)
    zero, last = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    errors, same = [], 0
    for token in fed.split(1):
        batch = Batch(token, torch.tensor([0, 1], dtype=torch.int32), zero, last)
        want, got = (model.model.forward(batch, model.engine.runner.states)[0].clone() for model in both)
        errors.append(float((got - want).norm() / want.norm()))
        same += int(want.argmax() == got.argmax())
    late = statistics.mean(errors[-200:])
    first = statistics.mean(errors[:200])
    return f"{first:.1e} at first, {late:.1e} after {tokens} tokens; same argmax {same / tokens:.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {"resume": resume, "copies": copies, "prefix": prefix, "disk": disk, "types": types}
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--threads", type=count, default=2)
    parser.add_argument("--requests", type=count, default=100)
    parser.add_argument("--length", type=count, default=4000)
    parser.add_argument("--sessions", type=count, default=10_000)
    parser.add_argument("--folder", type=Path, help="where the database of the disk part is made")
    parser.add_argument("--rows", type=count, default=64)
    options = parser.parse_args()
    if not options.parts or {"prefix", "disk"} & set(options.parts):
        require_test_extra()
    for name in options.parts or parts:
        parts[name](options)
        print()


if __name__ == "__main__":
    main()
