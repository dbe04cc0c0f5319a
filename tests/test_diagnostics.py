"""The measurements against float64, on padded, packed and hostile batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from device_cases import drawn_rows, learner_of, one_row, packed_batch, poison

from evsys_jax.batch import pack
from evsys_jax.diagnostics import diagnose, measure, truncated_importance_weights


def by_hand(learner, batch, low=0.8, high=1.2, threshold=2.0):
    """Compress to the live tokens, then float64."""
    mask, ids = np.asarray(batch.mask), np.asarray(batch.segment_ids)
    sampler = np.asarray(batch.logprobs, np.float64)[mask]
    d = np.clip(np.asarray(learner, np.float64)[mask] - sampler, -20, 20)
    r, a = np.exp(d), np.asarray(batch.advantages)[mask]
    return {
        "kl_k1": np.mean(-d),
        "kl_k2": np.mean(d**2 / 2),
        "kl_k3": np.mean(r - 1 - d),
        "entropy": np.mean(-sampler),
        "ratio_min": r.min(),
        "ratio_mean": r.mean(),
        "ratio_max": r.max(),
        "clip_fraction": np.mean((r < low) | (r > high)),
        "clip_active_fraction": np.mean(((r < low) & (a < 0)) | ((r > high) & (a > 0))),
        "effective_sample_size": r.sum() ** 2 / (r**2).sum(),
        "over_threshold_fraction": np.mean(r > threshold),
        "prompt_tokens": np.count_nonzero((ids > 0) & ~mask),
        "sampled_tokens": mask.sum(),
        "live_tokens": mask.sum(),
    }


def check(got, want, rtol=1e-4):
    assert got.keys() == want.keys()
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=rtol, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("batch", [pack(drawn_rows(3)), packed_batch(5)], ids=["padded", "packed"])
def test_measurements_equal_float64(batch):
    learner = learner_of(batch)
    want = by_hand(learner, batch)
    assert 0 < want["clip_active_fraction"] < want["clip_fraction"] < 1
    got = diagnose(learner, batch)
    check(got, want)
    assert all(type(value) is float for value in got.values())
    bounds = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.5, "ratio_threshold": 1.1}
    check(diagnose(learner, batch, **bounds), by_hand(learner, batch, 0.7, 1.5, 1.1))
    check(measure(jnp.asarray(learner), batch), want)
    hostile = dataclasses.replace(
        batch,
        logprobs=poison(batch.logprobs, batch.mask),
        advantages=poison(batch.advantages, batch.mask),
    )
    check(diagnose(poison(learner, batch.mask), hostile), want)


def test_thresholds_do_not_compile_again():
    from evsys_jax.diagnostics import _measure

    batch = packed_batch(5)
    diagnose(learner_of(batch), batch)
    before = _measure._cache_size()
    diagnose(learner_of(batch), batch, clip_low_threshold=0.1, ratio_threshold=9)
    assert _measure._cache_size() == before


def test_absurd_ratio_is_clamped():
    batch = one_row([-1000.0, 0.0, -1.0], [1.0, 1.0, 1.0], [True, True, True])
    got = diagnose(np.array([[0.0, -1000.0, -1.0]], np.float32), batch)
    np.testing.assert_allclose(got["ratio_max"], np.exp(20.0), rtol=1e-6)
    np.testing.assert_allclose(got["ratio_min"], np.exp(-20.0), rtol=1e-6)
    assert all(np.isfinite(value) for value in got.values())


@pytest.mark.parametrize("name", ["kl_k1", "kl_k3", "ratio_min", "ratio_max", "ratio_mean"])
def test_live_nan_stays_visible(name):
    batch = one_row([-1.0, -1.0], [1.0, 1.0], [True, True])
    assert np.isnan(diagnose(np.array([[np.nan, -1.0]], np.float32), batch)[name])


def test_empty_batch_gives_zeros():
    got = diagnose(np.zeros(pack([]).shape, np.float32), pack([]))
    assert set(got.values()) == {0.0}
    batch = dataclasses.replace(packed_batch(), mask=np.zeros(packed_batch().shape, bool))
    got = diagnose(poison(batch.logprobs, batch.mask), batch)
    assert got.pop("prompt_tokens") == np.count_nonzero(batch.segment_ids)
    assert set(got.values()) == {0.0}


def test_narrowed_mask_counts_what_was_sampled():
    batch = packed_batch(4)
    narrowed = dataclasses.replace(batch, mask=batch.mask & (batch.advantages > 0))
    got = diagnose(learner_of(batch), narrowed, sampled=batch.mask)
    assert got["live_tokens"] == np.count_nonzero(narrowed.mask) < got["sampled_tokens"]
    assert got["sampled_tokens"] == np.count_nonzero(batch.mask)
    real = np.count_nonzero(batch.segment_ids)
    assert got["prompt_tokens"] + got["sampled_tokens"] == real


def test_estimate_can_serve_as_a_penalty(run):
    batch = packed_batch(5)
    learner = poison(learner_of(batch), batch.mask)
    slope = run(jax.grad(lambda x, b: measure(x, b)["kl_k3"]))(learner, batch)
    d = np.where(batch.mask, learner_of(batch).astype(np.float64) - batch.logprobs, 0.0)
    want = np.where(batch.mask, np.expm1(d), 0.0) / np.count_nonzero(batch.mask)
    np.testing.assert_allclose(slope, want, rtol=1e-4, atol=1e-7)


def test_truncated_weights(run):
    batch = packed_batch(5)
    learner = poison(learner_of(batch), batch.mask)
    weights = run(lambda x, b: truncated_importance_weights(x, b, cap=1.3))(learner, batch)
    ratio = np.exp(learner_of(batch).astype(np.float64) - batch.logprobs)
    want = np.where(batch.mask, np.minimum(ratio, 1.3), 0.0)
    assert (want == 1.3).any()
    np.testing.assert_allclose(weights, want, rtol=1e-5)
    slope = run(jax.grad(lambda x, b: jnp.sum(truncated_importance_weights(x, b))))(learner, batch)
    assert not np.any(slope)


def test_wrong_dtype_is_a_broken_contract():
    batch = packed_batch()
    with pytest.raises(AssertionError):
        measure(jnp.zeros(batch.shape, jnp.bfloat16), batch)
    with pytest.raises(AssertionError):
        truncated_importance_weights(jnp.zeros((batch.shape[0], 1), jnp.float32), batch)
