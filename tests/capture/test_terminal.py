"""Terminal attribution: each witness, how they agree, and what malformed content costs."""

from typing import Any

import pytest

from evsys_jax.capture.fingerprint import assistant_fingerprint
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.terminal import TerminalAttribution, resolve_terminal


def _message(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(call_id: str, text: str = "", **fields: Any) -> TokenEntry:
    fields.setdefault("generation_token_ids", [2])
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        prompt_token_ids=[1],
        generation_log_probs=[-0.5] * len(fields["generation_token_ids"]),
        output_items=[_message(text)] if text else [],
        **fields,
    )


A = _call("a", "first", response_id="ra", generation_token_ids=[2])
B = _call("b", "second", response_id="rb", generation_token_ids=[3])
SAID_B = {"id": "rb", "output": [_message("second")]}


@pytest.mark.parametrize(
    ("response", "explicit", "declared", "expected"),
    [
        (None, None, None, (None, "", "no_response_object")),
        ("text", None, None, (None, "", "no_response_object")),
        ({}, None, None, (None, "", "response_has_no_id,response_has_no_output")),
        (None, "b", None, ("b", "explicit", "no_response_object")),
        (None, "", "", (None, "", "no_response_object")),
        (None, "z", None, (None, "", "explicit_terminal_not_captured,no_response_object")),
        (None, None, "rb", ("b", "declared", "no_response_object")),
        (SAID_B, "b", "zz", (None, "", "declared_terminal_not_captured")),
        (SAID_B, "z", "zz",
         (None, "", "explicit_terminal_not_captured,declared_terminal_not_captured")),
        (SAID_B, None, None, ("b", "response_id", "corroborated_by=content_output")),
        ({"id": "zz", "output": SAID_B["output"]}, None, None,
         ("b", "content_output", "response_id_no_match")),
        ({"id": "rb", "output": "text"}, None, None,
         ("b", "response_id", "response_has_no_output")),
        ({"id": "rb", "output": [7, None]}, None, None,
         ("b", "response_id", "no_model_authored_output")),
        ({"output": [_message("first"), {"role": "user"}, _message("second")]}, None, None,
         ("b", "content_output", "response_has_no_id")),
        ({"output": [_message("third")]}, None, None,
         (None, "", "response_has_no_id,no_content_match")),
        (SAID_B, "a", None,
         (None, "", "witness_disagreement[explicit=a;response_id=b;content_output=b]")),
    ],
)  # fmt: skip
def test_witnesses(response: Any, explicit: Any, declared: Any, expected: Any) -> None:
    found = resolve_terminal([A, B], response, explicit, declared_response_id=declared)
    assert (found.model_call_id, found.method, found.reason) == expected
    assert found.attributed == (expected[0] is not None)
    assert found.disagreed == ("witness_disagreement" in expected[2])


def test_an_id_that_is_no_text_is_compared_as_text() -> None:
    entries = [_call("a", response_id="12")]
    found = resolve_terminal(entries, {"id": 12})
    assert (found.model_call_id, found.method) == ("a", "response_id")


def test_twins_with_the_same_tokens_count_as_one_and_the_smallest_id_stands_for_them() -> None:
    twins = [_call("t2", "same"), _call("t1", "same")]
    assert resolve_terminal(twins, {"output": [_message("same")]}).model_call_id == "t1"
    stamped = [_call("t2", "same", digest="d", cum_len=2), _call("t1", "same")]
    found = resolve_terminal(stamped, {"output": [_message("same")]})
    assert found.reason == "response_has_no_id,content_ambiguous"


def test_the_last_copy_of_an_explicit_call_is_the_witness() -> None:
    other = _call("a", generation_token_ids=[9], response_id="rx")
    assert resolve_terminal([A, other], {"id": "rx"}, "a").method == "explicit"
    assert resolve_terminal([other, A], {"id": "rx"}, "a").disagreed


def test_cumulative_fingerprints_of_this_version_only() -> None:
    output = [_message("first"), {"role": "tool", "content": "x"}, _message("second")]
    stamp = assistant_fingerprint(output)
    for version, method in ((None, "content_cumulative"), (2, "content_cumulative"), (1, "")):
        entry = _call("c", continuation_fingerprint=stamp, fingerprint_version=version)
        assert resolve_terminal([entry], {"output": output}).method == method


@pytest.mark.parametrize("broken", [[{"tool_calls": 5, "role": "assistant"}], [7], "text", 5])
def test_malformed_items_of_a_record_cost_that_reading_only(broken: Any) -> None:
    entry = _call("a", "first", response_id="ra")
    entry.output_items = broken
    found = resolve_terminal([entry, B], SAID_B)
    assert found.reason == "corroborated_by=content_output"
    assert resolve_terminal([entry, B], {"id": "ra", "output": [_message("x")]}) == (
        TerminalAttribution("a", "response_id", "no_content_match")
    )


def test_malformed_content_of_the_response_costs_the_content_witness_only() -> None:
    response = {"id": "rb", "output": [{"role": "assistant", "tool_calls": "bad"}]}
    assert resolve_terminal([A, B], response) == (
        TerminalAttribution("b", "response_id", "response_output_unfingerprintable")
    )
