"""Initial states from state-tuning files: which way round, from where, whose sessions."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from server_thread import ServerThread
from state_calls import GREEDY, MULTI, STATE, body, fork, listed, question, serve, text_of, turn

from rwkv_lightning.core.cache.initial import InitialStates
from rwkv_lightning.core.demo import demo_model_path
from rwkv_lightning.core.errors import CheckpointError, InvalidField, StartError
from rwkv_lightning.core.interfaces import Batch, LoadOptions
from rwkv_lightning.plugins.backends.fp16 import Fp16Backend

L, H, N = 4, 4, 64  # the demo model
NAMED: list[dict[str, str]] = [{}, {"state": "one.pth"}, {"state": "two.pth"}]
PROMPT = "A"  # short: the demo model soon forgets what it began from
LONG = question("What is the capital of France?") + "and so on " * 10


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "junk.pth": lambda whole: b"hello",  # the unpickler looks up what no memo holds
    "dot.pth": lambda whole: b".",
    "nothing.pth": lambda whole: b"",
    "zeros.pth": lambda whole: bytes(100),
    "half.pth": lambda whole: whole[: len(whole) // 2],
    "start.pth": lambda whole: whole[:4],
    "call.pth": lambda whole: b"cos\nsystem\n(S'true'\ntR.",
}
ODD = ("nan.pth", "inf.pth", "sparse.pth", "whole.pth", "object.pth")


def state_file(path: Path, seed: int, scale: float = 0.3, **changes: Any) -> Path:
    """A state-tuning file as trainers write it: rows are value channels, columns key channels."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {f"blocks.{i}.att.time_state": scale * torch.randn(H, N, N, generator=generator) for i in range(L)}
    torch.save({**tensors, **changes}, path)
    return path


RWKV_PACKAGE = """
import sys, torch
from rwkv.model import RWKV
model = RWKV(sys.argv[1].removesuffix(".pth"), "cpu fp32")
tuned = torch.load(sys.argv[2])
_, state = model.forward([1], None)
for i in range(len(state) // 3):
    state[3 * i] = torch.zeros_like(state[3 * i])
    state[3 * i + 1] = tuned[f"blocks.{i}.att.time_state"].float()
    state[3 * i + 2] = torch.zeros_like(state[3 * i + 2])
logits, _ = model.forward([5, 300, 2, 77, 41, 8], state)
torch.save(logits.float(), sys.argv[3])
"""


def test_the_matrices_are_the_way_round_that_the_rwkv_package_has_them(tmp_path: Path) -> None:
    """The package keeps S of y = S r in its state, and state tuning trains that S."""
    file = state_file(tmp_path / "tuned.pth", seed=1)
    arguments = [sys.executable, "-c", RWKV_PACKAGE, str(demo_model_path()), str(file), str(tmp_path / "logits.pt")]
    environment = os.environ | {"RWKV_V7_ON": "1", "RWKV_JIT_ON": "0", "RWKV_CUDA_ON": "0"}
    done = subprocess.run(arguments, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    expected = torch.load(tmp_path / "logits.pt")
    model = Fp16Backend().load(demo_model_path(), LoadOptions(dtype="float32", state_dtype="float32"))
    initial = InitialStates(model.config, torch.float32, None, file).default
    assert initial.snapshot is not None
    pool: Any = model.new_states(1)
    pool.restore(0, initial.snapshot)
    tokens = torch.tensor([5, 300, 2, 77, 41, 8], dtype=torch.int32)
    offsets, slots, last = torch.tensor([0, 6]).int(), torch.tensor([0]).int(), torch.tensor([5])
    logits = model.forward(Batch(tokens, offsets, slots, last), pool)[0]
    assert float((logits - expected).norm() / expected.norm()) < 1e-5
    turned = {key: tensor.mT.contiguous() for key, tensor in torch.load(file).items()}
    torch.save(turned, file)
    other = InitialStates(model.config, torch.float32, None, file).default
    assert other.snapshot is not None
    pool.restore(0, other.snapshot)
    logits = model.forward(Batch(tokens, offsets, slots, last), pool)[0]
    assert float((logits - expected).norm() / expected.norm()) > 1e-2, "the test can tell"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tuned")
    state_file(folder / "one.pth", 1, scale=30.0)
    state_file(folder / "two.pth", 2, scale=30.0)
    state_file(folder / "small.pth", 3, scale=0.0)
    state_file(folder / "odd.pth", 1, **{"blocks.2.att.time_state": torch.zeros(H, N, N + 1)})
    torch.save([1, 2], folder / "list.pth")
    (folder / "text.pth").write_text("no tensors here")
    for name, content in DAMAGE.items():
        (folder / name).write_bytes(content((folder / "one.pth").read_bytes()))
    torch.save({"blocks.0.att.time_state": object()}, folder / "object.pth")
    for name, value in {"nan.pth": math.nan, "inf.pth": -math.inf}.items():
        state_file(folder / name, 1, **{"blocks.1.att.time_state": torch.full((H, N, N), value)})
    for name, odd in {"sparse.pth": torch.zeros(H, N, N).to_sparse(), "whole.pth": torch.zeros(H, N, N).int()}.items():
        state_file(folder / name, 1, **{"blocks.1.att.time_state": odd})
    (folder.parent / "outside.pth").write_bytes((folder / "one.pth").read_bytes())
    (folder / "link.pth").symlink_to(folder.parent / "outside.pth")
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folder: Path) -> Iterator[ServerThread]:
    with serve(tmp_path_factory.mktemp("states"), state_dir=str(folder)) as running:
        yield running


