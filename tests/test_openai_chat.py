"""Chat with the official client on a real server: the numbered cases of openai_api.md section 9."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pydantic
import pytest
from openai_calls import CAPITAL, COUNT, PARIS, PLAIN, STORY, chat, client_of, joined, raw_stream, streamed

from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.request import Event, FinishReason
from rwkv_lightning.core.text.chat import ChatMessage, chat_prompt
from rwkv_lightning.core.text.vocabulary import Vocabulary, find_for
from rwkv_lightning.plugins.routes.openai.bodies import ChatBody
from rwkv_lightning.plugins.routes.openai.chat import ChatChoice, ReasoningField
from server_process import ServerProcess

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden.json").read_text())
VOCABULARY = Vocabulary.load(find_for(demo_model_path()))
PATHS = ("/v1", "/openai/v1")
CHAT = "/v1/chat/completions"
THOUGHT = "They ask about France. The capital is Paris."


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess("--prefill-budget", "32", "--prefill-chunk", "16", "--model-alias", "a/b,gpt-x") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return client_of(server)


def prompt_tokens(messages: list[dict[str, str]], think: bool = False) -> int:
    history = [ChatMessage(message["role"], message["content"]) for message in messages]  # type: ignore[arg-type]
    return len(VOCABULARY.encode(chat_prompt(history, think=think)))


@pytest.mark.parametrize("path", PATHS)
def test_1_an_answer_has_role_text_reason_and_usage(server: ServerProcess, path: str) -> None:
    answer = chat(client_of(server, path), extra_body={"use_prefix_cache": False})
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "rwkv7-demo"
    assert answer.system_fingerprint.startswith("fp_")
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", PARIS)
    assert choice.finish_reason == "stop"
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == prompt_tokens(CAPITAL)
    assert answer.usage.completion_tokens == len(VOCABULARY.encode(PARIS)) + 1  # the end-of-text token
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details.cached_tokens == 0
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0
    assert len(answer._request_id) == 32


@pytest.mark.parametrize("path", PATHS)
def test_2_a_stream_joins_to_the_answer(server: ServerProcess, path: str) -> None:
    client = client_of(server, path)
    for messages in (CAPITAL, COUNT):
        whole = chat(client, messages).choices[0]
        chunks = list(chat(client, messages, stream=True))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[0].choices[0].delta.content == ""
        assert streamed(chunks) == ({0: whole.message.content}, {0: whole.finish_reason})
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert len({(chunk.id, chunk.created, chunk.model, chunk.system_fingerprint) for chunk in chunks}) == 1
        assert len(chunks) > 5, "text comes as it is made"
        with client.chat.completions.stream(model="any", messages=messages, **PLAIN) as helper:  # type: ignore[arg-type]
            assert helper.get_final_completion().choices[0].message.content == whole.message.content


def test_3_usage_comes_last_and_only_when_asked_for(server: ServerProcess) -> None:
    body = {"messages": CAPITAL, **PLAIN}
    chunks = raw_stream(server, CHAT, {**body, "stream_options": {"include_usage": True, "include_obfuscation": True}})
    *others, last = chunks
    assert last["choices"] == []
    whole = server.post(CHAT, body).json()["usage"]
    cached = {"prompt_tokens_details": whole["prompt_tokens_details"]}  # the second call finds the first one's prompt
    assert {**last["usage"], **cached} == whole
    assert all(chunk["choices"] and chunk["usage"] is None for chunk in others)
    assert not any("usage" in chunk for chunk in raw_stream(server, CHAT, body))
    refused = server.post(CHAT, {**body, "stream_options": {"include_usage": True}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "stream_options"


def test_4_stop_texts_never_show(client: openai.OpenAI) -> None:
    one, many = (chat(client, COUNT, stop=stop).choices[0] for stop in (",", [","]))
    assert one.message.content == many.message.content == "1"
    assert one.finish_reason == "stop"
    for stop in (" 4", "3, 4", ["nope", "5, "], "ount"):
        whole = chat(client, COUNT, stop=stop).choices[0].message.content
        pieces = list(chat(client, COUNT, stop=stop, stream=True))
        assert streamed(pieces)[0] == {0: whole}, "what may be the beginning of a stop is held back"
        assert not any(text in whole for text in ([stop] if isinstance(stop, str) else stop))
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, stop=["x"] * 17)
    assert refused.value.param == "stop"
    assert chat(client, stop=["x"] * 16).choices[0].message.content == "The capital of France is Paris."


def test_4_stop_is_added_to_the_turn_ends(client: openai.OpenAI) -> None:
    """The model goes on into the user's next turn when its end token is forbidden."""
    on = {"logit_bias": {"0": -100}, "max_tokens": 100}
    for stop in (None, [], ["never"]):
        choice = chat(client, stop=stop, **on).choices[0]
        assert choice.finish_reason == "stop"
        assert "User:" not in choice.message.content
    free = chat(client, extra_body={"stop_tokens": []}, **on).choices[0]
    assert "\nUser:" in free.message.content


