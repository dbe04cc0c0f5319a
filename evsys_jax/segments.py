"""Sums over the sequences of a batch row, and the way back to its tokens.

Segment s of a row (`segment_ids` count from 1) is column s - 1 of the index arrays [B, S].
"""

from __future__ import annotations

from functools import partial

import chex
import jax
import jax.numpy as jnp

from evsys_jax.batch import Array, TokenBatch


def sum_segments(values: Array, batch: TokenBatch) -> jax.Array:
    """Add up a value over the tokens of each segment: out[b, s - 1] = sum of segment s.

    Args:
      values: [B, T] of any numeric dtype. What lies in padding is left out, NaN included.
      batch: B rows with S segments each.

    Returns:
      [B, S] of the dtype of `values`; 0 where there is no segment.
    """
    chex.assert_rank(values, 2)
    chex.assert_equal_shape([values, batch.segment_ids])
    # Row by row, so that rows that lie on different devices need not meet.
    sums = jax.vmap(partial(jax.ops.segment_sum, num_segments=batch.segment_lengths.shape[1] + 1))
    return sums(jnp.asarray(values), batch.segment_ids)[:, 1:]


def spread_segments(per_segment: Array, batch: TokenBatch) -> jax.Array:
    """Give every token the value of its segment; the inverse direction of `sum_segments`.

    Args:
      per_segment: [B, S] of any dtype.
      batch: B rows with S segments each.

    Returns:
      [B, T] of the dtype of `per_segment`; 0 in padding.
    """
    chex.assert_rank(per_segment, 2)
    chex.assert_equal_shape([per_segment, batch.segment_lengths])
    padding = jnp.zeros((per_segment.shape[0], 1), per_segment.dtype)
    table = jnp.concatenate([padding, jnp.asarray(per_segment)], axis=1)
    return jnp.take_along_axis(table, jnp.asarray(batch.segment_ids), axis=1)
