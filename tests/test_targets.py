"""One row: shift, mask and padding, and that nothing leaks in from behind its end."""

from __future__ import annotations

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from evsys_jax.targets import shift_row


def row(tokens, sampled, logprobs, advantages=1.5, length=None, pad=0):
    return (
        jnp.array(tokens, jnp.int32),
        jnp.array(sampled, bool),
        jnp.array(logprobs, jnp.float32),
        jnp.array(advantages, jnp.float32),
        jnp.array(len(tokens) if length is None else length, jnp.int32),
        jnp.array(pad, jnp.int32),
    )


def test_known_row(run):
    out = run(shift_row)(*row([10, 11, 12, 13], [0, 0, 1, 1], [0, 0, -0.1, -0.2]))
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
    clean = run(shift_row)(*row([2, 2, 5, 2], [0, 0, 1, 1], [0, 0, -1, -2]))
    hostile = run(shift_row)(
        *row(
            [2, 2, 5, 2, 5, 2, -9],
            [1, 0, 1, 1, 1, 1, 1],
            [nan, nan, -1, -2, nan, float("inf"), nan],
            [nan, nan, 1.5, 1.5, nan, float("inf"), nan],
            length=4,
            pad=pad,
        )
    )
    for name, values in clean._asdict().items():
        np.testing.assert_array_equal(getattr(hostile, name)[:3], values, err_msg=name)
    assert hostile.input_tokens[3:].tolist() == [pad] * 3
    assert hostile.target_tokens[3:].tolist() == [pad] * 3
    assert not hostile.mask[3:].any()
    for name in ("logprobs", "advantages", "positions", "segment_ids"):
        assert not np.asarray(getattr(hostile, name))[3:].any(), name


def test_live_zero_advantage_stays_live(run):
    out = run(shift_row)(*row([1, 2, 3], [0, 1, 1], [0, -1, -1], advantages=0.0))
    assert out.mask.tolist() == [True, True]


def test_filler_row_is_empty(run):
    out = run(shift_row)(*row([1, 2, 3], [1, 1, 1], [-1, -1, -1], length=0, pad=4))
    assert out.input_tokens.tolist() == [4, 4]
    assert not out.mask.any()
    assert not out.segment_ids.any()


@pytest.mark.parametrize(
    ("position", "wrong"),
    [(0, jnp.zeros((2, 3), jnp.int32)), (1, jnp.zeros(4, bool)), (2, jnp.zeros(3, jnp.int32))],
)
def test_broken_contracts_are_assertion_errors(run, position, wrong):
    arguments = list(row([1, 2, 3], [0, 1, 1], [0, -1, -1]))
    arguments[position] = wrong
    with pytest.raises(AssertionError):
        run(partial(shift_row))(*arguments)
