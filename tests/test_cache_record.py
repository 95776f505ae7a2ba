"""Records: lossless, checked throughout, and refused with a reason when anything is wrong."""

from __future__ import annotations

import hashlib
import json
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load, save

from rwkv_lightning.core.cache import record as records
from rwkv_lightning.core.cache.keys import SessionKey, check_session_id, is_prefix_key, prefix_key
from rwkv_lightning.core.cache.prefix import pack
from rwkv_lightning.core.cache.record import NO_TOKENS, Expected, StateHeader, StateRecord, few_words, hash_tokens
from rwkv_lightning.core.errors import InvalidField, StateCorrupt, StateError, StateForeign, StateVersion
from rwkv_lightning.core.interfaces import ModelConfig, StateInfo
from rwkv_lightning.core.slots import SlotPool, Snapshot

CONFIG = ModelConfig(n_layer=2, n_embd=8, n_head=2, head_size=4, n_ffn=16, vocab_size=300)
EXPECTED = Expected("f" * 32, config=CONFIG)
TOKENS = (5, 299, 0, 17)


def header(**changes: Any) -> StateHeader:
    values: dict[str, Any] = {
        "model": "f" * 32,
        "initial": "poet",
        "tokens": 4,
        "token_hash": hash_tokens(TOKENS),
        "key": "naïve 會話:3:poet",
        "parent": "naïve 會話:1:poet",
        "last_text": "she said “goodbye” 😀",
        "created": 1764490000.123456,
    }
    return StateHeader(**{**values, **changes})


def snapshot(dtype: torch.dtype = torch.float32) -> Snapshot:
    """Any bits at all: not-a-numbers, infinities, subnormals."""
    pool = SlotPool(CONFIG, 1, dtype=dtype)
    generator = torch.Generator().manual_seed(1)
    for part in (pool.shift, pool.wkv):
        bits = torch.randint(0, 256, (part.nbytes,), dtype=torch.uint8, generator=generator)
        part.copy_(bits.view(part.dtype).reshape(part.shape))
    return pool.export(0)


def session(**changes: Any) -> StateRecord:
    return StateRecord(header(**changes), snapshot(), (0, 17))


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# Round trips


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_state_comes_back_bit_for_bit_in_its_own_type(dtype: torch.dtype) -> None:
    made = StateRecord(header(), snapshot(dtype), (0, 17))
    back = StateRecord.from_bytes(made.to_bytes(), replace(EXPECTED, dtype=dtype, key=made.key, initial="poet"))
    assert back.header == made.header
    assert back.tail == (0, 17)
    assert back.logits is None
    for name, tensor in made.snapshot.to_tensors().items():
        other = back.snapshot.to_tensors()[name]
        assert (other.dtype, other.shape, bits(other)) == (tensor.dtype, tensor.shape, bits(tensor))
    assert back.nbytes == made.nbytes == made.snapshot.nbytes + 8
    pool = SlotPool(CONFIG, 3, dtype=dtype)
    pool.restore(2, back.snapshot)
    assert bits(pool.export(2).wkv) == bits(made.snapshot.wkv)


def test_a_prefix_keeps_its_logits() -> None:
    logits = torch.arange(300, dtype=torch.float32)
    key = prefix_key("f" * 32, "", pack(TOKENS))
    made = StateRecord(header(key=key, initial=""), snapshot(), logits=logits)
    back = StateRecord.from_bytes(made.to_bytes(), replace(EXPECTED, token_hash=hash_tokens(TOKENS)))
    assert back.logits is not None
    assert bits(back.logits) == bits(logits)
    assert back.tail == ()
    stored = made.to_stored(pack(TOKENS))
    assert (stored.info.kind, stored.info.session, stored.info.branch) == ("prefix", "", 0)
    assert stored.tokens == pack(TOKENS)
    assert stored.info.nbytes == len(stored.data) + 16


