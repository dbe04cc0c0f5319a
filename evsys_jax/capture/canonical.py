"""Canonical JSON: one text per value, so that equal contents have equal bytes and hashes."""

from __future__ import annotations

import json
import math
from functools import cache
from typing import Any

import orjson
from numpy.typing import NDArray

MIN_INT = -(2**63)
MAX_INT = 2**64 - 1
MAX_DEPTH = 253


def canonical_json(value: Any) -> bytes:
    """Write a JSON value in its one canonical form.

    No white space; keys sorted by code point at every depth; text raw in UTF-8 with the fewest
    escapes; NaN and infinities as `null`; finite floats with the shortest digits that
    round-trip, plain where the decimal exponent E has -5 <= E < 16 (`0.00001`, `1.0`, `-0.0`),
    else like `1e+16` and `1.5e-7`.

    Args:
      value: None, bool, int, float, str, and lists, tuples and dicts with str keys of them.

    Returns:
      The UTF-8 text.

    Raises:
      ValueError: an integer outside [-2**63, 2**64), more than 253 levels of nesting, a key
        that is no text, a lone surrogate, or a value of another type.
    """
    if _orjson_is_canonical() and _is_plain(value, 0):
        try:
            return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        except orjson.JSONEncodeError as error:
            raise ValueError(f"not canonical JSON: {error}") from error
    parts: list[str] = []
    _write(value, 0, parts)
    try:
        return "".join(parts).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError("not canonical JSON: a text holds a lone surrogate") from error


def canonical_object(values: dict[str, Any], arrays: dict[str, NDArray[Any]]) -> bytes:
    """Write an object with 1-D number arrays among its values, without a walk over their elements.

    Args:
      values: the other keys, as for `canonical_json`.
      arrays: keys with contiguous int or float arrays of native byte order.

    Raises:
      ValueError: as `canonical_json`.
    """
    if _orjson_is_canonical() and _is_plain(values, 0):
        try:
            option = orjson.OPT_SORT_KEYS | orjson.OPT_SERIALIZE_NUMPY
            return orjson.dumps({**values, **arrays}, option=option)
        except orjson.JSONEncodeError as error:
            raise ValueError(f"not canonical JSON: {error}") from error
    return canonical_json({**values, **{key: array.tolist() for key, array in arrays.items()}})


@cache
def _orjson_is_canonical() -> bool:
    # Earlier versions write 1e16 without the sign; then the writer below does all the work.
    return orjson.dumps([1e16, 1e-5, 1.5e-7, 1e15]) == b"[1e+16,0.00001,1.5e-7,1000000000000000.0]"


def _is_plain(value: Any, depth: int) -> bool:
    # orjson also takes dates, UUIDs, enums and dataclasses: only exact types may reach it.
    kind = type(value)
    if kind is str or kind is float or kind is bool or value is None:
        return True
    if kind is int:
        return bool(MIN_INT <= value <= MAX_INT)
    if depth >= MAX_DEPTH:
        return False
    if kind is dict:
        for key, item in value.items():
            if type(key) is not str or not _is_plain(item, depth + 1):
                return False
        return True
    if kind is list or kind is tuple:
        for item in value:
            if type(item) is not str and not _is_plain(item, depth + 1):
                return False
        return True
    return False


def _write(value: Any, depth: int, parts: list[str]) -> None:
    if value is None:
        parts.append("null")
    elif isinstance(value, bool):
        parts.append("true" if value else "false")
    elif isinstance(value, str):
        parts.append(_text(value))
    elif isinstance(value, int):
        parts.append(_int_text(value))
    elif isinstance(value, float):
        parts.append(_float_text(value))
    elif isinstance(value, dict | list | tuple):
        if depth >= MAX_DEPTH:
            raise ValueError(f"not canonical JSON: more than {MAX_DEPTH} levels of nesting")
        if isinstance(value, dict):
            _write_object(value, depth, parts)
        else:
            _write_array(value, depth, parts)
    else:
        raise ValueError(f"not canonical JSON: a value of type {type(value).__name__}")


def _write_object(value: dict[Any, Any], depth: int, parts: list[str]) -> None:
    for key in value:
        if not isinstance(key, str):
            raise ValueError(f"not canonical JSON: a key of type {type(key).__name__}")
    parts.append("{")
    for index, key in enumerate(sorted(value)):
        parts.append(("," if index else "") + _text(key) + ":")
        _write(value[key], depth + 1, parts)
    parts.append("}")


def _write_array(value: list[Any] | tuple[Any, ...], depth: int, parts: list[str]) -> None:
    parts.append("[")
    for index, item in enumerate(value):
        if index:
            parts.append(",")
        _write(item, depth + 1, parts)
    parts.append("]")


def _text(value: str) -> str:
    return json.dumps(str.__str__(value), ensure_ascii=False)


def _int_text(value: int) -> str:
    if not MIN_INT <= value <= MAX_INT:
        raise ValueError("not canonical JSON: an integer outside [-2**63, 2**64)")
    return int.__repr__(value)


def _float_text(value: float) -> str:
    if not math.isfinite(value):
        return "null"
    text = float.__repr__(value)
    mantissa, mark, exponent = text.partition("e")
    if not mark:
        return text
    power = int(exponent)
    if power != -5:
        return f"{mantissa}e{power:+d}"
    # repr turns to exponents one decade earlier than this form does.
    sign = "-" if mantissa.startswith("-") else ""
    return f"{sign}0.0000{mantissa.lstrip('-').replace('.', '')}"
