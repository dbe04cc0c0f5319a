"""The fast reader gives what the strict one gives, and torn ends are told from damage."""

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from evsys_jax.capture import lines, prompts
from evsys_jax.capture.lines import LineReader, line_spans, read_records
from evsys_jax.capture.numerals import parse_ids, parse_log_probs
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.torn import is_torn


def make(call_id: str = "c", **fields: Any) -> TokenEntry:
    values: dict[str, Any] = {
        "rollout_id": "r",
        "model_call_id": call_id,
        "prompt_token_ids": [1, 2],
        "generation_token_ids": [3, 0],
        "generation_log_probs": [-0.5, -1e-7],
    }
    return TokenEntry(**(values | fields))


LINE = make(output_items=[{"a": "\u00e9"}], extra={"n": 1.5}, created_at=1e16).to_json()


def outcome(read: Any) -> Any:
    try:
        return read()
    except ValueError as error:
        return str(error)


def assert_same_as_strict(line: bytes) -> None:
    if b"\n" in line or not line.strip():
        return
    expected = outcome(lambda: TokenEntry.from_json(line))
    if isinstance(expected, str):
        expected = f"f:1: {expected}"
    elif expected.rollout_id != "r":
        expected = f"f:1: the record is of rollout {expected.rollout_id!r}, not 'r'"
    got = outcome(lambda: read_records(line, "r", "f"))
    assert got == ([expected] if isinstance(expected, TokenEntry) else expected)


def fast(line: bytes) -> TokenEntry | None:
    reader = LineReader("r", "f")
    entries = reader._read_batch(reader._take_batch(line, [(0, 0, len(line))], 0))
    return entries[0] if entries else None


def test_canonical_lines_take_the_fast_path() -> None:
    for entry in (
        make(),
        make(prompt_token_ids=[], generation_token_ids=[], generation_log_probs=[]),
    ):
        assert fast(entry.to_json()) == entry
    assert fast(LINE) == TokenEntry.from_json(LINE)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"[1,2]", b"[1, 2]"),
        (b"[1,2]", b"[1,,2]"),
        (b"[1,2]", b"[,1]"),
        (b"[1,2]", b"[1,]"),
        (b"[1,2]", b"[01,2]"),
        (b"[1,2]", b"[1,02]"),
        (b"[1,2]", b"[1,00]"),
        (b"[1,2]", b"[-1]"),
        (b"[1,2]", b"[1.0]"),
        (b"[1,2]", b"[2147483648]"),
        (b"[1,2]", b"[18446744073709551621]"),
        (b"[1,2]", b"[36893488147419103237]"),
        (b"[1,2]", b"[" + b"9" * 40 + b"]"),
        (b"[1,2]", b"[1e3]"),
        (b"[1,2]", b"[1\x002]"),
        (b"[1,2]", b"[[1]]"),
        (b"[1,2]", b'["1"]'),
        (b"[1,2]", b"[true]"),
        (b"[1,2]", b"null"),
        (b"[1,2]", b"[1"),
        (b"[3,0]", b"[3,-0]"),
        (b"[-0.5,-1e-7]", b"[-0.5,-0]"),
        (b"[-0.5,-1e-7]", b"[-0.5,NaN]"),
        (b"[-0.5,-1e-7]", b"[-0.5,1e999]"),
        (b"[-0.5,-1e-7]", b"[-0.5,null]"),
        (b"[-0.5,-1e-7]", b"[-0.5,true]"),
        (b"[-0.5,-1e-7]", b'[-0.5,"-1"]'),
        (b"[-0.5,-1e-7]", b"[-0.5]"),
        (b"[-0.5,-1e-7]", b"[-1,18446744073709551616]"),
        (b"[-0.5,-1e-7]", b"[-0.5,[-1]]"),
        (b"[-0.5,-1e-7]", b"[ -0.5 , -1e-7 ]"),
        (b'"n":1.5', b'"n":1.50'),
        (b'"n":1.5', b'"n":1e999'),
        (b'"n":1.5', b'"n":NaN'),
        (b'"n":1.5', b'"n":2,"n":1.5'),
        (b'"n":1.5', b'"n":100000000000000000000'),
        (b'"n":1.5', b'"n":{"prompt_token_ids":[5]}'),
        (b'"n":1.5', b'"n\\"prompt_token_ids":[5]'),
        (b'"n":1.5', b'"n":"\\"prompt_token_ids\\":[5]"'),
        (b'"n":1.5', b'"n":"\\ud83d"'),
        (b'"n":1.5', b'"n":"\xff"'),
        (b'"n":1.5', b'"prompt_token_ids":[1,2]'),
        (b'"cum_len":null', b'"cum_len":null,"cum_len":null'),
        (b'"cum_len":null', b'"cum_len":3.0'),
        (b'"cum_len":null', b'"cum_len":true'),
        (b'"schema_version":1', b'"schema_version":2'),
        (b'"rollout_id":"r"', b'"rollout_id":"other"'),
        (b'"rollout_id":"r",', b""),
        (b'"prompt_token_ids":[1,2],', b""),
        (b'"staging', b'"staging'),
        (b'"parent_resolution":null', b'"parent_resolution":"resolved"'),
        (b'"routed_experts":null', b'"routed_experts":null,"staging_key":"s"'),
        (b"}", b"}}"),
    ],
)
def test_changed_lines(old: bytes, new: bytes) -> None:
    assert_same_as_strict(LINE.replace(old, new))