def test_every_endpoint_takes_it(server: ServerThread) -> None:
    plain = {"contents": [PROMPT], "max_tokens": 8, **GREEDY}
    for path in ("/v1/chat/completions", "/v2/chat/completions", STATE):
        sent = {**plain, "session_id": f"at {path}"} if path == STATE else plain
        texts = [text_of(server.post(path, {**sent, **named})) for named in NAMED]
        assert len(set(texts)) == 3, path
    chat = {"messages": [{"role": "user", "content": "A"}], "logprobs": True, "max_tokens": 1, **GREEDY}
    text = {"prompt": PROMPT, "logprobs": 1, "max_tokens": 1, **GREEDY}
    for path, sent in {"/openai/v1/chat/completions": chat, "/v1/completions": text}.items():
        answers = [server.post(path, {**sent, **named}).json()["choices"] for named in NAMED]
        assert len({str(choices[0]["logprobs"]) for choices in answers}) == 3, path
    answer = server.post("/FIM/v1/batch-FIM", {"prefix": ["a"], "suffix": ["b"], "max_tokens": 1, "state": "one.pth"})
    assert answer.status_code == 200
    assert "x-ignored-fields" not in answer.headers


def test_a_state_of_zeros_is_the_zero_state(server: ServerThread) -> None:
    sent = {"contents": [PROMPT], "max_tokens": 12, **GREEDY}
    zero, small = (server.post("/v1/chat/completions", {**sent, **named}) for named in ({}, {"state": "small.pth"}))
    assert text_of(zero) == text_of(small)


@pytest.mark.parametrize(
    "name",
    [
        *("none.pth", "../outside.pth", "link.pth", "/etc/passwd", "", ".", "..", "odd.pth", "list.pth", "a\0b"),
        *("text.pth", *DAMAGE, *ODD),
    ],
)
def test_what_is_no_state_file_of_the_folder_is_refused(server: ServerThread, name: str, folder: Path) -> None:
    for path in ("/v1/chat/completions", STATE):
        sent = {"session_id": "refused", "contents": [PROMPT], "max_tokens": 3, "state": name}
        answer = server.post(path, sent)
        assert answer.status_code == 422
        assert str(folder) not in answer.text
    assert "refused" not in listed(server)


def test_without_a_folder_there_are_none(tmp_path: Path) -> None:
    with serve(tmp_path, state_store="none") as server:
        answer = server.post("/v1/chat/completions", {"contents": ["A"], "state": "one.pth"})
        assert (answer.status_code, "--state-dir" in answer.text) == (422, True)


def test_a_session_under_another_initial_state_is_another_session(server: ServerThread) -> None:
    first = {name: turn(server, "mine", PROMPT, max_tokens=6, state=name) for name in ("one.pth", "two.pth")}
    first[""] = turn(server, "mine", PROMPT, max_tokens=6)
    second = {name: turn(server, "mine", "B", max_tokens=6, state=name) for name in ("one.pth", "two.pth")}
    fresh = {name: turn(server, f"fresh {name}", PROMPT, max_tokens=6, state=name) for name in second}
    assert fresh == {name: first[name] for name in fresh}
    assert {n: turn(server, f"fresh {n}", "B", max_tokens=6, state=n) for n in second} == second
    exports = [server.client.get("/state/mine/export", params=q) for q in ({}, {"state": "one.pth"})]
    assert [answer.status_code for answer in exports] == [200, 200]
    assert exports[0].content != exports[1].content
    _, number = fork(server, "mine", 0, PROMPT, state="one.pth", max_tokens=2)
    assert server.post("/multi_state/chat/completions", body("mine", "B", dialogue_idx=number)).status_code == 404
    assert fork(server, "mine", number, "B", state="one.pth", max_tokens=2)[1] == number + 1
    assert server.post("/state/delete", {"session_id": "mine"}).status_code == 200
    assert server.client.get("/state/mine/export", params={"state": "one.pth"}).status_code == 404


