"""Converted files against the original, in one run: size, accuracy, loading and speed.

    python -m benchmarks.quantised [--only sizes accuracy loading speed]

Accuracy is of the demo model through the engine, greedy, over the held-out items beside the tests; perplexity is over
the same items' whole text. Sizes, loading and speed are of a random model of the 0.1B shape, interleaved, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks.common import FOLDER, EngineLoop, checkpoint, count, interleaved, load
from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path, demo_vocab_path
from rwkv_lightning.core.interfaces import Batch, Model
from rwkv_lightning.core.manifest import TARGETS
from rwkv_lightning.core.models import LoadedModel
from rwkv_lightning.core.random_checkpoint import SHAPES
from rwkv_lightning.core.request import GenerationRequest, SamplingParams

EVAL = Path(__file__).parents[1] / "tests" / "data" / "eval.jsonl"
ROWS = (1, 8, 64, 256)
PREFILL = 512
TASKS = ("sizes", "accuracy", "loading", "speed")


def files(source: Path) -> dict[str, Path]:
    """The original and its conversions by target, made once and kept; older ones than the original are made again."""
    found = {"fp16": source}
    for target in TARGETS:
        out = FOLDER / f"{source.stem}-{target}.safetensors"
        if not out.exists() or out.stat().st_mtime < source.stat().st_mtime:
            FOLDER.mkdir(parents=True, exist_ok=True)
            convert(source, target, out, overwrite=True)
        found[target] = out
    return found


def open_engine(path: Path, target: str, **settings: object) -> LoadedModel:
    return load(path, inference_engine=target.partition("-")[0], state_store="none", **settings)


# ---- accuracy


def accuracy(model: LoadedModel, items: Sequence[Mapping[str, str]]) -> float:
    """The share of items whose greedy continuation starts with what is expected."""
    encode = model.vocabulary.encode
    answers = asyncio.run(generate(model, [tuple(encode(item["prompt"])) for item in items]))
    return sum(a.startswith(item["expected"]) for a, item in zip(answers, items, strict=True)) / len(items)


async def generate(model: LoadedModel, prompts: list[tuple[int, ...]]) -> list[str]:
    """Greedy continuations through the running engine, as many at once as it takes."""
    options = model.engine.samplers["temperature"].validate({"temperature": 0})
    params = SamplingParams("temperature", options, 500, stop=("\n\nUser:",))
    texts = ["" for _ in prompts]
    model.engine.start()
    with model.engine.submit(GenerationRequest("accuracy", prompts, params)) as stream:
        async for events in stream.batches():
            for event in events:
                texts[event.row] += event.text
    await model.engine.stop()
    return texts


def perplexity(model: Model, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-likelihood of every token after the first of its text."""
    total, count = 0.0, 0
    for text in texts:
        states = model.new_states(1)
        states.reset([0])
        logits = model.forward(one_row(text, len(text)), states)[:-1]
        wanted = torch.tensor(text[1:], dtype=torch.int64).unsqueeze(1)
        total -= float(logits.log_softmax(-1).gather(1, wanted).sum())
        count += len(text) - 1
    return math.exp(total / count)


def one_row(tokens: Sequence[int], logits: int) -> Batch:
    """A whole text as one step, with logits after its last `logits` tokens."""
    return Batch(
        tokens=torch.tensor(tokens, dtype=torch.int32),
        offsets=torch.tensor([0, len(tokens)], dtype=torch.int32),
        slots=torch.tensor([0], dtype=torch.int32),
        logit_positions=torch.arange(len(tokens) - logits, len(tokens)),
    )


def report_accuracy(options: argparse.Namespace) -> None:
    items = [json.loads(line) for line in EVAL.read_text().splitlines()]
    print("\n| demo model | accuracy | perplexity |\n|---|---|---|")
    for target, path in files(demo_model_path()).items():
        model = open_engine(path, target, vocab=str(demo_vocab_path()), threads=options.threads)
        texts = [model.vocabulary.encode(item["prompt"] + item["expected"]) for item in items]
        print(f"| {target} | {accuracy(model, items):.1%} | {perplexity(model.model, texts):.4f} |", flush=True)


# ---- sizes, loading and speed


def report_sizes(options: argparse.Namespace) -> None:
    sizes = {target: path.stat().st_size for target, path in files(checkpoint(options.shape)).items()}
    print(f"\n| {options.shape} file | MB | of the original |\n|---|---|---|")
    for target, size in sizes.items():
        print(f"| {target} | {size / 1e6:.1f} | {size / sizes['fp16']:.3f} |")


def report_loading(options: argparse.Namespace) -> None:
    def seconds(target: str, path: Path) -> float:
        begun = time.perf_counter()
        open_engine(path, target, threads=options.threads)
        return time.perf_counter() - begun

    paths = files(checkpoint(options.shape))
    runs = {target: partial(seconds, target, path) for target, path in paths.items()}
    medians = interleaved(runs, options.rounds)
    print(f"\n| {options.shape}, loading | seconds |\n|---|---|")
    for target, median in medians.items():
        print(f"| {target} | {median:.2f} |")


def report_speed(options: argparse.Namespace) -> None:
    paths = files(checkpoint(options.shape))
    models = {target: open_engine(path, target, threads=options.threads) for target, path in paths.items()}
    print(f"\n| {options.shape}, tokens/s | {' | '.join(models)} |\n|---|{'---|' * len(models)}")
    for rows in options.rows:
        loops = {target: EngineLoop(model, rows, temperature=0) for target, model in models.items()}
        steps = max(3, 64 // rows)
        show(f"{rows} rows", {target: partial(loop.rate, steps) for target, loop in loops.items()}, options)
        for loop in loops.values():
            loop.close()
    show(
        f"prefill {PREFILL}", {target: partial(prefill_rate, model.model) for target, model in models.items()}, options
    )


def show(name: str, runs: Mapping[str, Callable[[], float]], options: argparse.Namespace) -> None:
    rates = interleaved(runs, options.rounds)
    cells = (f"{rate:.0f} ({rate / rates['fp16']:.2f})" for rate in rates.values())
    print(f"| {name} | {' | '.join(cells)} |", flush=True)


def prefill_rate(model: Model) -> float:
    """Tokens per second of one prompt in one step."""
    states = model.new_states(1)
    states.reset([0])
    batch = one_row([1 + i * 7 % (model.config.vocab_size - 1) for i in range(PREFILL)], 1)
    begun = time.perf_counter()
    model.forward(batch, states)
    return PREFILL / (time.perf_counter() - begun)


REPORTS = {"sizes": report_sizes, "accuracy": report_accuracy, "loading": report_loading, "speed": report_speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--shape", choices=SHAPES, default="0.1b")
    parser.add_argument("--rows", type=count, nargs="+", default=ROWS)
    parser.add_argument("--rounds", type=count, default=9)
    parser.add_argument("--threads", type=count, default=1)
    options = parser.parse_args()
    for task in options.only:
        REPORTS[task](options)


if __name__ == "__main__":
    main()
