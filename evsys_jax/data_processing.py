"""Groups of rollouts to Datums for tinker's importance_sampling loss, in two steps.

`compute_advantages` compares each reward with its group; `assemble_training_data` flattens the
groups into one Datum per assistant turn. Both run on the array core.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from evsys_jax.datums import DatumMetadata, collector_paused, unpack
from evsys_jax.plans import MIN_ROWS, MIN_WIDTH, bucket, by_width, pad_slots
from evsys_jax.ragged import MismatchPolicy, ragged_rows
from evsys_jax.reference import compute_trajectory_metrics
from evsys_jax.rollouts import Trajectory, TrajectoryGroup
from evsys_jax.trajectories import trajectory_table

if TYPE_CHECKING:
    import tinker

    from evsys_jax.batch import TokenBatch

Item = TypeVar("Item")

logger = logging.getLogger(__name__)

__all__ = [
    "DatumMetadata",
    "assemble_training_data",
    "compute_advantages",
    "compute_trajectory_metrics",
]


CACHED_POSITIONS = 2**18
"""Padded positions of one batch on the device while Datums are made, about 6 MB: small enough for
a cache, and for the next batch to be worked on meanwhile."""


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
    from evsys_jax.advantage_inputs import AdvantageInputs, per_trajectory
    from evsys_jax.advantages import centre
    from evsys_jax.batch import pack_slots

    rows = ragged_rows(trajectory_groups, on_logprob_mismatch=on_logprob_mismatch, keep_lists=True)
    given = centre(rows.table)._replace(rewards=per_trajectory(rows.table, advantages))
    start = AdvantageInputs(None, given, "none", "none")
    positions = rows.lengths - 1
    datums: list[Any] = [None] * len(rows)
    metadata: list[Any] = [None] * len(rows)

    def dispatched() -> Iterator[tuple[NDArray[np.int64], TokenBatch]]:
        for index in by_width(positions, CACHED_POSITIONS):
            width = bucket(int(positions[index].max()), MIN_WIDTH)
            least = max(1, min(MIN_ROWS, CACHED_POSITIONS // width))
            slots = pad_slots(index[:, None], bucket(len(index), least))
            yield index, pack_slots(rows, slots, start, width=width, pad_token=0)

    with collector_paused():
        # The device works on the next batch while Datums are made of this one.
        for index, batch in _one_ahead(dispatched()):
            inputs = [rows.inputs[r] for r in index.tolist()] if rows.inputs else None
            made, places = unpack(batch, inputs=inputs)
            for r, datum, place in zip(index.tolist(), made, places, strict=True):
                datums[r], metadata[r] = datum, place
    return datums, metadata


def _one_ahead(items: Iterable[Item]) -> Iterator[Item]:
    """Yield items, each after the next one has been asked for."""
    stream = iter(items)
    for waiting in stream:
        for following in stream:
            yield waiting
            waiting = following
        yield waiting


def _turn_to_datum(turn: Any, *, advantage: float) -> tinker.Datum | None:
    """Make the Datum of one turn, or None where it has nothing to train on.

    Args:
      turn: see `evsys_jax.rollouts.Turn`.
      advantage: a finite float32.
    """
    group = TrajectoryGroup([Trajectory([turn])])
    datums, _ = assemble_training_data([group], [[advantage]])
    return datums[0] if datums else None