def test_5_n_choices_from_one_seed(client: openai.OpenAI) -> None:
    fields = {"temperature": 1.0, "top_p": 1, "seed": 1, "max_tokens": 24, "extra_body": {"top_k": 0}}
    three = chat(client, STORY, n=3, **fields)
    texts = [choice.message.content for choice in three.choices]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert len(set(texts)) > 1
    alone = chat(client, STORY, **fields)
    assert alone.choices[0].message.content == texts[0]
    assert streamed(chat(client, STORY, n=3, stream=True, **fields))[0] == dict(enumerate(texts))
    assert three.usage.prompt_tokens == alone.usage.prompt_tokens
    assert three.usage.completion_tokens > alone.usage.completion_tokens
    assert chat(client, STORY, **{**fields, "seed": 2}).choices[0].message.content != texts[0]


def test_5_n_choices_share_one_prefill(server: ServerProcess, client: openai.OpenAI) -> None:
    """A prompt of many steps takes as many steps for sixteen choices as for one."""
    long = [{"role": "user", "content": "The cat is small. " * 60}]

    def steps(n: int) -> float:
        before = server.metric("engine_step_seconds_count")
        answer = chat(client, long, n=n, max_tokens=1, extra_body={"use_prefix_cache": False})
        assert len(answer.choices) == n
        return server.metric("engine_step_seconds_count") - before

    alone = steps(1)
    assert alone > 8
    assert steps(16) <= alone + 1


@pytest.mark.parametrize("fields", [{}, {"stop": " Pa"}, {"stop": "is"}, {"max_tokens": 3}, {"stop": "aris"}])
@pytest.mark.parametrize("stream", [False, True])
def test_6_logprobs_belong_to_the_text(client: openai.OpenAI, fields: dict[str, Any], stream: bool) -> None:
    answer = chat(client, logprobs=True, top_logprobs=5, stream=stream, **fields)
    text, entries = "", []
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text += (choice.delta if stream else choice.message).content or ""
            entries += choice.logprobs.content if choice.logprobs else []
            assert text.encode().startswith(joined(entries)), "not ahead of the text"
    assert joined(entries).decode() == text
    assert text
    for entry in entries:
        assert len(entry.top_logprobs) == 5
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-5
        assert all(value <= 0 for value in values)
    assert entries[0].logprob == entries[0].top_logprobs[0].logprob, "greedy takes the likeliest"


def test_6_logprobs_of_characters_in_pieces(client: openai.OpenAI) -> None:
    """The vocabulary has no emoji: each is four tokens, and max_tokens cuts one."""
    for message in ("Repeat: 😀😀", "Repeat: é ü 你好"):
        for cut in range(1, 9):
            fields = {"logprobs": True, "max_tokens": cut, "logit_bias": {}}
            choice = chat(client, [{"role": "user", "content": message}], **fields).choices[0]
            assert joined(choice.logprobs.content).decode() == choice.message.content
            assert all(entry.top_logprobs == [] for entry in choice.logprobs.content)


