"""The strict reader of one JSON object: what it cannot vouch for is an error, never a repair."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection
from typing import Any

from evsys_jax.capture.canonical import MAX_INT, MIN_INT

BYTE_ORDER_MARK = b"\xef\xbb\xbf"

_LONG_DIGITS = re.compile(r"[0-9]{19}")
_SURROGATE_HINT = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)", re.DOTALL)


def read_object(text: bytes, single_keys: Collection[str]) -> tuple[dict[str, Any], bool]:
    """Read the one JSON object that a line holds.

    Integers outside [-2**63, 2**64) become floats. NaN, infinities and numbers too large for a
    double are no syntax errors here: they come back as such floats, and the caller is told, so
    that its own error can name the place.

    Args:
      text: the line, UTF-8, ASCII white space around it allowed.
      single_keys: keys of the outermost object that may stand there once only. Of other keys
        the last value counts.

    Returns:
      The object, and whether any number in the text is not finite.

    Raises:
      ValueError: a byte order mark, invalid UTF-8, no JSON, no object, anything behind it, a
        lone surrogate in a text or key, a repeated single key, or nesting that is too deep.
    """
    stripped = text.strip()
    if stripped.startswith(BYTE_ORDER_MARK):
        raise ValueError("the line begins with a byte order mark (BOM)")
    try:
        decoded = stripped.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"invalid UTF-8 at byte {error.start} of the line") from error

    outermost: list[tuple[str, Any]] = []
    numbers = _Numbers()

    def keep_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        # Objects close from the inside out, so the last call is the outermost object's.
        nonlocal outermost
        outermost = pairs
        return dict(pairs)

    # One Python call per integer is dear; a text without long digit runs needs none.
    parse_int = numbers.parse_int if _LONG_DIGITS.search(decoded) else None
    try:
        value = json.loads(
            decoded,
            object_pairs_hook=keep_pairs,
            parse_float=numbers.parse_float,
            parse_int=parse_int,
            parse_constant=numbers.parse_float,
        )
    except RecursionError as error:
        raise ValueError("the line nests deeper than the JSON reader can go") from error
    if not isinstance(value, dict):
        raise ValueError(f"the line holds no JSON object but {_json_kind(value)}")
    _check_single(outermost, single_keys)
    if _SURROGATE_HINT.search(decoded):
        _check_surrogates(decoded)
    return value, numbers.not_finite


class _Numbers:
    """Number parsers that remember whether any number was not finite."""

    def __init__(self) -> None:
        self.not_finite = False

    def parse_float(self, text: str) -> float:
        value = float(text)
        if not math.isfinite(value):
            self.not_finite = True
        return value

    def parse_int(self, text: str) -> int | float:
        # The length test also keeps Python's limit on digits of one integer out of the way.
        if len(text) <= 20:
            value = int(text)
            if MIN_INT <= value <= MAX_INT:
                return value
        return self.parse_float(text)


def _json_kind(value: Any) -> str:
    if value is None:
        return "null"
    kinds = {list: "a list", str: "a text", bool: "a bool"}
    return kinds.get(type(value), "a number")


def _check_single(pairs: list[tuple[str, Any]], single_keys: Collection[str]) -> None:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen and key in single_keys:
            raise ValueError(f"the field {key} is given twice")
        seen.add(key)


def _check_surrogates(text: str) -> None:
    # On the text, not on the value: of a repeated key the value shows the last one only.
    high_end = -1
    for match in _ESCAPE.finditer(text):
        unit = int(match[1], 16) if match[1] else 0
        joined = high_end == match.start() and 0xDC00 <= unit <= 0xDFFF
        if (high_end >= 0 or 0xDC00 <= unit <= 0xDFFF) and not joined:
            break
        high_end = match.end() if 0xD800 <= unit <= 0xDBFF else -1
    else:
        if high_end < 0:
            return
    raise ValueError("a text or key of the line holds a lone surrogate")
