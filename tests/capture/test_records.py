"""TokenEntry: types, rules, stamps, and the line."""

import dataclasses
import json
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evsys_jax.capture import fingerprint, records
from evsys_jax.capture.canonical import canonical_json, canonical_object
from evsys_jax.capture.records import ParentResolutionStatus, TokenEntry


def make(**fields: Any) -> TokenEntry:
    values: dict[str, Any] = {
        "rollout_id": "r",
        "model_call_id": "call-7",
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3],
        "generation_log_probs": [-0.5],
    }
    return TokenEntry(**(values | fields))


def line_of(**fields: Any) -> bytes:
    """A line as any JSON writer makes it, not canonical."""
    values = make().to_dict() | fields
    return json.dumps(values).encode()


def test_arrays_are_copies_of_the_right_types() -> None:
    prompt = np.array([5, 6], np.uint16)
    log_probs = np.array([-0.1], np.float32)
    entry = make(prompt_token_ids=prompt, generation_token_ids=(3,), generation_log_probs=log_probs)
    prompt[0] = 9
    assert entry.prompt_token_ids.dtype == np.int32
    assert entry.prompt_token_ids.tolist() == [5, 6]
    assert entry.generation_token_ids.tolist() == [3]
    assert entry.generation_log_probs.dtype == np.float64
    assert entry.generation_log_probs[0] == float(np.float32(-0.1))


@pytest.mark.parametrize("name", ["prompt_token_ids", "generation_token_ids"])
@pytest.mark.parametrize(
    "bad",
    [
        -1,
        2**31,
        2**32 + 5,
        2**63,
        2**64 + 5,
        10**30,
        3.0,
        2.5,
        True,
        "12",
        None,
        math.nan,
        [1],
    ],
)
def test_bad_token_ids_name_call_field_and_index(name: str, bad: Any) -> None:
    with pytest.raises(ValueError, match=rf"call-7.*{name}.*\[1\]"):
        make(**{name: [4, bad]})


@pytest.mark.parametrize("dtype", [np.int64, np.int8])
def test_bad_token_ids_in_arrays(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"call-7.*prompt_token_ids.*\[2\].*-1"):
        make(prompt_token_ids=np.array([1, 2, -1], dtype))
    with pytest.raises(ValueError, match=r"prompt_token_ids.*\[0\].*4294967301"):
        make(prompt_token_ids=np.array([2**32 + 5], np.uint64))


@pytest.mark.parametrize(
    "bad",
    [
        "12",
        None,
        5,
        {1: 2},
        range(3),
        iter([1]),
        np.array([[1]]),
        np.array(1),
        np.array([1.0]),
        np.array([True]),
        np.array(["1"]),
        np.array([1], object),
    ],
)
def test_what_is_no_list_of_ids(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"call-7.*prompt_token_ids"):
        make(prompt_token_ids=bad)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, None, "-1", True, 10**400, [-1.0]])
def test_bad_log_probs_name_call_field_and_index(bad: Any) -> None:
    with pytest.raises(ValueError, match=r"call-7.*generation_log_probs.*\[1\]"):
        make(generation_token_ids=[3, 4], generation_log_probs=[-0.5, bad])


def test_log_probs_in_arrays() -> None:
    with pytest.raises(ValueError, match=r"generation_log_probs.*\[0\].*inf"):
        make(generation_log_probs=np.array([-np.inf], np.float32))
    with pytest.raises(ValueError, match=r"generation_log_probs"):
        make(generation_log_probs=np.array([True]))
    with pytest.raises(ValueError, match=r"generation_log_probs"):
        make(generation_log_probs=np.array(["-1.0"]))
    huge = np.array([np.longdouble(10) ** 400])
    if np.isfinite(huge[0]):
        with pytest.raises(ValueError, match=r"generation_log_probs.*\[0\]"):
            make(generation_log_probs=huge)


@pytest.mark.parametrize(
    "field", ["prompt_token_ids", "generation_log_probs", "cum_len", "created_at"]
)
def test_integers_that_cannot_be_written_out(field: str) -> None:
    huge = 10**5000
    with pytest.raises(ValueError, match=rf"call-7.*{field}"):
        make(**{field: [huge] if field.startswith(("p", "g")) else huge})


