"""Text completions with the official client on a real server: openai_api.md section 3 and cases 4, 5, 7, 16."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai_calls import PLAIN, client_of, complete, raw_stream, streamed

from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.text.vocabulary import Vocabulary, find_for
from server_process import ServerProcess

PATH = "/v1/completions"
CHAT_PROMPT = "User: What is the capital of France?\n\nAssistant: <think>\n</think>\n"
PARIS = "The capital of France is Paris."
STORY = "Once upon a time"
VOCABULARY = Vocabulary.load(find_for(demo_model_path()))
FIM = [json.loads(line) for line in (Path(__file__).parent / "data" / "eval.jsonl").open() if '"fim"' in line]
HOT = {"temperature": 1.0, "top_p": 1, "seed": 3, "max_tokens": 16}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--prefill-budget", "16", "--prefill-chunk", "8", "--max-rows", "40") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def test_16_an_answer_has_the_form(client: openai.OpenAI) -> None:
    answer = complete(client, CHAT_PROMPT)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.model == "rwkv7-demo"
    [choice] = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, PARIS, "stop", None)
    assert answer.usage.prompt_tokens == len(VOCABULARY.encode(CHAT_PROMPT))
    assert answer.usage.completion_tokens == len(VOCABULARY.encode(PARIS)) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_16_a_stream_joins_to_the_answer(server: ServerProcess, client: openai.OpenAI) -> None:
    prompts = [CHAT_PROMPT, STORY]
    fields: dict[str, Any] = {**HOT, "n": 2, "echo": True, "stream_options": {"include_usage": True}}
    whole = complete(client, prompts, **{**fields, "stream_options": None})
    chunks = list(complete(client, prompts, stream=True, **fields))
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert len({(chunk.id, chunk.created) for chunk in chunks}) == 1
    texts, reasons = streamed(chunks)
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert all(chunk.usage is None for chunk in chunks[:-1])
    plain = raw_stream(server, PATH, {"prompt": STORY, "max_tokens": 3})
    assert not any("usage" in chunk for chunk in plain)


def test_16_several_prompts_and_choices(client: openai.OpenAI) -> None:
    prompts = [STORY, "A list of animals:", "The cat"]
    answer = complete(client, prompts, n=2, **HOT)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert len({choice.text for choice in answer.choices}) >= 5, "each has its own random stream"
    assert answer.usage.prompt_tokens == sum(len(VOCABULARY.encode(prompt)) for prompt in prompts)
    first = complete(client, STORY, **HOT)
    assert answer.choices[0].text == first.choices[0].text
    greedy = complete(client, [CHAT_PROMPT] * 3, n=2, max_tokens=64)
    assert {choice.text for choice in greedy.choices} == {PARIS}


def test_16_token_ids_equal_the_text(client: openai.OpenAI) -> None:
    texts = [STORY, CHAT_PROMPT]
    ids = [VOCABULARY.encode(text) for text in texts]
    expected = [choice.text for choice in complete(client, texts, **HOT).choices]
    assert [choice.text for choice in complete(client, ids, **HOT).choices] == expected
    assert complete(client, ids[0], **HOT).choices[0].text == expected[0]
    assert complete(client, ids[0], echo=True, **HOT).choices[0].text == STORY + expected[0]


def test_16_the_prompt_is_taken_as_it_is(client: openai.OpenAI) -> None:
    for prompt in ("  two\n\n\nlines \n\n", "\n", "a\r\nb"):
        assert complete(client, prompt, max_tokens=1).usage.prompt_tokens == len(VOCABULARY.encode(prompt))


def test_16_suffix_fills_in_the_middle(client: openai.OpenAI) -> None:
    for item in FIM[:4]:
        suffix, _, prefix = item["prompt"].removeprefix("✿prefix✿✿suffix✿").partition("✿middle✿")
        assert complete(client, prefix, suffix=suffix).choices[0].text == item["expected"]
        echoed = complete(client, prefix, suffix=suffix, echo=True).choices[0].text
        assert echoed == prefix + item["expected"]
    for fields in ({"suffix": "b", "prompt": [1, 2]}, {"suffix": "b", "prompt": "a", "echo": True, "logprobs": 0}):
        with pytest.raises(openai.BadRequestError) as refused:
            complete(client, **fields)
        assert refused.value.param in ("suffix", "echo")


@pytest.mark.parametrize("stream", [False, True])
def test_16_logprobs(client: openai.OpenAI, stream: bool) -> None:
    for fields in ({}, {"stop": "aris"}, {"max_tokens": 2}):
        answer = complete(client, [CHAT_PROMPT, STORY], logprobs=5, stream=stream, **fields)
        parts = list(answer) if stream else [answer]
        for index in (0, 1):
            text, scores = gather(parts, index)
            check_scores(text, scores)
            top = scores["top_logprobs"][0]
            assert scores["token_logprobs"][0] == max(top.values())


def gather(parts: list[Any], index: int) -> tuple[str, dict[str, list[Any]]]:
    """A choice's text and its joined log-probabilities."""
    text = ""
    scores: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for choice in (choice for part in parts for choice in part.choices if choice.index == index):
        text += choice.text
        if choice.logprobs:
            for name, values in scores.items():
                values += getattr(choice.logprobs, name)
    return text, scores


