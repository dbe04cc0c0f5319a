"""Each loss against a float64 loop; hostile values; the means."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import drawn_rows, groups_of, learner_of, one_row, packed_batch, poison

from evsys_jax import losses
from evsys_jax.batch import pack
from evsys_jax.ragged import ragged_rows
from evsys_jax.reductions import ReducedBatch, count_live, reduce_by
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn

KEYWORDS = {
    "importance_sampling": {},
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.15},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.3},
    "dro": {"beta": 0.3},
    "gspo": {"clip_low_threshold": 0.95, "clip_high_threshold": 1.1},
}
NAMES = list(KEYWORDS)
UNITS = ["token", "sequence", "trajectory", "group"]


def call(name):
    return lambda learner, batch: getattr(losses, name)(learner, batch, **KEYWORDS[name])


def gradient(name):
    return lambda learner, batch: jax.grad(call(name), has_aux=True)(learner, batch)[0]


def batches():
    rows = drawn_rows(3)
    yield "padded", pack(rows.take(np.arange(8)), width=32)
    yield "merged", pack(groups_of(4, groups=3), rows="merged", width=32)
    yield "packed", packed_batch(5)


def by_hand(name, learner, batch):
    """Loop over live tokens in float64; return the terms and their gradient."""
    options = KEYWORDS[name]
    low, high = options.get("clip_low_threshold"), options.get("clip_high_threshold")
    value, slope = np.zeros(batch.shape), np.zeros(batch.shape)
    mask, segments = np.asarray(batch.mask), np.asarray(batch.segment_ids)
    sampler = np.asarray(batch.logprobs)
    for b, t in np.argwhere(mask):
        own, q = float(learner[b, t]), float(sampler[b, t])
        a = float(batch.advantages[b, t])
        ratio = math.exp(own - q)
        if name == "gspo":
            logs = [
                float(learner[b, u]) - float(sampler[b, u])
                for u in range(batch.shape[1])
                if mask[b, u] and segments[b, u] == segments[b, t]
            ]
            ratio = math.exp(sum(logs) / len(logs))
        if name == "importance_sampling":
            value[b, t], slope[b, t] = -ratio * a, -ratio * a
        elif name in ("ppo", "gspo"):
            clipped = min(max(ratio, low), high)
            value[b, t] = -min(ratio * a, clipped * a)
            slope[b, t] = -ratio * a if ratio * a <= clipped * a else 0.0
        elif name == "cispo":
            clipped = min(max(ratio, low), high)
            value[b, t], slope[b, t] = -clipped * own * a, -clipped * a
        else:
            value[b, t] = -(own * a - 0.5 * options["beta"] * (own - q) ** 2)
            slope[b, t] = -(a - options["beta"] * (own - q))
    return value, slope


@pytest.mark.parametrize("name", NAMES)
def test_loss_equals_float64_loop(name, run):
    both = run(lambda learner, batch: (call(name)(learner, batch), gradient(name)(learner, batch)))
    for label, batch in batches():
        learner = learner_of(batch)
        value, slope = by_hand(name, learner, batch)
        assert np.count_nonzero(value) == np.count_nonzero(batch.mask), label
        hostile = dataclasses.replace(
            batch,
            logprobs=poison(batch.logprobs, batch.mask, (np.inf, np.nan, -np.inf)),
            advantages=poison(batch.advantages, batch.mask, (np.nan, 1.0, np.inf)),
        )
        for given, variant in ((learner, batch), (poison(learner, batch.mask), hostile)):
            (total, per_token), got = both(jnp.asarray(given), variant)
            np.testing.assert_allclose(per_token, value, rtol=2e-5, atol=1e-6, err_msg=label)
            np.testing.assert_allclose(total, value.sum(), rtol=1e-5, atol=1e-5, err_msg=label)
            np.testing.assert_allclose(got, slope, rtol=2e-5, atol=1e-6, err_msg=label)
            assert np.all(np.asarray(per_token)[~np.asarray(batch.mask)] == 0.0)
            assert np.all(np.asarray(got)[~np.asarray(batch.mask)] == 0.0)


def test_clip_bounds_are_reached_in_the_comparison():
    batch = packed_batch(5)
    ratio = np.exp(learner_of(batch) - batch.logprobs)[batch.mask]
    advantages = batch.advantages[batch.mask]
    assert ((ratio > 1.15) & (advantages > 0)).any() and ((ratio < 0.9) & (advantages < 0)).any()
    value, slope = by_hand("gspo", learner_of(batch), batch)
    assert ((value != 0) & (slope == 0)).any()


@pytest.mark.parametrize("name", NAMES)
def test_masked_token_cannot_reach_value_or_gradient(name, run):
    both = run(lambda learner, batch: (call(name)(learner, batch), gradient(name)(learner, batch)))
    slots = [(np.nan, -1.0), (np.inf, -1.0), (-np.inf, -1.0), (-1000.0, 0.0), (0.0, np.nan)]
    for sampler, learner in slots:
        batch = one_row([-1.0, sampler], [1.0, 0.0], [True, False])
        (total, per_token), slope = both(jnp.array([[-1.0, learner]], jnp.float32), batch)
        if name == "importance_sampling":
            assert total == -1.0
        assert np.isfinite(total) and per_token[0, 1] == 0.0
        np.testing.assert_array_equal(slope, [[-1.0, 0.0]])


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_overflow_without_advantage_adds_nothing(name, run):
    batch = one_row([-1000.0], [0.0], [True])
    learner = jnp.zeros((1, 1), jnp.float32)
    assert run(call(name))(learner, batch)[0] == 0.0
    assert run(gradient(name))(learner, batch)[0, 0] == 0.0


def test_overflow_under_a_clip_stays_at_the_bound(run):
    batch = one_row([-1000.0], [1.0], [True])
    learner = jnp.zeros((1, 1), jnp.float32)
    for loss in (
        losses.ppo,
        lambda *a: losses.gspo(*a, clip_low_threshold=0.8, clip_high_threshold=1.2),
    ):
        total, slope = run(jax.value_and_grad(lambda x, b, f=loss: f(x, b)[0]))(learner, batch)
        assert total == np.float32(-1.2) and slope[0, 0] == 0.0
    bounded = dataclasses.replace(batch, advantages=np.full((1, 1), -1.0, np.float32))
    assert run(losses.ppo)(learner, bounded)[0] == np.inf


@pytest.mark.parametrize("name", NAMES)
def test_live_nan_stays_visible(name, run):
    loss = run(call(name))
    clean = one_row([-1.0, -1.0], [0.0, 1.0], [True, True])
    learner = np.full((1, 2), -1.0, np.float32)
    assert np.isfinite(loss(learner, clean)[0])
    for token in (0, 1):
        spoilt = learner.copy()
        spoilt[0, token] = np.nan
        assert np.isnan(loss(spoilt, clean)[0])
        for field in ("logprobs", "advantages"):
            array = np.array(getattr(clean, field))
            array[0, token] = np.nan
            assert np.isnan(loss(learner, dataclasses.replace(clean, **{field: array}))[0])


@pytest.mark.parametrize("name", NAMES)
def test_nothing_to_train_gives_exactly_zero(name, run):
    rows = drawn_rows(2).take(np.arange(8))
    same = dataclasses.replace(rows.table, rewards=np.full(len(rows.table), 0.95))
    constant = dataclasses.replace(rows, table=same)
    masked = pack(rows)
    masked = dataclasses.replace(masked, mask=jnp.zeros_like(masked.mask))
    both = run(jax.value_and_grad(lambda learner, batch: call(name)(learner, batch)[0]))
    # dro's pull acts without an advantage too
    for batch in (masked, pack([]), *([pack(constant)] if name != "dro" else [])):
        total, slope = both(jnp.asarray(learner_of(batch)), batch)
        assert total == 0.0 and not np.any(slope)


@pytest.mark.parametrize("by", [*UNITS, 8])
def test_nothing_to_train_survives_a_reduction(by):
    reduce = jax.jit(lambda batch: reduce_by(batch, by))
    masked = dataclasses.replace(packed_batch(), mask=np.zeros(packed_batch().shape, bool))
    for batch in (masked, pack([])):
        learner = jnp.asarray(learner_of(batch))
        assert losses.dro(learner, reduce(batch), beta=1.0)[0] == 0.0


@pytest.mark.parametrize("name", NAMES)
def test_packing_and_padding_change_nothing(name):
    rows = drawn_rows(6)
    narrow, wide = pack(rows), pack(rows.take(np.arange(len(rows))[::-1]), width=64)
    learner = np.asarray(learner_of(narrow))
    spread = np.zeros(wide.shape, np.float32)
    spread[: len(rows), : narrow.shape[1]] = learner[: len(rows)][::-1]
    loss = jax.jit(call(name))
    total = loss(jnp.asarray(learner), narrow)[0]
    np.testing.assert_allclose(loss(jnp.asarray(spread), wide)[0], total, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shape_or_dtype_is_a_broken_contract(name):
    batch = packed_batch()
    for bad in (
        jnp.zeros(batch.shape[0], jnp.float32),
        jnp.zeros((batch.shape[0], 1), jnp.float32),
        jnp.zeros(batch.shape, jnp.bfloat16),
    ):
        with pytest.raises(AssertionError):
            call(name)(bad, batch)


def mean_by_hand(per_token, batch, by):
    """Loop over units in float64."""
    units = {}
    for b, t in np.argwhere(np.asarray(batch.mask)):
        s = int(batch.segment_ids[b, t]) - 1
        g, n = int(batch.segment_group[b, s]), int(batch.segment_trajectory[b, s])
        key = {"token": (), "sequence": (b, s), "trajectory": (g, n), "group": (g,)}[by]
        units.setdefault(key, []).append(float(per_token[b, t]))
    return sum(sum(unit) / len(unit) for unit in units.values()) / len(units)


@pytest.mark.parametrize("by", UNITS)
def test_reduced_sum_is_the_mean(by):
    reduce = jax.jit(lambda batch, counts: reduce_by(batch, by, counts=counts))
    for _, batch in batches():
        learner = learner_of(batch)
        for counts in (None, count_live(batch)):
            reduced = reduce(batch, counts)
            for name in NAMES:
                want = mean_by_hand(by_hand(name, learner, batch)[0], batch, by)
                got = call(name)(jnp.asarray(learner), reduced)[0]
                np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6, err_msg=name)


def test_the_four_means_differ():
    _, batch = list(batches())[2]
    terms = by_hand("ppo", learner_of(batch), batch)[0]
    assert len({round(mean_by_hand(terms, batch, by), 5) for by in UNITS}) == 4


@pytest.mark.parametrize("name", NAMES)
def test_constant_divides(name, run):
    batch = packed_batch(8)
    learner = jnp.asarray(learner_of(batch))
    total = call(name)(learner, batch)[0]
    halved = run(lambda b: reduce_by(b, 2))(batch)
    np.testing.assert_allclose(call(name)(learner, halved)[0], total / 2, rtol=1e-6)
    twice = reduce_by(halved, jnp.float32(5.0))
    np.testing.assert_allclose(call(name)(learner, twice)[0], total / 10, rtol=1e-6)


@pytest.mark.parametrize("by", UNITS)
@pytest.mark.parametrize("name", ["dro", "gspo"])
def test_microbatches_add_up_to_the_whole(name, by):
    rows = drawn_rows(9, groups=5)
    whole = pack(rows, width=32)
    learner = learner_of(whole)
    step = jax.jit(
        lambda learner, batch, counts: jax.value_and_grad(call(name), has_aux=True)(
            learner, reduce_by(batch, by, counts=counts)
        )
    )
    want, slope = step(jnp.asarray(learner), whole, None)
    parts = [np.arange(i, len(rows), 3) for i in range(3)]  # splits groups and trajectories
    micro = [pack(rows.take(part), width=32) for part in parts]
    for counts in (count_live(rows), count_live(micro)):
        total, pieces = 0.0, np.zeros_like(np.asarray(slope))
        for part, batch in zip(parts, micro, strict=True):
            own = np.zeros(batch.shape, np.float32)
            own[: len(part)] = learner[part]
            value, piece = step(jnp.asarray(own), batch, counts)
            total += float(value[0])
            pieces[part] = piece[: len(part)]
        np.testing.assert_allclose(total, want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(pieces, slope, rtol=1e-5, atol=1e-7)


def test_counts_agree_wherever_they_are_taken():
    rows = ragged_rows(groups_of(11), rows="merged")
    halves = [pack(rows.take(np.arange(i, len(rows), 2))) for i in range(2)]
    want = count_live(rows)
    assert want.tokens == rows.account.trained
    for got in (count_live(pack(rows)), count_live(halves)):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    assert count_live([]).tokens == 0 == count_live(pack([])).tokens


def test_token_mean_over_unequal_microbatches():
    # 100 tokens at loss .5 and 900 at .3: the token mean is .32, not .4.
    sizes, terms = (100, 900), (0.5, 0.3)
    parts = [
        one_row([0.0] * n, [-term] * n, [True] * n) for n, term in zip(sizes, terms, strict=True)
    ]
    counts = count_live(parts)
    for by, want in (("token", 0.32), (1, 320.0)):
        total = sum(
            losses.importance_sampling(
                jnp.zeros(part.shape, jnp.float32), reduce_by(part, by, counts=counts)
            )[0]
            for part in parts
        )
        np.testing.assert_allclose(total, want, rtol=1e-6)


def test_reduction_compiles_once_for_a_stream_of_counts():
    compiled = jax.jit(lambda b, c: reduce_by(b, "trajectory", counts=c).advantages)
    for seed in range(4):
        rows = drawn_rows(seed)
        compiled(pack(rows.take(np.arange(8)), width=32), count_live(rows))
    assert compiled._cache_size() == 1


def test_unknown_unit_is_visible():
    rows = drawn_rows(1, groups=9)
    early = rows.take(np.flatnonzero(rows.group < 2))
    late = pack(rows.take(np.flatnonzero(rows.group == 8)))
    for by in ("trajectory", "group"):
        reduced = reduce_by(late, by, counts=count_live(early))
        assert np.isnan(np.asarray(reduced.advantages)[np.asarray(late.mask)]).all()
    first = count_live(rows.take(np.flatnonzero(rows.trajectory == 0)))
    others = pack(rows.take(np.flatnonzero(rows.trajectory == 1)))
    reduced = reduce_by(others, "trajectory", counts=first)
    assert np.isnan(np.asarray(reduced.advantages)[np.asarray(others.mask)]).all()


@pytest.mark.parametrize("by", [0, -1.0, float("nan"), float("inf"), "tokens"])
def test_bad_reduction_is_named(by):
    with pytest.raises(ValueError, match=r"tokens|divided by"):
        reduce_by(packed_batch(), by)


def test_masked_nan_advantage_does_not_survive_a_reduction():
    batch = packed_batch(2)
    spoilt = dataclasses.replace(batch, advantages=poison(batch.advantages, batch.mask))
    for by in [*UNITS, 3.0]:
        np.testing.assert_array_equal(
            reduce_by(spoilt, by).advantages, reduce_by(batch, by).advantages
        )


def test_reduced_batch_is_a_pytree_with_every_field():
    batch = dataclasses.replace(packed_batch(2), wire_mask=("mask", "float32"))
    reduced = reduce_by(batch, "token")
    again = jax.tree.map(lambda x: x, reduced)
    assert isinstance(again, ReducedBatch) and again.wire_mask == batch.wire_mask
    assert len(jax.tree.leaves(reduced)) == len(jax.tree.leaves(batch)) + 1


@pytest.mark.parametrize("name", ["importance_sampling", "ppo", "cispo", "gspo"])
def test_a_token_that_the_learner_rules_out_weighs_nothing(run, name):
    rows = pack([TrajectoryGroup([Trajectory([Turn([1], [2, 3], [-1.0, -1.0])], 1.0)])], width=2)
    bounds = {"clip_low_threshold": 0.0, "clip_high_threshold": 2.0} if name == "gspo" else {}
    loss = getattr(losses, name)
    learner = jnp.where(rows.mask & (rows.positions == 0), -jnp.inf, -1.0).astype(jnp.float32)
    value, gradient = run(jax.value_and_grad(lambda x: loss(x, rows, **bounds)[0]))(learner)
    assert bool(jnp.isfinite(value))
    assert bool(jnp.isfinite(gradient).all())