def test_integers_and_numpy_scalars_are_numbers() -> None:
    entry = make(
        prompt_token_ids=[np.int64(4), 5],
        generation_token_ids=[1, 2, 3],
        generation_log_probs=[-1, np.float32(-0.5), 10**20],
        created_at=np.int64(3),
        cum_len=np.int32(5),
    )
    assert entry.generation_log_probs.tolist() == [-1.0, -0.5, 1e20]
    assert TokenEntry.from_json(entry.to_json()) == entry


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("cum_len", 2**64),
        ("cum_len", -(2**63) - 1),
        ("cum_len", 3.0),
        ("continuation_context_len", None),
        ("created_at", 10**400),
        ("parent_resolution", ["root"]),
        ("parent_resolution", 1),
        ("output_items", {}),
        ("output_items", [{}, 1]),
        ("extra", []),
        ("extra", {1: 2}),
        ("extra", {"cum_len": 2}),
        ("extra", {"staging_key": ""}),
        ("prefix_requested", 0),
        ("model", b"m"),
    ],
)
def test_other_fields_name_call_and_field(field: str, bad: Any) -> None:
    name = next((key for key in bad if isinstance(key, str)), field) if field == "extra" else field
    with pytest.raises(ValueError, match=rf"call-7.*{name}"):
        make(**{field: bad})


def test_a_missing_field() -> None:
    with pytest.raises(ValueError, match=r"call.*c.*generation_log_probs"):
        TokenEntry(
            rollout_id="r",
            model_call_id="c",
            prompt_token_ids=[],
            generation_token_ids=[],
        )


def test_unequal_counts_are_both_named() -> None:
    with pytest.raises(ValueError, match=r"call-7.*generation_log_probs.*3.*1"):
        make(generation_log_probs=[-1.0, -1.0, -1.0])


def test_resolutions() -> None:
    entry = make(parent_resolution="resolved", parent_call_id="p")
    assert entry.parent_resolution is ParentResolutionStatus.RESOLVED
    assert type(entry.to_dict()["parent_resolution"]) is str
    assert [status.value for status in ParentResolutionStatus] == ["root", "resolved", "unresolved"]


def test_equality_is_by_content() -> None:
    assert make() == make()
    assert make() != make(model="m")
    assert make() != make(prompt_token_ids=[1, 3])
    assert make() != make(extra={"a": 1})
    assert make(generation_log_probs=[0.0]) != make(generation_log_probs=[-0.0])
    assert make() != "call-7"
    with pytest.raises(TypeError):
        hash(make())


def test_copies() -> None:
    entry = make(extra={"a": 1}, output_items=[{"b": 2}], token_item_index=0)
    assert dataclasses.replace(entry) == entry
    assert pickle.loads(pickle.dumps(entry)) == entry
    assert TokenEntry.from_dict(entry.to_dict()) == entry


def test_unknown_keys_stay() -> None:
    values = make().to_dict() | {"extra": 5, "z": {"y": [1, None]}, "staging_key": None}
    entry = TokenEntry.from_dict(values)
    assert dict(entry.extra) == {"extra": 5, "z": {"y": [1, None]}, "staging_key": None}
    assert entry.to_dict() == values
    assert TokenEntry.from_json(entry.to_json()) == entry


@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=20),
    st.lists(st.integers(0, 2**31 - 1), max_size=20),
    st.text(st.characters(codec="utf-8")),
)
def test_the_line_keeps_every_bit(numbers: list[float], ids: list[int], text: str) -> None:
    entry = make(
        prompt_token_ids=ids,
        generation_token_ids=[1] * len(numbers),
        generation_log_probs=numbers,
        output_items=[{"text": text}],
        model=text,
    )
    line = entry.to_json()
    assert b"\n" not in line
    assert TokenEntry.from_json(line) == entry
    assert TokenEntry.from_json(line.decode()) == entry
    assert line == canonical_json(entry.to_dict())
    assert json.loads(line) == entry.to_dict()