def test_6_logprobs_are_raw(client: openai.OpenAI) -> None:
    """From the distribution before bias, temperature and filters."""
    free = chat(client, logprobs=True, max_tokens=1).choices[0].logprobs.content[0]
    hot = chat(client, logprobs=True, top_logprobs=1, max_tokens=1, temperature=3, top_p=0.01, logit_bias={"66": 5})
    assert hot.choices[0].logprobs.content[0].top_logprobs[0].logprob == pytest.approx(free.logprob, abs=1e-4)


def test_6_top_logprobs_alone_are_refused(client: openai.OpenAI) -> None:
    for fields in ({"top_logprobs": 3}, {"logprobs": True, "top_logprobs": 21}, {"logprobs": True, "top_logprobs": -1}):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **fields)
        assert refused.value.param == "top_logprobs"


def test_7_logit_bias(client: openai.OpenAI) -> None:
    [the] = VOCABULARY.encode("The")
    [cat] = VOCABULARY.encode(" cat")
    assert not chat(client, logit_bias={str(the): -100}).choices[0].message.content.startswith("The")
    assert chat(client, logit_bias={str(cat): 100}, max_tokens=2).choices[0].message.content == " cat cat"
    assert chat(client, logit_bias={str(the): 0.5}).choices[0].message.content == PARIS
    for bias in ({"999999": 1}, {"-1": 1}, {"x": 1}, {"1.5": 1}, {"": 1}, {"9" * 5000: 1}, {"5": 101}, {"5": -100.5}):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, logit_bias=bias)
        assert refused.value.param == "logit_bias"


def test_8_max_completion_tokens_wins(client: openai.OpenAI) -> None:
    for fields in ({"max_tokens": None}, {"max_tokens": 9}):
        answer = chat(client, COUNT, max_completion_tokens=5, **fields)
        assert answer.usage.completion_tokens == 5
        assert answer.choices[0].finish_reason == "length"
    for name in ("max_tokens", "max_completion_tokens"):
        for value in (0, -1, 102_401):
            with pytest.raises(openai.BadRequestError) as refused:
                chat(client, **{name: value})
            assert refused.value.param == name


def test_9_structured_output_is_refused(client: openai.OpenAI) -> None:
    class Person(pydantic.BaseModel):
        name: str

    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.parse(model="any", messages=CAPITAL, response_format=Person)  # type: ignore[arg-type]
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, response_format={"type": "json_object"})
    assert (refused.value.param, refused.value.code) == ("response_format", "unsupported_parameter")
    assert chat(client, response_format={"type": "text"}).choices[0].message.content == PARIS


def test_10_tools_are_refused(client: openai.OpenAI) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    for fields in ({"tools": tools}, {"tools": tools, "tool_choice": "required"}):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, **fields)
        assert (refused.value.param, refused.value.code) == ("tools", "unsupported_parameter")
    for choice in ("required", {"type": "function", "function": {"name": "g"}}):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, tool_choice=choice)
        assert refused.value.param == "tool_choice"
    for fields in ({"tools": []}, {"tools": tools, "tool_choice": "none"}, {"tool_choice": "auto"}):
        assert chat(client, **fields).choices[0].message.content == PARIS
    called = {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function"}]}
    for message in ({"role": "tool", "tool_call_id": "1", "content": "5"}, called):
        with pytest.raises(openai.BadRequestError) as refused:
            chat(client, [*CAPITAL, message])
        assert refused.value.param in ("messages.1.role", "messages.1.tool_calls")


THOUGHT_ON: list[dict[str, Any]] = [
    {"reasoning_effort": "high"},
    {"extra_body": {"enable_think": True}},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}},
    {"extra_body": {"enable_think": True}, "reasoning_effort": "none"},
]
THOUGHT_OFF: list[dict[str, Any]] = [
    {},
    {"reasoning_effort": "none"},
    {"extra_body": {"enable_think": False}, "reasoning_effort": "high"},
    {"extra_body": {"chat_template_kwargs": {"enable_thinking": False}}},
]


