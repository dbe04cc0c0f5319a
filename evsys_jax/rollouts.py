"""Rollout types: what a sampler hands over, before it becomes arrays.

Three plain dataclasses. Anything with the same attributes serves in their place, so a
trainer's own rollout objects need no conversion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Tokens: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]
Floats: TypeAlias = Sequence[float] | NDArray[np.floating[Any]]


@dataclass(eq=False)
class Turn:
    """One model call: the whole context that the policy saw, and what it wrote.

    Args:
      prompt_tokens: [P] ints in [0, 2**31), list or 1-D array. The whole prompt, not only
        what is new since the last turn.
      completion_tokens: [C] ints in [0, 2**31), list or 1-D array. The sampled tokens.
      logprobs: [C] floats, natural logarithm, list or 1-D array. The sampler's log-probability
        of each completion token.
      text: the completion as text, for people; never used in arithmetic.
    """

    prompt_tokens: Tokens
    completion_tokens: Tokens
    logprobs: Floats = field(default_factory=list)
    text: str = ""


@dataclass(eq=False)
class Trajectory:
    """One rollout: its turns in order and the reward it earned.

    Args:
      turns: the model calls, in order.
      reward: a finite number. May be anything where neither `votes` nor `trains` is set.
      metadata: free; `rollout_id` and `mask_reason` are written by `collect`.
      votes: the reward enters the baseline of the group.
      trains: the tokens yield rows.
    """

    turns: Sequence[Turn]
    reward: float = 0.0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    votes: bool = True
    trains: bool = True


@dataclass(eq=False)
class TrajectoryGroup:
    """The rollouts of one task, which are compared with each other.

    Args:
      trajectories: the siblings, in order. May be empty.
    """

    trajectories: Sequence[Trajectory]

    @property
    def rewards(self) -> list[float]:
        """The reward of each trajectory, in order, as given."""
        return [trajectory.reward for trajectory in self.trajectories]
