"""Seeded rollouts of every shape, for tests that hold the arrays to the reference."""

from __future__ import annotations

import numpy as np

from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def random_groups(seed: int, *, arrays: bool | None = None, hostile: bool = True):
    """Make groups with empty, single, constant, masked and non-voting members.

    Args:
      seed: the same seed gives the same groups.
      arrays: token fields as arrays, as lists, or (None) some of each.
      hostile: masked members carry rewards and tokens that would be errors if anyone looked.
    """
    rng = np.random.default_rng(seed)
    return [_group(rng, arrays, hostile) for _ in range(rng.integers(0, 6))]


def _group(rng, arrays, hostile):
    constant = rng.random() < 0.2
    reward = float(rng.choice([0.0, 0.1, 0.95, 1e8]))
    members = []
    for _ in range(rng.choice([0, 1, 2, 3, 5], p=[0.05, 0.15, 0.25, 0.25, 0.3])):
        value = reward if constant else reward + float(rng.normal())
        kind = rng.choice(["full", "masked", "mute", "unheard"], p=[0.7, 0.15, 0.1, 0.05])
        trajectory = Trajectory(_turns(rng, arrays), value)
        if kind == "masked":
            trajectory.votes = trajectory.trains = False
            if hostile:
                trajectory.reward = float("nan")
                trajectory.turns = [*trajectory.turns, Turn([-1], [2**40], [float("inf")])]
        elif kind == "mute":
            trajectory.votes = False
        elif kind == "unheard":
            trajectory.trains = False
        members.append(trajectory)
    return TrajectoryGroup(members)


def _turns(rng, arrays):
    turns, history = [], []
    for _ in range(rng.integers(0, 5)):
        if rng.random() < 0.2:
            history = []  # a context that starts anew: no extension of what came before
        prompt = history + rng.integers(0, 50, rng.integers(0, 6)).tolist()
        completion = rng.integers(0, 50, rng.integers(0, 6)).tolist()
        logprobs = (-rng.exponential(size=len(completion))).tolist()
        history = prompt + completion
        turns.append(_turn(rng, arrays, prompt, completion, logprobs))
    return turns


def _turn(rng, arrays, prompt, completion, logprobs):
    if arrays if arrays is not None else rng.random() < 0.5:
        dtype = rng.choice([np.int32, np.int64, np.uint32])
        floats = rng.choice([np.float32, np.float64])
        return Turn(
            np.array(prompt, dtype), np.array(completion, dtype), np.array(logprobs, floats)
        )
    return Turn(prompt, completion, logprobs)