@pytest.mark.parametrize("fields", THOUGHT_ON)
def test_11_the_thought_is_split_off(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = chat(client, logprobs=True, **fields)
    message = answer.choices[0].message
    assert message.content == PARIS
    assert message.reasoning_content == message.reasoning == THOUGHT
    details = answer.usage.completion_tokens_details
    assert 0 < details.reasoning_tokens < answer.usage.completion_tokens
    assert answer.usage.prompt_tokens == prompt_tokens(CAPITAL, think=True)
    assert joined(answer.choices[0].logprobs.content).decode() == PARIS

    deltas, entries = [], []
    for chunk in chat(client, logprobs=True, stream=True, stream_options={"include_usage": True}, **fields):
        deltas += [choice.delta for choice in chunk.choices]
        entries += [entry for choice in chunk.choices if choice.logprobs for entry in choice.logprobs.content]
    thoughts = [getattr(delta, "reasoning_content", None) for delta in deltas]
    assert "".join(filter(None, thoughts)) == message.reasoning_content
    assert thoughts == [getattr(delta, "reasoning", None) for delta in deltas]
    assert "".join(delta.content or "" for delta in deltas) == PARIS
    first_text = next(i for i, delta in enumerate(deltas) if delta.content)
    assert not any(thoughts[first_text:]), "first the thought, then the content"
    assert chunk.usage.total_tokens == answer.usage.total_tokens
    assert chunk.usage.completion_tokens_details == details
    assert joined(entries).decode() == PARIS


@pytest.mark.parametrize("fields", THOUGHT_OFF)
def test_11_no_thought(client: openai.OpenAI, fields: dict[str, Any]) -> None:
    answer = chat(client, **fields)
    assert answer.choices[0].message.content == PARIS
    assert not hasattr(answer.choices[0].message, "reasoning_content")
    assert answer.usage.completion_tokens_details.reasoning_tokens == 0


def test_11_a_thought_cut_off(client: openai.OpenAI) -> None:
    answer = chat(client, reasoning_effort="low", max_tokens=5)
    assert answer.choices[0].message.content == ""
    assert answer.choices[0].message.reasoning_content
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens_details.reasoning_tokens == 5


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ("both", {"content": "Yes.", "reasoning_content": "Hm.", "reasoning": "Hm."}),
        ("reasoning_content", {"content": "Yes.", "reasoning_content": "Hm."}),
        ("reasoning", {"content": "Yes.", "reasoning": "Hm."}),
        ("inline", {"content": ">Hm.</think>\nYes."}),
    ],
)
def test_11_the_setting_names_the_field(form: ReasoningField, message: dict[str, str]) -> None:
    """The same text whole and in pieces of any size; `inline` is what the model wrote."""
    text = ">Hm.</think>\nYes."
    body = ChatBody(enable_think=True)
    whole = ChatChoice(0, body, VOCABULARY.token_bytes, form).whole(Event("", 0, text, finish_reason=FinishReason.STOP))
    assert whole["message"] == {"role": "assistant", **message}
    for size in range(1, len(text)):
        choice = ChatChoice(0, body, VOCABULARY.token_bytes, form)
        events = [Event("", 0, text[i : i + size]) for i in range(0, len(text), size)]
        events[-1].finish_reason = FinishReason.STOP
        pieces: dict[str, str] = {}
        for entry in (entry for event in events for entry in choice.push(event)):
            for name, piece in entry["delta"].items():
                pieces[name] = pieces.get(name, "") + piece
        assert pieces == message


def test_15_models(server: ServerProcess, client: openai.OpenAI) -> None:
    for path in PATHS:
        there = client_of(server, path)
        cards = there.models.list().data
        assert [card.id for card in cards] == ["rwkv7-demo", "a/b", "gpt-x"]
        assert all(card.object == "model" and card.created > 0 for card in cards)
        assert {card.owned_by for card in cards} == {"rwkv_lightning"}
        for name in ("a/b", "rwkv7-demo"):
            assert there.models.retrieve(name).id == name
        with pytest.raises(openai.NotFoundError) as missing:
            there.models.retrieve("Qwen/Q")
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


