"""Fingerprints: recorded hashes, and the three wire formats hashed alike."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from evsys_jax.capture.fingerprint import (
    assistant_fingerprint,
    canonicalize_tool_arguments,
    conversation_digest,
)

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "vectors.json").read_text())
FUNCTIONS = {
    "assistant_fingerprint": assistant_fingerprint,
    "conversation_digest": conversation_digest,
    "canonicalize_tool_arguments": canonicalize_tool_arguments,
}


def _revive(value: Any) -> Any:
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: _revive(each) for key, each in value.items()}
    return [_revive(each) for each in value] if isinstance(value, list) else value


def _cases(group: str) -> list[Any]:
    return [
        pytest.param(case["input"], expected, id=f"{case.get('name', index)}-{place}")
        for index, case in enumerate(VECTORS[group])
        for place, expected in enumerate(case["expect"])
    ]


@pytest.mark.parametrize(("value", "expected"), _cases("messages") + _cases("tool_arguments"))
def test_recorded(value: Any, expected: dict[str, Any]) -> None:
    function = FUNCTIONS[expected["function"]]
    if "error" in expected:
        with pytest.raises(ValueError):
            function(_revive(value))
    else:
        assert function(_revive(value)) == expected["value"]


def test_a_message_of_one_text_by_hand() -> None:
    def field(tag: int, text: bytes) -> bytes:
        return bytes([tag]) + len(text).to_bytes(8, "big") + text

    by_hand = hashlib.sha256(b"nemo-gym-lineage" + field(0, b"text") + field(1, "é".encode()))
    assert assistant_fingerprint([{"role": "assistant", "content": "é"}]) == by_hand.hexdigest()


@pytest.mark.parametrize("function", [assistant_fingerprint, conversation_digest])
@pytest.mark.parametrize("messages", ["text", 5, {"role": "assistant"}])
def test_what_is_no_list_has_no_fingerprint(function: Any, messages: Any) -> None:
    with pytest.raises(ValueError, match="must be a list"):
        function(messages)


def test_null_is_the_empty_conversation() -> None:
    assert assistant_fingerprint(None) == assistant_fingerprint([]) == ""
    assert conversation_digest(None) == conversation_digest([])


@pytest.mark.parametrize("text", ["[" * 100_000, "[" * 300 + "]" * 300, "9" * 5000, "x\ud800"])
def test_arguments_that_cannot_be_held_are_errors(text: str) -> None:
    with pytest.raises(ValueError):
        canonicalize_tool_arguments(text)


def test_the_order_of_keys_and_the_spelling_of_numbers_do_not_matter() -> None:
    assert canonicalize_tool_arguments('{"b": 1e0, "a": "\\u00e9"}') == '{"a":"é","b":1.0}'
    assert canonicalize_tool_arguments({"b": 1.0, "a": "é"}) == '{"a":"é","b":1.0}'
