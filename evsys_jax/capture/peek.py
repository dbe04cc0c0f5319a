"""A look at a rollout's capture that changes nothing: no freeze, no lock file, no cut."""

from __future__ import annotations

from pathlib import Path

from evsys_jax.capture.files import file_size, read_locked
from evsys_jax.capture.index import sync_index
from evsys_jax.capture.lines import read_records
from evsys_jax.capture.protocols import TokenCaptureSnapshot
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.state import RolloutState
from evsys_jax.capture.store import split_intents, validate_rollout_id


def peek_capture(rollout_id: str, directory: Path) -> TokenCaptureSnapshot:
    """Give what `TokenCaptureStore.freeze_now` would give now; writers go on afterwards.

    Args:
      rollout_id: the rollout.
      directory: the capture directory, which need not exist and may be read-only.

    Returns:
      The snapshot, without a torn end. Its `snapshot_id` is "" where the rollout is not frozen.

    Raises:
      ValueError: as `freeze_now`.
      KeyError: as `freeze_now`.
      RuntimeError: as `freeze_now`.
    """
    with read_locked(_path(rollout_id, directory, "lock")):
        # Before the records: the first writer may come between two reads, without a lock to
        # wait for, and announces what it records.
        announced = _read(_path(rollout_id, directory, "intents"))
        state = RolloutState(rollout_id, _path(rollout_id, directory, "state.json"))
        state.refuse_retired()
        for key in ("snapshot_id", "version"):
            if state.frozen and key not in state.values:
                raise KeyError(f"rollout {rollout_id!r}: the frozen state lacks {key}")
        version = state.values.get("version", 0)
        entries = _read_entries(state, _path(rollout_id, directory, "jsonl"))
        marked = file_size(_path(rollout_id, directory, "incomplete")) > 0
    incomplete = state.incomplete or marked or bool(_unrecorded(announced, entries))
    snapshot_id = state.values["snapshot_id"] if state.frozen else ""
    return TokenCaptureSnapshot(rollout_id, tuple(entries), incomplete, snapshot_id, version)


def lost_calls(rollout_id: str, directory: Path) -> list[str]:
    """Name the calls that were announced and have no record, or were marked as lost.

    Args:
      rollout_id: the rollout.
      directory: the capture directory, which need not exist and may be read-only.

    Returns:
      Their ids, each once. A call that was marked without its id is not among them.

    Raises:
      ValueError: the records cannot be read, or an announced id is no UTF-8.
    """
    entries = peek_capture(rollout_id, directory).entries
    unrecorded = _unrecorded(_read(_path(rollout_id, directory, "intents")), entries)
    marked = split_intents(_read(_path(rollout_id, directory, "incomplete")))
    return list(dict.fromkeys([*unrecorded, *(call.decode("utf-8", "replace") for call in marked)]))


def _path(rollout_id: str, directory: Path, kind: str) -> Path:
    return directory / f"{validate_rollout_id(rollout_id)}.tokens.{kind}"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return b""


def _read_entries(state: RolloutState, path: Path) -> list[TokenEntry]:
    _, entries = sync_index(state, path, write=False)
    if entries is None:
        entries = read_records(_read(path)[: state.indexed_size], state.rollout_id, path.name)
    return entries


def _unrecorded(announced: bytes, entries: list[TokenEntry] | tuple[TokenEntry, ...]) -> list[str]:
    recorded = {entry.model_call_id for entry in entries}
    try:
        calls = [line.decode("utf-8") for line in split_intents(announced)]
    except UnicodeDecodeError as error:
        raise ValueError("an announced call id is no UTF-8") from error
    return [call for call in calls if call not in recorded]