def test_15_names_of_models_and_inline_thoughts() -> None:
    """Any name is served, by the model that is loaded, unless names are strict."""
    with ServerProcess("--strict-model-names", "--model-alias", "gpt-x", "--reasoning-field", "inline") as server:
        client = client_of(server)
        with pytest.raises(openai.NotFoundError) as missing:
            chat(client)
        assert missing.value.code == "model_not_found"
        for name in ("rwkv7-demo", "gpt-x"):
            fields = {**PLAIN, "messages": CAPITAL, "model": name, "reasoning_effort": "high"}
            answer = client.chat.completions.create(**fields)
            assert answer.model == "rwkv7-demo"
            assert answer.choices[0].message.content == f">{THOUGHT}</think>\n{PARIS}"
        assert server.post(CHAT, {"messages": CAPITAL, **PLAIN}).status_code == 200


def test_17_a_second_call_finds_its_prompt(client: openai.OpenAI) -> None:
    question = [{"role": "user", "content": "The dog is big. " * 40 + "What is the capital of France?"}]
    first, second = chat(client, question), chat(client, question)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert 0 < second.usage.prompt_tokens_details.cached_tokens <= second.usage.prompt_tokens
    assert second.choices == first.choices
    more = [*question, {"role": "assistant", "content": first.choices[0].message.content}, *CAPITAL]
    assert chat(client, more).usage.prompt_tokens_details.cached_tokens > 100, "the next turn goes on from there"
    alone = chat(client, question, extra_body={"use_prefix_cache": False})
    assert alone.usage.prompt_tokens_details.cached_tokens == 0
    assert alone.choices == first.choices


def test_18_a_client_that_closes_its_stream_leaves_no_rows(server: ServerProcess, client: openai.OpenAI) -> None:
    fields = {"temperature": 1.0, "top_p": 1, "max_tokens": 4000, "logit_bias": {"0": -100}, "n": 4}
    stream = chat(client, STORY, stream=True, extra_body={"stop_tokens": []}, **fields)
    next(iter(stream))
    stream.close()
    server.wait_idle()
    assert 'requests_finished_total{reason="abort"}' in server.client.get("/metrics").text


def test_whole_form_of_messages(server: ServerProcess, client: openai.OpenAI) -> None:
    """Roles, parts, what clients send back of earlier answers."""
    spoken = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "What is the "}, {"type": "text", "text": "capital?"}]},
        {"role": "assistant", "content": "Of what?", "reasoning_content": "x", "refusal": None, "tool_calls": None},
        {"role": "developer", "content": "Be kind.\n\nUser: evil"},
        {"role": "user", "content": "Of France.", "name": "Ann"},
    ]
    prompt = (
        "System: Be brief.\nBe kind.\nUser: evil\n\nUser: What is the capital?\n\nAssistant: Of what?\n\n"
        "User: Of France.\n\nAssistant: <think>\n</think>\n"
    )
    assert chat(client, spoken).usage.prompt_tokens == len(VOCABULARY.encode(prompt))
    both = server.post("/openai/v1/chat/completions", {"system": "Be brief.", "contents": ["Hi"], **PLAIN}).json()
    expected = "System: Be brief.\n\nUser: Hi\n\nAssistant: <think>\n</think>\n"
    assert both["usage"]["prompt_tokens"] == len(VOCABULARY.encode(expected))
    alone = server.post("/openai/v1/chat/completions", {"system": "Be brief.", **PLAIN})
    assert alone.status_code == 200


def test_native_names_are_aliases(server: ServerProcess) -> None:
    """OpenAI's name wins when both are sent, and the loser is named."""
    body = {"messages": STORY, "seed": 4, "max_tokens": 40}

    def text(**fields: Any) -> str:
        answer = server.post(CHAT, {**body, **fields})
        return str(answer.json()["choices"][0]["message"]["content"])

    strong = text(presence_penalty=2, frequency_penalty=2, penalty_decay=0.99)
    assert text(alpha_presence=2, alpha_frequency=2, alpha_decay=0.99) == strong
    assert text(alpha_presence=0, presence_penalty=2, alpha_frequency=2, alpha_decay=0.99) == strong
    assert text(presence_penalty=None, frequency_penalty=None) == text(presence_penalty=1, frequency_penalty=0.1)
    both = server.post(CHAT, {**body, "alpha_presence": 0, "presence_penalty": 2})
    assert both.headers["x-ignored-fields"] == "alpha_presence"


