"""From where a rollout's capture lies to its build, without ever raising.

What a batch job calls for each of its rollouts: one that cannot be read or built is a masked
build with an error, and the others go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from evsys_jax.capture.build import RolloutBuild, build_rollout, describe_error, fail_build
from evsys_jax.capture.builder import PREFIX_MERGING
from evsys_jax.capture.peek import peek_capture
from evsys_jax.capture.protocols import TokenCaptureSnapshot, TokenSource
from evsys_jax.capture.store import TokenCaptureStore, validate_rollout_id

Directories = Sequence[str | PathLike[str]] | PathLike[str]

_FILES = ("jsonl", "state.json", "intents", "incomplete")


def build_from_directories(
    rollout_id: str,
    token_capture_dirs: Directories,
    *,
    builder: str = PREFIX_MERGING,
    model: str = "",
    freeze: bool = True,
    **keywords: Any,
) -> RolloutBuild:
    """Freeze a rollout's capture and build it.

    Args:
      rollout_id: the rollout.
      token_capture_dirs: one directory or more, see `find_directory`.
      builder: `prefix_merging`.
      model: the model's name, handed through.
      freeze: False builds what a freeze would give now, and changes nothing in any directory.
      **keywords: as in `build_rollout`.

    Returns:
      The build. Whatever fails, it is a masked one with an error.
    """
    reason = "capture_not_located"
    try:
        directory = find_directory(rollout_id, token_capture_dirs)
        reason = "capture_unreadable"
        if freeze:
            snapshot = TokenCaptureStore(directory).freeze_now(rollout_id)
        else:
            snapshot = peek_capture(rollout_id, directory)
    except Exception as error:
        return fail_build(rollout_id, reason, describe_error(error), builder, model)
    return _build(rollout_id, snapshot, builder, model, keywords)


async def build_from_source(
    rollout_id: str,
    source: TokenSource,
    *,
    builder: str = PREFIX_MERGING,
    model: str = "",
    **keywords: Any,
) -> RolloutBuild:
    """Await the source's frozen capture and build it off the event loop.

    Args:
      rollout_id: the rollout.
      source: what freezes it.
      builder: `prefix_merging`.
      model: the model's name, handed through.
      **keywords: as in `build_rollout`.

    Returns:
      The build. Whatever fails, it is a masked one with an error.
    """
    try:
        snapshot = await freeze_source(rollout_id, source)
    except Exception as error:
        error_text = describe_error(error)
        return fail_build(rollout_id, "capture_unreadable", error_text, builder, model)
    return await asyncio.to_thread(_build, rollout_id, snapshot, builder, model, keywords)


def freeze_in_directories(rollout_id: str, token_capture_dirs: Directories) -> TokenCaptureSnapshot:
    """Freeze a rollout where its capture lies.

    Raises:
      ValueError: as `find_directory`, and for data that cannot be trusted.
      RuntimeError: the rollout is retired.
    """
    return TokenCaptureStore(find_directory(rollout_id, token_capture_dirs)).freeze_now(rollout_id)


async def freeze_source(rollout_id: str, source: TokenSource) -> TokenCaptureSnapshot:
    """Await a source's snapshot and check that it is of this rollout.

    Raises:
      ValueError: a record belongs to another rollout; names both.
    """
    snapshot = await source.freeze(rollout_id)
    for entry in snapshot.entries:
        if entry.rollout_id != rollout_id:
            raise ValueError(
                f"the source gave rollout {rollout_id!r} a record of {entry.rollout_id!r}"
                f" (call {entry.model_call_id!r})"
            )
    return snapshot


def find_directory(rollout_id: str, token_capture_dirs: Directories) -> Path:
    """Find the one directory that knows a rollout, without touching any.

    A directory knows it if it holds its record, state, intents or marker file. The same
    directory twice counts once. NeMo Gym 0.7 looked into the first directory only.

    Args:
      rollout_id: the rollout.
      token_capture_dirs: at least one directory; they need not exist.

    Returns:
      The directory that knows the rollout; the first one where none does.

    Raises:
      ValueError: the rollout id is no file name, there is no directory, or more than one knows
        it; then the error names them.
    """
    validate_rollout_id(rollout_id)
    if isinstance(token_capture_dirs, str | PathLike):  # one path is no list of letters
        return Path(token_capture_dirs)
    if len(token_capture_dirs) == 1:
        return Path(token_capture_dirs[0])
    distinct: dict[Path, Path] = {}
    for each in token_capture_dirs:
        distinct.setdefault(Path(each).resolve(), Path(each))
    ordered = list(distinct.values())
    if not ordered:
        raise ValueError(f"no capture directory for rollout {rollout_id!r}")
    knowing = [each for each in ordered if _knows(each, rollout_id)]
    if len(knowing) > 1:
        names = ", ".join(str(each) for each in knowing)
        raise ValueError(f"rollout {rollout_id!r} was captured in {names}")
    return (knowing or ordered)[0]


def _knows(directory: Path, rollout_id: str) -> bool:
    return any((directory / f"{rollout_id}.tokens.{kind}").exists() for kind in _FILES)


def _build(
    rollout_id: str,
    snapshot: TokenCaptureSnapshot,
    builder: str,
    model: str,
    keywords: dict[str, Any],
) -> RolloutBuild:
    try:
        return build_rollout(rollout_id, snapshot, builder=builder, model=model, **keywords)
    except Exception as error:  # also what no data should cause: the other rollouts go on
        return fail_build(rollout_id, "build_failed", describe_error(error), builder, model)
