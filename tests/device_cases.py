"""Batches for the tests of what runs on the device, made by hand or drawn from a seed."""

import numpy as np

from evsys_jax.batch import TokenBatch
from evsys_jax.ragged import ragged_rows
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def groups_of(seed=0, groups=4, tokens=20):
    """Draw groups of two or three rollouts of one or two turns, every number its own."""
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(groups):
        members = []
        for _ in range(int(rng.integers(2, 4))):
            turns, context = [], rng.integers(0, tokens, int(rng.integers(0, 4))).tolist()
            for _ in range(int(rng.integers(1, 3))):
                n = int(rng.integers(1, 5))
                completion = rng.integers(0, tokens, n).tolist()
                turns.append(Turn(context, completion, (-rng.random(n)).tolist()))
                context = [*context, *completion, 7]
            members.append(Trajectory(turns, reward=float(rng.normal())))
        drawn.append(TrajectoryGroup(members))
    return drawn


def drawn_rows(seed=0, **kwargs):
    return ragged_rows(groups_of(seed, **kwargs), rows="turns")


def packed_batch(seed=0, rows=5, width=16, segments=3):
    """Lay up to `segments` sequences into each row by hand; the last row is padding."""
    rng = np.random.default_rng(seed)
    shape = (rows, width)
    ids, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    lengths = np.zeros((rows, segments), np.int32)
    index = np.full((4, rows, segments), -1, np.int32)
    count = 0
    for b in range(rows - 1):
        at = 0
        for s in range(segments):
            n = int(rng.integers(2, 6))
            ids[b, at : at + n], positions[b, at : at + n] = s + 1, np.arange(n)
            lengths[b, s] = n
            index[:, b, s] = (count // 6, count // 2 % 3, count % 2, count)
            at, count = at + n, count + 1
    mask = (ids > 0) & (rng.random(shape) < 0.7)
    mask[0, ids[0] == 2] = False  # one sequence without a live token
    return TokenBatch(
        input_tokens=rng.integers(0, 9, shape).astype(np.int32),
        target_tokens=rng.integers(0, 9, shape).astype(np.int32),
        logprobs=np.where(mask, -rng.random(shape), 0.0).astype(np.float32),
        advantages=np.where(mask, rng.normal(size=shape), 0.0).astype(np.float32),
        mask=mask,
        positions=positions,
        segment_ids=ids,
        segment_lengths=lengths,
        segment_group=index[0],
        segment_trajectory=index[1],
        segment_turn=index[2],
        segment_row=index[3],
    )


def one_row(logprobs, advantages, mask):
    """Make a batch of one row, all of it one sequence."""
    width = len(mask)
    plane = np.zeros((1, width), np.int32)
    return TokenBatch(
        input_tokens=plane,
        target_tokens=plane,
        logprobs=np.array([logprobs], np.float32),
        advantages=np.array([advantages], np.float32),
        mask=np.array([mask]),
        positions=np.arange(width, dtype=np.int32)[None],
        segment_ids=np.ones((1, width), np.int32),
        segment_lengths=np.full((1, 1), width, np.int32),
        segment_group=np.zeros((1, 1), np.int32),
        segment_trajectory=np.zeros((1, 1), np.int32),
        segment_turn=np.zeros((1, 1), np.int32),
        segment_row=np.zeros((1, 1), np.int32),
    )


def learner_of(batch, seed=1, spread=0.4):
    """Draw a learner near the sampler: ratios on both sides of the usual bounds."""
    rng = np.random.default_rng(seed)
    near = np.asarray(batch.logprobs) + spread * rng.normal(size=batch.shape)
    return near.astype(np.float32)


def poison(array, mask, values=(np.nan, np.inf, -np.inf, 1e30)):
    """Put hostile values wherever the mask is off."""
    array = np.array(array)
    off = np.flatnonzero(~np.asarray(mask).ravel())
    array.ravel()[off] = np.resize(np.array(values, array.dtype), len(off))
    return array
