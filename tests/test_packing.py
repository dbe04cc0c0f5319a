"""The packed layout and micro-batches: every sequence once, whole, and nothing across a seam."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from generators import random_groups
from hypothesis import given, settings
from hypothesis import strategies as st

from evsys_jax import batch as batch_module
from evsys_jax.batch import attention_mask, microbatches, pack
from evsys_jax.datums import unpack
from evsys_jax.plans import first_fit_decreasing, plan_slots
from evsys_jax.ragged import ragged_rows
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn

seeds = st.integers(0, 2**32 - 1)


def group_of(*lengths):
    """One trajectory per length, whose row has that many positions."""
    return TrajectoryGroup(
        [
            Trajectory([Turn([n], list(range(length)), [-1.0 - n] * length)], float(n))
            for n, length in enumerate(lengths)
        ]
    )


def contents(batch):
    """List what every segment holds, in the order of the rows."""
    found = {}
    for b, s in zip(*np.nonzero(np.asarray(batch.segment_lengths)), strict=True):
        own = np.asarray(batch.segment_ids)[b] == s + 1
        assert own.sum() == batch.segment_lengths[b, s]
        assert np.asarray(batch.positions)[b, own].tolist() == list(range(own.sum()))
        fields = ("input_tokens", "target_tokens", "logprobs", "advantages", "mask")
        found[int(batch.segment_row[b, s])] = [
            *(np.asarray(getattr(batch, name))[b, own].tolist() for name in fields),
            int(batch.segment_group[b, s]),
            int(batch.segment_trajectory[b, s]),
            int(batch.segment_turn[b, s]),
        ]
    return [found[r] for r in sorted(found)]


def test_each_sequence_is_shifted_before_it_is_laid_down():
    groups = [
        TrajectoryGroup(
            [Trajectory([Turn([1], [2, 3], [-1.0, -1.0])]), Trajectory([Turn([4], [5], [-1.0])])]
        )
    ]
    batch = pack(groups, layout="packed", width=4)
    assert batch.input_tokens[0, :3].tolist() == [1, 2, 4]
    assert batch.target_tokens[0, :3].tolist() == [2, 3, 5]
    assert batch.segment_ids[0].tolist() == [1, 1, 2, 0]
    assert batch.positions[0].tolist() == [0, 1, 0, 0]


@settings(max_examples=20)  # each may compile a shape of its own
@given(seed=seeds, rows=st.sampled_from(["turns", "merged"]), extra=st.integers(0, 40))
def test_packed_and_padded_hold_the_same(seed, rows, extra):
    groups = random_groups(seed)
    padded = pack(groups, rows=rows)
    longest = max(1, int(np.asarray(padded.segment_lengths).max()))
    packed = pack(groups, rows=rows, layout="packed", width=longest + extra)
    assert contents(packed) == contents(padded)
    padding = np.asarray(packed.segment_ids) == 0
    for name in ("logprobs", "advantages", "mask", "positions"):
        assert not np.asarray(getattr(packed, name))[padding].any()


@pytest.mark.parametrize("seed", range(4))
def test_unpack_gives_the_rows_in_their_order(seed):
    groups = random_groups(seed)
    padded, places = unpack(pack(groups))
    packed, again = unpack(pack(groups, layout="packed", width=80))
    assert again == places
    for one, other in zip(padded, packed, strict=True):
        assert one.model_input == other.model_input
        for key, tensor in one.loss_fn_inputs.items():
            assert tensor.tolist() == other.loss_fn_inputs[key].tolist()


def test_an_exact_fit_fits_and_one_more_is_named():
    batch = pack([group_of(5, 3, 8)], layout="packed", width=8)
    assert np.asarray(batch.segment_lengths).sum(axis=1).tolist()[:2] == [8, 8]
    with pytest.raises(ValueError, match=r"row 2 .*trajectory 2, .*: 9 positions > width 8"):
        pack([group_of(5, 3, 9)], layout="packed", width=8)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_overlong_rows_can_be_masked_and_are_counted(layout, caplog):
    groups = [group_of(5, 9, 3)]
    batch = pack(groups, layout=layout, width=8, overlong="mask")
    assert int(np.asarray(batch.mask).sum()) == 8
    assert sorted(np.asarray(batch.segment_row)[np.asarray(batch.segment_row) >= 0]) == [0, 2]
    assert "1 rows are longer than width 8" in caplog.text
    rows = ragged_rows(groups).without_overlong(8)
    assert rows.account.masked == {"overlong": 9}
    assert rows.account.balanced
    assert rows.account.trained == 8
    alone = pack(rows, width=8)
    assert alone.advantages[0, 0] == -1.0  # the masked sibling still votes


def test_five_hundred_mixed_rows_fill_their_batch():
    rng = np.random.default_rng(0)
    width = 2048
    sizes = np.clip(rng.lognormal(np.log(width / 8), 0.8, 500).astype(int), 1, width)
    slots = plan_slots(sizes, width, "packed")
    assert sorted(slots[slots >= 0]) == list(range(500))
    assert sizes.sum() / (len(slots) * width) >= 0.95
    batch = pack([group_of(*sizes)], layout="packed", width=width)
    counts = batch.occupancy()
    assert (counts["segments"], counts["positions"]) == (500, sizes.sum())
    assert counts["share"] >= 0.95


@given(sizes=st.lists(st.integers(1, 50), max_size=60), capacity=st.integers(50, 80))
def test_the_plan_is_plain_first_fit_decreasing(sizes, capacity):
    plain = []
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        for bin_ in plain:
            if sum(sizes[i] for i in bin_) + sizes[item] <= capacity:
                bin_.append(item)
                break
        else:
            plain.append([item])
    assert first_fit_decreasing(np.array(sizes, int), capacity) == plain


def test_packed_advantages_per_position():
    groups = [group_of(2, 1)]
    given_ = [np.array([1.0, 2.0]), np.array([3.0])]
    batch = pack(groups, layout="packed", width=4, advantages=given_)
    by_row = {tuple(entry[3]) for entry in contents(batch)}
    assert by_row == {(1.0, 2.0), (3.0,)}


def test_hostile_neighbours_do_not_reach_across_a_seam():
    groups = [group_of(3, 3, 3)]
    calm = [np.ones(3), np.ones(3), np.ones(3)]
    loud = [np.ones(3), np.full(3, 1e30), np.ones(3)]
    one = contents(pack(groups, layout="packed", width=16, advantages=calm))
    other = contents(pack(groups, layout="packed", width=16, advantages=loud))
    assert [one[0], one[2]] == [other[0], other[2]]


@pytest.mark.parametrize("layout", ["padded", "packed"])
@settings(max_examples=20)
@given(seed=seeds)
def test_microbatches_hold_every_row_once_in_one_shape(layout, seed):
    rows = ragged_rows(random_groups(seed))
    whole = contents(pack(rows))
    batches = list(microbatches(rows, max_tokens=256, layout=layout))
    assert len({batch.shape for batch in batches}) <= 1
    assert all(b * t <= 256 for b, t in (batch.shape for batch in batches))
    seen = sorted(r for batch in batches for r in np.asarray(batch.segment_row).ravel() if r >= 0)
    assert seen == list(range(len(rows)))
    assert sorted(map(str, (c for batch in batches for c in contents(batch)))) == sorted(
        map(str, whole)
    )


def test_a_budget_below_one_row_is_an_error():
    with pytest.raises(ValueError, match="max_tokens=31 holds no batch row of 32"):
        next(microbatches(ragged_rows([group_of(4)]), max_tokens=31))


def test_packed_batches_of_a_stream_share_programs():
    batch_module._pack.clear_cache()
    rng = np.random.default_rng(1)
    for _ in range(20):
        pack([group_of(*rng.integers(1, 60, 40))], layout="packed", width=256)
    assert batch_module._pack._cache_size() <= 3  # batch rows 8 or 16, segments 8 or 16


def test_microbatches_of_a_stream_share_programs():
    batch_module._pack.clear_cache()
    for count in range(50, 70):
        list(microbatches(ragged_rows([group_of(*[20] * count)]), max_tokens=100 * 32))
    assert batch_module._pack._cache_size() <= 2  # 64 or 100 batch rows


def test_attention_stays_inside_its_segment(run):
    mask = run(attention_mask)(jnp.array([[1, 1, 2, 2, 0, 0], [0] * 6], jnp.int32))
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]
    scores = jnp.where(mask, jnp.zeros((2, 6, 6)), -jnp.inf)
    assert bool(jnp.isfinite(jax.nn.softmax(scores, axis=-1)).all())


def test_options_are_checked():
    with pytest.raises(ValueError, match="layout='dense'"):
        pack([], layout="dense")
    with pytest.raises(ValueError, match="overlong='cut'"):
        pack([], overlong="cut")
