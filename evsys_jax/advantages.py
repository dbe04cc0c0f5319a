"""Group baselines: what a rollout earned beyond its siblings.

The kernel takes the N trajectories of a batch together, since a mean needs its whole group. It
runs in the precision of its input; `pack` hands it float64, so that the difference of two rewards
is rounded once, when it becomes a float32 advantage.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from evsys_jax.ragged import TrajectoryTable


def group_advantages(
    centred: jax.Array,
    votes: jax.Array,
    group_ids: jax.Array,
    keeps_reward: jax.Array,
) -> jax.Array:
    r"""Subtract from each trajectory the mean of its group's voters.

    With c the centred rewards, A_i = c_i - mean_{j votes, g(j) = g(i)} c_j. Source: the group
    baseline of GRPO (https://arxiv.org/abs/2402.03300), without its division by the deviation.

    Args:
      centred: [N] float, rewards less a constant of their group (see `centre`).
      votes: [N] bool, enters the mean of its group.
      group_ids: [N] int32 in [0, N).
      keeps_reward: [N] bool, has no baseline: A_i = c_i.

    Returns:
      [N] advantages, of the dtype of `centred`. Where nobody in a group votes, 0.
    """
    chex.assert_rank([centred, votes, group_ids, keeps_reward], 1)
    chex.assert_equal_shape([centred, votes, group_ids, keeps_reward])
    chex.assert_type([votes, group_ids, keeps_reward], [bool, jnp.int32, bool])
    num_groups = group_ids.shape[0]
    zero = jnp.zeros((), centred.dtype)
    total = jax.ops.segment_sum(jnp.where(votes, centred, zero), group_ids, num_groups)
    count = jax.ops.segment_sum(votes.astype(centred.dtype), group_ids, num_groups)
    mean = total / jnp.maximum(count, jnp.ones((), centred.dtype))
    against_peers = jnp.where(count[group_ids] > zero, centred - mean[group_ids], zero)
    return jnp.where(keeps_reward, centred, against_peers)


def centre(
    table: TrajectoryTable, *, normalize: bool
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Subtract the reward of each group's first voter, on the host.

    Rewards near 1e8 then keep their differences, and those of a constant group are exact zeros,
    whatever precision the mean is taken in.

    Args:
      table: the N trajectories.
      normalize: False keeps every reward.

    Returns:
      [N] float64 centred rewards, 0.0 for a trajectory that neither votes nor trains; and [N]
      bool, True where that is the advantage already: a group given with one trajectory has no
      baseline.
    """
    kept: NDArray[np.bool_] = (table.group_sizes[table.group] == 1) | (not normalize)
    first = np.zeros(len(table.group_sizes))
    voters = np.flatnonzero(table.votes)[::-1]
    first[table.group[voters]] = table.rewards[voters]  # of equal indices the last one stays
    live = table.votes | table.trains
    with np.errstate(over="ignore"):
        centred = np.where(kept, table.rewards, table.rewards - first[table.group])
    return np.where(live, centred, 0.0), kept | ~live
