"""What an advantage starts from, on the host: rewards to compare, or numbers that are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks
from evsys_jax.advantages import Baseline, Rewards, Scale, centre
from evsys_jax.ragged import RaggedRows


class AdvantageInputs(NamedTuple):
    """Where the advantages of a batch come from.

    Args:
      per_token: [L] float32, or None where there is one per trajectory.
      rewards: [N] each, what the kernel starts from.
      baseline: that the kernel shall take; "none" where advantages were given.
      scale: likewise.
    """

    per_token: NDArray[np.float32] | None
    rewards: Rewards
    baseline: Baseline
    scale: Scale


def advantage_inputs(
    rows: RaggedRows,
    advantages: Sequence[Any] | None,
    *,
    baseline: Baseline,
    scale: Scale,
) -> AdvantageInputs:
    """Choose between the caller's advantages, those stored with the rows, and the rewards.

    Args:
      rows: the rows, with the table of all N trajectories.
      advantages: None, [G][N_g] numbers, or one array per row, per position.
      baseline: for rewards.
      scale: for rewards.

    Raises:
      ValueError: advantages that don't match the rows or groups, or are not finite float32;
        rewards too large for float32.
    """
    checks.check_choice("scale", scale, ("none", "group_std", "batch_std"))
    start = centre(rows.table)
    if advantages is None and rows.advantages is not None:
        return AdvantageInputs(rows.advantages, start, "none", "none")
    if advantages is None:
        _check_range(rows, start, baseline)
        return AdvantageInputs(None, start, baseline, scale)
    if len(advantages) and all(hasattr(item, "ndim") and item.ndim for item in advantages):
        return AdvantageInputs(_per_token(rows, advantages), start, "none", "none")
    table = rows.table
    members = np.split(table.trains, np.cumsum(table.group_sizes)[:-1])
    trains = [part.tolist() for part in members] if len(table.group_sizes) else []
    checks.check_advantages(advantages, trains)
    given = np.array([float(a) for group in advantages for a in group], np.float64)
    given = np.where(table.trains, given, 0.0)
    return AdvantageInputs(None, start._replace(rewards=given), "none", "none")


def _check_range(rows: RaggedRows, start: Rewards, baseline: Baseline) -> None:
    """Raise ValueError where a reward gives an advantage that float32 cannot hold."""
    kept = np.asarray(start.kept) | (baseline == "none")
    # A mean takes away as much again, and leaving one out at most doubles that.
    room = np.where(kept, checks.FLOAT32_LIMIT, checks.FLOAT32_LIMIT / 4)
    large = rows.table.trains & ~(np.abs(np.where(kept, start.rewards, start.centred)) < room)
    if large.any():
        n = int(np.flatnonzero(large)[0])
        raise ValueError(
            f"group {rows.table.group[n]}, trajectory {rows.table.place[n]}: reward"
            f" {rows.table.rewards[n]} gives no finite float32 advantage"
        )


def _per_token(rows: RaggedRows, advantages: Sequence[Any]) -> NDArray[np.float32]:
    """Lay one array per row, per position, over the tokens that the positions predict."""
    if len(advantages) != len(rows):
        raise ValueError(f"{len(rows)} rows but {len(advantages)} arrays of advantages")
    flat = np.zeros(len(rows.tokens), np.float32)
    for r, (given, start, length) in enumerate(
        zip(advantages, rows.offsets[:-1].tolist(), rows.lengths.tolist(), strict=True)
    ):
        array = np.asarray(given)
        if array.shape != (length - 1,):
            raise ValueError(
                f"row {r}: {length - 1} positions but advantages of shape {array.shape}"
            )
        with np.errstate(over="ignore"):  # an infinity is named below
            flat[start + 1 : start + length] = array
    if not np.isfinite(flat).all():
        at = int(np.flatnonzero(~np.isfinite(flat))[0])
        r = int(np.searchsorted(rows.offsets, at, side="right")) - 1
        raise ValueError(f"row {r}: advantages[{at - rows.offsets[r] - 1}] is not a finite float32")
    return flat
