"""The state of one rollout: what is decided about it, and which records its index knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeGuard

import orjson

from evsys_jax.capture.canonical import canonical_json
from evsys_jax.capture.files import replace_file

_FLAGS = ("frozen", "retired", "incomplete")


class RolloutState:
    """The state file, read and written whole.

    Keys that it does not know stay as they are; a key that is missing reads as false or 0 and
    is not added until an operation sets it. Stricter than NeMo Gym: a flag that is no bool and a
    version that is no integer are errors.

    Args:
      rollout_id: for errors.
      path: the state file. Without it all is false, empty, 0.

    Raises:
      ValueError: the file is no JSON object, or a value has the wrong type; names the rollout.
    """

    def __init__(self, rollout_id: str, path: Path) -> None:
        self.rollout_id = rollout_id
        self.path = path
        self.values = _read(rollout_id, path)

    @property
    def frozen(self) -> bool:
        return bool(self.values.get("frozen", False))

    @property
    def retired(self) -> bool:
        return bool(self.values.get("retired", False))

    @property
    def incomplete(self) -> bool:
        return bool(self.values.get("incomplete", False))

    @property
    def is_old(self) -> bool:
        """Whether the state is from before the index existed."""
        return not isinstance(self.values.get("entry_digests"), dict) or not _is_int(
            self.values.get("indexed_size")
        )

    @property
    def digests(self) -> dict[str, str]:
        """Call id -> SHA-256 of its line; a fresh dict where the state has none."""
        digests = self.values.get("entry_digests")
        return digests if isinstance(digests, dict) else {}

    @property
    def indexed_size(self) -> int:
        size = self.values.get("indexed_size")
        return size if _is_int(size) else 0

    def advance(self, count: int = 1) -> None:
        """Let the version grow."""
        self.values["version"] = self.values.get("version", 0) + count

    def mark(self) -> None:
        """Set the flag of a lost or contested call, and let the version grow."""
        self.values["incomplete"] = True
        self.advance()

    def index(self, digests: dict[str, str], size: int) -> None:
        """Set what the index covers."""
        self.values["entry_digests"] = digests
        self.values["indexed_size"] = size

    def write(self, *, durable: bool = False) -> None:
        """Replace the state file."""
        data = canonical_json(self.values) + b"\n"
        replace_file(self.path, data, prefix=".tokens-state-", durable=durable)

    def refuse_retired(self) -> None:
        """Raise a RuntimeError if the rollout is retired."""
        if self.retired:
            raise RuntimeError(f"rollout {self.rollout_id!r} is retired")

    def refuse_closed(self) -> None:
        """Raise a RuntimeError if the rollout is retired or frozen."""
        self.refuse_retired()
        if self.frozen:
            raise RuntimeError(f"rollout {self.rollout_id!r} is frozen")


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _read(rollout_id: str, path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return {
            "frozen": False,
            "retired": False,
            "incomplete": False,
            "snapshot_id": "",
            "version": 0,
            "entry_digests": {},
            "indexed_size": 0,
        }
    where = f"rollout {rollout_id!r}: the state {path.name}"
    try:
        values = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if not isinstance(values, dict):
        raise ValueError(f"{where} is no object")
    for key in _FLAGS:
        if not isinstance(values.get(key, False), bool):
            raise ValueError(f"{where} has a {key} that is no bool: {values[key]!r}")
    if not _is_int(values.get("version", 0)):
        raise ValueError(f"{where} has a version that is no integer: {values['version']!r}")
    if not isinstance(values.get("snapshot_id", ""), str):
        raise ValueError(f"{where} has a snapshot_id that is no text: {values['snapshot_id']!r}")
    return values
