"""The conformance suites: built-ins and examples pass them, and each planted defect is caught by the test for it."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from example_plugins import EXAMPLES
from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from rwkv_lightning.core.convert import convert
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import InvalidField, RequestError, StoreError
from rwkv_lightning.core.interfaces import Backend, LoadOptions, RouteGroup, Sampler, SamplerContext, StateStore
from rwkv_lightning.core.rendering import render_openai
from rwkv_lightning.core.testing import (
    BackendSuite,
    RouteGroupSuite,
    SamplerSuite,
    StateStoreSuite,
    Suite,
    failures,
)
from rwkv_lightning.plugins.backends.cutlass import CutlassBackend
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend
from rwkv_lightning.plugins.backends.gemlite import GemliteBackend
from rwkv_lightning.plugins.routes import native, openai, service
from rwkv_lightning.plugins.samplers.temperature import TemperatureSampler
from rwkv_lightning.plugins.samplers.v1 import V1Sampler
from rwkv_lightning.plugins.samplers.v2 import V2Sampler
from rwkv_lightning.plugins.stores.sqlite import SqliteStore

sys.path += [str(EXAMPLES / "plugin-minp"), str(EXAMPLES / "plugin-echo-backend")]
import rwkv_lightning_echo as echo
import rwkv_lightning_minp as minp

NUMBERS = {"temperature": [-1, 1001, "x", True, None, math.nan, [1]]}


class TestFp16(BackendSuite):
    """With --deterministic: the same bits in every batch, whatever the type."""

    def backend(self) -> Backend:
        return Fp16Backend()


class TestFp16Float32(TestFp16):
    options = LoadOptions(dtype="float32")
    tolerance = 1e-4


class TestFp16BFloat16(TestFp16):
    options = LoadOptions(dtype="bfloat16")
    tolerance = 2e-2


class TestGemliteInt8(BackendSuite):
    """Converted files; with --deterministic, as above."""

    target = "gemlite-int8"

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def _converted(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls.model_file = tmp_path_factory.mktemp("converted") / f"{cls.target}.safetensors"
        convert(demo_model_path(), cls.target, cls.model_file)

    def backend(self) -> Backend:
        return GemliteBackend()


class TestGemliteInt4(TestGemliteInt8):
    target = "gemlite-int4"


class TestCutlass(TestGemliteInt8):
    target = "cutlass-w8a16"

    def backend(self) -> Backend:
        return CutlassBackend()


class TestEcho(BackendSuite):
    reads_files = False

    def backend(self) -> Backend:
        return echo.EchoBackend(echo.Section())


class TestV1(SamplerSuite):
    wrong: ClassVar = {**NUMBERS, "top_p": [-0.1, 1.1], "top_k": [1.5], "alpha_decay": [2], "alpha_presence": ["x"]}
    accepted: ClassVar = ({}, {"temperature": 0}, {"top_k": 0, "top_p": 1, "temperature": 2.5}, {"top_k": 1})

    def sampler(self, context: SamplerContext) -> Sampler:
        return V1Sampler()


class TestV2(TestV1):
    def sampler(self, context: SamplerContext) -> Sampler:
        return V2Sampler(context.token_bytes)


class TestTemperature(SamplerSuite):
    wrong = NUMBERS
    accepted: ClassVar = ({}, {"temperature": 0}, {"temperature": 0.4}, {"temperature": 30})

    def sampler(self, context: SamplerContext) -> Sampler:
        return TemperatureSampler()

    def oracle(self, logits: torch.Tensor, fields: Mapping[str, Any]) -> torch.Tensor:
        return (logits / max(fields.get("temperature", 1.0), 1e-9)).softmax(-1)


class TestMinP(SamplerSuite):
    wrong: ClassVar = {**NUMBERS, "min_p": [-0.1, 1.1, "x", False, None, math.inf]}
    accepted: ClassVar = ({}, {"min_p": 0}, {"min_p": 0.5, "temperature": 3}, {"min_p": 1}, {"temperature": 0})

    def sampler(self, context: SamplerContext) -> Sampler:
        return minp.MinP()

    def oracle(self, logits: torch.Tensor, fields: Mapping[str, Any]) -> torch.Tensor:
        shares = (logits / max(fields.get("temperature", 1.0), 1e-9)).softmax(-1)
        kept = shares.where(shares >= fields.get("min_p", 0.1) * shares.max(), 0.0)
        return kept / kept.sum()


def group_of(plugin: Any) -> RouteGroup:
    groups: list[RouteGroup] = []
    plugin.register_routes(groups.append)
    return groups[0]


class TestNativeRoutes(RouteGroupSuite):
    def group(self) -> RouteGroup:
        return group_of(native)


class TestOpenAIRoutes(RouteGroupSuite):
    def group(self) -> RouteGroup:
        return group_of(openai)


class TestServiceRoutes(RouteGroupSuite):
    def group(self) -> RouteGroup:
        return group_of(service)


class TestMinPRoutes(RouteGroupSuite):
    def group(self) -> RouteGroup:
        return group_of(minp)


class TestSqlite(StateStoreSuite):
    def store(self) -> StateStore:
        return SqliteStore()


# Planted defects: a class that does one thing wrong, and the test that must notice


def caught(suite: type[Suite], test: str) -> None:
    failed = failures(suite, [test])
    assert test in failed, f"{test} did not notice"
    assert isinstance(failed[test], AssertionError), failed[test]
    assert str(failed[test]), "a failure says what is wrong"


def test_every_test_of_a_suite_has_a_defect_that_it_catches() -> None:
    planted = {BackendSuite: BACKENDS, SamplerSuite: SAMPLERS, RouteGroupSuite: ROUTES, StateStoreSuite: STORES}
    for suite, defects in planted.items():
        assert {test for test, *_ in defects} == set(suite.names()), suite.__name__


class Model(echo.EchoModel):
    """The echo, with one thing wrong."""

    states = echo.EchoStates

    def new_states(self, count: int) -> Any:
        return self.states(count, self._delay)


class NeighboursMix(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        logits = super().forward(batch, states)
        return logits + logits.mean(0)


class ChunksForget(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        long = [int(s) for s, n in zip(batch.slots, batch.offsets.diff(), strict=True) if n > 1]
        states.tape[long] = 0
        return super().forward(batch, states)


class DecodeIsWrong(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        logits = super().forward(batch, states)
        return logits.flip(0) if len(batch.tokens) == len(batch.slots) > 1 else logits


class SlotIsIgnored(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        return super().forward(replace(batch, slots=torch.arange(len(batch.slots))), states)


class LastPositionOnly(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        rows = torch.searchsorted(batch.offsets[1:].long(), batch.logit_positions, right=True)
        return super().forward(replace(batch, logit_positions=batch.offsets[1:][rows].long() - 1), states)


class SilenceIsNotHeard(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        before = states.tape.clone()
        logits = super().forward(batch, states)
        if not len(batch.logit_positions):
            states.tape.copy_(before)
        return logits


class NextSlotHearsToo(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        logits = super().forward(batch, states)
        states.tape[(int(batch.slots[0]) + 1) % states.count] += 1
        return logits


class DoubleLogits(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        return super().forward(batch, states).double()


class NanLogits(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        return super().forward(batch, states).index_fill(1, torch.tensor([3]), math.nan)


class AtLeastOneRow(Model):
    def forward(self, batch: Any, states: Any) -> torch.Tensor:
        logits = super().forward(batch, states)
        return logits if len(logits) else torch.zeros(1, self.config.vocab_size)


class OneSlotMore(Model):
    def new_states(self, count: int) -> Any:
        return super().new_states(count + 1)


class StateLooksSmaller(Model):
    def state_nbytes(self) -> int:
        return 1


class NoDescription(Model):
    def __init__(self, section: Any) -> None:
        super().__init__(section)
        self.description = ""


def with_states(**methods: Any) -> type[Model]:
    return type("Planted", (Model,), {"states": type("States", (echo.EchoStates,), methods)})


def move(self: Any, pairs: Any) -> None:
    echo.EchoStates.copy(self, pairs)
    self.reset([source for source, _ in pairs])


def copy_first(self: Any, pairs: Any) -> None:
    echo.EchoStates.copy(self, pairs[:1])


def wrap(self: Any, slot: int) -> torch.Tensor:
    return self.tape[slot % self.count]


def reset_all(self: Any, slots: Any) -> None:
    self.tape.zero_()


def restore_to_all(self: Any, slot: int, snapshot: Any) -> None:
    echo.EchoStates.restore(self, slot, snapshot)
    self.tape[:] = snapshot


def backend_suite(model: type[Model], probe: Any = None, reads: bool = False) -> type[BackendSuite]:
    class Backend(echo.EchoBackend):
        def load(self, path: Path, options: LoadOptions) -> Any:
            return model(self.section)

    if probe is not None:
        Backend.probe = probe

    class Planted(BackendSuite):
        reads_files = reads

        def backend(self) -> Any:
            return Backend(echo.Section(vocab_size=500))

    return Planted


SNAPSHOTS, COPIES = "test_snapshots_come_back_bit_for_bit", "test_copies_are_equal_and_independent"
WHERE_ASKED = "test_logits_are_given_where_asked_and_asking_changes_nothing"
BACKENDS: list[Any] = [
    ("test_ragged_batch_equals_rows_alone", NeighboursMix),
    ("test_chunk_boundaries_do_not_matter", ChunksForget),
    ("test_rows_decode_beside_prompts", DecodeIsWrong),
    ("test_order_and_slots_do_not_matter", SlotIsIgnored),
    (WHERE_ASKED, LastPositionOnly),
    (WHERE_ASKED, SilenceIsNotHeard),
    ("test_other_slots_are_left_alone", NextSlotHearsToo),
    ("test_logits_have_the_promised_form", DoubleLogits),
    ("test_logits_have_the_promised_form", NanLogits),
    ("test_logits_have_the_promised_form", AtLeastOneRow),
    ("test_model_describes_itself", OneSlotMore),
    ("test_model_describes_itself", StateLooksSmaller),
    ("test_model_describes_itself", NoDescription),
    ("test_a_reset_slot_is_a_new_one", with_states(reset=lambda self, slots: None)),
    ("test_a_reset_slot_is_a_new_one", with_states(reset=reset_all)),
    (COPIES, with_states(copy=move)),
    (COPIES, with_states(copy=copy_first)),
    (SNAPSHOTS, with_states(export=lambda self, slot: self.tape[slot])),
    (SNAPSHOTS, with_states(restore=lambda self, slot, snapshot: None)),
    (SNAPSHOTS, with_states(restore=restore_to_all)),
    ("test_slots_that_do_not_exist_are_refused", with_states(_row=wrap)),
    ("test_slots_that_do_not_exist_are_refused", with_states(restore=lambda self, slot, snapshot: self._row(slot))),
    ("test_probe_says_usable_or_why_not", Model, lambda self, device: None),
    ("test_probe_says_usable_or_why_not", Model, lambda self, device: ""),
    ("test_missing_files_are_refused_as_start_errors", Model, None, True),
]


@pytest.mark.parametrize(("test", "planted"), [(test, planted) for test, *planted in BACKENDS])
def test_defects_of_backends_are_caught(test: str, planted: list[Any]) -> None:
    caught(backend_suite(*planted), test)


def sampler_suite(**methods: Any) -> type[SamplerSuite]:
    planted = type("PlantedSampler", (minp.MinP,), methods)

    class Planted(TestMinP):
        def sampler(self, context: SamplerContext) -> Sampler:
            return planted()

    return Planted


good = minp.MinP


def refuses_strangers(self: Any, values: Any) -> Any:
    if set(values) - set(minp.LIMITS):
        raise InvalidField("unknown", param="unknown")
    return good.validate(self, values)


def raises_value_error(self: Any, values: Any) -> Any:
    try:
        return good.validate(self, values)
    except InvalidField as error:
        raise ValueError(str(error)) from None


def names_another_field(self: Any, values: Any) -> Any:
    try:
        return good.validate(self, values)
    except InvalidField as error:
        raise InvalidField(error.message, param="min_q") from None


def narrow(self: Any, values: Any) -> Any:
    if values.get("min_p") == 0:
        raise InvalidField("min_p must be positive", param="min_p")
    return good.validate(self, values)


def remembers(self: Any, options: Any, seed: int, row: int) -> Any:
    rows = self.__dict__.setdefault("rows", {})
    return rows.setdefault((options, seed, row), good.open(self, options, seed, row))


def first_rows_options(self: Any, logits: Any, rows: Any) -> Any:
    for row in rows:
        row.options = rows[0].options
    return good.sample(self, logits, rows)


def shares_a_stream(self: Any, logits: Any, rows: Any) -> Any:
    for row in rows:
        row.stream = rows[0].stream
    return good.sample(self, logits, rows)


def reads_nan_as_zero(self: Any, logits: Any, rows: Any) -> Any:
    return good.sample(self, logits.nan_to_num(nan=0.0, neginf=-1e9), rows)


def fails_all(self: Any, logits: Any, rows: Any) -> Any:
    tokens = good.sample(self, logits, rows)
    return [-1] * len(tokens) if -1 in tokens else tokens


def advances_bad_rows(self: Any, logits: Any, rows: Any) -> Any:
    tokens = good.sample(self, logits, rows)
    for token, row in zip(tokens, rows, strict=True):
        if token < 0:
            row.stream.random()
    return tokens


def changed_tokens(change: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda self, logits, rows: change(good.sample(self, logits, rows))


def changed_logits(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., Any]:
    return lambda self, logits, rows: good.sample(self, change(logits), rows)


def opened(change: Callable[[int, int], tuple[int, int]]) -> Callable[..., Any]:
    return lambda self, options, seed, row: good.open(self, options, *change(seed, row))


BAD_ROWS = "test_bad_rows_fail_alone_and_do_not_advance"
STREAMS = "test_seeds_and_rows_have_streams_of_their_own"
SERVED, REFUSED = "test_requests_that_name_nothing_are_served", "test_wrong_values_are_refused_by_name"
SAMPLERS: list[tuple[str, dict[str, Any]]] = [
    (SERVED, {"validate": refuses_strangers}),
    (SERVED, {"sample": changed_tokens(lambda tokens: tokens[:-1])}),
    (SERVED, {"sample": changed_tokens(lambda tokens: [1000 for _ in tokens])}),
    (REFUSED, {"validate": lambda self, values: good.validate(self, {})}),
    (REFUSED, {"validate": raises_value_error}),
    (REFUSED, {"validate": names_another_field}),
    ("test_accepted_values_are_accepted", {"validate": narrow}),
    ("test_the_same_seed_gives_the_same_tokens", {"open": opened(lambda seed, row: (time_seed(), row))}),
    (STREAMS, {"open": opened(lambda seed, row: (0, row))}),
    (STREAMS, {"open": opened(lambda seed, row: (seed, 0))}),
    (STREAMS, {"open": opened(lambda seed, row: (seed % 2**32, row))}),
    ("test_a_crowd_changes_nothing", {"sample": shares_a_stream}),
    ("test_rows_may_change_places", {"sample": shares_a_stream}),
    ("test_rows_with_other_options_share_a_call", {"sample": first_rows_options}),
    ("test_a_new_row_remembers_nothing", {"open": remembers}),
    (BAD_ROWS, {"sample": reads_nan_as_zero}),
    (BAD_ROWS, {"sample": fails_all}),
    (BAD_ROWS, {"sample": advances_bad_rows}),
    ("test_banned_tokens_are_never_drawn", {"sample": changed_logits(lambda logits: logits.clamp(min=-2.0))}),
    ("test_extreme_logits_are_served", {"sample": changed_logits(lambda logits: logits * 10)}),
    ("test_shares_are_the_oracles", {"sample": changed_logits(lambda logits: logits * 0.9)}),
]
_seeds = iter(range(10**9))


def time_seed() -> int:
    """Another one at each call, as a clock would give."""
    return next(_seeds)


@pytest.mark.parametrize(("test", "methods"), SAMPLERS)
def test_defects_of_samplers_are_caught(test: str, methods: dict[str, Any]) -> None:
    caught(sampler_suite(**methods), test)


def render(content: Any = None, status: int | None = None, headers: bool = True) -> Callable[..., Response]:
    """OpenAI's rendering with another body, status, or none of its headers."""

    def render_error(request: Request, error: RequestError) -> Response:
        answer = render_openai(request, error)
        body = content(error) if content else {"error": {"message": error.message, "param": error.param}}
        kept = {name: value for name, value in answer.headers.items() if not name.startswith("content-")}
        return JSONResponse(body, status or answer.status_code, kept if headers else None)

    return render_error


