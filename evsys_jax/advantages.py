"""Group baselines: what a rollout earned beyond its siblings.

The kernel takes the N trajectories of a batch together, since a mean needs its whole group. It
runs in the precision of its input; `pack` hands it float64, so that the difference of two rewards
is rounded once, when it becomes a float32 advantage.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import chex
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from evsys_jax.trajectories import TrajectoryTable

Baseline: TypeAlias = Literal["mean", "leave_one_out", "none"]
Scale: TypeAlias = Literal["none", "group_std", "batch_std"]


class Rewards(NamedTuple):
    """The rewards of N trajectories, made ready on the host.

    Args:
      rewards: [N] float; 0 for a trajectory that neither votes nor trains.
      centred: [N] float, rewards less the reward of the group's first voter.
      votes: [N] bool, enters the statistics.
      group_ids: [N] int32 in [0, N).
      kept: [N] bool, has no baseline: the reward is the advantage.
    """

    rewards: jax.Array | NDArray[np.float64]
    centred: jax.Array | NDArray[np.float64]
    votes: jax.Array | NDArray[np.bool_]
    group_ids: jax.Array | NDArray[np.int32]
    kept: jax.Array | NDArray[np.bool_]


def group_advantages(
    inputs: Rewards, *, baseline: Baseline = "mean", scale: Scale = "none"
) -> jax.Array:
    r"""Compare each trajectory with the voters of its group.

    With c the centred rewards and V(g) the voters of group g, n of them,
      mean:           A_i = c_i - 1/n sum_{j in V(g)} c_j
      leave_one_out:  A_i = c_i - 1/(n - 1) sum_{j in V(g), j != i} c_j   (n > 1, i votes)
    and A_i = r_i where the reward is kept. Then A_i is divided by the population deviation of
    the rewards of V(g) (group_std), or of the advantages of all voters (batch_std); a deviation
    of zero leaves it as it is. Sources: GRPO, https://arxiv.org/abs/2402.03300 (mean, group_std);
    RLOO, https://arxiv.org/abs/2402.14740; REINFORCE++, https://arxiv.org/abs/2501.03262
    (batch_std).

    Args:
      inputs: [N] each; see `Rewards`.
      baseline: static. "none" leaves the rewards, as `kept` does for single ones.
      scale: static.

    Returns:
      [N] advantages, of the dtype of the rewards. Where nobody in a group votes, 0.
    """
    rewards, centred, votes, group_ids, kept = (jnp.asarray(x) for x in inputs)
    chex.assert_rank([rewards, centred, votes, group_ids, kept], 1)
    chex.assert_equal_shape([rewards, centred, votes, group_ids, kept])
    chex.assert_type([votes, group_ids, kept], [bool, jnp.int32, bool])
    zero, one = jnp.zeros((), centred.dtype), jnp.ones((), centred.dtype)

    def of_group(values: jax.Array) -> jax.Array:
        voting = jnp.where(votes, values, zero)
        return jax.ops.segment_sum(voting, group_ids, group_ids.shape[0])[group_ids]

    count = of_group(jnp.ones_like(centred))
    beyond = centred - of_group(centred) / jnp.maximum(count, one)
    if baseline == "none":
        advantages = rewards
    else:
        against_peers = beyond
        if baseline == "leave_one_out":
            peers = jnp.maximum(count - one, one)
            against_peers = beyond * jnp.where(votes & (count > one), count / peers, one)
        against_peers = jnp.where(count > zero, against_peers, zero)
        advantages = jnp.where(kept, rewards, against_peers)
    if scale == "none":
        return advantages
    if scale == "group_std":
        variance = of_group(beyond**2) / jnp.maximum(count, one)
    else:
        # From the first voter's on, so that equal advantages have a spread of exactly zero.
        offset = jnp.where(votes, advantages - advantages[jnp.argmax(votes)], zero)
        voters = jnp.maximum(jnp.sum(votes, dtype=centred.dtype), one)
        mean = jnp.sum(offset) / voters
        variance = jnp.sum(jnp.where(votes, offset - mean, zero) ** 2) / voters
    deviation = jnp.sqrt(variance)
    return advantages / jnp.where(deviation > zero, deviation, one)


def centre(table: TrajectoryTable) -> Rewards:
    """Subtract the reward of each group's first voter, on the host, in float64.

    Rewards near 1e8 then keep their differences, and those of a constant group are exact zeros,
    whatever precision the mean is taken in.

    Args:
      table: the N trajectories.

    Returns:
      Rewards ready for `group_advantages`; group ids run from 0 without gaps. The reward is kept
      in a group given with one trajectory.
    """
    first = np.zeros(len(table.group_sizes))
    voters = np.flatnonzero(table.votes)[::-1]
    first[table.group[voters]] = table.rewards[voters]  # of equal indices the last one stays
    live = table.votes | table.trains
    with np.errstate(over="ignore"):
        centred = np.where(live, table.rewards - first[table.group], 0.0)
    return Rewards(
        rewards=np.where(live, table.rewards, 0.0),
        centred=centred,
        votes=table.votes,
        group_ids=np.unique(table.group, return_inverse=True)[1].astype(np.int32),
        kept=(table.group_sizes[table.group] == 1) | ~live,
    )
