"""The types of a record's fields, checked; errors name the call, the field and the index."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_jax.capture.canonical import MAX_INT, MIN_INT

TOKEN_ID_LIMIT = 2**31


def field_error(call: str | None, name: str, problem: str) -> ValueError:
    """Make the error about one field of one call."""
    where = "" if call is None else f"call {call!r}: "
    return ValueError(f"{where}{name} {problem}")


def checked_token_ids(value: Any, call: str | None, name: str) -> NDArray[np.int32]:
    """Turn token ids into a fresh int32 array.

    Args:
      value: list, tuple or 1-D integer array.
      call: the call id for the error, None if unknown.
      name: the field for the error.

    Raises:
      ValueError: not such a sequence, or an element that is no integer in [0, 2**31).
    """
    if isinstance(value, np.ndarray):
        wide = _checked_array(value, "iu", call, name)
        bad = np.flatnonzero((wide < 0) | (wide >= TOKEN_ID_LIMIT))
    else:
        wide = _listed_ids(_checked_list(value, call, name))
        bad = np.flatnonzero(wide < 0)
    if bad.size:
        index = int(bad[0])
        problem = f"[{index}] is no token id (an integer in [0, 2**31)): {_shown(value[index])}"
        raise field_error(call, name, problem)
    return wide.astype(np.int32)


def _shown(element: Any) -> str:
    value = element.item() if isinstance(element, np.generic) else element
    if isinstance(value, int) and value.bit_length() > 128:
        # Python refuses to write out an integer of some thousand digits.
        return f"an integer of {value.bit_length()} bits"
    return repr(value)


def _listed_ids(items: list[Any] | tuple[Any, ...]) -> NDArray[np.int64]:
    """[N] ids, -1 where an element is no token id."""
    if set(map(type, items)) <= {int}:
        try:
            ids = np.array(items, dtype=np.int64)
        except OverflowError:
            pass
        else:
            return np.where(ids < TOKEN_ID_LIMIT, ids, -1)
    return np.array(
        [int(i) if _is_integer(i) and 0 <= i < TOKEN_ID_LIMIT else -1 for i in items], np.int64
    )


def checked_log_probs(value: Any, call: str | None) -> NDArray[np.float64]:
    """Turn log-probabilities into a fresh float64 array.

    Args:
      value: list, tuple or 1-D array of finite numbers; integers are numbers, bools are not.
      call: the call id for the error, None if unknown.

    Raises:
      ValueError: not such a sequence, or an element that is no finite number.
    """
    name = "generation_log_probs"
    if isinstance(value, np.ndarray):
        # A longdouble may overflow on the way; the check on finite values finds it.
        with np.errstate(over="ignore"):
            numbers = _checked_array(value, "fiu", call, name).astype(np.float64)
    else:
        numbers = _listed_numbers(_checked_list(value, call, name))
    bad = np.flatnonzero(~np.isfinite(numbers))
    if bad.size:
        index = int(bad[0])
        problem = f"[{index}] is no finite number: {_shown(value[index])}"
        raise field_error(call, name, problem)
    return numbers


def _listed_numbers(items: list[Any] | tuple[Any, ...]) -> NDArray[np.float64]:
    """[N] numbers, NaN where an element is none."""
    if set(map(type, items)) <= {int, float}:
        try:
            return np.array(items, dtype=np.float64)
        except OverflowError:
            pass
    return np.array([_number_or_nan(item) for item in items], dtype=np.float64)


def _number_or_nan(item: Any) -> float:
    if not (_is_integer(item) or isinstance(item, float | np.floating)):
        return math.nan
    try:
        return float(item)
    except OverflowError:
        return math.nan


def _checked_array(value: NDArray[Any], kinds: str, call: str | None, name: str) -> NDArray[Any]:
    if value.ndim != 1:
        raise field_error(call, name, f"is no 1-D array but has the shape {value.shape}")
    if value.dtype.kind not in kinds and value.size:
        problem = f"[0] is no {'token id' if name.endswith('ids') else 'number'}: "
        raise field_error(call, name, f"{problem}the array holds {value.dtype}")
    return value


def _checked_list(value: Any, call: str | None, name: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        problem = f"is no list, tuple or array but {type(value).__name__}"
        raise field_error(call, name, problem)
    return value


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_int(value: Any, call: str | None, name: str) -> int:
    """Return an integer of the range that a line can hold.

    Raises:
      ValueError: another type (also bool and 3.0), or outside [-2**63, 2**64).
    """
    if not _is_integer(value):
        raise field_error(call, name, f"is no integer: {value!r}")
    if not MIN_INT <= value <= MAX_INT:
        raise field_error(call, name, "is an integer outside [-2**63, 2**64)")
    return int(value)


def check_float(value: Any, call: str | None, name: str) -> float:
    """Return a finite number as a float.

    Raises:
      ValueError: another type (also bool), NaN, infinite, or too large for a double.
    """
    number = _number_or_nan(value)
    if not math.isfinite(number):
        shown = repr(value) if isinstance(value, bool | float | str) else type(value).__name__
        raise field_error(call, name, f"is no finite number: {shown}")
    return number


def checked_items(value: Any, call: str | None) -> list[dict[str, Any]]:
    """Return a list of objects.

    Raises:
      ValueError: no list or tuple, or an element that is no dict.
    """
    if not isinstance(value, list | tuple):
        raise field_error(call, "output_items", f"is no list but {type(value).__name__}")
    for index, item in enumerate(value):
        if not isinstance(item, dict):
            raise field_error(call, "output_items", f"[{index}] is no object: {item!r}")
    return list(value)