def routes(*paths: str, methods: tuple[str, ...] = ("POST",), **options: Any) -> APIRouter:
    """A router of handlers that take whatever body comes."""
    router = APIRouter()

    async def handle(request: Request) -> dict[str, Any]:
        return {"length": len(await request.json())}

    for path in paths:
        router.add_api_route(path, handle, methods=list(methods), **options)
    return router


def route_suite(**changes: Any) -> type[RouteGroupSuite]:
    class Planted(RouteGroupSuite):
        def group(self) -> RouteGroup:
            return replace(group_of(minp), **changes)

    return Planted


STATUS = "test_every_error_keeps_its_status_and_message"
ROUTES: list[tuple[str, dict[str, Any]]] = [
    (STATUS, {"validation_status": 418}),
    (STATUS, {"validation_status": 422}),
    (STATUS, {"render_error": render(status=500)}),
    (STATUS, {"render_error": render(lambda error: {"error": error.code})}),
    (STATUS, {"render_error": render(lambda error: [error.message])}),
    ("test_errors_name_the_field", {"render_error": render(lambda error: {"error": error.message})}),
    ("test_errors_tell_clients_whether_to_try_again", {"render_error": render(headers=False)}),
    ("test_errors_may_carry_extra_members", {"render_error": render(lambda error: [1] if error.extra else {"e": 1})}),
    ("test_paths_clash_with_nobodys", {"router": routes("/v2/chat/completions")}),
    ("test_paths_clash_with_nobodys", {"router": routes("/minp/a/{b}", "/minp/a/{c}")}),
    ("test_openapi_describes_every_path", {"router": routes("/minp/a", include_in_schema=False)}),
    ("test_unknown_paths_are_answered_in_the_groups_form", {"prefixes": ("minp/",)}),
    (
        "test_unknown_paths_are_answered_in_the_groups_form",
        {"router": routes("/minp/{rest:path}", methods=("GET",))},
    ),
    ("test_other_methods_are_refused", {"router": routes("/minp/a", methods=("POST", "PROPFIND"))}),
    ("test_broken_bodies_are_the_clients_fault", {"router": routes("/minp/a")}),
]