def test_cached_prefixes_do_not_cross(server: ServerThread) -> None:
    def first(named: dict[str, str], **fields: Any) -> tuple[float, int]:
        """The log-probability of the likeliest next token, and how much was cached."""
        sent = {"prompt": LONG, "logprobs": 1, "max_tokens": 1, **GREEDY, **named, **fields}
        answer = server.post("/v1/completions", sent).json()
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer["choices"][0]["logprobs"]["token_logprobs"][0], cached

    plain = [first(named, use_prefix_cache=False)[0] for named in NAMED]
    assert len(set(plain)) == 3
    assert [first(named) for named in NAMED] == [(pytest.approx(value, abs=1e-5), 0) for value in plain]
    again = [first(named) for named in NAMED]
    assert [value for value, _ in again] == pytest.approx(plain, abs=1e-5)
    assert all(cached > 40 for _, cached in again)


def test_the_servers_own(tmp_path: Path, folder: Path) -> None:
    """Sessions belong to the file's content; a server with another one does not see them."""
    with serve(tmp_path, initial_state=str(folder / "one.pth")) as server:
        answer = turn(server, "s", PROMPT, max_tokens=6)
        turn(server, "s", "B", max_tokens=6)
    with serve(tmp_path, state_dir=str(folder)) as server:
        assert server.client.get("/state/s/export").status_code == 404
        assert turn(server, "fresh", PROMPT, max_tokens=6, state="one.pth") == answer
        assert server.client.get("/state/s/export", params={"state": "one.pth"}).status_code == 200


def test_a_file_that_does_not_fit_stops_the_start(folder: Path, tmp_path: Path) -> None:
    faults = {
        "odd.pth": "blocks.2.att.time_state of shape",
        "text.pth": "cannot be read",
        "gone.pth": "there is no such file",
        ".": "it is a folder",
        "nan.pth": "blocks.1.att.time_state holds NaN or infinity",
        "inf.pth": "blocks.1.att.time_state holds NaN or infinity",
        "sparse.pth": "blocks.1.att.time_state is no plain tensor",
        "whole.pth": "blocks.1.att.time_state is no plain tensor",
        "object.pth": "cannot be read: it holds pickled objects",
        "call.pth": "cannot be read",
        **dict.fromkeys(DAMAGE.keys() - {"call.pth"}, "cannot be read: it is truncated or damaged, or no PyTorch file"),
    }
    for name, why in faults.items():
        with pytest.raises(StartError, match=f"^--initial-state: .*{why}") as caught:
            serve(tmp_path, initial_state=str(folder / name)).__enter__()
        assert "Error" not in str(caught.value), "in words"
    with serve(tmp_path) as server:
        assert turn(server, "s", PROMPT, max_tokens=3), "the store was not left locked"


def test_a_changed_file_is_another_state(tmp_path: Path) -> None:
    config = Fp16Backend().load(demo_model_path(), LoadOptions()).config
    states = InitialStates(config, torch.float16, tmp_path, None)
    file = state_file(tmp_path / "a.pth", 1)
    one = states.named("a.pth")
    assert states.named("a.pth") is one
    state_file(file, 2)
    os.utime(file, ns=(1, 1))
    assert states.named("a.pth").name != one.name
    (tmp_path / "a.pth").unlink()
    with pytest.raises(InvalidField, match="there is no file"):
        states.named("a.pth")
    with pytest.raises(CheckpointError):
        InitialStates(config, torch.float16, None, tmp_path / "a.pth")


def test_numbers_that_the_slots_cannot_hold_are_refused(tmp_path: Path) -> None:
    config = Fp16Backend().load(demo_model_path(), LoadOptions()).config
    file = state_file(tmp_path / "big.pth", 1, **{"blocks.3.att.time_state": torch.full((H, N, N), 1e6)})
    with pytest.raises(
        CheckpointError, match=r"blocks.3.att.time_state holds values too large .* --state-dtype float32"
    ):
        InitialStates(config, torch.float16, None, file)
    assert InitialStates(config, torch.float32, None, file).default.name


def test_trained_parameters_are_taken_as_they_are(tmp_path: Path) -> None:
    config = Fp16Backend().load(demo_model_path(), LoadOptions()).config
    plain = state_file(tmp_path / "plain.pth", 1)
    torch.save({key: torch.nn.Parameter(value) for key, value in torch.load(plain).items()}, tmp_path / "trained.pth")
    states = InitialStates(config, torch.float32, tmp_path, plain)
    assert states.named("trained.pth").name == states.default.name


