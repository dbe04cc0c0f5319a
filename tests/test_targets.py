"""One row: shift, mask and padding, and that nothing leaks in from behind its end."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from evsys_jax.targets import lay_segments, shift_row


def shift(run, tokens, sampled, logprobs, advantages=1.5, start=0, length=None, pad=0):
    """Run the kernel on one row; what lies behind it in the flat arrays comes with it."""
    width = len(tokens) - start - 1
    return run(partial(shift_row, width=width))(
        jnp.array(tokens, jnp.int32),
        jnp.array(sampled, bool),
        jnp.array(logprobs, jnp.float32),
        jnp.array(advantages, jnp.float32),
        jnp.array(start, jnp.int32),
        jnp.array(len(tokens) - start if length is None else length, jnp.int32),
        jnp.array(pad, jnp.int32),
    )


@pytest.mark.parametrize("before", [0, 1, 3])
def test_known_row(run, before):
    out = shift(
        run,
        [9] * before + [10, 11, 12, 13],
        [1] * before + [0, 0, 1, 1],
        [-9] * before + [0, 0, -0.1, -0.2],
        start=before,
    )
    assert out.input_tokens.tolist() == [10, 11, 12]
    assert out.target_tokens.tolist() == [11, 12, 13]
    np.testing.assert_array_equal(out.logprobs, np.array([0, -0.1, -0.2], np.float32))
    assert out.advantages.tolist() == [0, 1.5, 1.5]
    assert out.mask.tolist() == [False, True, True]
    assert out.positions.tolist() == [0, 1, 2]
    assert out.segment_ids.tolist() == [1, 1, 1]


@pytest.mark.parametrize("pad", [0, 2, 7])
def test_hostile_neighbours_do_not_leak(run, pad):
    nan = float("nan")
    clean = shift(run, [2, 2, 5, 2], [0, 0, 1, 1], [0, 0, -1, -2])
    hostile = shift(
        run,
        [2, 2, 5, 2, 5, 2, -9],
        [1, 0, 1, 1, 1, 1, 1],
        [nan, nan, -1, -2, nan, float("inf"), nan],
        [nan, nan, 1.5, 1.5, nan, float("inf"), nan],
        length=4,
        pad=pad,
    )
    for name, values in clean._asdict().items():
        np.testing.assert_array_equal(getattr(hostile, name)[:3], values, err_msg=name)
    assert hostile.input_tokens[3:].tolist() == [pad] * 3
    assert hostile.target_tokens[3:].tolist() == [pad] * 3
    assert not hostile.mask[3:].any()
    for name in ("logprobs", "advantages", "positions", "segment_ids"):
        assert not np.asarray(getattr(hostile, name))[3:].any(), name


def test_live_zero_advantage_stays_live(run):
    out = shift(run, [1, 2, 3], [0, 1, 1], [0, -1, -1], advantages=0.0)
    assert out.mask.tolist() == [True, True]


def test_filler_row_is_empty(run):
    out = shift(run, [1, 2, 3], [1, 1, 1], [-1, -1, -1], length=0, pad=4)
    assert out.input_tokens.tolist() == [4, 4]
    assert not out.mask.any()
    assert not out.segment_ids.any()


def segments(run, advantages, width, taken=(2, 1, 0)):
    """Lay the sequences 1 2 3 and 4 5 down in the second of two rows of three segments."""
    ends = np.cumsum(taken)
    return run(partial(lay_segments, width=width))(
        jnp.array([9, 1, 2, 3, 4, 5, 8, 9], jnp.int32),
        jnp.array([1, 0, 1, 1, 0, 1, 1, 1], bool),
        jnp.array([np.nan, 0, -1, -2, 0, -3, np.nan, np.nan], jnp.float32),
        jnp.array(advantages, jnp.float32),
        jnp.array([7, 7, 7, *(ends - taken)], jnp.int32),
        jnp.array(ends, jnp.int32),
        jnp.array(1, jnp.int32),
        jnp.array(3, jnp.int32),
        jnp.array(7, jnp.int32),
    )


PER_SEGMENT = [7, 7, 7, 0.5, -2.0, 9.0]
PER_TOKEN = [7, 0, 0.5, 0.5, 0, -2.0, np.nan, np.nan]


@pytest.mark.parametrize("advantages", [PER_SEGMENT, PER_TOKEN])
def test_segments_are_shifted_before_they_are_laid_down(run, advantages):
    out = segments(run, advantages, width=5)
    assert out.input_tokens.tolist() == [1, 2, 4, 7, 7]
    assert out.target_tokens.tolist() == [2, 3, 5, 7, 7]
    assert out.logprobs.tolist() == [-1, -2, -3, 0, 0]
    assert out.advantages.tolist() == [0.5, 0.5, -2, 0, 0]
    assert out.mask.tolist() == [True, True, True, False, False]
    assert out.positions.tolist() == [0, 1, 0, 0, 0]
    assert out.segment_ids.tolist() == [1, 1, 2, 0, 0]


def test_a_full_row_and_an_empty_one(run):
    assert segments(run, PER_SEGMENT, width=3).segment_ids.tolist() == [1, 1, 2]
    empty = segments(run, PER_SEGMENT, width=3, taken=(0, 0, 0))
    assert not empty.mask.any()
    assert not empty.segment_ids.any()


@pytest.mark.parametrize(
    ("position", "wrong"),
    [
        (0, jnp.zeros((2, 3), jnp.int32)),
        (1, jnp.zeros(4, bool)),
        (2, jnp.zeros(3, jnp.int32)),
        (4, jnp.zeros(1, jnp.int32)),
    ],
)
def test_broken_contracts_are_assertion_errors(run, position, wrong):
    zero = jnp.zeros((), jnp.int32)
    arguments = [
        jnp.zeros(3, jnp.int32),
        jnp.zeros(3, bool),
        jnp.zeros(3, jnp.float32),
        jnp.zeros((), jnp.float32),
        zero,
        zero,
        zero,
    ]
    arguments[position] = wrong
    with pytest.raises(AssertionError):
        run(partial(shift_row, width=2))(*arguments)