def test_the_index_line_says_what_the_header_says() -> None:
    stored = session().to_stored()
    assert StateRecord.from_bytes(stored.data, EXPECTED).header == header()
    assert stored.info == StateInfo(
        key="naïve 會話:3:poet",
        kind="session",
        session="naïve 會話",
        branch=3,
        parent="naïve 會話:1:poet",
        model="f" * 32,
        initial="poet",
        tokens=4,
        token_hash=hash_tokens(TOKENS),
        last_text="she said “goodbye” 😀",
        created=1764490000.123456,
        nbytes=len(stored.data),
    )


def test_a_renamed_record_is_the_same_state() -> None:
    made = session().renamed("other", created=9.0)
    back = StateRecord.from_bytes(made.to_bytes(), replace(EXPECTED, key="other"))
    assert back.header == header(key="other", parent="", created=9.0)
    assert bits(back.snapshot.wkv) == bits(snapshot().wkv)


def test_the_stored_form_is_what_the_description_says() -> None:
    """Read with nothing but safetensors, JSON and SHA-256."""
    data = session().to_bytes()
    size = int.from_bytes(data[:8], "little")
    fields = json.loads(data[8 : 8 + size])["__metadata__"]
    checksum = fields.pop("checksum")
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode())
    for name, form in (("shift", "float32 [2, 2, 8]"), ("tail", "int32 [2]"), ("wkv", "float32 [2, 2, 4, 4]")):
        digest.update(f"\n{name} {form}\n".encode() + bits(load(data)[name]))
    assert checksum == digest.hexdigest()
    assert fields == {
        "format": "rwkv_lightning.state",
        "version": "1",
        **{name: str(getattr(header(), name)) for name in records.FIELDS},
    }


# The hash of the tokens


def test_the_hash_is_the_documented_chain() -> None:
    digest = bytes(16)
    for token in TOKENS:
        digest = hashlib.blake2b(digest + token.to_bytes(4, "little"), digest_size=16).digest()
    assert hash_tokens(TOKENS) == digest.hex()
    assert hash_tokens(()) == NO_TOKENS


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**32 - 1)))
def test_a_stored_hash_is_enough_to_go_on_from(first: list[int], second: list[int]) -> None:
    assert hash_tokens(second, hash_tokens(first)) == hash_tokens(first + second)


# Damage


def test_a_flipped_bit_anywhere_is_refused() -> None:
    data = session().to_bytes()
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1 << (i * 5 + 3) % 8
        with pytest.raises((StateCorrupt, StateVersion)) as caught:
            StateRecord.from_bytes(bytes(changed), EXPECTED)
        in_version = data[i - 12 : i + 12].find(b'"version":"1"') >= 0
        assert isinstance(caught.value, StateCorrupt) or in_version, f"byte {i}"


def test_every_truncation_and_extension_is_refused() -> None:
    data = session().to_bytes()
    for length in range(len(data)):
        with pytest.raises(StateCorrupt):
            StateRecord.from_bytes(data[:length], EXPECTED)
    for more in (b"\0", b"x" * 64, data):
        with pytest.raises(StateCorrupt):
            StateRecord.from_bytes(data + more, EXPECTED)


@given(st.binary(max_size=300))
def test_noise_is_refused(noise: bytes) -> None:
    with pytest.raises(StateCorrupt):
        StateRecord.from_bytes(noise, EXPECTED)


class Bomb:
    def __reduce__(self) -> Any:
        return (pytest.fail, ("a pickle was executed",))


HOSTILE = {
    "a pickle": pickle.dumps(Bomb()),
    "a header of 2^63 bytes": (2**63).to_bytes(8, "little") + b"{}" * 50,
    "a deep header": (60_000).to_bytes(8, "little") + b'{"__metadata__":' + b"[" * 60_000,
    "a header that is a list": (2).to_bytes(8, "little") + b"[]",
    "metadata that is a list": (22).to_bytes(8, "little") + b'{"__metadata__": [1,2]}'[:22],
    "no metadata": save({"shift": torch.zeros(1)}),
    "other metadata": save({"shift": torch.zeros(1)}, {"format": "pt"}),
}


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_record_is_refused(what: str) -> None:
    with pytest.raises(StateCorrupt):
        StateRecord.from_bytes(HOSTILE[what], EXPECTED)


