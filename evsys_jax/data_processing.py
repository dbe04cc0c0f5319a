"""Groups of rollouts to Datums for tinker's importance_sampling loss, in two steps.

`compute_advantages` compares each reward with its group; `assemble_training_data` flattens the
groups into one Datum per assistant turn. Both run on the array core: the first with the kernel
of `evsys_jax.advantages`, the second with that of `evsys_jax.targets`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from evsys_jax.datums import DatumMetadata
from evsys_jax.ragged import MismatchPolicy, ragged_rows
from evsys_jax.reference import compute_trajectory_metrics
from evsys_jax.rollouts import Trajectory, TrajectoryGroup
from evsys_jax.trajectories import trajectory_table

if TYPE_CHECKING:
    import tinker

logger = logging.getLogger(__name__)

__all__ = [
    "DatumMetadata",
    "assemble_training_data",
    "compute_advantages",
    "compute_trajectory_metrics",
]


def compute_advantages(
    trajectory_groups: Sequence[Any], *, normalize: bool = True
) -> list[list[float]]:
    """Return one advantage per trajectory: its reward minus the mean of its group's voters.

    Args:
      trajectory_groups: [G] groups; see `evsys_jax.rollouts`.
      normalize: False returns the rewards as they are.

    Returns:
      [G][N_g] floats, computed in float64. A group given with one trajectory keeps the raw
      reward, an empty one gives [], a constant one exact zeros. A trajectory that neither votes
      nor trains gets 0.0; its reward is not looked at and moves nobody.

    Raises:
      ValueError: a reward that counts is not a finite number.
    """
    from evsys_jax.advantage_inputs import trajectory_advantages

    table = trajectory_table(trajectory_groups)
    flat = trajectory_advantages(table, baseline="mean" if normalize else "none")
    if not np.isfinite(flat).all():
        n = int(np.flatnonzero(~np.isfinite(flat))[0])
        where = f"group {table.group[n]}, trajectory {table.place[n]}"
        raise ValueError(f"{where}: advantage {flat[n]} is not finite")
    numbers = iter(flat.tolist())
    return [[next(numbers) for _ in range(size)] for size in table.group_sizes.tolist()]


def assemble_training_data(
    trajectory_groups: Sequence[Any],
    advantages: Sequence[Sequence[float]],
    *,
    on_logprob_mismatch: MismatchPolicy = "error",
) -> tuple[list[tinker.Datum], list[DatumMetadata]]:
    """Flatten (group, trajectory, turn) into Datums for tinker's importance_sampling loss.

    One Datum per turn with completion tokens, whose `loss_fn_inputs` are exactly
    `target_tokens`, `logprobs` (the sampler's; 0 on the prompt) and `advantages` (the
    trajectory's on the completion; 0 on the prompt, which masks the loss there).

    Args:
      trajectory_groups: [G] groups; see `evsys_jax.rollouts`.
      advantages: [G][N_g] floats, one per trajectory.
      on_logprob_mismatch: "error", or "pad" to fill up missing logprobs with 0.0 and cut surplus
        ones, with a warning that counts the turns.

    Returns:
      Datums and their places, in the order group, trajectory, turn. The model input is a list of
      ints where the turn's tokens are lists, and an int32 buffer where they are arrays.

    Raises:
      ValueError: groups and advantages that don't match; bad tokens, logprobs or advantages,
        named by group, trajectory, turn and index.
    """
    from evsys_jax.advantage_inputs import per_trajectory
    from evsys_jax.datums import collector_paused, datums_of_runs
    from evsys_jax.unpadded import iter_runs

    with collector_paused():
        rows = ragged_rows(
            trajectory_groups, on_logprob_mismatch=on_logprob_mismatch, keep_lists=True
        )
        runs = iter_runs(rows, per_trajectory(rows.table, advantages))
        return datums_of_runs(rows, runs)


def _turn_to_datum(turn: Any, *, advantage: float) -> tinker.Datum | None:
    """Make the Datum of one turn, or None where it has nothing to train on.

    Args:
      turn: see `evsys_jax.rollouts.Turn`.
      advantage: a finite float32.
    """
    group = TrajectoryGroup([Trajectory([turn])])
    datums, _ = assemble_training_data([group], [[advantage]])
    return datums[0] if datums else None
