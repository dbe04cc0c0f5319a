"""The lines of a record file: the reader of whole files, fast where a line is canonical.

`TokenEntry.from_json` is the definition. The fast path gives the same records without a Python
object per token: it takes the three token arrays out of the text, reads the small rest as JSON,
and reads the arrays straight into numpy. A prompt that begins with the text of an earlier one
is compared with it byte by byte, and only what is new is read. Whatever the fast path is not
sure about, errors included, goes to the definition.
"""

from __future__ import annotations

import re
from collections import deque
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from evsys_jax.capture.checks import TOKEN_ID_LIMIT
from evsys_jax.capture.records import TokenEntry

# In the order in which a canonical line has them.
_ARRAYS = (
    b'"generation_log_probs":[',
    b'"generation_token_ids":[',
    b'"prompt_token_ids":[',
)
_NAMES = ("generation_log_probs", "generation_token_ids", "prompt_token_ids")
_LEADING_ZERO = re.compile(rb"(?:^|,)0[0-9]")
_OPEN, _CLOSE, _COMMA, _ZERO = b"{},0"
_RECENT_PROMPTS = 4
_SHORT_PROMPT = 256

Span = tuple[int, int, int]


def line_spans(data: bytes, start: int = 0) -> list[Span]:
    """Find the lines that are not blank.

    A line ends at a line feed and nowhere else.

    Args:
      data: the file.
      start: where to begin.

    Returns:
      Per line the offset of its first byte, and begin and end without white space around it.
    """
    spans: list[Span] = []
    size = len(data)
    while start < size:
        end = data.find(b"\n", start)
        end = size if end < 0 else end
        if end > start and data[start] == _OPEN and data[end - 1] == _CLOSE:
            spans.append((start, start, end))
        else:
            line = data[start:end]
            left = len(line) - len(line.lstrip())
            stripped = line.strip()
            if stripped:
                spans.append((start, start + left, start + left + len(stripped)))
        start = end + 1
    return spans


def read_records(data: bytes, rollout_id: str, name: str, start: int = 0) -> list[TokenEntry]:
    """Read all records of a record file, in file order, repeats included.

    Args:
      data: the file.
      rollout_id: whose records they must be.
      name: the file's name for errors.
      start: the offset at which to begin.

    Raises:
      ValueError: a line is bad, a torn end included; the text names file and line.
    """
    reader = LineReader(rollout_id, name)
    return [reader.read(data, span) for span in line_spans(data, start)]


class LineReader:
    """Reads the lines of one record file; knows the last prompts, which the next may continue.

    Args:
      rollout_id: whose records they must be.
      name: the file's name for errors.
    """

    def __init__(self, rollout_id: str, name: str) -> None:
        self.rollout_id = rollout_id
        self.name = name
        self._prompts: deque[tuple[bytes, _Trunk, int]] = deque(maxlen=_RECENT_PROMPTS)

    def read(self, data: bytes, span: Span) -> TokenEntry:
        """Read the record of one line.

        Raises:
          ValueError: the line is bad, or of another rollout; the text names file and line,
            counted from 1 in the whole file.
        """
        start, begin, end = span
        try:
            entry = self._read_fast(data, begin, end) or TokenEntry.from_json(data[begin:end])
            if entry.rollout_id != self.rollout_id:
                problem = f"the record is of rollout {entry.rollout_id!r}, not {self.rollout_id!r}"
                raise ValueError(problem)
        except ValueError as error:
            number = data.count(b"\n", 0, start) + 1
            raise ValueError(f"{self.name}:{number}: {error}") from error
        return entry

    def _read_fast(self, data: bytes, begin: int, end: int) -> TokenEntry | None:
        found = _find_arrays(data, begin, end)
        if found is None:
            return None
        rest, spans = found
        value = _canonical_object(rest)
        if value is None:
            return None
        # The rest is canonical, so these are the one place of each pattern: the fields.
        if any(value.pop(name, None) != [] for name in _NAMES):
            return None
        if any(rest.count(pattern) != 1 for pattern in _ARRAYS):
            return None
        log_probs = _parse_log_probs(data[slice(*spans[0])])
        generation = parse_ids(data[slice(*spans[1])])
        if log_probs is None or generation is None:
            return None
        prompt = self._prompt(data, *spans[2])
        if prompt is None:
            return None
        try:
            return TokenEntry.from_checked(value, prompt, generation, log_probs)
        except ValueError:
            return None

    def _prompt(self, data: bytes, begin: int, end: int) -> NDArray[np.int32] | None:
        for text, trunk, count in self._prompts:
            behind = begin + len(text)
            if not data.startswith(text, begin, end):
                continue
            if behind == end:
                return trunk.view(count)
            if data[behind] == _COMMA:
                fresh = parse_ids(data[behind + 1 : end])
                if fresh is None or not fresh.size:
                    return None
                trunk = trunk.extended(count, fresh)
                return self._remember(data[begin:end], trunk, count + fresh.size)
        ids = parse_ids(data[begin:end])
        if ids is None or end - begin < _SHORT_PROMPT:
            return ids
        return self._remember(data[begin:end], _Trunk(ids, ids.size), ids.size)

    def _remember(self, text: bytes, trunk: _Trunk, count: int) -> NDArray[np.int32]:
        self._prompts.appendleft((text, trunk, count))
        return trunk.view(count)