@pytest.mark.parametrize(("name", "why"), [("nope", "does not exist"), ("one.pth", "is a file, not a folder")])
def test_a_state_dir_that_is_no_folder_stops_the_start(folder: Path, tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(StartError, match=f"^--state-dir: .*{name}' {why}"):
        serve(tmp_path, state_dir=str(folder / name)).__enter__()


class TestAnInitialStateThatIsNotHere:
    """No request can reach such a session, and none begins anew in its place."""

    @pytest.fixture
    def exported(self, server: ServerThread) -> bytes:
        turn(server, "guest", PROMPT, max_tokens=3, state="one.pth")
        return server.client.get("/state/guest/export", params={"state": "one.pth"}).content

    def test_it_is_not_imported(self, exported: bytes, folder: Path, tmp_path: Path) -> None:
        for number, settings in enumerate(({}, {"initial_state": str(folder / "two.pth")})):
            (tmp_path / str(number)).mkdir()
            with serve(tmp_path / str(number), **settings) as other:
                answer = other.client.post("/state/import", content=exported)
                assert (answer.status_code, other.metric('states_refused_total{code="state_foreign"}')) == (409, 1)
                assert "state-tuning file of id" in answer.json()["error"]
                assert "--state-dir" in answer.json()["error"]
                assert "delete" not in answer.json()["error"]
                assert listed(other) == {}
        with serve(tmp_path, initial_state=str(folder / "one.pth")) as other:
            assert other.client.post("/state/import", content=exported).status_code == 200
            plain = turn(other, "guest", "B", max_tokens=3)
        with serve(tmp_path, state_dir=str(folder), state_store="none") as other:
            assert other.client.post("/state/import", content=exported).status_code == 200
            assert turn(other, "guest", "B", max_tokens=3, state="one.pth") == plain

    def test_one_from_the_zero_state_where_nothing_begins_there(
        self, server: ServerThread, folder: Path, tmp_path: Path
    ) -> None:
        turn(server, "plain guest", PROMPT, max_tokens=3)
        data = server.client.get("/state/plain guest/export").content
        with serve(tmp_path, initial_state=str(folder / "one.pth")) as other:
            answer = other.client.post("/state/import", content=data)
            assert (answer.status_code, "without --initial-state" in answer.text) == (409, True)

    @pytest.mark.parametrize("store", ["sqlite", "none"])
    def test_a_turn_is_refused(self, folder: Path, tmp_path: Path, store: str) -> None:
        """After a restart without the folder; without a store, when the file has changed."""
        files = tmp_path / "files"
        files.mkdir()
        state_file(files / "mine.pth", 5)
        with serve(tmp_path, state_dir=str(files), state_store=store) as server:
            turn(server, "s", PROMPT, max_tokens=3, state="mine.pth")
            _, number = fork(server, "s", 0, PROMPT, max_tokens=3, state="mine.pth")
            turn(server, "both", PROMPT, max_tokens=3)
            turn(server, "both", PROMPT, max_tokens=3, state="mine.pth")
            if store == "none":
                state_file(files / "mine.pth", 6)
                self.is_refused(server, number, state="mine.pth")
                self.is_refused(server, number)
                return
            server.wait_for(lambda: server.metric("state_writes_waiting") == 0)
        with serve(tmp_path) as server:
            self.is_refused(server, number)
            assert turn(server, "both", "B", max_tokens=3), "what is under the zero state goes on"
            assert server.client.get("/state/s/export").status_code == 409
            assert server.post("/state/delete", {"session_id": "s"}).status_code == 200
            assert turn(server, "s", PROMPT, max_tokens=3)
        with serve(tmp_path, state_dir=str(files)) as server:
            assert fork(server, "s", number, "B", max_tokens=3, state="mine.pth")[1] == number + 1

    def is_refused(self, server: ServerThread, number: int, **named: Any) -> None:
        before = server.metric('states_refused_total{code="state_foreign"}')
        for path, more in ((STATE, {}), (MULTI, {"dialogue_idx": number})):
            answer = server.post(path, body("s", "B", **more, **named))
            assert answer.status_code == 409, path
            for words in ("--state-dir", "/state/delete", "state-tuning file of id"):
                assert words in answer.json()["error"]
        assert server.metric('states_refused_total{code="state_foreign"}') == before + 2


def test_the_tree_tells_them_apart(server: ServerThread, folder: Path, tmp_path: Path) -> None:
    for named in NAMED:
        turn(server, "three", PROMPT, max_tokens=2, state=named.get("state"))
    branches = server.client.get("/state/tree/three").json()["branches"]
    assert [branch["dialogue_idx"] for branch in branches] == [0, 0, 0]
    assert {branch["state"] for branch in branches} == {None, "one.pth", "two.pth"}
    with serve(tmp_path, initial_state=str(folder / "two.pth")) as other:
        turn(other, "default", PROMPT, max_tokens=2)
        (branch,) = other.client.get("/state/tree/default").json()["branches"]
        assert branch["state"] == "two.pth"
    with serve(tmp_path) as other:
        (branch,) = other.client.get("/state/tree/default").json()["branches"]
        assert branch["state"] not in (None, "two.pth"), "its id, as nobody knows the file"
