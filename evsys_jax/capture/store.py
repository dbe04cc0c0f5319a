"""TokenCaptureStore: a directory that holds recorded calls durably, one JSONL file per rollout."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import os
import re
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from evsys_jax.capture.config import TokenIdCaptureConfig
from evsys_jax.capture.files import append_durably, file_size, locked, sync_directory
from evsys_jax.capture.index import mark_conflict, sync_index
from evsys_jax.capture.lines import read_records
from evsys_jax.capture.protocols import TokenCaptureSnapshot
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.state import RolloutState

_ROLLOUT_ID = re.compile(r"[A-Za-z0-9._-]{1,237}")
_INTENT_END = re.compile(rb"\r\n|\r|\n")
_STATE_SUFFIX = ".tokens.state.json"


def validate_rollout_id(rollout_id: str) -> str:
    """Return a rollout id that can name files.

    Args:
      rollout_id: 1 to 237 ASCII letters, digits, dots, underscores and hyphens.

    Raises:
      ValueError: anything else.
    """
    if not isinstance(rollout_id, str) or not _ROLLOUT_ID.fullmatch(rollout_id):
        raise ValueError(
            f"rollout id {rollout_id!r} is not 1 to 237 ASCII letters, digits, '.', '_', '-'"
        )
    return rollout_id


def make_token_store(config: Any) -> TokenCaptureStore | None:
    """Open the store that a configuration names.

    Args:
      config: a mapping with a `token_id_capture` block.

    Returns:
      The store, or None where capture is off, goes to a sink, or has no directory.

    Raises:
      ValueError: the configuration is wrong; names the key.
    """
    settings = TokenIdCaptureConfig.model_validate(config)
    directory = settings.resolved_dir() if settings.captures_to_directory else None
    return None if directory is None else TokenCaptureStore(directory)


class TokenCaptureStore:
    """A directory of recorded calls, in NeMo Gym's formats; both a sink and a source.

    Every operation holds the rollout's `flock`, so that any number of processes on one machine
    can share a directory. When `append` returns, the record's line is on the disk; the state
    file may lag behind, and the next operation brings it up to date.

    Args:
      root: the directory, created if absent.
    """

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(root)
        self.root.mkdir(parents=True, exist_ok=True)

    def path_for(self, rollout_id: str) -> Path:
        """Give the record file: one canonical line per record, appended."""
        return self._path(rollout_id, ".tokens.jsonl")

    def state_path_for(self, rollout_id: str) -> Path:
        """Give the state file, replaced whole."""
        return self._path(rollout_id, _STATE_SUFFIX)

    def intents_path_for(self, rollout_id: str) -> Path:
        """Give the file of announced call ids, one per line."""
        return self._path(rollout_id, ".tokens.intents")

    def incomplete_path_for(self, rollout_id: str) -> Path:
        """Give the marker file: one lost call id per line."""
        return self._path(rollout_id, ".tokens.incomplete")

    def lock_path_for(self, rollout_id: str) -> Path:
        """Give the lock file."""
        return self._path(rollout_id, ".tokens.lock")

    def _path(self, rollout_id: str, suffix: str) -> Path:
        return self.root / (validate_rollout_id(rollout_id) + suffix)

    @contextmanager
    def _locked_state(self, rollout_id: str) -> Iterator[RolloutState]:
        with locked(self.lock_path_for(rollout_id)):
            yield RolloutState(rollout_id, self.state_path_for(rollout_id))

    def append(self, entry: TokenEntry) -> None:
        """Store a record; when this returns, its line is on the disk.

        The same record again changes nothing. Stricter than NeMo Gym 0.7: the whole record is
        checked again, so that nothing is written that cannot be read back, and a last line
        that lacks its end is ended first, so that nothing is glued to it.

        Raises:
          ValueError: the record is malformed; the call id is taken by another content, which
            makes the rollout incomplete; or what is stored cannot be read.
          RuntimeError: the rollout is frozen or retired.
          OSError: the line could not be written.
        """
        if not isinstance(entry, TokenEntry):
            raise TypeError(f"append takes a TokenEntry, not {type(entry).__name__}")
        # The fields may have been assigned since the record was made.
        entry = dataclasses.replace(entry)
        rollout_id, call_id = entry.rollout_id, entry.model_call_id
        path = self.path_for(rollout_id)
        line = entry.to_json()
        digest = hashlib.sha256(line).hexdigest()
        with self._locked_state(rollout_id) as state:
            state.refuse_closed()
            changed, _ = sync_index(state, path)
            known = state.digests.get(call_id)
            if known == digest:
                if changed:
                    state.write()
                return
            if known is not None:
                raise mark_conflict(state, call_id)
            size = append_durably(path, line + b"\n")
            state.index({**state.digests, call_id: digest}, size)
            state.advance()
            state.write()

    async def put(self, entry: TokenEntry) -> None:
        """Do as `append`, off the event loop."""
        await asyncio.to_thread(self.append, entry)

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Announce a call: until its record is stored, the rollout is incomplete.

        Stricter than NeMo Gym 0.7: an id that would not come back from the file as it went in
        is refused, because another record could seem to keep the promise.

        Args:
          rollout_id: the rollout.
          model_call_id: the call; not blank, no line end in it, no white space around it.

        Raises:
          ValueError: such an id.
          RuntimeError: the rollout is frozen or retired.
          OSError: the announcement could not be written.
        """
        await asyncio.to_thread(self._begin_call, rollout_id, model_call_id)

    def _begin_call(self, rollout_id: str, model_call_id: str) -> None:
        path = self.intents_path_for(rollout_id)
        if not isinstance(model_call_id, str):
            raise ValueError(f"rollout {rollout_id!r}: call id {model_call_id!r} is no text")
        line = model_call_id.encode("utf-8")
        if split_intents(line) != [line]:
            raise ValueError(f"rollout {rollout_id!r}: call id {model_call_id!r} fits no line")
        with self._locked_state(rollout_id) as state:
            state.refuse_closed()
            append_durably(path, line + b"\n")

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Note durably that a call was lost; also after a freeze.

        Args:
          rollout_id: the rollout.
          model_call_id: the call, if known.

        Raises:
          RuntimeError: the rollout is retired.
          OSError: state or marker could not be written; either alone is a mark.
        """
        await asyncio.to_thread(self._mark_incomplete, rollout_id, model_call_id)

    def _mark_incomplete(self, rollout_id: str, model_call_id: str) -> None:
        path = self.incomplete_path_for(rollout_id)
        # Never refuse a mark for the looks of its id.
        line = str(model_call_id).encode("utf-8", "backslashreplace") + b"\n"
        with self._locked_state(rollout_id) as state:
            state.refuse_retired()
            state.mark()
            try:
                state.write(durable=True)
            finally:
                append_durably(path, line, end_bare_line=False)

    def is_incomplete(self, rollout_id: str) -> bool:
        """Tell whether a call is marked as lost, or contested. Announced calls don't count.

        Stricter than NeMo Gym 0.7: a marker file counts without the state's flag.
        """
        with locked(self.lock_path_for(rollout_id), shared=True):
            state = RolloutState(rollout_id, self.state_path_for(rollout_id))
            return state.incomplete or self._is_marked(rollout_id)

    def _is_marked(self, rollout_id: str) -> bool:
        return file_size(self.incomplete_path_for(rollout_id)) > 0

    def freeze_now(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close a rollout for records, and give all of them.

        Twice gives the same. A torn end is cut off, with a warning in the log.

        Raises:
          ValueError: a record cannot be read, or state or announcements are malformed. If the
            index was good, the rollout stays frozen.
          KeyError: the state says frozen but lacks `snapshot_id` or `version`.
          RuntimeError: the rollout is retired.
        """
        path = self.path_for(rollout_id)
        with self._locked_state(rollout_id) as state:
            state.refuse_retired()
            if state.frozen:
                for key in ("snapshot_id", "version"):
                    if key not in state.values:
                        raise KeyError(f"rollout {rollout_id!r}: the frozen state lacks {key}")
            changed, entries = sync_index(state, path)
            if not state.frozen:
                state.values["frozen"] = True
                state.values["snapshot_id"] = uuid.uuid4().hex
                state.advance()
                changed = True
            if changed:
                state.write(durable=True)
            if entries is None:
                entries = self._read(rollout_id)
            return TokenCaptureSnapshot(
                rollout_id=rollout_id,
                entries=tuple(entries),
                incomplete=self._lacks_calls(state, entries),
                snapshot_id=state.values["snapshot_id"],
                version=state.values["version"],
            )

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Do as `freeze_now`, off the event loop."""
        return await asyncio.to_thread(self.freeze_now, rollout_id)

    def _lacks_calls(self, state: RolloutState, entries: list[TokenEntry]) -> bool:
        if state.incomplete or self._is_marked(state.rollout_id):
            return True
        path = self.intents_path_for(state.rollout_id)
        try:
            lines = split_intents(path.read_bytes())
        except FileNotFoundError:
            return False
        recorded = {entry.model_call_id for entry in entries}
        try:
            return not recorded.issuperset([line.decode("utf-8") for line in lines])
        except UnicodeDecodeError as error:
            raise ValueError(f"{path.name} holds a call id that is no UTF-8") from error

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Remove the records of a frozen rollout, if the snapshot is still its latest state.

        The rollout is retired then and takes nothing more; the same drop is true again.

        Returns:
          Whether they are gone; false where id or version do not match.
        """
        return await asyncio.to_thread(self._drop, rollout_id, snapshot_id, version)

    def _drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        with self._locked_state(rollout_id) as state:
            latest = (state.values.get("snapshot_id"), state.values.get("version"))
            if not state.frozen or latest != (snapshot_id, version):
                return False
            # The records go first: what a crash leaves behind must not look complete.
            self.path_for(rollout_id).unlink(missing_ok=True)
            self.intents_path_for(rollout_id).unlink(missing_ok=True)
            self.incomplete_path_for(rollout_id).unlink(missing_ok=True)
            state.index({}, 0)
            state.values["retired"] = True
            state.write(durable=True)
            return True

    def delete(self, rollout_id: str) -> None:
        """Remove a rollout with its state; it is new afterwards. The lock file stays."""
        with locked(self.lock_path_for(rollout_id)):
            # The records go first, and the state last, for the same reason as in a drop.
            self.path_for(rollout_id).unlink(missing_ok=True)
            self.intents_path_for(rollout_id).unlink(missing_ok=True)
            self.incomplete_path_for(rollout_id).unlink(missing_ok=True)
            self.state_path_for(rollout_id).unlink(missing_ok=True)
            sync_directory(self.root)

    def sweep_retired(self, older_than_seconds: float) -> int:
        """Remove what is left of retired rollouts.

        Args:
          older_than_seconds: only where the state file was not written since.

        Returns:
          The count of rollouts that were removed. A state that cannot be read stays.
        """
        latest = time.time() - older_than_seconds
        count = 0
        for path in sorted(self.root.glob("*" + _STATE_SUFFIX)):
            rollout_id = path.name.removesuffix(_STATE_SUFFIX)
            if _ROLLOUT_ID.fullmatch(rollout_id) and _is_old_file(path, latest):
                count += self._sweep(rollout_id, latest)
        return count

    def _sweep(self, rollout_id: str, latest: float) -> bool:
        lock = self.lock_path_for(rollout_id)
        with locked(lock):
            path = self.state_path_for(rollout_id)
            try:
                retired = RolloutState(rollout_id, path).retired and _is_old_file(path, latest)
            except ValueError:
                retired = False
            if retired:
                self.intents_path_for(rollout_id).unlink(missing_ok=True)
                self.incomplete_path_for(rollout_id).unlink(missing_ok=True)
                path.unlink(missing_ok=True)
                lock.unlink(missing_ok=True)
            return retired

    def read_entries(self, rollout_id: str) -> list[TokenEntry]:
        """Read all records in file order, repeats included; change nothing.

        Returns:
          The records, `[]` without a file.

        Raises:
          ValueError: a line is bad, a torn end included; names file and line.
        """
        with locked(self.lock_path_for(rollout_id), shared=True):
            return self._read(rollout_id)

    def _read(self, rollout_id: str) -> list[TokenEntry]:
        path = self.path_for(rollout_id)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return []
        return read_records(data, rollout_id, path.name)

    async def close(self) -> None:
        """Do nothing: the store holds nothing open."""


def split_intents(data: bytes) -> list[bytes]:
    """Split a file of announced call ids into the ids, as bytes; blank lines are none."""
    return [line for line in map(bytes.strip, _INTENT_END.split(data)) if line]


def _is_old_file(path: Path, latest: float) -> bool:
    try:
        return path.stat().st_mtime <= latest
    except FileNotFoundError:
        return False
