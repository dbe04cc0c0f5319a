"""The baseline kernel on [N] trajectories, eager and jitted."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generators import random_groups
from hypothesis import given
from hypothesis import strategies as st

from evsys_jax import reference
from evsys_jax.advantage_inputs import trajectory_advantages
from evsys_jax.advantages import Rewards, centre, group_advantages
from evsys_jax.batch import pack
from evsys_jax.rollouts import Trajectory, TrajectoryGroup
from evsys_jax.trajectories import trajectory_table


def kernel(run, rewards, votes, ids, kept=None, dtype=jnp.float32, **options):
    inputs = Rewards(
        rewards=jnp.array(rewards, dtype),
        centred=jnp.array(rewards, dtype),
        votes=jnp.array(votes, bool),
        group_ids=jnp.array(ids, jnp.int32),
        kept=jnp.array([False] * len(rewards) if kept is None else kept, bool),
    )
    return run(partial(group_advantages, **options))(inputs)


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


def test_leave_one_out_compares_with_the_others(run):
    out = kernel(run, [1, 2, 6, 9], [1, 1, 1, 0], [0] * 4, baseline="leave_one_out")
    assert out.tolist() == [1 - 4, 2 - 3.5, 6 - 1.5, 9 - 3]
    assert kernel(run, [5, 5], [1, 0], [0, 1], baseline="leave_one_out").tolist() == [0, 0]


@pytest.mark.parametrize("baseline", ["mean", "leave_one_out", "none"])
@pytest.mark.parametrize("scale", ["group_std", "batch_std"])
def test_equal_rewards_do_not_explode(baseline, scale):
    group = TrajectoryGroup([Trajectory([], 0.95) for _ in range(7)])
    options = {"baseline": baseline, "scale": scale}
    out = trajectory_advantages(trajectory_table([group]), **options)
    assert out.tolist() == [0.95 if baseline == "none" else 0.0] * 7


def test_scales(run):
    rewards, ids = [0, 2, 0, 6], [0, 0, 1, 1]
    assert kernel(run, rewards, [1] * 4, ids, scale="group_std").tolist() == [-1, 1, -1, 1]
    batch = kernel(run, rewards, [1] * 4, ids, scale="batch_std")
    np.testing.assert_allclose(batch, np.array([-1, 1, -3, 3]) / np.sqrt(5), rtol=1e-6)


def test_broken_contracts_are_assertion_errors(run):
    with pytest.raises(AssertionError):
        kernel(run, [1, 2, 3], [1, 1], [0, 0, 0])


@given(
    seed=st.integers(0, 2**32 - 1),
    baseline=st.sampled_from(["mean", "leave_one_out", "none"]),
    scale=st.sampled_from(["none", "group_std", "batch_std"]),
)
def test_every_estimator_agrees_with_the_reference(seed, baseline, scale):
    groups = random_groups(seed)
    options = {"baseline": baseline, "scale": scale}
    wanted = [a for row in reference.compute_advantages(groups, **options) for a in row]
    actual = trajectory_advantages(trajectory_table(groups), **options)
    # Rewards near 1e8 carry 1e-8 of noise into a deviation of order one.
    np.testing.assert_allclose(actual, wanted, rtol=1e-9, atol=1e-12)
    batch = pack(groups, **options)
    rows = reference.training_rows(groups, reference.compute_advantages(groups, **options))
    for b, row in enumerate(rows):
        np.testing.assert_allclose(
            np.asarray(batch.advantages)[b, : len(row.mask)], row.advantages, rtol=1e-6
        )


def table_of(*groups):
    return trajectory_table(
        [TrajectoryGroup([Trajectory([], reward) for reward in group]) for group in groups]
    )


def test_centring_keeps_small_differences_and_exact_zeros():
    inputs = centre(table_of([1e8, 1e8 + 1], [0.95] * 3, [0.7]))
    assert inputs.centred.tolist() == [0, 1, 0, 0, 0, 0]
    assert inputs.kept.tolist() == [False] * 5 + [True]
    assert inputs.rewards.tolist() == [1e8, 1e8 + 1, 0.95, 0.95, 0.95, 0.7]
    assert inputs.group_ids.tolist() == [0, 0, 1, 1, 1, 2]


def test_unknown_estimators_are_refused():
    with pytest.raises(ValueError, match="scale='std'"):
        pack([], scale="std")
    with pytest.raises(ValueError, match="baseline='median'"):
        pack([], baseline="median")
    with pytest.raises(ValueError, match="baseline='median'"):
        reference.compute_advantages([], baseline="median")
