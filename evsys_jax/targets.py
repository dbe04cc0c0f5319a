"""One row: the shift to the next token, the mask of what the policy wrote, the padding."""

from __future__ import annotations

from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp


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
    length: jax.Array,
    pad_token: jax.Array,
) -> RowTargets:
    """Shift one sequence by a token and blank out what is not its own.

    Position i gets input token i and everything about target token i + 1:
    input = tokens[:-1], target = tokens[1:], mask = sampled[1:], logprobs = logprobs[1:] and
    advantages = A[1:] where the mask is on. Positions from length - 1 on are padding, whatever
    the arrays hold there.

    Args:
      tokens: [T + 1] int32.
      sampled: [T + 1] bool, the policy wrote this token.
      logprobs: [T + 1] float32, the sampler's.
      advantages: [] float32 for the whole row, or [T + 1] float32, one per token.
      length: [] int32, how many of the tokens are real.
      pad_token: [] int32.

    Returns:
      `RowTargets`, [T] each: padding has `pad_token`, zeros, mask off and segment 0.
    """
    chex.assert_rank([tokens, sampled, logprobs], 1)
    chex.assert_equal_shape([tokens, sampled, logprobs])
    chex.assert_rank(advantages, {0, 1})
    chex.assert_type(
        [tokens, sampled, logprobs, advantages], [jnp.int32, bool, jnp.float32, jnp.float32]
    )
    positions = jnp.arange(tokens.shape[0] - 1, dtype=jnp.int32)
    real = positions < length - 1
    mask = real & sampled[1:]
    zero = jnp.zeros((), jnp.float32)
    return RowTargets(
        input_tokens=jnp.where(real, tokens[:-1], pad_token),
        target_tokens=jnp.where(real, tokens[1:], pad_token),
        logprobs=jnp.where(mask, logprobs[1:], zero),
        advantages=jnp.where(mask, advantages[1:] if advantages.ndim else advantages, zero),
        mask=mask,
        positions=jnp.where(real, positions, jnp.zeros((), jnp.int32)),
        segment_ids=real.astype(jnp.int32),
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
    chex.assert_rank([tokens, sampled, logprobs, advantages, starts, lengths], 1)
    chex.assert_equal_shape([tokens, sampled, logprobs])
    chex.assert_equal_shape([starts, lengths])
    taken = jnp.maximum(lengths - 1, jnp.int32(0))
    ends = jnp.cumsum(taken, dtype=jnp.int32)
    slot = jnp.arange(width, dtype=jnp.int32)
    # A segment ends where the next begins; counting the ends passed numbers the segments.
    passed = jnp.zeros(width, jnp.int32).at[ends].add(jnp.int32(1), mode="drop")
    segment = jnp.minimum(jnp.cumsum(passed, dtype=jnp.int32), jnp.int32(starts.shape[0] - 1))
    real = slot < ends[-1]
    position = slot - (ends - taken)[segment]
    source = starts[segment] + position
    target = jnp.minimum(source + 1, jnp.int32(tokens.shape[0] - 1))
    mask = real & sampled[target]
    own = advantages[target] if advantages.shape == tokens.shape else advantages[segment]
    zero, none = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.int32)
    return RowTargets(
        input_tokens=jnp.where(real, tokens[source], pad_token),
        target_tokens=jnp.where(real, tokens[target], pad_token),
        logprobs=jnp.where(mask, logprobs[target], zero),
        advantages=jnp.where(mask, own, zero),
        mask=mask,
        positions=jnp.where(real, position, none),
        segment_ids=jnp.where(real, segment + 1, none),
    )
