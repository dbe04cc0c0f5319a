"""The table of trajectories: what rows and baselines need to know about each rollout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evsys_jax import checks


@dataclass(frozen=True, eq=False)
class TrajectoryTable:
    """What rows need to know about the N trajectories of G groups. Numpy, on the host.

    Args:
      group: [N] int32, the group of each trajectory.
      place: [N] int32, its place in that group.
      rewards: [N] float64; 0.0 where the trajectory neither votes nor trains.
      votes: [N] bool, the reward enters the baseline.
      trains: [N] bool, the tokens yield rows.
      group_sizes: [G] int32, trajectories in each group as it was given.
      rollout_ids: [N] texts from `metadata["rollout_id"]`, "" where there is none.
    """

    group: NDArray[np.int32]
    place: NDArray[np.int32]
    rewards: NDArray[np.float64]
    votes: NDArray[np.bool_]
    trains: NDArray[np.bool_]
    group_sizes: NDArray[np.int32]
    rollout_ids: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.rewards)


def trajectory_table(groups: Sequence[Any]) -> TrajectoryTable:
    """Read what the rows need to know about their trajectories.

    Raises:
      ValueError: a reward that votes or trains is not a finite number.
    """
    group, place, rewards, votes, trains, ids = [], [], [], [], [], []
    for g, n, trajectory, where in checks.members(groups):
        group.append(g)
        place.append(n)
        votes.append(checks.votes(trajectory))
        trains.append(checks.trains(trajectory))
        live = votes[-1] or trains[-1]
        rewards.append(checks.check_reward(trajectory.reward, where) if live else 0.0)
        ids.append(_metadata(trajectory, "rollout_id"))
    return TrajectoryTable(
        group=np.array(group, np.int32),
        place=np.array(place, np.int32),
        rewards=np.array(rewards, np.float64),
        votes=np.array(votes, bool),
        trains=np.array(trains, bool),
        group_sizes=np.array([len(group.trajectories) for group in groups], np.int32),
        rollout_ids=tuple(ids),
    )


def constant_groups(table: TrajectoryTable) -> NDArray[np.bool_]:
    """Tell for each group whether all its members that vote or train have one reward.

    Returns:
      [G] bool; False for a group given with one trajectory, which has no baseline.
    """
    live = table.votes | table.trains
    low, high = np.full(len(table.group_sizes), np.inf), np.full(len(table.group_sizes), -np.inf)
    np.minimum.at(low, table.group[live], table.rewards[live])
    np.maximum.at(high, table.group[live], table.rewards[live])
    constant: NDArray[np.bool_] = (low == high) & (table.group_sizes > 1)
    return constant


def mask_reason(trajectory: Any) -> str:
    """Return why a trajectory does not train, as far as its metadata say."""
    return _metadata(trajectory, "mask_reason") or "not_training"


def _metadata(trajectory: Any, key: str) -> str:
    metadata = getattr(trajectory, "metadata", None)
    value = metadata.get(key) if isinstance(metadata, dict | Mapping) else None
    return "" if value is None else str(value)
