"""The recorded inputs of the pure functions around records, rollout ids and settings."""

import json
from pathlib import Path
from typing import Any

import pytest

from evsys_jax.capture import records
from evsys_jax.capture.records import TokenEntry

GOLDEN = Path(__file__).parent.parent / "golden"
VECTORS = json.loads((GOLDEN / "vectors.json").read_text("utf-8"))
ERRORS = {"ValueError": ValueError, "any": Exception, "KeyError": KeyError}


def revive(value: Any) -> Any:
    """Turn `{"$float": "nan"}` back into that number."""
    if isinstance(value, dict):
        if set(value) == {"$float"}:
            return float(value["$float"])
        return {key: revive(item) for key, item in value.items()}
    return [revive(item) for item in value] if isinstance(value, list) else value


def run(function: str, value: Any) -> Any:
    if function == "encode_token_ids":
        return records.encode_token_ids(value).hex()
    if function == "record":
        return TokenEntry.from_dict(value).to_dict()
    if function == "record_line":
        return TokenEntry.from_dict(value).to_json().decode("utf-8")
    if function == "strip_token_fields":
        return list(records.strip_token_fields(records.response_to_output_items(value)))
    if function == "validate_rollout_id":
        from evsys_jax.capture.store import validate_rollout_id

        return validate_rollout_id(value)
    if function.endswith("_from_config"):
        from evsys_jax.capture import config

        got = getattr(config, function)(value)
        return [str(path) for path in got] if isinstance(got, list) else got
    return getattr(records, function)(value)


def cases() -> list[Any]:
    groups = ("token_ids", "responses", "records", "record_lines", "rollout_ids", "config")
    return [
        pytest.param(
            case["input"], expect, id=f"{group}-{case.get('name', i)}-{expect['function']}"
        )
        for group in groups
        for i, case in enumerate(VECTORS[group])
        for expect in case["expect"]
    ]


@pytest.mark.parametrize(("given", "expect"), cases())
def test_vector(given: Any, expect: dict[str, Any]) -> None:
    given = revive(given)
    if "error" in expect:
        with pytest.raises(ERRORS[expect["error"]]) as caught:
            run(expect["function"], given)
        for name in expect.get("names", []):
            assert name in str(caught.value)
    else:
        got = run(expect["function"], given)
        assert got == expect["value"]
        # 1 == 1.0 == True: the text shows what a comparison hides, where it may matter.
        if expect["function"] != "record":
            assert json.dumps(got) == json.dumps(expect["value"])
