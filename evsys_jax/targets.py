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
    begins: jax.Array,
    ends: jax.Array,
    start: jax.Array,
    first: jax.Array,
    pad_token: jax.Array,
    *,
    width: int,
) -> RowTargets:
    """Lay several sequences side by side in one row, each shifted before it is laid down.

    A sequence of n tokens takes n - 1 positions, so that the last token of one is never the input
    that the first of the next is predicted from. The sequences of a row lie end to end among the
    tokens; each one passed leaves one token more behind than positions, so position i of segment
    s reads token start + i + s.

    Args:
      tokens: [L] int32, many sequences end to end.
      sampled: [L] bool, the policy wrote this token.
      logprobs: [L] float32, the sampler's.
      advantages: [K] float32, one per segment of all rows, or [L] float32, one per token (K < L).
      begins: [K] int32, the position in its row where each segment of all rows begins.
      ends: [S] int32, the positions where the segments of this row end, ascending.
      start: [] int32, where the first sequence of the row begins among the tokens.
      first: [] int32, the number of the row's first segment among all K.
      pad_token: [] int32.
      width: static, T.

    Returns:
      `RowTargets`, [T] each; `positions` restart at 0 and `segment_ids` count from 1.
    """
    _check_flat(tokens, sampled, logprobs)
    chex.assert_rank([advantages, begins, ends], 1)
    chex.assert_rank([start, first, pad_token], 0)
    slot = jnp.arange(width, dtype=jnp.int32)
    # A segment ends where the next begins: the ends passed so far number the segments.
    marks = jnp.zeros(width, jnp.int32).at[ends].add(jnp.int32(1), mode="drop")
    passed = jnp.cumsum(marks, dtype=jnp.int32)
    segment = jnp.minimum(passed, jnp.int32(ends.shape[0] - 1))
    source = jnp.minimum(start + slot + segment, jnp.int32(tokens.shape[0] - 2))
    target = source + 1

    # From flat tables that all rows share: a gather that is batched itself is far slower.
    def at(table: jax.Array, index: jax.Array) -> jax.Array:
        return table.at[index].get(mode="promise_in_bounds")

    own = at(advantages, target if advantages.shape == tokens.shape else first + segment)
    return _blank(
        RowTargets(
            input_tokens=at(tokens, source),
            target_tokens=at(tokens, target),
            logprobs=at(logprobs, target),
            advantages=own,
            mask=at(sampled, target),
            positions=slot - at(begins, first + segment),
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
