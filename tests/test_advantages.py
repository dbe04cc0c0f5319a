"""The baseline kernel on [N] trajectories, eager and jitted."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from evsys_jax.advantages import centre, group_advantages
from evsys_jax.ragged import trajectory_table
from evsys_jax.rollouts import Trajectory, TrajectoryGroup


def kernel(run, centred, votes, ids, kept=None, dtype=jnp.float32):
    kept = [False] * len(centred) if kept is None else kept
    return run(group_advantages)(
        jnp.array(centred, dtype),
        jnp.array(votes, bool),
        jnp.array(ids, jnp.int32),
        jnp.array(kept, bool),
    )


def test_group_ids_in_any_order(run):
    out = kernel(run, [1, 10, 3, 20], [True] * 4, [0, 1, 0, 1])
    assert out.tolist() == [-1, -5, 1, 5]


def test_ragged_groups_and_filler(run):
    out = kernel(run, [-4, -6, -8, -2, -4, 0], [1, 1, 1, 1, 1, 0], [0, 0, 0, 1, 1, 2])
    assert out.tolist() == [2, 0, -2, 1, -1, 0]


def test_only_voters_count(run):
    out = kernel(run, [1, 0, 7], [1, 1, 0], [0, 0, 0])
    assert out.tolist() == [0.5, -0.5, 6.5]
    assert kernel(run, [1, 2], [0, 0], [0, 0]).tolist() == [0, 0]


def test_kept_rewards_have_no_baseline(run):
    assert kernel(run, [0.5, 3, 4], [1, 1, 1], [0, 1, 1], [1, 0, 0]).tolist() == [0.5, -0.5, 0.5]


def test_double_precision_where_it_is_given(run):
    with jax.enable_x64(True):
        out = kernel(run, [0.1, 0.2, 0.4], [1] * 3, [0] * 3, dtype=jnp.float64)
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, np.array([0.1, 0.2, 0.4]) - 0.7 / 3, atol=1e-16)


def test_broken_contracts_are_assertion_errors(run):
    with pytest.raises(AssertionError):
        kernel(run, [1, 2, 3], [1, 1], [0, 0, 0])


def table_of(*groups):
    return trajectory_table(
        [TrajectoryGroup([Trajectory([], reward) for reward in group]) for group in groups]
    )


def test_centring_keeps_small_differences_and_exact_zeros():
    centred, kept = centre(table_of([1e8, 1e8 + 1], [0.95] * 3, [0.7]), normalize=True)
    assert centred.tolist() == [0, 1, 0, 0, 0, 0.7]
    assert kept.tolist() == [False] * 5 + [True]


def test_without_normalization_every_reward_is_kept():
    centred, kept = centre(table_of([1.0, 3.0]), normalize=False)
    assert centred.tolist() == [1, 3]
    assert kept.all()