@given(st.integers(0, len(LINE)), st.integers(0, 12), st.binary(max_size=4))
@settings(max_examples=300, deadline=None)
def test_any_edit(at: int, length: int, new: bytes) -> None:
    assert_same_as_strict(LINE[:at] + new + LINE[at + length :])


@given(st.integers(0, len(LINE)), st.sampled_from(list('0123456789,-.eE+[]{}"\\ :nNtu\t')))
@settings(max_examples=300, deadline=None)
def test_json_like_edits(at: int, new: str) -> None:
    assert_same_as_strict(LINE[:at] + new.encode() + LINE[at:])
    assert_same_as_strict(LINE[:at] + new.encode() + LINE[at + 1 :])


@given(st.text(st.sampled_from("0123456789,"), max_size=30))
@example("2147483647")
@example("2147483648")
@example("18446744073709551621")
def test_parse_ids(text: str) -> None:
    try:
        expected = json.loads(f"[{text}]")
    except ValueError:
        expected = [-1]
    arrays = parse_ids([text.encode()])
    got = None if arrays is None else arrays[0]
    if all(0 <= item < 2**31 for item in expected):
        assert got is not None
        assert got.dtype == np.int32
        assert got.tolist() == expected
    else:
        assert got is None


@given(st.lists(st.text(st.sampled_from("0123456789,"), max_size=6), max_size=5))
@example(["1", "", "2,3"])
@example(["1,", "2"])
@example(["1", ",2"])
@example(["1", ","])
@example(["2147483647", "1"])
@example(["2147483648", "1"])
@example(["9999999999", "1"])
@example(["0", "00"])
def test_ids_of_joined_texts(texts: list[str]) -> None:
    coded = [text.encode() for text in texts]
    alone = [parse_ids([text]) for text in coded]
    got = parse_ids(coded)
    if None in alone:
        assert got is None
    else:
        assert got is not None
        assert [ids.tolist() for ids in got] == [json.loads(f"[{text}]") for text in texts]


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), max_size=6))
@example([-0.0, 5e-324, 1.7976931348623157e308])
def test_log_probs_keep_every_bit(numbers: list[float]) -> None:
    got = parse_log_probs(json.dumps(numbers)[1:-1].encode())
    assert got is not None
    assert got.tobytes() == np.array(numbers, np.float64).tobytes()


@pytest.mark.parametrize(
    "text",
    ["true", "false", "null", '"1"', "[1]", "{}", "NaN", "1e999", "1,", ",1", "1 2", '{"a":1}'],
)
def test_what_is_no_log_prob(text: str) -> None:
    assert parse_log_probs(text.encode()) is None
    assert parse_log_probs(b"-0.5," + text.encode()) is None


def strict_outcome(data: bytes) -> list[Any]:
    """What a reader gives that reads line by line: records, then perhaps an error."""
    found: list[Any] = []
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            entry = TokenEntry.from_json(line)
            if entry.rollout_id != "r":
                raise ValueError(f"the record is of rollout {entry.rollout_id!r}, not 'r'")
            found.append(entry)
        except ValueError as error:
            return [*found, f"f:{number}: {error}"]
    return found


def outcome_in_batches(data: bytes) -> list[Any]:
    found: list[Any] = []
    try:
        for entry in LineReader("r", "f").read_all(data, line_spans(data)):
            found.append(entry)
    except ValueError as error:
        found.append(str(error))
    return found


