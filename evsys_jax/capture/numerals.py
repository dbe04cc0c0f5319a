"""Arrays of numbers from the text of a canonical line, without a Python object per token id."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from evsys_jax.capture.checks import TOKEN_ID_LIMIT

_COMMA, _ZERO = b",0"
# Of the largest token id; ids of one digit less fit 32 bits whatever they are.
_MOST_DIGITS = len(str(TOKEN_ID_LIMIT - 1))


def parse_ids(texts: Sequence[bytes]) -> list[NDArray[np.int32]] | None:
    """Read arrays of token ids, all in one go: short ones cost more calls than numbers.

    Args:
      texts: per array what stands between the brackets of a canonical line.

    Returns:
      Per array [N] read-only int32; None if any text is not exactly such ids, separated by commas.
    """
    text = b",".join(filter(None, texts))
    if text.translate(None, b"0123456789,"):
        return None
    if not text:
        return [_read_only(np.empty(0, np.int32)) for _ in texts]
    codes = np.frombuffer(text, np.uint8)
    ends = np.append(np.flatnonzero(codes == _COMMA), len(text))
    widths = np.diff(ends, prepend=-1) - 1
    widest = int(widths.max())
    if widths.min() < 1 or widest > _MOST_DIGITS:
        return None
    if ((codes[ends - widths] == _ZERO) & (widths > 1)).any():
        return None
    ids = _add_digits(codes, ends, widths.astype(np.uint8), widest)
    if widest == _MOST_DIGITS and ids.max() >= TOKEN_ID_LIMIT:
        return None
    ids = _read_only(ids.astype(np.int32, copy=False))
    behind = np.cumsum([len(each) + bool(each) for each in texts]) - 1
    stops = np.searchsorted(ends, behind, side="right").tolist()
    return [ids[start:stop] for start, stop in pairwise([0, *stops])]


def _add_digits(
    codes: NDArray[np.uint8], ends: NDArray[np.intp], widths: NDArray[np.uint8], widest: int
) -> Any:
    """[N] the numbers that end before `ends`: one pass per digit, ones first."""
    # In front of the text stand zeros, so that every number has a digit in every pass.
    digits = np.zeros(widest + len(codes), np.uint8)
    np.subtract(codes, _ZERO, out=digits[widest:])
    dtype = np.int64 if widest == _MOST_DIGITS else np.int32
    place = ends + (widest - 1)
    ids: Any = digits.take(place).astype(dtype)
    for power in range(1, widest):
        place -= 1
        digit = digits.take(place)
        digit *= widths > power
        part: Any = digit.astype(dtype)
        part *= 10**power
        ids += part
    return ids


def parse_log_probs(text: bytes) -> NDArray[np.float64] | None:
    """Read finite numbers from the text between the brackets of an array.

    Returns:
      [N] read-only float64; None if the text is not exactly such numbers.
    """
    # An array of doubles takes Python numbers only, and true and false are two.
    if b"t" in text or b"f" in text:
        return None
    try:
        numbers = array("d", orjson.loads(b"[%b]" % text))
    except (orjson.JSONDecodeError, TypeError):
        return None
    return _read_only(np.frombuffer(numbers)) if numbers else _read_only(np.empty(0))


def _read_only(values: NDArray[Any]) -> NDArray[Any]:
    values.setflags(write=False)
    return values
