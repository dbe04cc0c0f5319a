"""Turn a rollout's frozen token capture into trajectories, as plain Python dictionaries.

The caller names the rollout; where its calls were recorded is a list of directories or a
`TokenSource`. A result says with `mask_sample` whether it may train. What is unsafe is masked,
never repaired. For arrays instead of dictionaries see `build_rollout`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from evsys_jax.capture.build import (
    ATTRIBUTION_ERROR,
    RolloutBuild,
    assemble,
    attribute_terminal,
    describe_error,
    no_records_error,
)
from evsys_jax.capture.builder import run_builder
from evsys_jax.capture.config import (
    mask_incomplete_when_attributed_from_config,
    rollout_id_of,
    token_id_capture_dirs_from_config,
)
from evsys_jax.capture.projection import Item, make_response, measure_usage, to_plain_items
from evsys_jax.capture.protocols import TokenCaptureSnapshot, TokenSource
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.sources import Directories, freeze_in_directories, freeze_source
from evsys_jax.capture.store import TokenCaptureStore
from evsys_jax.capture.terminal import resolve_terminal

__all__ = [
    "clear_token_captures_for_rollouts",
    "logger",
    "mask_incomplete_when_attributed_from_config",
    "token_id_capture_dirs_from_config",
    "trajectories_for_rollout",
    "trajectories_from_source",
]

logger = logging.getLogger(__name__)

Result = dict[str, Any]


def trajectories_for_rollout(
    rollout_id: str,
    token_capture_dirs: Directories,
    *,
    builder: str = "prefix_merging",
    model: str = "",
    verified_response: dict[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    mask_incomplete_when_attributed: bool = True,
) -> Result | None:
    """Freeze a rollout's capture in its directory and build the result.

    Stricter than NeMo Gym 0.7: all directories are searched, and a rollout that more than one of
    them knows is an error.

    Args:
      rollout_id: the rollout.
      token_capture_dirs: the capture directories. The one that knows the rollout is used; where
        none does, the first.
      builder: `prefix_merging`.
      model: the model's name for the response.
      verified_response: the response that was scored; helps to find its call.
      explicit_terminal_call_id: the call whose response was scored.
      mask_incomplete_when_attributed: False keeps an incomplete capture whose scored chain was
        delivered, since the lost call cannot sit inside that chain.

    Returns:
      The result, or None where no directory is given. A failed result has `error`, no response
      and is masked, as is one without records.
    """
    if not token_capture_dirs:
        return None
    try:
        snapshot = freeze_in_directories(rollout_id, token_capture_dirs)
    except Exception as error:
        return _refuse(rollout_id, builder, error)
    return _finish(
        rollout_id,
        snapshot,
        builder,
        model,
        mask_incomplete_when_attributed,
        verified_response=verified_response,
        explicit_terminal_call_id=explicit_terminal_call_id,
        declared_response_id=None,
    )


async def trajectories_from_source(
    rollout_id: str,
    source: TokenSource | None,
    *,
    builder: str = "prefix_merging",
    model: str = "",
    verified_response: dict[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    mask_incomplete_when_attributed: bool = True,
    declared_response_id: str | None = None,
) -> Result | None:
    """Await a source's frozen capture and build the result off the event loop.

    Stricter than NeMo Gym 0.7: a record of another rollout is an error.

    Args:
      rollout_id: the rollout.
      source: what freezes it; None where there is none.
      builder: `prefix_merging`.
      model: the model's name for the response.
      verified_response: the response that was scored; helps to find its call.
      explicit_terminal_call_id: the call whose response was scored.
      mask_incomplete_when_attributed: as in `trajectories_for_rollout`.
      declared_response_id: the response id that the harness reports. One that names no call
        masks the rollout.

    Returns:
      The result, or None without a source.
    """
    if source is None:
        return None
    try:
        snapshot = await freeze_source(rollout_id, source)
    except Exception as error:
        return _refuse(rollout_id, builder, error)
    return await asyncio.to_thread(
        _finish,
        rollout_id,
        snapshot,
        builder,
        model,
        mask_incomplete_when_attributed,
        verified_response=verified_response,
        explicit_terminal_call_id=explicit_terminal_call_id,
        declared_response_id=declared_response_id,
    )


def clear_token_captures_for_rollouts(
    records: Iterable[Mapping[str, Any]], token_capture_dirs: Iterable[Path]
) -> None:
    """Delete what earlier attempts of these rollouts left in any of the directories.

    Rollout ids are deterministic and captures are appended to, so a reused id would mix two
    attempts.

    Args:
      records: rollout records about to be dispatched; those without an id are skipped.
      token_capture_dirs: the capture directories.

    Raises:
      ValueError: a rollout id that cannot be used.
    """
    rollout_ids = [rollout_id_of(record) for record in records]
    for directory in token_capture_dirs:
        store = TokenCaptureStore(directory)
        for rollout_id in rollout_ids:
            if rollout_id is not None:
                store.delete(rollout_id)


def _finish(
    rollout_id: str,
    snapshot: TokenCaptureSnapshot,
    builder: str,
    model: str,
    always: bool,
    **witnesses: Any,
) -> Result:
    entries = list(snapshot.entries)
    if entries:
        built = _assemble(rollout_id, entries, builder, model, **witnesses)
    else:
        built = _failed_build(rollout_id, builder, no_records_error(rollout_id))
    if snapshot.incomplete:
        built["metrics"]["capture_incomplete"] = True
        if _incomplete_masks(built, always):
            built["mask_sample"] = True
    built["_capture_snapshot"] = {
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
    }
    return built


def _assemble(
    rollout_id: str,
    entries: Sequence[TokenEntry],
    builder: str,
    model: str,
    *,
    verified_response: dict[str, Any] | None = None,
    explicit_terminal_call_id: str | None = None,
    declared_response_id: str | None = None,
) -> Result:
    attribution = attribute_terminal(
        entries,
        verified_response,
        explicit_terminal_call_id,
        declared_response_id,
        resolve=resolve_terminal,
    )
    if attribution.reason == ATTRIBUTION_ERROR:
        logger.warning("rollout %s: terminal attribution failed, masked", rollout_id)
    build, items = assemble(
        rollout_id,
        entries,
        builder=builder,
        model=model,
        attribution=attribution,
        run=run_builder,
    )
    return _describe(build, items)


def _describe(build: RolloutBuild, items: list[Item]) -> Result:
    if build.error is not None:
        logger.warning("rollout %s: build failed: %s", build.rollout_id, build.error)
        failed = _failed_build(build.rollout_id, build.builder, build.error)
        failed["metrics"] = build.metrics
        return failed
    output = to_plain_items(items, build.tokens)
    return {
        "rollout_id": build.rollout_id,
        "builder": build.builder,
        "rebuilt_response": make_response(
            build.rollout_id, build.model, output, measure_usage(items)
        ),
        "metrics": build.metrics,
        "mask_sample": not build.trains,
        "unresolved_retries": list(build.unresolved_retries),
        "unresolved_parent_calls": list(build.unresolved_parent_calls),
    }


def _failed_build(rollout_id: str, builder: str, error: str, *, n_calls: int = 0) -> Result:
    return {
        "rollout_id": rollout_id,
        "builder": builder,
        "rebuilt_response": None,
        "mask_sample": True,
        "error": error,
        "metrics": {"n_calls": n_calls},
    }


def _incomplete_masks(built: Result, always: bool) -> bool:
    """Whether an incomplete capture masks this result.

    Incomplete means that a call was announced or marked and is lost; it may be the real terminal.
    Without `always` a delivered chain stands: it reaches the scored response whole, so the lost
    call is outside of it. NeMo Gym 0.7 had no such choice.

    Args:
      built: the result.
      always: mask whatever was attributed.
    """
    attribution = built["metrics"].get("terminal_attribution") or {}
    return always or attribution.get("chain") != "delivered"


def _refuse(rollout_id: str, builder: str, error: Exception) -> Result:
    logger.warning("rollout %s: capture not readable: %s", rollout_id, error)
    return _failed_build(rollout_id, builder, describe_error(error))
