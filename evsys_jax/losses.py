"""Policy-gradient losses on a `TokenBatch`, each a sum over the live tokens.

All five take the learner's log-probabilities of the target tokens and share these letters:
l the learner's and q the sampler's log-probability, A the advantage, r = exp(l - q) the ratio,
sg stop-gradient. None divides by anything: for a mean, see `evsys_jax.reductions`.

Where the mask is off, everything is set to zero *before* `exp` or a square, so that neither the
value nor the gradient there can be anything else, whatever the slots hold. A live token with
A = 0 has no ratio to speak of either, and adds exactly nothing even where r overflows. A NaN on
a live token stays visible.

The names and keywords are those of tinker's losses.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from jax import lax

from evsys_jax.batch import TokenBatch
from evsys_jax.reductions import ReducedBatch, count_live, reduce_by
from evsys_jax.segments import spread_segments, sum_segments

__all__ = [
    "cispo",
    "count_live",
    "dro",
    "gspo",
    "importance_sampling",
    "ppo",
    "reduce_by",
]


def importance_sampling(
    learner_logprobs: jax.Array, batch: TokenBatch
) -> tuple[jax.Array, jax.Array]:
    r"""Sum the policy gradient with importance weights, loss_t = -r_t A_t.

    Source: the off-policy policy gradient (https://arxiv.org/abs/1205.4839), per token.

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.

    Returns:
      [] float32, the sum over live tokens; and [B, T] float32, the terms, 0 off the mask.

    Raises:
      AssertionError: the logprobs are not float32 (bfloat16 leaves two digits to a ratio) or not
        of the shape of the batch.
    """
    learner, sampler, advantages = _live(learner_logprobs, batch)
    per_token = -jnp.exp(_settle_idle(learner - sampler, advantages)) * advantages
    return jnp.sum(per_token), per_token


def ppo(
    learner_logprobs: jax.Array,
    batch: TokenBatch,
    *,
    clip_low_threshold: float | jax.Array = 0.8,
    clip_high_threshold: float | jax.Array = 1.2,
) -> tuple[jax.Array, jax.Array]:
    r"""Sum PPO's clipped surrogate, loss_t = -min(r_t A_t, clip(r_t, lo, hi) A_t).

    Source: equation 7 of https://arxiv.org/abs/1707.06347. A clipped token has gradient 0.

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.
      clip_low_threshold: lo, a bound on the ratio itself: 0.8, not 0.2.
      clip_high_threshold: hi, likewise.

    Returns:
      [] float32, the sum over live tokens; and [B, T] float32, the terms, 0 off the mask.

    Raises:
      AssertionError: as in `importance_sampling`.
    """
    learner, sampler, advantages = _live(learner_logprobs, batch)
    per_token = _clipped_surrogate(
        learner - sampler, advantages, clip_low_threshold, clip_high_threshold
    )
    return jnp.sum(per_token), per_token


def cispo(
    learner_logprobs: jax.Array,
    batch: TokenBatch,
    *,
    clip_low_threshold: float | jax.Array = 0.0,
    clip_high_threshold: float | jax.Array = 4.0,
) -> tuple[jax.Array, jax.Array]:
    r"""Sum REINFORCE under a clipped weight, loss_t = -sg(clip(r_t, lo, hi)) l_t A_t.

    Source: https://arxiv.org/abs/2506.13585, section 3.1. A clipped token keeps its gradient.

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.
      clip_low_threshold: lo, a bound on the ratio itself.
      clip_high_threshold: hi, likewise.

    Returns:
      [] float32, the sum over live tokens; and [B, T] float32, the terms, 0 off the mask.

    Raises:
      AssertionError: as in `importance_sampling`.
    """
    learner, sampler, advantages = _live(learner_logprobs, batch)
    ratio = jnp.exp(lax.stop_gradient(_settle_idle(learner - sampler, advantages)))
    weight = jnp.clip(ratio, clip_low_threshold, clip_high_threshold)
    # A weight of 0 takes the token out, also where its log-probability is -inf.
    scored = jnp.where(weight == 0.0, 0.0, _settle_idle(learner, advantages))
    per_token = -weight * scored * advantages
    return jnp.sum(per_token), per_token


def dro(
    learner_logprobs: jax.Array, batch: TokenBatch, *, beta: float | jax.Array
) -> tuple[jax.Array, jax.Array]:
    r"""Sum the loss with a quadratic pull, loss_t = -(l_t A_t - beta / 2 (l_t - q_t)^2).

    Source: https://arxiv.org/abs/2405.19107, per token. The pull does not scale with A; in a
    batch that went through `reduce_by`, beta is weighted as the advantages were. It acts on live
    tokens with A = 0 too.

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.
      beta: [] the strength of the pull towards the sampler.

    Returns:
      [] float32, the sum over live tokens; and [B, T] float32, the terms, 0 off the mask.

    Raises:
      AssertionError: as in `importance_sampling`.
    """
    learner, sampler, advantages = _live(learner_logprobs, batch)
    pull = 0.5 * beta * jnp.square(learner - sampler)
    if isinstance(batch, ReducedBatch):
        pull = pull * batch.weights
    per_token = pull - learner * advantages
    return jnp.sum(per_token), per_token


def gspo(
    learner_logprobs: jax.Array,
    batch: TokenBatch,
    *,
    clip_low_threshold: float | jax.Array,
    clip_high_threshold: float | jax.Array,
) -> tuple[jax.Array, jax.Array]:
    r"""Sum PPO's surrogate under one ratio per sequence.

    s = exp(mean over the live tokens of the sequence of (l - q)),
    s_t = sg(s) exp(l_t - sg(l_t)),
    loss_t = -min(s_t A_t, clip(s_t, lo, hi) A_t).

    Source: GSPO-token, https://arxiv.org/abs/2507.18071. A sequence is a segment, so packing
    several into a row changes nothing.

    Args:
      learner_logprobs: [B, T] float32, natural logarithm; anything where the mask is off.
      batch: B rows.
      clip_low_threshold: lo, a bound on s itself; the paper's is 1 - 3e-4.
      clip_high_threshold: hi, likewise; the paper's is 1 + 4e-4.

    Returns:
      [] float32, the sum over live tokens; and [B, T] float32, the terms, 0 off the mask.

    Raises:
      AssertionError: as in `importance_sampling`.
    """
    learner, sampler, advantages = _live(learner_logprobs, batch)
    total = sum_segments(lax.stop_gradient(learner - sampler), batch)
    count = sum_segments(jnp.asarray(batch.mask).astype(jnp.float32), batch)
    mean = spread_segments(total / jnp.maximum(count, 1.0), batch)
    # The value of the mean, the gradient of the token: exp of it is s_t.
    # A token that the learner rules out (-inf) has no slope, and -inf - -inf would be NaN.
    sloped = jnp.where(jnp.isneginf(learner), 0.0, learner)
    log_ratio = jnp.where(batch.mask, mean, 0.0) + (sloped - lax.stop_gradient(sloped))
    per_token = _clipped_surrogate(log_ratio, advantages, clip_low_threshold, clip_high_threshold)
    return jnp.sum(per_token), per_token


def _live(learner_logprobs: jax.Array, batch: TokenBatch) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Check the contract; return l, q and A [B, T], all three 0 where the mask is off."""
    arrays = [learner_logprobs, batch.logprobs, batch.advantages]
    chex.assert_rank(arrays, 2)
    chex.assert_equal_shape([*arrays, batch.mask])
    chex.assert_type([*arrays, batch.mask], [jnp.float32] * 3 + [bool])
    learner, sampler, advantages = (jnp.where(batch.mask, array, 0.0) for array in arrays)
    return learner, sampler, advantages


def _settle_idle(values: jax.Array, advantages: jax.Array) -> jax.Array:
    """Set to zero what an advantage of 0 will multiply: an overflow times 0 would be NaN."""
    return jnp.where((advantages == 0.0) & ~jnp.isnan(values), 0.0, values)


def _clipped_surrogate(
    log_ratio: jax.Array,
    advantages: jax.Array,
    low: float | jax.Array,
    high: float | jax.Array,
) -> jax.Array:
    """Return -min(r A, clip(r, lo, hi) A), [B, T], with r kept out of `exp` where it is clipped.

    Written with `minimum`, the branch not taken would send 0 * inf back through `exp`.
    """
    ratio = jnp.exp(lax.stop_gradient(log_ratio))
    above = (advantages > 0.0) & (ratio > high)
    below = (advantages < 0.0) & (ratio < low)
    free = jnp.exp(_settle_idle(jnp.where(above | below, 0.0, log_ratio), advantages))
    return -jnp.where(above, high, jnp.where(below, low, free)) * advantages