@pytest.mark.parametrize(("test", "changes"), ROUTES)
def test_defects_of_route_groups_are_caught(test: str, changes: dict[str, Any]) -> None:
    caught(route_suite(**changes), test)


real = SqliteStore


def keeps_the_first(self: Any, states: Any) -> None:
    real.put(self, [state for state in states if self.get(state.info.key) is None])


def elsewhere(self: Any, location: str | None = None) -> None:
    real.open(self, f"{location}-{time_seed()}")


def says_nothing_when_closed(self: Any, key: str) -> bytes | None:
    try:
        return real.get(self, key)
    except StoreError:
        return None


def like(self: Any, session: str) -> list[Any]:
    return sorted((i for i in self.sessions() if i.key.startswith(session)), key=lambda info: info.branch)


def forgets_the_last(self: Any, budget: int) -> list[str]:
    return real.evict(self, budget)[:-1]


def counts_in_memory(self: Any, session: str, count: int = 1, at_least: int = 1) -> int:
    taken = self.__dict__.setdefault("taken", {})
    first = max(taken.get(session, 1), at_least)
    taken[session] = first + count
    return first


def reads_then_writes(self: Any, session: str, count: int = 1, at_least: int = 1) -> int:
    first = int(self.get_meta(session) or 1)
    time.sleep(0.001)
    self.set_meta(session, str(first + count))
    return first