class _Trunk:
    """A growing array; prompts that continue each other are views of its beginning."""

    def __init__(self, buffer: NDArray[np.int32], used: int) -> None:
        self.buffer = buffer
        self.used = used

    def view(self, count: int) -> NDArray[np.int32]:
        view = self.buffer[:count]
        view.setflags(write=False)
        return view

    def extended(self, count: int, fresh: NDArray[np.int32]) -> _Trunk:
        """Give a trunk of the first `count` ids and then the fresh ones: this one if it can."""
        total = count + fresh.size
        if count == self.used and total <= self.buffer.size and self.buffer.flags.writeable:
            self.buffer[count:total] = fresh
            self.used = total
            return self
        buffer = np.empty(2 * total, np.int32)
        buffer[:count] = self.buffer[:count]
        buffer[count:total] = fresh
        return _Trunk(buffer, total)


def _find_arrays(data: bytes, begin: int, end: int) -> tuple[bytes, list[tuple[int, int]]] | None:
    """Find the texts of the three arrays; give the line without them, and their spans."""
    spans: list[tuple[int, int]] = []
    pieces: list[bytes] = []
    at = begin
    for pattern in _ARRAYS:
        found = data.find(pattern, at, end)
        if found < 0:
            return None
        first = found + len(pattern)
        last = data.find(b"]", first, end)
        if last < 0:
            return None
        pieces.append(data[at:first])
        spans.append((first, last))
        at = last
    pieces.append(data[at:end])
    return b"".join(pieces), spans


def _canonical_object(text: bytes) -> dict[str, Any] | None:
    """Read an object if its text is canonical: then nothing in it is repeated or not finite."""
    try:
        value = orjson.loads(text)
        if type(value) is dict and orjson.dumps(value, option=orjson.OPT_SORT_KEYS) == text:
            return value
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        pass
    return None


def parse_ids(text: bytes) -> NDArray[np.int32] | None:
    """Read token ids from the text between the brackets of a canonical array.

    Returns:
      [N] read-only int32; None if the text is not exactly such ids, separated by commas.
    """
    if not text:
        return _read_only(np.empty(0, np.int32))
    if text.translate(None, b"0123456789,") or b",," in text:
        return None
    if text[0] == _COMMA or text[-1] == _COMMA:
        return None
    if (text[0] == _ZERO or b",0" in text) and _LEADING_ZERO.search(text):
        return None
    # What is too large for 64 bits comes out as the largest integer, and is refused with it.
    ids = np.fromstring(text, dtype=np.int64, sep=",")
    if ids.max() >= TOKEN_ID_LIMIT:
        return None
    return _read_only(ids.astype(np.int32))


def _parse_log_probs(text: bytes) -> NDArray[np.float64] | None:
    try:
        numbers = orjson.loads(b"[%b]" % text)
    except orjson.JSONDecodeError:
        return None
    # np.array would also take true, null and texts; integers are left to the definition.
    if set(map(type, numbers)) - {float}:
        return None
    return _read_only(np.array(numbers, dtype=np.float64))


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.setflags(write=False)
    return array
