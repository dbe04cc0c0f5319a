"""What an advantage starts from, on the host: rewards to compare, or numbers that are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks
from evsys_jax.advantages import Baseline, Rewards, Scale, centre, group_advantages
from evsys_jax.plans import MIN_ROWS, bucket
from evsys_jax.ragged import RaggedRows
from evsys_jax.trajectories import TrajectoryTable

SAFE_REWARD = 1e30
"""Rewards below this give float32 advantages under every baseline, without a scale."""


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
        _check_range(rows.table, start, baseline, scale)
        return AdvantageInputs(None, start, baseline, scale)
    if _is_per_position(rows, advantages):
        return AdvantageInputs(_per_token(rows, advantages), start, "none", "none")
    given = start._replace(rewards=per_trajectory(rows.table, advantages))
    return AdvantageInputs(None, given, "none", "none")


def per_trajectory(
    table: TrajectoryTable, advantages: Sequence[Sequence[float]]
) -> NDArray[np.float64]:
    """Flatten [G][N_g] numbers to [N] float64; 0.0 for a trajectory that doesn't train.

    Raises:
      ValueError: other counts than the groups have, or no finite float32 where one trains.
    """
    members = np.split(table.trains, np.cumsum(table.group_sizes)[:-1])
    trains = [part.tolist() for part in members] if len(table.group_sizes) else []
    checks.check_advantages(advantages, trains)
    pairs = zip(table.trains.tolist(), (a for group in advantages for a in group), strict=True)
    return np.array([float(given) if live else 0.0 for live, given in pairs], np.float64)


def _is_per_position(rows: RaggedRows, advantages: Sequence[Any]) -> bool:
    """Tell whether advantages are arrays per row; lists are always per trajectory.

    Raises:
      ValueError: arrays that could be either.
    """
    if not len(advantages) or not all(getattr(item, "ndim", 0) == 1 for item in advantages):
        return False
    sizes = [len(item) for item in advantages]
    fits_rows = sizes == (rows.lengths - 1).tolist()
    fits_groups = sizes == rows.table.group_sizes.tolist()
    if fits_rows and fits_groups and max(sizes) > 1:
        raise ValueError(
            "the arrays of advantages fit the rows and the groups alike;"
            " give lists for one number per trajectory"
        )
    return not fits_groups or fits_rows


def _check_range(table: TrajectoryTable, start: Rewards, baseline: Baseline, scale: Scale) -> None:
    """Raise ValueError where rewards give an advantage that float32 cannot hold."""
    largest = max(np.abs(start.rewards).max(initial=0.0), np.abs(start.centred).max(initial=0.0))
    if largest < SAFE_REWARD and scale == "none":
        return
    advantages = trajectory_advantages(table, baseline=baseline, scale=scale)
    wrong = table.trains & ~(np.abs(advantages) < checks.FLOAT32_LIMIT)
    if wrong.any():
        n = int(np.flatnonzero(wrong)[0])
        raise ValueError(
            f"group {table.group[n]}, trajectory {table.place[n]}: the rewards of the group give"
            f" the advantage {advantages[n]}, no finite float32"
        )


def trajectory_advantages(
    table: TrajectoryTable, *, baseline: Baseline = "mean", scale: Scale = "none"
) -> NDArray[np.float64]:
    """Compute the advantages of N trajectories in float64, with the kernel that `pack` runs.

    Args:
      table: the N trajectories.
      baseline: as in `pack`.
      scale: as in `pack`.

    Returns:
      [N] float64. Computed on the CPU backend where there is one, since not every accelerator
      has the float64 of IEEE 754.
    """
    members = padded_rewards(centre(table), MIN_ROWS)
    with jax.enable_x64(True), jax.default_device(_float64_device()):
        flat = _group_advantages(members, baseline=baseline, scale=scale)
        return np.asarray(flat)[: len(table)]


def padded_rewards(inputs: Rewards, minimum: int) -> Rewards:
    """Round N up, so that shapes are few; filler neither votes nor counts."""
    size = bucket(len(inputs.rewards), bucket(minimum, MIN_ROWS))

    def padded(values: Any) -> NDArray[Any]:
        out = np.zeros(size, values.dtype)
        out[: len(values)] = values
        return out

    return Rewards(*(padded(values) for values in inputs))


_group_advantages = jax.jit(group_advantages, static_argnames=("baseline", "scale"))


def _float64_device() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves the CPU out
        return None


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