EDITS = (
    (b"[", b"[ "),
    (b"]", b",]"),
    (b"]", b" ]"),
    (b'ids":[', b'ids":[,'),
    (b'ids":[', b'ids":[0'),
    (b'ids":[', b'ids":[2147483648,'),
    (b'log_probs":[', b'log_probs":[1,'),
    (b'log_probs":[', b'log_probs":["a'),
    (b'log_probs":[-', b'log_probs":[true,-'),
    (b'"rollout_id":"r"', b'"rollout_id":"s"'),
    (b"}", b""),
    (b'"model":""', b'"model":3'),
)


@given(
    st.integers(0, 10**6),
    st.lists(st.tuples(st.integers(0, 11), st.sampled_from(EDITS)), max_size=3),
    st.sampled_from([1, 100, 1000, 1 << 19]),
)
@settings(max_examples=200, deadline=None)
def test_batches_read_what_single_lines_give(
    seed: int, edits: list[tuple[int, tuple[bytes, bytes]]], size: int
) -> None:
    texts = [entry.to_json() for entry in random_capture(random.Random(seed))]
    for index, (old, new) in edits:
        texts[index % len(texts)] = texts[index % len(texts)].replace(old, new, 1)
    data = b"\n".join(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lines, "_BATCH", size)
        patch.setattr(prompts, "_SHORT", 20)
        assert outcome_in_batches(data) == strict_outcome(data)


def random_capture(rng: random.Random) -> list[TokenEntry]:
    """Calls that continue, repeat, branch from and forget each other's prompts."""

    def ids(count: int) -> list[int]:
        return [rng.choice([rng.randrange(10), rng.randrange(2**31)]) for _ in range(count)]

    prompts: list[list[int]] = [ids(rng.randrange(200))]
    entries: list[TokenEntry] = []
    for number in range(rng.randrange(1, 12)):
        base = rng.choice(prompts[-6:])
        kind = rng.randrange(5)
        cut = rng.randrange(len(base) + 1)
        prompt = [base + ids(rng.randrange(40)), base, base[:cut], base[:cut] + ids(9), ids(60)][
            kind
        ]
        prompts.append(prompt)
        generation = ids(rng.randrange(5))
        entries.append(
            make(
                f"c{number}",
                prompt_token_ids=prompt,
                generation_token_ids=generation,
                generation_log_probs=[-rng.expovariate(1) for _ in generation],
            )
        )
    return entries


@pytest.mark.parametrize("short", [0, 256])
def test_shared_prompts(short: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "_SHORT", short)
    for seed in range(60):
        entries = random_capture(random.Random(seed))
        data = b"\n".join(entry.to_json() for entry in entries)
        got = read_records(data, "r", "f")
        assert got == entries
        for entry in got:
            with pytest.raises(ValueError, match="read-only"):
                entry.prompt_token_ids[:1] = 5  # type: ignore[index]


def test_a_prefix_must_end_at_a_comma() -> None:
    long = [7] * 300
    first = make("a", prompt_token_ids=[*long, 12])
    second = make("b", prompt_token_ids=[*long, 1234])
    third = make("c", prompt_token_ids=[*long, 12, 5])
    entries = [first, second, third]
    assert read_records(b"\n".join(e.to_json() for e in entries), "r", "f") == entries
    bad = second.to_json().replace(b"7,1234]", b"7,12,]")
    with pytest.raises(ValueError, match="f:2: "):
        read_records(first.to_json() + b"\n" + bad, "r", "f")


def test_continued_prompts_share_memory() -> None:
    prompt = list(range(1000))
    entries = [make(f"c{n}", prompt_token_ids=prompt + [5] * n) for n in range(10)]
    got = read_records(b"\n".join(e.to_json() for e in entries), "r", "f")
    assert got == entries
    assert np.shares_memory(got[8].prompt_token_ids, got[9].prompt_token_ids)


def test_two_prompts_that_continue_one() -> None:
    prompt = list(range(300))
    grown = [*prompt, 1, 2]
    prompts = [prompt, grown, [*grown, 3], [*grown, 4], [*grown, 4, 5], [*grown, 3, 6], grown]
    entries = [make(f"c{n}", prompt_token_ids=ids) for n, ids in enumerate(prompts)]
    assert read_records(b"\n".join(e.to_json() for e in entries), "r", "f") == entries


def test_an_array_inside_another_value_is_not_the_field() -> None:
    nested = {"prompt_token_ids": [5]}
    for name in ("a", "n", "z"):
        for prompt in ([], [1, 2]):
            line = make(prompt_token_ids=prompt, extra={name: nested}).to_json()
            assert_same_as_strict(line)
            assert read_records(line, "r", "f")[0].prompt_token_ids.tolist() == prompt
        line = make(prompt_token_ids=[], extra={name: nested}).to_json()
        assert_same_as_strict(line.replace(b'"prompt_token_ids":[],', b""))


