"""What a capture transport offers: a sink for those who record, a source for those who build."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from evsys_jax.capture.records import TokenEntry


@dataclass(frozen=True)
class TokenCaptureSnapshot:
    """All records of a rollout at one moment, after which it takes no more.

    Args:
      rollout_id: the rollout.
      entries: its records in the order in which they were stored, repeats included.
      incomplete: a call is known to be lost, or was announced and has no record.
      snapshot_id: names this freeze; the same for every later freeze of the rollout.
      version: grows with every change, so that `drop` can tell whether this is the latest.
    """

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int


@runtime_checkable
class TokenSink(Protocol):
    """Where recorded calls go. A sink may also have `begin_call(rollout_id, model_call_id)`."""

    async def put(self, entry: TokenEntry) -> None:
        """Store a record durably; when this returns, it is safe.

        The same record again is no second one. The same call id with another content raises,
        or makes the rollout incomplete.

        Raises:
          ValueError: the record is malformed, or its id is taken by another content.
          RuntimeError: the rollout is frozen or retired.
        """
        ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Note durably that a call was lost; also after a freeze.

        Raises:
          RuntimeError: the rollout is retired.
        """
        ...

    async def close(self) -> None:
        """Release what the client holds."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """Where recorded calls come from."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close a rollout for records and give all of them; twice gives the same.

        Raises:
          ValueError: the stored records cannot be read.
          RuntimeError: the rollout is retired.
        """
        ...

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Remove the records of a frozen rollout, if the snapshot is still its latest state.

        Returns:
          Whether they are gone; false where id or version do not match.
        """
        ...

    async def close(self) -> None:
        """Release what the client holds."""
        ...