RECORDS, FAMILY = "test_records_come_back_byte_for_byte", "test_a_family_is_a_session_and_its_branches"
ALONE = "test_a_store_belongs_to_one_server_and_can_be_opened_again"
EVICTED = "test_eviction_takes_prefixes_first_then_the_least_recently_used"
NUMBERS_ONCE = "test_branch_numbers_are_never_given_twice"
STORES: list[tuple[str, dict[str, Any]]] = [
    (RECORDS, {"get": lambda self, key: real.get(self, key) or None}),
    (RECORDS, {"info": lambda self, key: real.info(self, key.lower())}),
    ("test_a_put_replaces", {"put": keeps_the_first}),
    ("test_states_and_texts_survive_a_restart", {"open": elsewhere}),
    ("test_states_and_texts_survive_a_restart", {"check": lambda self: ["the store is not well"]}),
    (ALONE, {"open": elsewhere}),
    (ALONE, {"get": says_nothing_when_closed}),
    ("test_sessions_are_listed_newest_first", {"sessions": lambda self, **options: real.sessions(self)[::-1]}),
    ("test_sessions_are_listed_newest_first", {"count": lambda self, exclude=(): real.count(self)}),
    (FAMILY, {"family": like}),
    (FAMILY, {"family": lambda self, session: sorted(real.family(self, session), key=lambda info: info.key)}),
    ("test_prefixes_are_listed_by_model_and_use", {"touch": lambda self, keys, now: None}),
    ("test_usage_counts_what_there_is", {"usage": lambda self: replace(real.usage(self), nbytes=0)}),
    ("test_deleted_states_are_gone", {"delete": lambda self, keys: real.delete(self, keys) and len(keys)}),
    (EVICTED, {"touch": lambda self, keys, now: None}),
    (EVICTED, {"evict": forgets_the_last}),
    (NUMBERS_ONCE, {"reserve_branches": counts_in_memory}),
    (NUMBERS_ONCE, {"reserve_branches": lambda self, session, count=1, at_least=1: at_least}),
    ("test_threads_may_read_and_write_at_once", {"reserve_branches": reads_then_writes}),
]


@pytest.mark.parametrize(("test", "methods"), STORES)
def test_defects_of_state_stores_are_caught(test: str, methods: dict[str, Any]) -> None:
    planted = type("PlantedStore", (SqliteStore,), methods)

    class Planted(StateStoreSuite):
        def store(self) -> Any:
            return planted()

    caught(Planted, test)
