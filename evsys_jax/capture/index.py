"""The index of a record file: brought up to date with what others have appended."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from evsys_jax.capture.files import file_size, truncate_durably
from evsys_jax.capture.lines import LineReader, Span, line_spans
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.state import RolloutState
from evsys_jax.capture.torn import is_torn

logger = logging.getLogger(__name__)


def sync_index(
    state: RolloutState, path: Path, *, write: bool = True
) -> tuple[bool, list[TokenEntry] | None]:
    """Bring the index up to date with the record file.

    A torn end is cut off the file, with a warning in the log. The state is changed but not
    written, except where a record conflicts with another.

    Args:
      state: the state; the caller holds the rollout's lock.
      path: the record file, which may be absent.
      write: False leaves the files as they are: a torn end is only left out, with a warning, and
        a conflict only raised.

    Returns:
      Whether the state has changed, and all records if they had to be read anyway.

    Raises:
      ValueError: the index does not fit the file; a line is bad and no torn end; or a call is
        stored with two contents, which makes the rollout incomplete. File and index are as
        they were.
    """
    size, offset = file_size(path), state.indexed_size
    if not 0 <= offset <= size:
        raise ValueError(
            f"rollout {state.rollout_id!r}: the index covers {offset} bytes of {path.name}, "
            f"which has {size}"
        )
    if offset == size and not state.is_old:
        return False, None
    tail = _read_from(path, offset)
    reader = LineReader(state.rollout_id, path.name)
    spans = line_spans(tail)
    digests = dict(state.digests)
    entries: list[TokenEntry] = []
    records = reader.read_all(tail, spans)
    for index, span in enumerate(spans):
        line = tail[span[1] : span[2]]
        try:
            entry = next(records)
        except ValueError:
            if index < len(spans) - 1 or not is_torn(line):
                _raise_numbered(reader, path, offset, span)
                raise
            size = offset + span[0]
            if write:
                truncate_durably(path, size)
            done = "was cut off" if write else "is left out"
            logger.warning("%s: a torn record %s at byte %d", path, done, size)
            break
        digest = hashlib.sha256(line).hexdigest()
        if digests.setdefault(entry.model_call_id, digest) != digest:
            raise mark_conflict(state, entry.model_call_id, write=write)
        entries.append(entry)
    if not state.is_old:
        state.advance(len(entries))
    state.index(digests, size)
    return True, None if offset else entries


def mark_conflict(state: RolloutState, call_id: str, *, write: bool = True) -> ValueError:
    """Mark the rollout incomplete, on the disk if `write`, and give the error; the index stays."""
    state.mark()
    if write:
        state.write()
    return ValueError(
        f"rollout {state.rollout_id!r}: call {call_id!r} is stored with another content"
    )


def _raise_numbered(reader: LineReader, path: Path, offset: int, span: Span) -> None:
    """Raise the error of a bad line again, with its number in the whole file."""
    start, begin, end = span
    reader.read(path.read_bytes(), (offset + start, offset + begin, offset + end))


def _read_from(path: Path, offset: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(offset)
            return file.read()
    except FileNotFoundError:
        return b""
