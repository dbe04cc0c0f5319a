"""The lines of a record file: the reader of whole files, fast where a line is canonical.

`TokenEntry.from_json` is the definition. The fast path gives the same records without a Python
object per token: it takes the three token arrays out of the text, reads the small rest as JSON,
and reads the arrays of many lines at once, straight into numpy. A prompt that begins with the
text of an earlier one is compared with it byte by byte, and only what is new is read. Whatever
the fast path is not sure about, errors included, goes to the definition, line by line.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import orjson

from evsys_jax.capture.numerals import parse_ids, parse_log_probs
from evsys_jax.capture.prompts import Prompt, RecentPrompts
from evsys_jax.capture.records import TokenEntry

# In the order in which a canonical line has them.
_ARRAYS = (
    b'"generation_log_probs":[',
    b'"generation_token_ids":[',
    b'"prompt_token_ids":[',
)
_NAMES = ("generation_log_probs", "generation_token_ids", "prompt_token_ids")
_OPEN, _CLOSE = b"{}"
# Bytes of numbers that are read at once: enough to forget what a call costs, and some megabytes
# of arrays on the way.
_BATCH = 1 << 19

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
    return list(LineReader(rollout_id, name).read_all(data, line_spans(data, start)))


class LineReader:
    """Reads the lines of one record file; knows the last prompts, which the next may continue.

    Args:
      rollout_id: whose records they must be.
      name: the file's name for errors.
    """

    def __init__(self, rollout_id: str, name: str) -> None:
        self.rollout_id = rollout_id
        self.name = name
        self._prompts = RecentPrompts()

    def read_all(self, data: bytes, spans: Sequence[Span]) -> Iterator[TokenEntry]:
        """Yield the records of the lines in order.

        Raises:
          ValueError: as `read`, when all records before the bad line have been yielded.
        """
        done = 0
        while done < len(spans):
            batch = self._take_batch(data, spans, done)
            entries = self._read_batch(batch)
            if entries:
                yield from entries
                done += len(entries)
            else:
                # Which line it was, and whether it is bad, comes out one by one.
                for span in spans[done : done + max(1, len(batch))]:
                    yield self.read(data, span)
                    done += 1

    def read(self, data: bytes, span: Span) -> TokenEntry:
        """Read the record of one line.

        Raises:
          ValueError: the line is bad, or of another rollout; the text names file and line,
            counted from 1 in the whole file.
        """
        start, begin, end = span
        entries = self._read_batch(self._take_batch(data, [span], 0))
        if entries:
            return entries[0]
        try:
            entry = TokenEntry.from_json(data[begin:end])
            if entry.rollout_id != self.rollout_id:
                problem = f"the record is of rollout {entry.rollout_id!r}, not {self.rollout_id!r}"
                raise ValueError(problem)
        except ValueError as error:
            number = data.count(b"\n", 0, start) + 1
            raise ValueError(f"{self.name}:{number}: {error}") from error
        return entry

    def _take_batch(self, data: bytes, spans: Sequence[Span], first: int) -> list[_Parts]:
        """Take lines apart up to one that is not canonical, or to the size of a batch."""
        batch: list[_Parts] = []
        size = 0
        for index in range(first, len(spans)):
            _, begin, end = spans[index]
            parts = self._take_apart(data, begin, end) if size < _BATCH else None
            if parts is None:
                break
            batch.append(parts)
            size += len(parts.log_probs) + len(parts.generation) + len(parts.fresh)
        return batch

    def _take_apart(self, data: bytes, begin: int, end: int) -> _Parts | None:
        found = _find_arrays(data, begin, end)
        if found is None:
            return None
        rest, (log_probs, generation, prompt) = found
        values = _canonical_object(rest)
        if values is None or values.get("rollout_id") != self.rollout_id:
            return None
        # The rest is canonical, so these are the one place of each pattern: the fields.
        if any(values.pop(name, None) != [] for name in _NAMES):
            return None
        if any(rest.count(pattern) != 1 for pattern in _ARRAYS):
            return None
        known = self._prompts.find(data, *prompt)
        if known is None:
            return None
        return _Parts(values, data[slice(*log_probs)], data[slice(*generation)], *known)

    def _read_batch(self, batch: list[_Parts]) -> list[TokenEntry] | None:
        """Read the numbers of all lines together; None if any line is not sound."""
        try:
            entries = _read_together(batch)
        except ValueError:
            entries = None
        if entries is None:
            self._prompts.forget()
        return entries


class _Parts(NamedTuple):
    """A line taken apart: the values beside the arrays, and the texts of the arrays.

    Of the prompt's text `fresh` is what has to be read.
    """

    values: dict[str, Any]
    log_probs: bytes
    generation: bytes
    prompt: Prompt
    fresh: bytes


def _read_together(batch: list[_Parts]) -> list[TokenEntry] | None:
    ids = parse_ids([text for parts in batch for text in (parts.generation, parts.fresh)])
    if ids is None:
        return None
    entries = []
    for parts, generation, fresh in zip(batch, ids[::2], ids[1::2], strict=True):
        log_probs = parse_log_probs(parts.log_probs)
        if log_probs is None:
            return None
        prompt = parts.prompt.ids(fresh)
        entries.append(TokenEntry.from_checked(parts.values, prompt, generation, log_probs))
    return entries


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
