"""The engine with the demo model, without HTTP: text, swapping, forks, leaving, draining."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rwkv_lightning.core.config import Settings
from rwkv_lightning.core.errors import Draining, Overloaded
from rwkv_lightning.core.generation import new_request, sampling_params
from rwkv_lightning.core.host import PluginHost
from rwkv_lightning.core.http import collect
from rwkv_lightning.core.metrics import Metrics
from rwkv_lightning.core.models import LoadedModel, ModelManager
from rwkv_lightning.core.request import Event, FinishReason, GenerationRequest

ITEMS = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())["items"]
GREEDY = {"temperature": 0, "alpha_presence": 0, "alpha_frequency": 0}
Load = Callable[..., LoadedModel]


def load(**settings: Any) -> LoadedModel:
    chosen = Settings(threads=1, state_store="none", **settings)
    return ModelManager(chosen, PluginHost(chosen), Metrics()).load(lambda summary: None)


@pytest_asyncio.fixture
async def start() -> AsyncIterator[Load]:
    """Loads models and starts their engines; stops them at the end."""
    models: list[LoadedModel] = []

    def begin(**settings: Any) -> LoadedModel:
        models.append(load(**settings))
        models[-1].engine.start()
        return models[-1]

    yield begin
    for model in models:
        await model.engine.stop()


def request(model: LoadedModel, prompts: list[Any], **values: Any) -> GenerationRequest:
    values = {"max_tokens": 48, "seed": 0, "stop": (), **values}
    general = {name: values.pop(name) for name in ("max_tokens", "seed", "stop")}
    params = sampling_params(model.engine, Settings(), sampler="V1", values={**GREEDY, **values}, **general)
    return new_request([tuple(prompt) for prompt in prompts], params)


async def answers(model: LoadedModel, prompts: list[Any], **values: Any) -> list[Event]:
    with model.engine.submit(request(model, prompts, **values)) as stream:
        return await collect(stream)


def ids(model: LoadedModel, text: str) -> list[int]:
    return model.vocabulary.encode(text)


async def test_greedy_equals_the_float64_reference_in_fp32(start: Load) -> None:
    model = start(dtype="float32")
    events = await answers(model, [item["prompt_ids"] for item in ITEMS])
    for event, item in zip(events, ITEMS, strict=True):
        assert event.tokens == item["greedy_ids"]
        assert event.text == item["greedy_text"]


async def test_greedy_in_bf16_up_to_the_first_near_tie(start: Load) -> None:
    model = start(dtype="bfloat16")
    events = await answers(model, [item["prompt_ids"] for item in ITEMS])
    for event, item in zip(events, ITEMS, strict=True):
        ties = [i for i, margin in enumerate(item["greedy_margins"]) if margin < 0.3]
        certain = ties[0] if ties else len(item["greedy_ids"])
        assert event.tokens[:certain] == item["greedy_ids"][:certain]


async def test_more_rows_than_slots_give_what_each_gives_alone(start: Load) -> None:
    """Rows that were swapped out and back, beside others, end as they would have with a slot of their own."""
    few, many = start(max_batch=3, dtype="float32"), start(max_batch=64, dtype="float32")
    prompts = [ids(few, f"User: Count from {i} to {i + 9}.\n\nAssistant:") for i in range(1, 25)]
    sampled = {"temperature": 1.2, "top_p": 0.9, "alpha_presence": 1.0, "alpha_frequency": 0.2, "seed": 11}
    crowded = await asyncio.gather(*(answers(few, [prompt], **sampled) for prompt in prompts))
    alone = [await answers(many, [prompt], **sampled) for prompt in prompts]
    assert [c[0].text for c in crowded] == [a[0].text for a in alone]
    assert len({c[0].text for c in crowded}) == len(prompts)


async def test_deterministic_logits_do_not_depend_on_neighbours(start: Load) -> None:
    """Sampling at a high temperature shows every last bit of the logits in its draws, over 200 tokens."""
    model = start(deterministic=True)
    prompt = ids(model, "Once upon a time")
    wild = {"temperature": 50, "top_p": 1, "top_k": 0, "seed": 3, "max_tokens": 200}
    alone = (await answers(model, [prompt], **wild))[0].tokens
    others = [ids(model, f"Number {i}") for i in range(63)]
    crowd = await answers(model, [prompt, *others], **wild)
    assert crowd[0].tokens == alone


async def test_equal_prompts_are_prefilled_once(start: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    model = start()
    prompt = ids(model, "The cat is small. " * 20)
    fed = []
    forward = model.model.forward
    monkeypatch.setattr(
        model.engine.runner.model, "forward", lambda b, s: fed.append(b.tokens.numel()) or forward(b, s)
    )
    events = await answers(model, [prompt] * 30, max_tokens=2)
    assert len({event.text for event in events}) == 1
    assert sum(fed) == len(prompt) + 30  # the prompt once, then each row's first token
    assert all(event.usage and event.usage.prompt_tokens == len(prompt) for event in events)


async def test_stops_and_text_agree_with_one_push_of_the_whole(start: Load) -> None:
    model = start(dtype="float32")
    prompt = ids(model, "User: Count from 1 to 12.\n\nAssistant: <think>\n</think>\n")
    whole = (await answers(model, [prompt], max_tokens=100))[0].text
    for stop in (",", "5, 6", " 1", "12", whole[:1], whole[-3:]):
        event = (await answers(model, [prompt], max_tokens=100, stop=(stop,)))[0]
        assert event.text == whole[: whole.index(stop)]
        assert event.finish_reason is FinishReason.STOP


async def test_leaving_ends_the_rows_and_frees_the_slots(start: Load) -> None:
    model = start(max_batch=8)
    scheduler = model.engine.scheduler
    with model.engine.submit(request(model, [ids(model, "A")] * 20, temperature=1000, max_tokens=10_000)) as stream:
        assert await stream.wait(20)
        assert scheduler.ledger.used == 8
    for _ in range(500):
        if scheduler.idle and not scheduler.ledger.used:
            break
        await asyncio.sleep(0.01)
    scheduler.check_integrity()
    assert scheduler.ledger.used == 0
    assert (await answers(model, [ITEMS[0]["prompt_ids"]]))[0].text == ITEMS[0]["greedy_text"]


async def test_a_draining_engine_refuses_and_finishes(start: Load) -> None:
    model = start()
    with model.engine.submit(request(model, [ITEMS[0]["prompt_ids"]])) as stream:
        model.engine.drain()
        with pytest.raises(Draining), model.engine.submit(request(model, [[1]])):
            pass
        (event,) = await collect(stream)
    assert event.text == ITEMS[0]["greedy_text"]


async def test_cut_requests_end_with_one_terminal_event_that_says_why(start: Load) -> None:
    model = start(max_batch=4)
    with model.engine.submit(request(model, [ids(model, "A")] * 9, temperature=1000, max_tokens=10_000)) as stream:
        assert await stream.wait(20)
        model.engine.cut()
        events = [event async for batch in stream.batches() for event in batch if event.finish_reason]
    assert sorted(event.row for event in events) == list(range(9))
    assert all(isinstance(event.error, Draining) for event in events)


async def test_too_much_waiting_is_refused_at_once(start: Load) -> None:
    model = start(max_batch=1, max_waiting=3)
    long = request(model, [ids(model, "A")] * 5, temperature=1000, max_tokens=10_000)
    with (
        model.engine.submit(long),
        pytest.raises(Overloaded, match="waiting already"),
        model.engine.submit(request(model, [[1]])),
    ):
        pass


async def test_a_slow_reader_gets_everything_merged(start: Load) -> None:
    model = start(dtype="float32")
    with model.engine.submit(request(model, [ITEMS[0]["prompt_ids"]] * 2)) as stream:
        while not stream.finished:
            await asyncio.sleep(0.01)  # reads nothing until all is there
        batches = [batch async for batch in stream.batches()]
    assert len(batches) == 1
    assert [event.text for event in batches[0]] == [ITEMS[0]["greedy_text"]] * 2
    assert batches[0][0].tokens == ITEMS[0]["greedy_ids"]
