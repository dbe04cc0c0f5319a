"""Packing: shapes, widths, given advantages, and laws that a batch must keep."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generators import random_groups

from evsys_jax import batch as batch_module
from evsys_jax import reference
from evsys_jax.batch import pack
from evsys_jax.data_processing import assemble_training_data, compute_advantages
from evsys_jax.plans import one_ahead
from evsys_jax.ragged import ragged_rows
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def group_of(*lengths, reward=1.0):
    """One group, one trajectory per length; each turn has a prompt of one token."""
    return TrajectoryGroup(
        [
            Trajectory([Turn([1], [5] * length, [-1.0] * length)], reward * n)
            for n, length in enumerate(lengths)
        ]
    )


@pytest.mark.parametrize("pad", [0, 2, 7])
def test_padding_is_known_by_length_not_by_token(pad):
    group = TrajectoryGroup(
        [
            Trajectory([Turn([1], [5, 2], [-1.0, -1.0])], 1.0),
            Trajectory([Turn([2, 1], [7, 7, 7], [-1.0, -1.0, -1.0])], 0.0),
        ]
    )
    batch = pack([group], width=6, pad_token=pad)
    live = np.asarray(batch.mask)
    targets = np.asarray(batch.target_tokens)
    assert targets[0][live[0]].tolist() == [5, 2]
    assert targets[1][live[1]].tolist() == [7, 7, 7]
    assert live.sum() == 5
    assert np.asarray(batch.input_tokens)[0, 2:].tolist() == [pad] * 4


@pytest.mark.parametrize("seed", range(5))
def test_pad_value_and_width_change_nothing_else(seed):
    groups = random_groups(seed)
    one, other = pack(groups), pack(groups, pad_token=9, width=1024)
    width = one.shape[1]
    for name in ("logprobs", "advantages", "mask", "positions", "segment_ids"):
        wide = np.asarray(getattr(other, name))
        np.testing.assert_array_equal(wide[:, :width], getattr(one, name), err_msg=name)
        assert not wide[:, width:].any()


def test_a_row_that_is_too_long_is_named():
    with pytest.raises(
        ValueError, match=r"row 2 \(group 0, trajectory 2, turn 0\).* 9 .*> width 8"
    ):
        pack([group_of(5, 3, 9)], width=8)
    assert pack([group_of(5, 3, 8)], width=8).shape == (8, 8)
    with pytest.raises(ValueError, match="width=0"):
        pack([group_of(1)], width=0)


@pytest.mark.parametrize("groups", [[], [TrajectoryGroup([])], [group_of(0, 0)]])
def test_nothing_to_train_on_is_an_empty_batch(groups):
    batch = pack(groups)
    assert not np.asarray(batch.mask).any()
    assert not np.asarray(batch.segment_lengths).any()


def test_a_batch_is_a_pytree_that_comes_back():
    batch = pack([group_of(2, 3)])
    leaves, structure = jax.tree.flatten(batch)
    again = jax.tree.unflatten(structure, leaves)
    assert all(a is b for a, b in zip(jax.tree.leaves(again), leaves, strict=True))
    doubled = jax.jit(lambda b: jax.tree.map(lambda x: x, b))(batch)
    np.testing.assert_array_equal(doubled.logprobs, batch.logprobs)


def test_dtypes():
    batch = pack([group_of(2, 3)])
    floats, flags = ("logprobs", "advantages"), ("mask",)
    for name in batch.__dataclass_fields__:
        if name != "wire_mask":
            wanted = jnp.float32 if name in floats else bool if name in flags else jnp.int32
            assert getattr(batch, name).dtype == wanted, name


def test_advantages_may_be_given_per_trajectory():
    batch = pack([group_of(1, 2), group_of(1)], advantages=[[0.25, -2.0], [4.0]])
    assert np.asarray(batch.advantages).max(axis=1)[:3].tolist() == [0.25, 0.0, 4.0]
    assert np.asarray(batch.advantages).min(axis=1)[1] == -2.0
    with pytest.raises(ValueError, match="group 0: 2 trajectories but 1 advantages"):
        pack([group_of(1, 2), group_of(1)], advantages=[[0.25], [4.0]])
    with pytest.raises(ValueError, match="2 groups but 0 lists"):
        pack([group_of(1, 2), group_of(1)], advantages=[])


def test_advantages_may_be_given_per_position():
    groups = [group_of(2, 1)]
    batch = pack(groups, advantages=[np.array([1.0, 2.0]), jnp.array([3.0])])
    assert np.asarray(batch.advantages)[:2, :2].tolist() == [[1, 2], [3, 0]]
    with pytest.raises(ValueError, match=r"row 1: 1 positions but advantages of shape \(2,\)"):
        pack(groups, advantages=[np.ones(2), np.ones(2)])
    with pytest.raises(ValueError, match="2 rows but 1 arrays"):
        pack(groups, advantages=[np.ones(3)])
    with pytest.raises(ValueError, match=r"row 0: advantages\[1\]"):
        pack(groups, advantages=[np.array([1.0, np.nan]), np.ones(1)])


def test_positional_advantages_are_zero_on_the_prompt():
    group = TrajectoryGroup([Trajectory([Turn([1, 2, 3], [4], [-1.0])])])
    batch = pack([group], advantages=[np.array([7.0, 7.0, 7.0])])
    assert np.asarray(batch.advantages)[0, :3].tolist() == [0, 0, 7]


def test_arrays_of_advantages_that_could_be_either_are_refused():
    masked = Trajectory([], 0.0, trains=False)
    group = TrajectoryGroup([masked, Trajectory([Turn([1], [2, 3], [-1.0, -1.0])])])
    with pytest.raises(ValueError, match="fit the rows and the groups alike"):
        pack([group], advantages=[np.array([9.0, 1.0])])
    assert np.asarray(pack([group], advantages=[[9.0, 1.0]]).advantages)[0, :2].tolist() == [1, 1]
    datums, _ = assemble_training_data([group], [np.array([9.0, 1.0])])
    assert datums[0].loss_fn_inputs["advantages"].tolist() == [1.0, 1.0]


def test_numbers_per_trajectory_may_come_as_arrays():
    batch = pack([group_of(1, 2, 3)], advantages=np.array([[1.0, 2.0, 3.0]]))
    assert np.asarray(batch.advantages).max(axis=1)[:3].tolist() == [1, 2, 3]


def test_advantages_of_those_who_do_not_train_are_not_looked_at():
    group = TrajectoryGroup(
        [Trajectory([], 0.0, trains=False), Trajectory([Turn([1], [2], [-1.0])])]
    )
    assert pack([group], advantages=[[None, 1.0]]).advantages[0, 0] == 1


def test_rewards_that_float32_cannot_hold_are_named():
    with pytest.raises(ValueError, match="group 0, trajectory 0: the rewards of the group give"):
        pack([group_of(1, 1, reward=1e39)])
    assert float(np.asarray(pack([group_of(1, 1, reward=1.2e38)]).advantages).max()) > 5e37
    mute = TrajectoryGroup([Trajectory([Turn([1], [2], [-1.0])]), Trajectory([], 1e39)])
    mute.trajectories[1].trains = False
    with pytest.raises(ValueError, match="group 0, trajectory 0"):
        pack([mute])
    tiny = [Trajectory([], 0.0), Trajectory([], 1e-45), Trajectory([Turn([1], [2], [-1.0])], 1.0)]
    tiny[2].votes = False
    with pytest.raises(ValueError, match="group 0, trajectory 2"):
        pack([TrajectoryGroup(tiny)], scale="group_std")


def test_advantages_that_overflow_double_precision_are_named():
    group = TrajectoryGroup([Trajectory([], 1.7e308), Trajectory([], -1.7e308)])
    for compute in (compute_advantages, reference.compute_advantages):
        with pytest.raises(ValueError, match="group 0, trajectory 0: advantage"):
            compute([group])


@pytest.mark.parametrize("pad_token", [-1, 2**31])
def test_a_pad_token_is_a_token(pad_token):
    with pytest.raises(ValueError, match="pad_token="):
        pack([group_of(1)], pad_token=pad_token)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_kernels_run_without_jit(layout):
    groups = random_groups(2)
    jitted = pack(groups, layout=layout, width=64)
    with jax.disable_jit():
        plain = pack(groups, layout=layout, width=64)
    for one, other in zip(jax.tree.leaves(jitted), jax.tree.leaves(plain), strict=True):
        np.testing.assert_array_equal(one, other)


def test_occupancy():
    counts = pack([group_of(*[40] * 9)], layout="packed", width=128).occupancy()
    assert counts == {"rows": 3, "segments": 9, "positions": 360, "share": 360 / 384}
    assert pack([]).occupancy()["share"] == 0.0


def test_a_subset_of_rows_keeps_the_baseline_of_its_group():
    groups = [group_of(1, 2, 3), group_of(2, 2)]
    whole = pack(groups)
    rows = ragged_rows(groups)
    part = pack(rows.take([4, 1]))
    for b, r in enumerate([4, 1]):
        np.testing.assert_array_equal(part.advantages[b], whole.advantages[r])
        np.testing.assert_array_equal(part.target_tokens[b], whole.target_tokens[r])
    assert part.segment_group[:2, 0].tolist() == [1, 0]


def test_constant_groups_can_be_left_out():
    groups = [group_of(1, 2, reward=0.0), group_of(1, 2), group_of(3, reward=0.0)]
    rows = ragged_rows(groups, drop_constant=True)
    assert rows.group.tolist() == [1, 1, 2]  # a group of one has no baseline and stays
    assert rows.account.dropped == {"constant_group": 3}


def test_a_stream_of_batches_compiles_no_more_programs_than_buckets():
    batch_module._pack.clear_cache()
    widths = range(100, 150)
    for width in widths:
        pack([group_of(width, width // 2)])
    assert batch_module._pack._cache_size() <= 2  # 128 and 256 positions


def test_shapes_are_powers_of_two():
    assert pack([group_of(*[40] * 9)]).shape == (16, 64)
    assert pack([group_of(33)]).shape == (8, 64)
    assert pack([group_of(32)]).shape == (8, 32)


def test_x64_mode_of_the_caller_changes_nothing():
    groups = random_groups(11)
    plain = pack(groups)
    with jax.enable_x64(True):
        wide = pack(groups)
    for a, b in zip(jax.tree.leaves(plain), jax.tree.leaves(wide), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def test_the_next_item_is_asked_for_before_one_is_handed_out():
    asked = []

    def items():
        for i in range(3):
            asked.append(i)
            yield i

    seen = [(item, len(asked)) for item in one_ahead(items())]
    assert seen == [(0, 2), (1, 3), (2, 3)]
    assert list(one_ahead([])) == []
