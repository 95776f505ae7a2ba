"""Turns of sessions over HTTP: each goes on from what the client was given, and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from server_thread import ServerThread
from state_calls import (
    MULTI,
    STATE,
    Oracle,
    body,
    demo_fingerprint,
    export,
    fork,
    listed,
    question,
    serve,
    text_of,
    turn,
)

from rwkv_lightning.core.cache.record import Expected, StateRecord, hash_tokens
from rwkv_lightning.core.slots import Snapshot
from server_process import sse_events

COUNT = question("Count from 1 to 12.")
FRANCE = question("What is the capital of France?")
SUM = question("What is 7 + 8?")
ENDLESS = "1, 2, 3, 4,"  # the model counts on for ever


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    with serve(tmp_path_factory.mktemp("states")) as running:
        yield running


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    alone = Oracle()
    yield alone
    alone.close()


class TestTheNextTurn:
    """It is answered as if the model had read what the client has seen, token by token."""

    @pytest.mark.parametrize("stream", [False, True])
    def test_equals_the_whole_transcript(self, server: ServerThread, oracle: Oracle, stream: bool) -> None:
        session = f"whole {stream}"
        turns = [FRANCE, SUM, "\n\n" + COUNT, FRANCE]
        answers = [turn(server, session, prompt, stream=stream) for prompt in turns]
        assert answers == oracle.conversation(turns)
        assert answers[0].startswith("The capital of France is Paris")
        transcript = f"{FRANCE}{answers[0]}\n\n{SUM}{answers[1]}\n\n{COUNT}{answers[2]}\n\n{FRANCE}"
        once = text_of(server.post("/v1/chat/completions", {**body("", transcript), "use_prefix_cache": False}))
        assert once == answers[3]

    @pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
    def test_after_a_cut_by_max_tokens(self, server: ServerThread, oracle: Oracle, max_tokens: int) -> None:
        """The last token was returned, but never fed: it is the tail."""
        session = f"cut at {max_tokens}"
        turns = [COUNT, " and", SUM]
        answers = [turn(server, session, prompt, max_tokens=max_tokens) for prompt in turns]
        assert answers == oracle.conversation(turns, max_tokens)
        record = export(server, session)
        assert len(record.tail) == 1

    @pytest.mark.parametrize(
        "stop", [",", "5, 6", " 1", "12", ", 4, 5, 6, 7", "1", "\n", "2, 3", "3,", " 7, 8, 9, 10, 11, 13", "4, 5, 6, 8"]
    )
    def test_after_a_stop_text_wherever_it_begins(self, server: ServerThread, oracle: Oracle, stop: str) -> None:
        """Inside a token, at its beginning, over several tokens, as a candidate that fails late, at once."""
        session = f"stop {stop}"
        turns = [COUNT, SUM, FRANCE]
        answers = [turn(server, session, prompt, stop_tokens=[stop]) for prompt in turns]
        assert answers == oracle.conversation(turns, stop=[stop])
        assert not any(stop in answer for answer in answers)

    @pytest.mark.parametrize("stop", ["1", "The", "7"])
    def test_an_empty_text_means_the_prompt_alone(self, server: ServerThread, oracle: Oracle, stop: str) -> None:
        prompt = {"1": COUNT, "The": FRANCE, "7": SUM}[stop]
        session = f"empty {stop}"
        assert turn(server, session, prompt, stop_tokens=[stop]) == ""
        record = export(server, session)
        ids = oracle.encode(prompt)
        assert (record.header.tokens, record.header.token_hash, record.tail) == (len(ids), hash_tokens(ids), ())
        assert turn(server, session, SUM) == oracle.answer(ids + oracle.encode("\n\n" + SUM)).text

    @pytest.mark.parametrize("seed", range(12))
    def test_after_anything_at_all(self, server: ServerThread, oracle: Oracle, seed: int) -> None:
        """Nearly uniform draws: broken characters, cut ones, tokens without bytes, an end of text."""
        session = f"wild {seed}"
        wild = {"temperature": 1000, "top_p": 1, "top_k": 0, "seed": seed}
        turns = ["Once upon a time", "\n", "and then", SUM]
        answers = [turn(server, session, text, max_tokens=1 + seed, stop_tokens=[], **wild) for text in turns]
        assert answers == oracle.conversation(turns, 1 + seed, stop=[], **wild)

    def test_a_cut_character_is_not_covered(self, server: ServerThread, oracle: Oracle) -> None:
        cut = 0
        for seed in range(600):
            if cut == 3:
                break
            wild = {"temperature": 1000, "top_p": 1, "top_k": 0, "seed": seed}
            event = oracle.answer(oracle.encode(COUNT), 2, stop=[], **wild)
            covered = oracle.covered(event)
            if len(covered) == 2 or 0 in event.tokens:
                continue
            cut += 1
            turn(server, f"character {seed}", COUNT, max_tokens=2, stop_tokens=[], **wild)
            assert export(server, f"character {seed}").header.token_hash == hash_tokens(oracle.encode(COUNT) + covered)
        assert cut == 3

    def test_an_end_of_text_is_not_covered(self, server: ServerThread, oracle: Oracle) -> None:
        event = oracle.answer(oracle.encode(FRANCE))
        assert event.tokens[-1] == 0
        turn(server, "end of text", FRANCE)
        seen = oracle.encode(FRANCE) + event.tokens[:-1]
        record = export(server, "end of text")
        assert (record.header.token_hash, record.tail) == (hash_tokens(seen), ())
        assert record.header.last_text == "The capital of France is Paris."


class TestTurnsThatDoNotCount:
    def test_a_failed_request_leaves_the_earlier_state(self, server: ServerThread, oracle: Oracle) -> None:
        first = turn(server, "kept", FRANCE)
        before = checksum(server, "kept")
        for bad in ({"temperature": "hot"}, {"sampler": "nobody's"}, {"max_tokens": 10**9}, {"stop_tokens": [""]}):
            assert server.post(STATE, body("kept", SUM, **bad)).status_code == 422
        assert checksum(server, "kept") == before
        assert [first, turn(server, "kept", SUM)] == oracle.conversation([FRANCE, SUM])

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_leaves_takes_nothing_along(self, server: ServerThread, oracle: Oracle, stream: bool) -> None:
        session = f"left {stream}"
        first = turn(server, session, FRANCE)
        long = body(session, ENDLESS, max_tokens=90_000, stop_tokens=[], stream=stream)
        with pytest.raises(httpx.TimeoutException):
            leave(server, long)
        assert [first, turn(server, session, SUM)] == oracle.conversation([FRANCE, SUM])
        server.wait_idle()

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_session_deleted_meanwhile_is_not_stored(self, server: ServerThread, stream: bool) -> None:
        """The turn ends normally all the same."""
        session = f"deleted {stream}"
        turn(server, session, ENDLESS, max_tokens=3)
        long = body(session, ENDLESS, max_tokens=300, stop_tokens=[], stream=stream)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(server.post, STATE, long)
            server.wait_for(lambda: server.metric("num_requests_running") == 1)
            assert server.post("/state/delete", {"session_id": session}).json()["status"] == "success"
            assert len(text_of(running.result())) > 100
        assert session not in listed(server)
        assert server.client.get(f"/state/{session}/export").status_code == 404
        assert server.post("/state/delete", {"session_id": session}).status_code == 404


class TestOneWriterAtATime:
    def test_a_second_turn_waits_for_the_first(self, server: ServerThread, oracle: Oracle) -> None:
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda prompt: turn(server, "queue", prompt), [FRANCE] * 4))
        assert answers == oracle.conversation([FRANCE] * 4), "each went on from the one before it"

    def test_a_full_queue_is_refused(self, tmp_path: Path) -> None:
        with serve(tmp_path, session_queue=2, max_batch=1) as server, ThreadPoolExecutor(6) as pool:
            long = body("busy", ENDLESS, max_tokens=400, stop_tokens=[])
            first = pool.submit(server.post, STATE, long)
            server.wait_for(lambda: server.metric("num_requests_running") == 1)
            others = [pool.submit(server.post, STATE, {**long, "max_tokens": 1}) for _ in range(5)]
            statuses = sorted(answer.result().status_code for answer in others)
            assert statuses == [200, 200, 409, 409, 409]
            assert first.result().status_code == 200
            (refused,) = {answer.result().text for answer in others if answer.result().status_code == 409}
            assert "2 turns wait" in refused
            assert turn(server, "another", FRANCE, max_tokens=2), "other sessions go on"

    def test_sixteen_turns_wait_by_default_and_no_more(self, tmp_path: Path, oracle: Oracle) -> None:
        """The first turn runs until all the others have come; the one too many is refused, and leaves nothing."""
        prompts = [ENDLESS, *(question(f"What is {number} + 8?") for number in range(16))]
        with serve(tmp_path) as server, ThreadPoolExecutor(17) as pool:
            users = partial(server.context.models.default.states.sessions.leases.users, "busy")
            sent = []
            for number, prompt in enumerate(prompts):
                fields = {"max_tokens": 8, "stream": number % 2 == 1} if number else {"max_tokens": 400}
                sent.append(pool.submit(turn, server, "busy", prompt, stop_tokens=[], **fields))
                server.wait_for(lambda awaited=number + 1: users() == awaited)
            refused = server.post(STATE, body("busy", FRANCE))
            assert users() == 17, "the refused one is not in the queue"
            assert refused.status_code == 409
            assert refused.json()["error"] == (
                "16 turns wait for this session already: send the next when one has ended"
            )
            assert refused.headers["retry-after"] == "1"
            answers = [answer.result() for answer in sent]
            assert users() == 0
        assert answers == oracle.conversation(prompts, [400] + [8] * 16, stop=[]), "each in its turn"


class TestForks:
    def test_every_success_makes_a_branch(self, server: ServerThread, oracle: Oracle) -> None:
        root, one = fork(server, "tree", 0, FRANCE)
        left, two = fork(server, "tree", one, SUM)
        right, three = fork(server, "tree", one, COUNT)
        again, four = fork(server, "tree", two, FRANCE)
        assert [one, two, three, four] == [1, 2, 3, 4]
        assert [root, left, again] == oracle.conversation([FRANCE, SUM, FRANCE])
        assert [root, right] == oracle.conversation([FRANCE, COUNT])
        tree = server.client.get("/state/tree/tree").json()
        assert [(b["dialogue_idx"], b["parent"]) for b in tree["branches"]] == [
            (1, None), (2, "tree:1"), (3, "tree:1"), (4, "tree:2")
        ]  # fmt: skip
        assert tree["branches"][0]["last_text"] == "The capital of France is Paris."
        lengths = [b["tokens"] for b in tree["branches"]]
        assert lengths[0] < lengths[1] < lengths[3]
        assert {f"tree:{n}" for n in range(1, 5)} <= listed(server).keys()

    def test_the_stream_says_which_branch_it_made(self, server: ServerThread) -> None:
        events = sse_events(server.post(MULTI, body("streamed", FRANCE, dialogue_idx=0, stream=True)))
        assert events[-1] == "[DONE]"
        assert json.loads(events[-2]) == {
            "object": "multi_state.dialogue_idx", "session_id": "streamed:1", "dialogue_idx": 1
        }  # fmt: skip

    def test_many_forks_of_one_branch_at_once(self, server: ServerThread, oracle: Oracle) -> None:
        _, one = fork(server, "bush", 0, FRANCE)
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(lambda prompt: fork(server, "bush", one, prompt), [SUM, COUNT] * 6))
        assert len({number for _, number in made} | {one}) == 13, "no number twice"
        assert [text for text, _ in made[:2]] == [oracle.conversation([FRANCE, p])[1] for p in (SUM, COUNT)]
        assert len({text for text, _ in made}) == 2

    def test_a_session_is_not_its_own_parent(self, server: ServerThread) -> None:
        for prompt in (FRANCE, SUM, COUNT):
            turn(server, "orphan", prompt, max_tokens=2)
            (branch,) = server.client.get("/state/tree/orphan").json()["branches"]
            assert branch["parent"] is None
            assert export(server, "orphan").header.parent == ""

    @pytest.mark.parametrize(
        "session", ["a/b", "/", "tree", "tree/x", "x/export", "tree/x/export", "a//b", "../up", "a%2Fb?"]
    )
    def test_a_name_may_hold_slashes(self, server: ServerThread, session: str) -> None:
        server.post("/state/delete", {"session_id": session, "delete_prefix": True})
        turn(server, session, FRANCE, max_tokens=2)
        _, number = fork(server, session, 0, FRANCE, max_tokens=2)
        name = quote(session, safe="").replace("tree", "%74ree")  # any letter may be encoded
        tree = server.client.get(f"/state/tree/{name}").json()
        assert (tree["session_id"], len(tree["branches"])) == (session, 2)
        for suffix in ("", f":{number}"):
            data = server.client.get(f"/state/{name}{suffix}/export")
            assert data.status_code == 200
            assert StateRecord.from_bytes(data.content, Expected(demo_fingerprint())).key == session + suffix
        assert server.post("/state/delete", {"session_id": session, "delete_prefix": True}).status_code == 200
        assert server.client.get(f"/state/tree/{name}").status_code == 404

    @pytest.mark.parametrize("fault", [{}, {"session_id": None}, {"session_id": ""}])
    def test_a_missing_session_id_is_a_bad_request(self, server: ServerThread, fault: dict[str, Any]) -> None:
        plain = {"contents": [FRANCE], "dialogue_idx": 0}
        for path in (STATE, MULTI, "/state/delete"):
            answer = server.post(path, {**plain, **fault})
            assert (answer.status_code, "session_id" in answer.json()["error"]) == (400, True), path
            for wrong in (5, ["s"], {}, True, False, 0):
                assert server.post(path, {**plain, "session_id": wrong}).status_code == 422
        for missing in ({}, {"dialogue_idx": None}):
            answer = server.post(MULTI, {"contents": [FRANCE], "session_id": "s", **missing})
            assert (answer.status_code, "dialogue_idx" in answer.json()["error"]) == (400, True)

    def test_what_is_wrong_with_a_fork(self, server: ServerThread) -> None:
        missing = server.post(MULTI, body("nobody", FRANCE, dialogue_idx=7))
        assert (missing.status_code, "dialogue_idx 7" in missing.json()["error"]) == (404, True)
        for wrong in (-1, "x", "", True):
            assert server.post(MULTI, body("nobody", FRANCE, dialogue_idx=wrong)).status_code == 422
        assert server.post(MULTI, body("a:b", FRANCE, dialogue_idx=0)).status_code == 422
        assert server.post(STATE, body("a:1", FRANCE)).status_code == 422
        assert server.post(STATE, {**body("x", FRANCE), "contents": ["a", "b"]}).status_code == 422
        assert server.client.get("/state/tree/nobody").status_code == 404

    def test_state_and_the_root_of_a_fork_are_different_sessions(self, server: ServerThread, oracle: Oracle) -> None:
        turn(server, "twin", FRANCE)
        text, _ = fork(server, "twin", 0, SUM)
        assert text == oracle.conversation([SUM])[0]

    def test_numbers_never_repeat_across_restarts_and_deletions(self, tmp_path: Path, oracle: Oracle) -> None:
        numbers = []
        for _ in range(3):
            with serve(tmp_path) as server:
                numbers += [fork(server, "s", 0, FRANCE, max_tokens=1)[1] for _ in range(2)]
                server.post("/state/delete", {"session_id": "s", "delete_prefix": True})
                numbers.append(fork(server, "s", 0, FRANCE, max_tokens=1)[1])
        assert numbers == sorted(set(numbers)), numbers


class TestListingAndDeleting:
    def test_pages(self, tmp_path: Path) -> None:
        with serve(tmp_path, l1_slots=2, l2_bytes=0) as server:
            for number in range(7):
                turn(server, f"s{number}", "A", max_tokens=1)
                server.wait_for(lambda: server.metric("state_writes_waiting") == 0)
            server.wait_for(lambda: server.post("/state/status", {}).json()["l1_cache_count"] == 2)
            whole = server.post("/state/status", {}).json()
            assert whole["total_sessions"] == len(whole["sessions"]) == 7
            counts = whole["l1_cache_count"] + whole["l2_cache_count"] + whole["database_count"]
            assert (counts, whole["l1_cache_count"]) == (7, 2)
            pages = [server.post("/state/status", {"limit": 3, "offset": at}).json() for at in (0, 3, 6, 9)]
            assert [len(page["sessions"]) for page in pages] == [3, 3, 1, 0]
            assert [entry for page in pages for entry in page["sessions"]] == whole["sessions"]
            assert {page["total_sessions"] for page in pages} == {7}
            for wrong in ({"limit": 0}, {"limit": -1}, {"offset": -1}, {"limit": "x"}):
                assert server.post("/state/status", wrong).status_code == 422

    def test_deletion(self, server: ServerThread) -> None:
        turn(server, "gone", FRANCE, max_tokens=1)
        fork(server, "gone", 0, FRANCE, max_tokens=1)
        fork(server, "gone", 0, FRANCE, max_tokens=1)
        assert server.post("/state/delete", {"session_id": "gone"}).status_code == 200
        assert {"gone:1", "gone:2"} <= listed(server).keys()
        assert server.post("/state/delete", {"session_id": "gone"}).json()["status"] == "not_found"
        assert server.post("/state/delete", {"session_id": "gone:1"}).status_code == 200
        assert "gone:1" not in listed(server)
        for _ in range(2):  # with delete_prefix it is never 404
            answer = server.post("/state/delete", {"session_id": "gone", "delete_prefix": True})
            assert (answer.status_code, answer.json()["status"]) == (200, "success")
        assert not [name for name in listed(server) if name.startswith("gone")]

    def test_without_slots_for_sessions_none_stays_in_one(self, tmp_path: Path) -> None:
        for store in ("sqlite", "none"):
            with serve(tmp_path, l1_slots=0, state_store=store) as server:
                for number in range(3):
                    turn(server, f"s{number}", "A", max_tokens=2)
                server.wait_for(lambda: server.post("/state/status", {}).json()["l1_cache_count"] == 0)
                assert listed(server) == {f"s{number}": "L2 (RAM)" for number in range(3)}
                assert server.metric('states_held{kind="session",tier="l1"}') == 0


class TestExportAndImport:
    def test_a_state_moves_to_another_server(self, server: ServerThread, oracle: Oracle, tmp_path: Path) -> None:
        turn(server, "travels", COUNT, max_tokens=5)
        data = server.client.get("/state/travels/export").content
        with serve(tmp_path) as other:
            answer = other.client.post("/state/import", content=data)
            assert answer.json() == {
                "status": "success",
                "session_id": "travels",
                "tokens": export(server, "travels").header.tokens,
            }
            assert turn(other, "travels", SUM, max_tokens=5) == oracle.conversation([COUNT, SUM], 5)[1]
            assert other.client.post("/state/import", content=data).status_code == 409, "it would replace a later state"
            assert other.client.post("/state/import?replace=true", content=data).status_code == 200
            assert turn(other, "travels", FRANCE, max_tokens=5) == oracle.conversation([COUNT, FRANCE], 5)[1]
            assert other.client.post("/state/import?session_id=copy:7", content=data).json()["session_id"] == "copy:7"
            assert fork(other, "copy", 7, SUM, max_tokens=5)[1] == 8, "the number counts as taken"

    def test_what_cannot_be_imported(self, server: ServerThread) -> None:
        turn(server, "odd", FRANCE, max_tokens=3)
        codes = ("state_corrupt", "state_foreign")
        before = [server.metric(f'states_refused_total{{code="{code}"}}') for code in codes]
        data = server.client.get("/state/odd/export").content
        for wrong in (b"", data[:-1], data[:100], data.replace(b"odd", b"eve"), data[:-8] + b"12345678", b"x" * 5000):
            assert server.client.post("/state/import?session_id=new", content=wrong).status_code == 400
        foreign = export(server, "odd")
        foreign = replace(foreign, header=replace(foreign.header, model="f" * 32))
        answer = server.client.post("/state/import?session_id=new", content=foreign.to_bytes())
        assert (answer.status_code, "another model" in answer.text) == (409, True)
        assert "delete" not in answer.text, "there is no session to delete"
        half = replace(export(server, "odd"), snapshot=halved(export(server, "odd").snapshot))
        answer = server.client.post("/state/import?session_id=new", content=half.to_bytes())
        assert (answer.status_code, "--state-dtype float16" in answer.text) == (409, True)
        after = [server.metric(f'states_refused_total{{code="{code}"}}') for code in codes]
        assert [a - b for a, b in zip(after, before, strict=True)] == [6, 2]
        for name in ("a:b", "a:0", "a:-1", ":1", "a:" + "9" * 16):
            answer = server.client.post(f"/state/import?session_id={name}", content=data)
            assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["query", "session_id"])
        for url, loc in {
            "/state/tree/a:b": ["path", "session_id"],
            "/state/a:b/export": ["path", "session_id"],
            "/state/odd/export?state=none.pth": ["query", "state"],
        }.items():
            answer = server.client.get(url)
            assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, loc)
        answer = server.client.post("/state/import?replace=maybe", content=data)
        assert (answer.status_code, answer.json()["detail"][0]["loc"]) == (422, ["query", "replace"])
        answer = server.post(STATE + "?session_id=x", body("a:b", FRANCE))
        assert answer.json()["detail"][0]["loc"] == ["body", "session_id"]
        assert server.client.post("/state/import", content=data * 200).status_code == 413
        assert "new" not in listed(server)
        assert server.client.get("/state/nobody/export").status_code == 404


def leave(server: ServerThread, turn: dict[str, Any]) -> None:
    """Send a turn and go: from a stream after its first bytes, else after a while."""
    with server.client.stream("POST", STATE, json=turn, timeout=0.2) as answer:
        assert turn["stream"], "only a stream begins before its end"
        for _ in answer.iter_bytes():
            raise httpx.ReadTimeout("that is enough")


def checksum(server: ServerThread, name: str) -> Any:
    """What an export holds, whatever the order of its header."""
    record = export(server, name)
    return record.header, record.tail, record.snapshot.shift.tolist(), record.snapshot.wkv.tolist()


def halved(snapshot: Snapshot) -> Snapshot:
    return Snapshot(snapshot.shift, snapshot.wkv.half())