def forged(drop: str = "", **changes: Any) -> bytes:
    """A record with a right checksum over wrong contents, as anybody can make one for an import."""
    good = session().to_bytes()
    fields = json.loads(good[8 : 8 + int.from_bytes(good[:8], "little")])["__metadata__"]
    tensors = load(good)
    for name, value in changes.items():
        (tensors if isinstance(value, torch.Tensor) else fields)[name] = value
    tensors.pop(drop, None)
    fields.pop("checksum")
    return save(tensors, {**fields, "checksum": records._checksum(fields, tensors)})


def test_a_forgery_without_a_change_is_a_record() -> None:
    assert StateRecord.from_bytes(forged(), EXPECTED).header == header()


@pytest.mark.parametrize(
    "changes",
    [
        {"tail": torch.tensor([-1], dtype=torch.int32)},
        {"tail": torch.tensor([300], dtype=torch.int32)},
        {"tail": torch.zeros(5, dtype=torch.int32)},
        {"tail": torch.zeros(1, dtype=torch.float32)},
        {"tail": torch.zeros(1, 1, dtype=torch.int32)},
        {"tail": torch.tensor(1, dtype=torch.int32)},
        {"shift": torch.zeros(2, 2, 8, dtype=torch.float64)},
        {"shift": torch.zeros(2, 2, 9)},
        {"shift": torch.zeros(32)},
        {"wkv": torch.zeros(2, 2, 4, 4, dtype=torch.bfloat16)},
        {"wkv": torch.zeros(3, 2, 4, 4)},
        {"wkv": torch.zeros(())},
        {"logits": torch.zeros(300)},
        {"logits": torch.zeros(300), "drop": "wkv"},
        {"extra": torch.zeros(1)},
        {"extra": "entry"},
        {"drop": "tail"},
        {"drop": "shift"},
        {"tokens": "-1"},
        {"tokens": "many"},
        {"created": "nan"},
        {"created": "inf"},
        {"created": "yesterday"},
        {"token_hash": ""},
        {"token_hash": "00 " * 10 + "00"},
        {"token_hash": "AB" * 16},
        {"token_hash": "ab" * 17},
    ],
    ids=str,
)
def test_forgeries_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StateCorrupt, match="damaged"):
        StateRecord.from_bytes(forged(**changes), EXPECTED)


@pytest.mark.parametrize("logits", [torch.zeros(299), torch.zeros(1, 300), torch.zeros(300, dtype=torch.float16)])
def test_forged_logits_are_refused(logits: torch.Tensor) -> None:
    with pytest.raises(StateCorrupt, match="logits"):
        StateRecord.from_bytes(forged(logits=logits, tail=torch.zeros(0, dtype=torch.int32)), EXPECTED)


# Records of somebody else


