"""How far the learner has moved from the sampler: numbers to watch, over live tokens only.

The log-ratio d = l - q (learner less sampler) is clamped to +-20 here, so that one absurd token
leaves the means finite; the losses do not clamp. A NaN on a live token stays visible.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from evsys_jax.batch import Array, TokenBatch

LOG_RATIO_LIMIT = 20.0


def diagnose(
    learner_logprobs: Array,
    batch: TokenBatch,
    *,
    clip_low_threshold: float = 0.8,
    clip_high_threshold: float = 1.2,
    ratio_threshold: float = 2.0,
    sampled: Array | None = None,
) -> dict[str, float]:
    """Take all measurements of `measure` in one jitted call and bring them to the host.

    Args:
      learner_logprobs: [B, T] float32, as in `measure`.
      batch: B rows; on several hosts, every process makes this call and gets the same numbers.
      clip_low_threshold: as in `measure`, and so are the others.
      clip_high_threshold: bound of the ratio.
      ratio_threshold: bound of the ratio.
      sampled: None, or [B, T] bool.

    Returns:
      A flat dict of floats, as in `measure`.

    Raises:
      AssertionError: as in `measure`.
    """
    bounds = (clip_low_threshold, clip_high_threshold, ratio_threshold)
    measured = _measure(learner_logprobs, batch, np.asarray(bounds, np.float32), sampled)
    return {name: float(value) for name, value in jax.device_get(measured).items()}


def measure(
    learner_logprobs: Array,
    batch: TokenBatch,
    *,
    clip_low_threshold: float | jax.Array = 0.8,
    clip_high_threshold: float | jax.Array = 1.2,
    ratio_threshold: float | jax.Array = 2.0,
    sampled: Array | None = None,
) -> dict[str, jax.Array]:
    r"""Measure a batch, with d = clamp(l - q, +-20), r = exp(d) and n live tokens.

    - `kl_k1`, `kl_k2`, `kl_k3`: means of -d, d^2 / 2 and (r - 1) - d, three estimates of
      KL(sampler || learner) from the sampler's own tokens (Schulman,
      http://joschu.net/blog/kl-approx.html);
    - `entropy`: mean of -q, an estimate of the sampler's entropy per token, not clamped;
    - `ratio_min`, `ratio_mean`, `ratio_max`: of r;
    - `clip_fraction`: share of tokens with r < lo or r > hi; `clip_active_fraction`: share where
      that stops the gradient of `ppo` (r < lo and A < 0, or r > hi and A > 0);
    - `effective_sample_size`: (sum r)^2 / sum r^2, in tokens, from 1 to n (Kish);
    - `over_threshold_fraction`: share of tokens with r > the threshold, those that
      `truncated_importance_weights` would cut;
    - `live_tokens`: n, the targets that train; `sampled_tokens`: the targets that the policy
      wrote; `prompt_tokens`: the other real targets. The first token of a sequence is no target
      and in none of these.

    Without a live token every number is 0, but for the counts of what there is.

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.
      clip_low_threshold: lo, a bound on the ratio itself.
      clip_high_threshold: hi, likewise.
      ratio_threshold: a bound on the ratio itself.
      sampled: [B, T] bool, what the policy wrote, where the mask has been narrowed since; None:
        the mask.

    Returns:
      [] float32 each, by name. For use inside a jitted step; `diagnose` gives floats.

    Raises:
      AssertionError: the logprobs are not float32 or not of the shape of the batch.
    """
    d, mask = _log_ratio(learner_logprobs, batch), jnp.asarray(batch.mask)
    written = mask if sampled is None else jnp.asarray(sampled)
    chex.assert_equal_shape([written, mask])
    chex.assert_type(written, bool)
    real = jnp.asarray(batch.segment_ids) > 0
    advantages = jnp.asarray(batch.advantages)
    ratio, live = jnp.exp(d), _count(mask)
    some = live > 0.0
    below, above = ratio < clip_low_threshold, ratio > clip_high_threshold
    active = (below & (advantages < 0.0)) | (above & (advantages > 0.0))
    total, squares = _sum(ratio, mask), _sum(jnp.square(ratio), mask)

    def mean(values: jax.Array) -> jax.Array:
        return _sum(values, mask) / jnp.maximum(live, 1.0)

    def share(tokens: jax.Array) -> jax.Array:
        return _count(tokens & mask) / jnp.maximum(live, 1.0)

    return {
        "kl_k1": mean(-d),
        "kl_k2": mean(0.5 * jnp.square(d)),
        "kl_k3": mean(jnp.expm1(d) - d),
        "entropy": mean(-jnp.asarray(batch.logprobs)),
        "ratio_min": jnp.where(
            some, jnp.min(jnp.where(mask, ratio, jnp.inf), initial=jnp.inf), 0.0
        ),
        "ratio_mean": mean(ratio),
        "ratio_max": jnp.max(jnp.where(mask, ratio, 0.0), initial=0.0),
        "clip_fraction": share(below | above),
        "clip_active_fraction": share(active),
        "effective_sample_size": jnp.square(total) / jnp.where(some, squares, 1.0),
        "over_threshold_fraction": share(ratio > ratio_threshold),
        "prompt_tokens": _count(real & ~written),
        "sampled_tokens": _count(real & written),
        "live_tokens": live,
    }


def truncated_importance_weights(
    learner_logprobs: Array, batch: TokenBatch, *, cap: float | jax.Array = 2.0
) -> jax.Array:
    r"""Return w_t = min(r_t, cap), a correction for a sampler that is not quite the learner.

    To be multiplied into advantages, hence without gradient. Source: truncated importance
    sampling (Ionides 2008, https://doi.org/10.1198/106186008X320456).

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.
      cap: the largest weight.

    Returns:
      [B, T] float32, 0 off the mask.

    Raises:
      AssertionError: the logprobs are not float32 or not of the shape of the batch.
    """
    ratio = jnp.exp(lax.stop_gradient(_log_ratio(learner_logprobs, batch)))
    return jnp.where(batch.mask, jnp.minimum(ratio, cap), 0.0)


@jax.jit
def _measure(
    learner_logprobs: Array, batch: TokenBatch, bounds: jax.Array, sampled: Array | None
) -> dict[str, jax.Array]:
    """Jit `measure` once for all thresholds."""
    low, high, threshold = bounds
    return measure(
        learner_logprobs,
        batch,
        clip_low_threshold=low,
        clip_high_threshold=high,
        ratio_threshold=threshold,
        sampled=sampled,
    )


def _log_ratio(learner_logprobs: Array, batch: TokenBatch) -> jax.Array:
    """Check the contract; return l - q, clamped, [B, T], 0 where the mask is off."""
    chex.assert_rank([learner_logprobs, batch.logprobs], 2)
    chex.assert_equal_shape([learner_logprobs, batch.logprobs, batch.mask])
    chex.assert_type(
        [learner_logprobs, batch.logprobs, batch.mask], [jnp.float32, jnp.float32, bool]
    )
    difference = jnp.where(batch.mask, jnp.asarray(learner_logprobs) - batch.logprobs, 0.0)
    return jnp.clip(difference, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _sum(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask, values, 0.0))


def _count(mask: jax.Array) -> jax.Array:
    return jnp.sum(mask.astype(jnp.int32)).astype(jnp.float32)
