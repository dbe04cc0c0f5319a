"""One row: the shift to the next token, the mask of what the policy wrote, the padding."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax import lax


class RowTargets(NamedTuple):
    """One padded row, target-aligned; each field [T]. See `evsys_jax.batch.TokenBatch`."""

    input_tokens: jax.Array
    target_tokens: jax.Array
    logprobs: jax.Array
    advantages: jax.Array
    mask: jax.Array
    positions: jax.Array
    segment_ids: jax.Array


def shift_row(
    tokens: jax.Array,
    sampled: jax.Array,
    logprobs: jax.Array,
    advantages: jax.Array,
    start: jax.Array,
    length: jax.Array,
    pad_token: jax.Array,
    *,
    width: int,
) -> RowTargets:
    """Cut one sequence out of the flat tokens, shifted by one, and blank out what is not its own.

    With the row's own tokens x, position i gets the input x[i] and everything about the target
    x[i + 1]: input = x[:-1], target = x[1:], and likewise mask, logprobs and advantages. From
    position length - 1 on there is padding, whatever the flat arrays hold there.

    Args:
      tokens: [L] int32, many sequences end to end, with at least `width` + 1 from `start` on.
      sampled: [L] bool, the policy wrote this token.
      logprobs: [L] float32, the sampler's.
      advantages: [] float32 for the whole row, or [L] float32, one per token.
      start: [] int32, where the sequence begins.
      length: [] int32, its tokens.
      pad_token: [] int32.
      width: static, T.

    Returns:
      `RowTargets`, [T] each: padding has `pad_token`, zeros, mask off and segment 0.
    """
    _check_flat(tokens, sampled, logprobs)
    chex.assert_rank(advantages, {0, 1})
    chex.assert_rank([start, length, pad_token], 0)

    def cut(flat: jax.Array, shift: int) -> jax.Array:
        return lax.dynamic_slice(flat, (start + jnp.int32(shift),), (width,))

    position = jnp.arange(width, dtype=jnp.int32)
    real = position < length - 1
    return _blank(
        RowTargets(
            input_tokens=cut(tokens, 0),
            target_tokens=cut(tokens, 1),
            logprobs=cut(logprobs, 1),
            advantages=cut(advantages, 1) if advantages.ndim else advantages,
            mask=cut(sampled, 1),
            positions=position,
            segment_ids=jnp.ones((), jnp.int32),
        ),
        real,
        pad_token,
    )


def lay_segments(
    tokens: jax.Array,
    sampled: jax.Array,
    logprobs: jax.Array,
    advantages: jax.Array,
    starts: jax.Array,
    lengths: jax.Array,
    pad_token: jax.Array,
    *,
    width: int,
) -> RowTargets:
    """Lay several sequences side by side in one row, each shifted before it is laid down.

    Sequence s of n tokens takes n - 1 positions behind those of s - 1, so that the last token of
    one is never the input that the first of the next is predicted from.

    Args:
      tokens: [L] int32, many sequences end to end.
      sampled: [L] bool, the policy wrote this token.
      logprobs: [L] float32, the sampler's.
      advantages: [S] float32, one per sequence, or [L] float32, one per token (S < L).
      starts: [S] int32, where each sequence begins among the tokens.
      lengths: [S] int32, its tokens; 0 or 1 takes no position.
      pad_token: [] int32.
      width: static, T.

    Returns:
      `RowTargets`, [T] each; `positions` restart at 0 and `segment_ids` count from 1.
    """
    _check_flat(tokens, sampled, logprobs)
    chex.assert_rank([advantages, starts, lengths], 1)
    chex.assert_equal_shape([starts, lengths])
    taken = jnp.maximum(lengths - 1, jnp.int32(0))
    ends = jnp.cumsum(taken, dtype=jnp.int32)
    slot = jnp.arange(width, dtype=jnp.int32)
    numbers = jnp.arange(starts.shape[0], dtype=jnp.int32)
    segment = jnp.repeat(numbers, taken, total_repeat_length=width)

    def at(flat: jax.Array, index: jax.Array) -> jax.Array:
        return flat.at[index].get(mode="promise_in_bounds")

    position = slot - at(ends - taken, segment)
    source = jnp.minimum(at(starts, segment) + position, jnp.int32(tokens.shape[0] - 2))

    target = source + 1
    own = at(advantages, target if advantages.shape == tokens.shape else segment)
    return _blank(
        RowTargets(
            input_tokens=at(tokens, source),
            target_tokens=at(tokens, target),
            logprobs=at(logprobs, target),
            advantages=own,
            mask=at(sampled, target),
            positions=position,
            segment_ids=segment + 1,
        ),
        slot < ends[-1],
        pad_token,
    )


def _check_flat(tokens: jax.Array, sampled: jax.Array, logprobs: jax.Array) -> None:
    chex.assert_rank([tokens, sampled, logprobs], 1)
    chex.assert_equal_shape([tokens, sampled, logprobs])
    chex.assert_type([tokens, sampled, logprobs], [jnp.int32, bool, jnp.float32])


def _blank(row: RowTargets, real: jax.Array, pad_token: jax.Array) -> RowTargets:
    """Blank padding out, and logprobs and advantages off the mask; `real` is [T] bool."""
    mask = real & row.mask
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return RowTargets(
        input_tokens=jnp.where(real, row.input_tokens, pad_token),
        target_tokens=jnp.where(real, row.target_tokens, pad_token),
        logprobs=jnp.where(mask, row.logprobs, zero),
        advantages=jnp.where(mask, row.advantages, zero),
        mask=mask,
        positions=jnp.where(real, row.positions, none),
        segment_ids=jnp.where(real, row.segment_ids, none),
    )