@pytest.mark.parametrize(
    ("expect", "error", "message"),
    [
        ({"fingerprint": "0" * 32}, StateForeign, f"another model .fingerprint {'f' * 32}, loaded is {'0' * 32}"),
        ({"initial": ""}, StateForeign, "began from another initial state: name that one, or delete"),
        ({"dtype": torch.float16}, StateForeign, "kept in float32, .* start it with --state-dtype float32, or delete"),
        ({"key": "other"}, StateCorrupt, "the stored state 'other' is damaged .it is the record of another key"),
        ({"token_hash": hash_tokens((1,))}, StateCorrupt, "has seen other tokens than those it is kept for"),
        ({"config": replace(CONFIG, n_layer=3)}, StateCorrupt, "its shape is not that of the model it names"),
    ],
)
def test_a_record_of_something_else_is_refused(expect: dict[str, Any], error: type[StateError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        StateRecord.from_bytes(session().to_bytes(), replace(EXPECTED, **{"key": header().key, **expect}))
    assert "/state/delete" in str(caught.value), "says what to do"
    assert "replace=true" in str(caught.value)


@pytest.mark.parametrize(
    ("expect", "way_out"),
    [({"fingerprint": "0" * 32}, "load that model"), ({"dtype": torch.float16}, "--state-dtype float32")],
)
def test_a_refused_import_is_not_told_to_delete_a_session(expect: dict[str, Any], way_out: str) -> None:
    """There is none of it here; Expected without a key means an import."""
    with pytest.raises(
        StateForeign, match=f"^the imported state .*{way_out}.*, or import one that a server of"
    ) as caught:
        StateRecord.from_bytes(session().to_bytes(), replace(EXPECTED, key=None, **expect))
    assert "delete" not in str(caught.value)
    with pytest.raises(StateVersion, match="or import one that"):
        StateRecord.from_bytes(forged(version="9"), replace(EXPECTED, key=None))


@pytest.mark.parametrize("version", ["2", "0", "", "1.0"])
def test_an_unknown_version_is_refused_as_such(version: str) -> None:
    with pytest.raises(StateVersion, match=f"format version '{version}'; this server reads version 1: serve it with"):
        StateRecord.from_bytes(forged(version=version), EXPECTED)


def test_refusals_differ_by_code_and_are_never_tried_again() -> None:
    kinds = (StateCorrupt, StateVersion, StateForeign)
    assert {kind.code for kind in kinds} == {"state_corrupt", "state_version", "state_foreign"}
    assert all(issubclass(kind, StateError) and kind.should_retry is False for kind in kinds)
    assert [kind.status for kind in kinds] == [500, 409, 409]


# Keys and words

IDS = st.text(st.characters(codec="utf-8", exclude_characters=":\0"), min_size=1)
INITIALS = st.text("0123456789abcdef-_.:")
KEYS = st.builds(SessionKey, IDS, st.integers(0, 2**63), INITIALS)


@given(KEYS)
def test_a_key_is_read_back(key: SessionKey) -> None:
    assert SessionKey.parse(str(key)) == key
    assert not is_prefix_key(str(key))
    assert check_session_id(key.session) == key.session


@given(KEYS, KEYS)
def test_different_keys_differ_in_the_store(one: SessionKey, other: SessionKey) -> None:
    assert (str(one) == str(other)) == (one == other)


def test_keys_as_people_see_them() -> None:
    assert [SessionKey("a").shown, SessionKey("a", 3).shown, SessionKey("a", 3, "poet").shown] == ["a", "a:3", "a:3"]
    assert [str(SessionKey("a")), str(SessionKey("a", 3))] == ["a", "a:3"]
    assert [str(SessionKey("a", 0, "poet")), str(SessionKey("a", 3, "poet"))] == ["a::poet", "a:3:poet"]


@pytest.mark.parametrize("text", ["", ":", ":3", "a:", "a:0", "a:03", "a:-1", "a:x", "a:3:", "a: 3", "a:３"])
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        SessionKey.parse(text)


@pytest.mark.parametrize("session_id", ["", "a:b", ":", "a\0b", "\ud800"])
def test_what_cannot_be_a_session_id_is_refused_by_field(session_id: str) -> None:
    with pytest.raises(InvalidField) as caught:
        check_session_id(session_id)
    assert caught.value.param == "session_id"


def test_prefix_keys_depend_on_everything() -> None:
    parts = [("m", "", b"00"), ("n", "", b"00"), ("m", "i", b"00"), ("m", "", b"01")]
    found = {prefix_key(*part) for part in parts}
    assert len(found) == 4
    assert all(is_prefix_key(key) for key in found)


@given(st.text())
def test_last_words_are_short_valid_and_on_one_line(text: str) -> None:
    words = few_words(text)
    assert len(words) <= records.WORDS
    assert words.encode().decode() == " ".join(words.split())


def test_last_words_are_the_last_and_whole() -> None:
    assert few_words(" a\n\nb ") == "a b"
    assert few_words("word " * 100 + "end").endswith("word word end")
    assert few_words("word " * 100).startswith("word ")
    assert few_words("好" * 100) == "好" * 60