def check_scores(text: str, scores: dict[str, list[Any]]) -> None:
    assert len({len(values) for values in scores.values()}) == 1
    assert scores["tokens"]
    assert "".join(scores["tokens"]) == text
    starts = itertools.accumulate(map(len, scores["tokens"]), initial=0)
    assert scores["text_offset"] == list(starts)[:-1]
    for top in filter(None, scores["top_logprobs"]):
        assert list(top.values()) == sorted(top.values(), reverse=True)
        assert sum(map(math.exp, top.values())) <= 1 + 1e-5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_16_echo_with_logprobs_scores_the_prompt(client: openai.OpenAI, stream: bool, n: int) -> None:
    """Also of prompts that take several steps to read, and of choices that share one reading."""
    prompts = [CHAT_PROMPT, CHAT_PROMPT[:-5] + " cat"]  # they begin alike
    parts = complete(client, prompts, n=n, echo=True, logprobs=3, max_tokens=4, stream=stream)
    parts = list(parts) if stream else [parts]
    for index in range(2 * n):
        text, scores = gather(parts, index)
        check_scores(text, scores)
        assert scores["token_logprobs"][0] is scores["top_logprobs"][0] is None
        assert not any(score is None for score in scores["token_logprobs"][1:])
        count = len(VOCABULARY.encode(prompts[index // n]))
        assert text.startswith(prompts[index // n])
        assert count <= len(scores["tokens"]) <= count + 4
        assert "".join(scores["tokens"][:count]) == prompts[index // n]
    assert gather(parts, 0)[1] == gather(parts, n - 1)[1]


def test_16_prompt_scores_are_those_of_generation(client: openai.OpenAI) -> None:
    """What a prompt's token scores is what it scores when it is generated after the tokens before it."""
    ids = VOCABULARY.encode(CHAT_PROMPT)
    echoed = complete(client, ids, echo=True, logprobs=1, max_tokens=1).choices[0].logprobs
    for place in (1, 2, 7, 8, 9, 15, 16, 17, len(ids) - 1):
        forced = complete(client, ids[:place], logprobs=1, max_tokens=1, logit_bias={str(ids[place]): 100})
        scores = forced.choices[0].logprobs
        assert scores.tokens == [echoed.tokens[place]]
        assert scores.token_logprobs[0] == pytest.approx(echoed.token_logprobs[place], abs=0.1)
        assert scores.top_logprobs[0] == pytest.approx(echoed.top_logprobs[place], abs=0.1)


def test_default_stop_and_what_replaces_it(server: ServerProcess) -> None:
    """The key absent: `\\n\\nUser`; null or []: none; a text: that one only."""
    body = {"prompt": CHAT_PROMPT, **PLAIN, "logit_bias": {"0": -100}, "max_tokens": 100}

    def text(**fields: Any) -> str:
        return str(server.post(PATH, {**body, **fields}).json()["choices"][0]["text"])

    assert "User" not in text()
    for none in (None, []):
        assert "\n\nUser" in text(stop=none)
    assert text(stop="France") == text(stop=["France"]) == text(stop_tokens=["France"]) == "The capital of "
    assert text(stop="of", stop_tokens=["France"]) == "The capital "


def test_5_choice_0_with_a_seed_equals_n_1(client: openai.OpenAI) -> None:
    three = [choice.text for choice in complete(client, STORY, n=3, **HOT).choices]
    assert three[0] == complete(client, STORY, **HOT).choices[0].text
    assert len(set(three)) == 3
    assert streamed(complete(client, STORY, n=3, stream=True, **HOT))[0] == dict(enumerate(three))


def test_7_logit_bias(client: openai.OpenAI) -> None:
    [cat] = VOCABULARY.encode(" cat")
    assert complete(client, STORY, logit_bias={str(cat): 100}, max_tokens=3).choices[0].text == " cat" * 3
    with pytest.raises(openai.BadRequestError) as refused:
        complete(client, STORY, logit_bias={"999999": 1})
    assert refused.value.param == "logit_bias"


BAD: list[tuple[str, dict[str, Any]]] = [
    ("prompt", {"prompt": None}),
    ("prompt", {"prompt": ""}),
    ("prompt", {"prompt": []}),
    ("prompt", {"prompt": ["a", ""]}),
    ("prompt", {"prompt": [[]]}),
    ("prompt", {"prompt": [[1], []]}),
    ("prompt", {"prompt": ["a", 1]}),
    ("prompt", {"prompt": ["a", [1]]}),
    ("prompt", {"prompt": [1, "a"]}),
    ("prompt", {"prompt": [1.5]}),
    ("prompt", {"prompt": [True]}),
    ("prompt", {"prompt": [[1, None]]}),
    ("prompt", {"prompt": 5}),
    ("prompt", {"prompt": {"a": 1}}),
    ("prompt", {"prompt": [-1]}),
    ("prompt", {"prompt": [3660]}),
    ("prompt", {"prompt": [10**30]}),
    ("prompt", {"prompt": "\ud800"}),
    ("prompt", {"prompt": ["a", "\udfff"]}),
    ("suffix", {"suffix": 5}),
    ("suffix", {"suffix": "\ud800"}),
    ("echo", {"echo": "maybe"}),
    ("logprobs", {"logprobs": 6}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("best_of", {"best_of": 2}),
    ("best_of", {"best_of": 1, "n": 2}),
    ("n", {"n": 0}),
    ("n", {"n": 17}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": "x" * 70_000}),
    ("stop_tokens", {"stop_tokens": 5}),
    ("max_tokens", {"max_tokens": 0}),
    ("temperature", {"temperature": 1e4}),
    ("top_p", {"top_p": 1.5}),
    ("penalty_decay", {"penalty_decay": 2}),
    ("alpha_decay", {"alpha_decay": 2}),
    ("presence_penalty", {"presence_penalty": "x"}),
    ("sampler", {"sampler": "nobody"}),
    ("seed", {"seed": "x"}),
    ("stream_options", {"stream_options": {}}),
    ("response_format", {"response_format": {"type": "json_object"}}),
]


@pytest.mark.parametrize(("param", "fields"), BAD)
def test_fields_at_fault_are_named(server: ServerProcess, param: str, fields: dict[str, Any]) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1, **fields})  # ASCII: lone surrogates as escapes
    response = server.client.post(PATH, content=body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"].split(".")[0] == param  # stop.0: the first of the texts
    assert error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_value", "missing_required_parameter", "unsupported_parameter")
    assert param in error["message"]


def test_rows_are_prompts_times_choices(server: ServerProcess) -> None:
    assert server.post(PATH, {"prompt": ["a"] * 20, "n": 2, "max_tokens": 1}).status_code == 200
    refused = server.post(PATH, {"prompt": ["a"] * 21, "n": 2, "max_tokens": 1})
    assert refused.status_code == 400
    assert "--max-rows" in refused.json()["error"]["message"]
    server.wait_idle()