@pytest.mark.parametrize(
    ("line", "names"),
    [
        (b"\xef\xbb\xbf" + line_of(), ["BOM"]),
        (b"", []),
        (b"nul", []),
        (b"[]", ["a list"]),
        (line_of() + line_of(), []),
        (line_of() + b"\0", []),
        (line_of()[:-1] + b', "cum_len": null}', ["cum_len", "twice"]),
        (line_of()[:-1] + b', "cum\\u005flen": null}', ["cum_len", "twice"]),
        (line_of(generation_log_probs=[math.nan]), ["call-7", "generation_log_probs", "[0]"]),
        (line_of(generation_log_probs=[-math.inf]), ["call-7", "generation_log_probs", "[0]"]),
        (line_of(prompt_token_ids=[1, math.nan]), ["call-7", "prompt_token_ids", "[1]"]),
        (line_of(created_at=math.inf), ["call-7", "created_at"]),
        (line_of(other=[{"x": math.nan}]), ["call-7", "NaN"]),
        (line_of(other=1).replace(b'"other": 1', b'"other": 1e999'), ["call-7"]),
        (line_of(other=1).replace(b'"other": 1', b'"other": ' + b"9" * 400), ["call-7"]),
        (line_of(other=1).replace(b'"other": 1', b'"other": ' + b"9" * 5000), ["call-7"]),
        (line_of(other=1).replace(b'"other": 1', b'"other": NaN, "other": 1'), ["call-7"]),
        (line_of(generation_log_probs=["X"]).replace(b'"X"', b"1e999"), ["[0]"]),
        (line_of(generation_log_probs=["X"]).replace(b'"X"', b"9" * 5000), ["[0]"]),
        (line_of(cum_len="X").replace(b'"X"', b"9" * 20), ["cum_len"]),
        (line_of(model="\ud83d"), ["surrogate"]),
        (line_of(model="\ude00\ud83d"), ["surrogate"]),
        (line_of(model="\ud83d\ud83d\ude00"), ["surrogate"]),
        (line_of(model="\ud83d-\ude00"), ["surrogate"]),
        (line_of(model="\ud83d", response_id="\ude00"), ["surrogate"]),
        (line_of(other=1).replace(b"other", b"\\uDFFF"), ["surrogate"]),
        (line_of(other=1).replace(b'"other": 1', b'"o": "\\ud83d", "o": 1'), ["surrogate"]),
        (line_of(model="X").replace(b"X", b"\xff"), ["UTF-8"]),
        (line_of(model="X").replace(b"X", b"\xed\xa0\xbd"), ["UTF-8"]),
        (line_of(model="X").replace(b"X", b"\t"), []),
        (line_of(other=1).replace(b": 1}", b": " + b"[" * 10**5 + b"]" * 10**5 + b"}"), ["deep"]),
    ],
)
def test_bad_lines(line: bytes, names: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        TokenEntry.from_json(line)
    for name in names:
        assert name in str(caught.value)


def test_good_lines() -> None:
    assert TokenEntry.from_json(b" \t\x0b\x0c\r" + line_of() + b"\r\n") == make()
    big = line_of(other=1).replace(b'"other": 1', b'"other": [18446744073709551615, 2e3]')
    assert TokenEntry.from_json(big).extra["other"] == [2**64 - 1, 2000.0]
    bigger = line_of(other=1).replace(b'"other": 1', b'"other": -9223372036854775809')
    assert TokenEntry.from_json(bigger).extra["other"] == -(2.0**63)
    assert type(TokenEntry.from_json(bigger).extra["other"]) is float
    log_prob = line_of(generation_log_probs=["X"]).replace(b'"X"', b"-" + b"1" * 30)
    assert TokenEntry.from_json(log_prob).generation_log_probs[0] == -float("1" * 30)
    pair = line_of(model="\U0001f600", other="\\ud83d")
    assert b"\\ud83d\\ude00" in pair
    assert TokenEntry.from_json(pair).model == "\U0001f600"
    repeated = line_of(other=1).replace(b'"other": 1', b'"other": 1, "other": 2')
    assert TokenEntry.from_json(repeated).extra["other"] == 2
    inner = line_of(output_items=[0]).replace(b"[0]", b'[{"model": 1, "model": 2}]')
    assert TokenEntry.from_json(inner).output_items == [{"model": 2}]


@pytest.mark.parametrize("bad", [{"x": object()}, {"x": {1: 2}}, {"x": 2**64}, {"x": "\ud83d"}])
def test_what_no_line_can_hold(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        make(extra=bad).to_json()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_canonical_json_depth_and_types() -> None:
    assert canonical_json(nested(253)) == b"[" * 253 + b"]" * 253
    with pytest.raises(ValueError):
        canonical_json(nested(254))
    assert canonical_json(ParentResolutionStatus.ROOT) == b'"root"'
    assert canonical_json((1, np.float64(2.5))) == b"[1,2.5]"
    for bad in (b"x", {1}, np.int64(1), np.zeros(2), {None: 1}, 1 + 2j):
        with pytest.raises(ValueError):
            canonical_json(bad)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(json_values)
@example([1e16, 1e-5, -1.5e-5, 9.99e-6, 1e15, -0.0, 1e22, 5e-324, 123456789012345680.0])
@example("\ud800")
@example({"\uffff": 1, "\U0001f600": 2, "z": '\x00\x1f\x7f\x08\x0c\n\r\t"\\/\u2028'})
def test_both_writers_agree(value: Any) -> None:
    def attempt(write: Any) -> Any:
        try:
            return write(value)
        except ValueError:
            return ValueError

    with pytest.MonkeyPatch.context() as patch:
        fast = attempt(canonical_json)
        patch.setattr("evsys_jax.capture.canonical._orjson_is_canonical", lambda: False)
        assert attempt(canonical_json) == fast
        arrays = {"a": np.array([1e16, -0.5]), "b": np.array([1, 2], np.int32)}
        slow = attempt(lambda v: canonical_object({"v": v}, arrays))
    assert attempt(lambda v: canonical_object({"v": v}, arrays)) == slow


def test_digests_take_lists_and_arrays() -> None:
    ids = [0, 1, 2**31 - 1, 77]
    expected = records.compute_digest(ids)
    for dtype in (np.int32, np.int64, np.uint64):
        assert records.compute_digest(np.array(ids, dtype)) == expected
        assert records.encode_token_ids(np.array(ids, dtype)) == records.encode_token_ids(ids)
    assert records.compute_digest(np.arange(10, dtype=np.int32)[::3]) == records.compute_digest(
        (0, 3, 6, 9)
    )
    assert records.compute_digest(np.array([])) == records.compute_digest([])
    for bad in ([-1], [2**64], np.array([-1])):
        with pytest.raises(ValueError):
            records.compute_digest(bad)
    for odd in ([True], [1.0], ["1"], np.array([1.0]), "12", np.array([[1]])):
        with pytest.raises(TypeError):
            records.encode_token_ids(odd)  # type: ignore[arg-type]


def test_stamps() -> None:
    entry = records.stamp_lineage(make(), None, parent_resolution="root")
    assert (entry.cum_len, entry.digest) == (3, records.compute_digest([1, 2, 3]))
    assert entry.parent_resolution is ParentResolutionStatus.ROOT
    assert records.cumulative_tokens(entry).tolist() == [1, 2, 3]
    again = records.stamp_lineage(make(), "p", parent_resolution="resolved", cumulative=[1, 2, 3])
    assert (again.parent_call_id, again.digest) == ("p", entry.digest)
    delta = make(prompt_is_delta=True, parent_resolution="resolved", parent_call_id="p")
    records.stamp_lineage(delta, "p", parent_resolution="resolved", cumulative=[9, 1, 2, 3])
    assert (delta.cum_len, delta.digest) == (4, records.compute_digest([9, 1, 2, 3]))
    with pytest.raises(ValueError, match="delta"):
        records.cumulative_tokens(delta)


@pytest.mark.parametrize(
    ("parent", "fields"),
    [
        (None, {"parent_resolution": "resolved"}),
        ("p", {"parent_resolution": "root"}),
        ("", {"parent_resolution": "unresolved"}),
        ("p", {"parent_resolution": "maybe"}),
        (None, {"cumulative": [1, 2]}),
        (None, {"cumulative": [1, 2, -3]}),
    ],
)
def test_bad_stamps_change_nothing(parent: str | None, fields: dict[str, Any]) -> None:
    entry = make()
    with pytest.raises(ValueError, match="call-7"):
        records.stamp_lineage(entry, parent, **fields)
    assert entry == make()


def test_continuation_stamps() -> None:
    request = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    entry = make(output_items=[{"role": "assistant", "content": "c"}])
    assert records.stamp_continuation(entry, request) is entry
    assert entry.continuation_fingerprint == fingerprint.assistant_fingerprint(
        [*request, *entry.output_items]
    )
    assert entry.continuation_context_len == 2
    assert entry.continuation_context_digest == fingerprint.conversation_digest(request)
    assert entry.fingerprint_version == 2
    with pytest.raises(ValueError):
        records.stamp_continuation(make(), ["x"])