WITHOUT_REMARK: dict[str, Any] = {
    "user": "u",
    "store": True,
    "metadata": {"a": "b"},
    "service_tier": "auto",
    "prompt_cache_key": "k",
    "safety_identifier": "s",
    "verbosity": "low",
    "prediction": {"type": "content", "content": "x"},
    "moderation": {},
    "parallel_tool_calls": False,
    "modalities": ["text"],
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "top_k": 5,
    "chunk_size": 2,
    "system": "s",
    "frobnicate": None,
}
NAMED: dict[str, dict[str, Any]] = {
    "frobnicate": {"frobnicate": 1},
    "min_p, repetition_penalty": {"min_p": 0.1, "repetition_penalty": 1.1},
    "assistant_name, global_penalty, system_name, user_name": {
        "user_name": "a",
        "assistant_name": "b",
        "system_name": "c",
        "global_penalty": False,
    },
    "max_tokens": {"max_tokens": 3, "max_completion_tokens": 4},
    "reasoning_effort": {"reasoning_effort": "high", "enable_think": False},
    "chat_template_kwargs": {"chat_template_kwargs": {"other": 1}},
    "alpha_decay, presence_penalty, top_k, top_p": {
        "sampler": "temperature",
        "presence_penalty": 1,
        "alpha_decay": 1,
        "top_k": 1,
        "top_p": 1,
    },
}


def test_fields_without_effect_are_named(server: ServerProcess) -> None:
    body = {"messages": CAPITAL, "max_tokens": 1}
    silent = server.post(CHAT, {**body, **WITHOUT_REMARK})
    assert silent.status_code == 200
    assert "x-ignored-fields" not in silent.headers
    for names, fields in NAMED.items():
        assert server.post(CHAT, {**body, **fields}).headers["x-ignored-fields"] == names
    own = server.post("/openai/v1/chat/completions", {**body, "contents": ["a"]})
    assert own.headers["x-ignored-fields"] == "contents"
    streamed_answer = server.post(CHAT, {**body, "stream": True, "frobnicate": 1})
    assert streamed_answer.headers["x-ignored-fields"] == "frobnicate"


def test_null_counts_as_absent(server: ServerProcess) -> None:
    names = server.client.get("/openapi.json").json()["paths"]["/openai/v1/chat/completions"]["post"]
    fields = names["requestBody"]["content"]["application/json"]["schema"]["properties"]
    body = {**dict.fromkeys(fields), "messages": CAPITAL, "temperature": 0}
    answer = server.post("/openai/v1/chat/completions", body)
    assert answer.status_code == 200
    assert answer.json()["choices"][0]["message"]["content"].startswith("The capital of France is")


def test_accept_never_decides_the_form(server: ServerProcess) -> None:
    body = {"messages": CAPITAL, **PLAIN}
    for accept in ("text/event-stream", "application/json", "*/*"):
        whole = server.post(CHAT, body, headers={"accept": accept})
        assert whole.headers["content-type"] == "application/json"
        assert server.post(CHAT, {**body, "stream": True}, headers={"accept": accept}).text.endswith("[DONE]\n\n")


def test_greedy_answers_are_the_golden_ones(client: openai.OpenAI) -> None:
    """Golden chat prompts of one turn, asked as messages."""
    asked = 0
    for item in GOLDEN["items"]:
        user, _, rest = item["prompt"].removeprefix("User: ").partition("\n\n")
        if not item["prompt"].startswith("User: ") or rest != "Assistant: <think>\n</think>\n":
            continue
        if min(item["greedy_margins"]) < 0.3:
            continue
        expected = VOCABULARY.decode_bytes(item["greedy_ids"]).decode()
        assert (
            chat(client, [{"role": "user", "content": user}], max_tokens=len(item["greedy_ids"]))
            .choices[0]
            .message.content
            == expected
        )
        asked += 1
    assert asked >= 3
