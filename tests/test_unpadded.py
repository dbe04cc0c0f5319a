"""Rows end to end: the unpadded way to Datums gives what the reference gives."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from generators import random_groups

from evsys_jax import Trajectory, TrajectoryGroup, Turn, reference, unpadded
from evsys_jax.ragged import ragged_rows
from evsys_jax.trajectories import trajectory_table
from evsys_jax.unpadded import iter_runs


def flat_advantages(groups):
    return np.array([a for group in reference.compute_advantages(groups) for a in group])


def rows_of(groups, kind):
    """Cut all runs into rows: target tokens, logprobs and advantages of each, as lists."""
    rows, cut = ragged_rows(groups, rows=kind), []
    for run in iter_runs(rows, flat_advantages(groups)):
        for r, begin in zip(run.rows, run.begins, strict=True):
            assert r == len(cut)
            own = slice(begin, begin + int(rows.lengths[r]) - 1)
            cut.append([values[own].tolist() for values in run[2:]])
    return cut


def expected(groups, kind):
    rows = reference.training_rows(groups, reference.compute_advantages(groups), rows=kind)
    return [
        [
            row.target_tokens,
            np.array(row.logprobs, np.float32).tolist(),
            np.array(row.advantages, np.float32).tolist(),
        ]
        for row in rows
    ]


@pytest.mark.parametrize("kind", ["turns", "merged"])
@pytest.mark.parametrize("positions", [1, 7, 40, 2**17])
def test_runs_of_any_length_hold_the_rows_of_the_reference(monkeypatch, positions, kind):
    monkeypatch.setattr(unpadded, "RUN_POSITIONS", positions)
    monkeypatch.setattr(unpadded, "MIN_RUN", 4)
    for seed in range(30):
        groups = random_groups(seed)
        assert rows_of(groups, kind) == expected(groups, kind)


def test_without_jit_it_is_the_same(monkeypatch):
    monkeypatch.setattr(unpadded, "RUN_POSITIONS", 16)
    groups = random_groups(4)
    with jax.disable_jit():
        assert rows_of(groups, "turns") == expected(groups, "turns")


def test_x64_mode_of_the_caller_changes_nothing():
    groups = random_groups(11)
    with jax.enable_x64(True):
        wide = rows_of(groups, "turns")
    assert wide == rows_of(groups, "turns")


def test_a_row_longer_than_a_run_has_one_of_its_own(monkeypatch):
    monkeypatch.setattr(unpadded, "RUN_POSITIONS", 8)
    turns = [Turn([1] * n, [2], [-0.5]) for n in (3, 30, 3, 3)]
    rows = ragged_rows([TrajectoryGroup([Trajectory(turns)])])
    runs = list(iter_runs(rows, np.ones(1)))
    assert [list(run.rows) for run in runs] == [[0], [1], [2, 3]]
    assert [len(run.logprobs) for run in runs] == [3, 30, 7]


def test_what_lies_between_two_rows_is_in_neither():
    turns = [Turn([1, 2], [3], [-1.0]), Turn([], [4, 5], [-2.0, -3.0])]
    rows = ragged_rows([TrajectoryGroup([Trajectory(turns)])])
    (run,) = iter_runs(rows, np.array([0.5]))
    assert run.begins == [0, 3]
    first, second = slice(0, 2), slice(3, 4)
    assert run.target_tokens[first].tolist() == [2, 3]
    assert run.target_tokens[second].tolist() == [5]
    assert run.logprobs[first].tolist() == [0.0, -1.0]
    assert run.logprobs[second].tolist() == [-3.0]
    assert run.advantages[first].tolist() == [0.0, 0.5]
    assert run.advantages[second].tolist() == [0.5]


def test_the_arrays_are_the_callers_own(monkeypatch):
    monkeypatch.setattr(unpadded, "RUN_POSITIONS", 16)
    groups = random_groups(8, arrays=True)
    rows = ragged_rows(groups)
    before = rows.logprobs.copy(), rows.tokens.copy()
    runs = list(iter_runs(rows, np.zeros(len(trajectory_table(groups)))))
    assert len(runs) > 1
    for run in runs:
        run.target_tokens[:], run.logprobs[:], run.advantages[:] = -1, 9.0, 9.0
    np.testing.assert_array_equal(before[0], rows.logprobs)
    np.testing.assert_array_equal(before[1], rows.tokens)
    assert all((run.target_tokens == -1).all() and (run.logprobs == 9).all() for run in runs)


def test_a_stream_of_batches_compiles_few_programs():
    unpadded._shift.clear_cache()
    for count in range(1, 60):
        turns = [Turn([1] * 90, [2] * 10, [-1.0] * 10)] * count
        rows = ragged_rows([TrajectoryGroup([Trajectory(turns)])])
        list(iter_runs(rows, np.ones(1)))
    assert unpadded._shift._cache_size() <= 4  # 1,024, 2,048, 4,096 and 8,192 positions