def test_lines_end_at_line_feeds_only() -> None:
    text = "\u2028 \u0085 \u000b"
    entry = make(output_items=[{"t": text}])
    data = b"\n \t\r\x0b\x0c\n" + LINE + b"\r\n\n  " + entry.to_json() + b" \x0c"
    assert [entry.output_items for entry in read_records(data, "r", "f")][1] == [{"t": text}]
    assert [data[begin:end] for _, begin, end in line_spans(data)] == [LINE, entry.to_json()]
    with pytest.raises(ValueError, match=r"^f:5: "):
        read_records(data + b"x", "r", "f")


def cuts(line: bytes) -> list[bytes]:
    return [line[:end].strip() for end in range(1, len(line))]


def test_every_beginning_is_torn() -> None:
    value = {"a": [1, -2.5e-7, {"b": None, "c": [True, False, {}], "": []}], "z": {"y": 10.5}}
    pretty = json.dumps(value | {"t": '\u00e9\u2028\U0001f600\\"\n/'}, indent=1, ensure_ascii=False)
    for line in (LINE, pretty.encode(), json.dumps({"t": "\u1234\U0001f600"}).encode()):
        for torn in cuts(line):
            assert is_torn(torn), torn
            assert is_torn(torn + b"\0\0\0")
        assert not is_torn(line)
        assert not is_torn(line + b"\0")


def test_only_beginnings_are_torn() -> None:
    """Against a slow definition: some completion of the text parses."""
    rng = random.Random(5)
    alphabet = '{}[]",:\\0-1.eE+truefalsn u\x00'
    tails = """} "} :1} ":1} 1} 0} ]} null} rue} alse} ue} lse} e} se} ull} ll} l} "a":1} n"}
        0000"} 000"} 00"} 0"} ":1}]}""".split()
    found = 0
    for _ in range(4000):
        text = "{" + "".join(rng.choice(alphabet) for _ in range(rng.randrange(7)))
        completes = False
        for tail in tails:
            for extra in ("", "}", "]", "]}", "}}"):
                try:
                    completes |= isinstance(json.loads(text + tail + extra), dict)
                except ValueError:
                    pass
        found += completes
        if completes:
            assert is_torn(text.strip().encode()), text
        elif is_torn(text.strip().encode()):
            # Torn deeper than the tails reach; then it must still be a beginning.
            assert text.count("{") + text.count("[") > 1 or "\x00" in text, text
    assert found > 200


@pytest.mark.parametrize(
    "line",
    [
        b"x",
        b"[",
        b'"',
        b"{{",
        b"{,",
        b"{1",
        b'{"a"1',
        b'{"a":01',
        b'{"a":1.e',
        b'{"a":-a',
        b'{"a":tru ',
        b'{"a":nuk',
        b'{"a":N',
        b'{"a":1,}',
        b'{"a":[1,]',
        b'{"a":[}',
        b'{"a":]',
        b'{"a":1 2',
        b'{"a":"\x01',
        b'{"a":"\\x',
        b'{"a":"\\u12g',
        b'{"a":1\0,',
        b'{"a":"\0"',
        b"\xef\xbb\xbf{",
        b'{"a":\xc3',
        b'{"a":"\\\xc3',
        b'{"a":"\xff',
        b'{"a":"\xc3(',
        b'{"a":"\xed\xa0',
        b'{"a":' + b"[" * 1000,
        LINE + LINE[:50],
        LINE[:50] + LINE,
        b'{"a":[' + LINE,
        b'{"a":' + LINE,
        b'{"a":[1,' + LINE + b"\0\0",
        b'{"a":[{"model\\u005fcall_id":1}',
    ],
)
def test_damage_is_not_torn(line: bytes) -> None:
    assert not is_torn(line)


@pytest.mark.parametrize(
    "line",
    [
        b"\0",
        b"{",
        b'{"a":{"model_call_id":1},',
        b'{"a":{"model_call_id":1',
        b'{"a":{"model_call_id":1}]'[:-1] + b",\0",
        b'{"a":{"b":{"model_call_id":1}}',
        b'{"a":"model_call_id"',
        b'{"model_call_id":{}',
        b'{"a":"' + b"\\n" * 100_000,
        b'{"a":' + b"[" * 800,
    ],
)
def test_beginnings_are_torn(line: bytes) -> None:
    assert is_torn(line)
