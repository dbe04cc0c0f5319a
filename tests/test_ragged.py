"""Flat rows: what comes in as any kind of sequence, and what is refused by name."""

from __future__ import annotations

import array
from collections import UserList, deque
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from generators import random_groups
from hypothesis import given
from hypothesis import strategies as st

from evsys_jax import reference
from evsys_jax.account import TokenAccount
from evsys_jax.batch import pack
from evsys_jax.parts import iter_ragged_rows
from evsys_jax.ragged import ragged_rows
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def rows_of(*turns, **options):
    return ragged_rows([TrajectoryGroup([Trajectory(list(turns))])], **options)


@pytest.mark.parametrize(
    "kind",
    [
        list,
        tuple,
        lambda x: array.array("i" if isinstance(x[0], int) else "d", x),
        np.array,
        jnp.array,
        lambda x: np.array(x, object),
        lambda x: np.array(x)[::1],
        lambda x: np.repeat(np.array(x), 2)[::2],
    ],
)
def test_any_sequence_of_numbers_serves(kind):
    rows = rows_of(Turn(kind([1, 2]), kind([0, 1, 5]), kind([-0.5, -1.5, 0.0])))
    assert rows.tokens.tolist() == [1, 2, 0, 1, 5]
    assert rows.sampled.tolist() == [False, False, True, True, True]
    assert rows.logprobs.tolist() == [0, 0, -0.5, -1.5, 0]
    assert rows.tokens.dtype == np.int32
    assert rows.logprobs.dtype == np.float32


def test_objects_with_the_same_attributes_serve():
    turn = SimpleNamespace(prompt_tokens=[1], completion_tokens=[2], logprobs=[-1.0])
    group = SimpleNamespace(trajectories=[SimpleNamespace(turns=[turn], reward=2)])
    rows = ragged_rows([group])
    assert rows.tokens.tolist() == [1, 2]
    assert rows.table.votes.tolist() == rows.table.trains.tolist() == [True]


bad_tokens = [
    [1, -1],
    [1, 2**31],
    [1, 2**32 + 5],
    [1, 2**63],
    [1, 2**70],
    [1, 3.0],
    [1, True],
    [0, False],
    [1, "12"],
    [1, None],
    np.array([1, 2**31]),
    np.array([1, 2**32 + 5]),
    np.array([1, -1], np.int32),
    np.array([1, 2**63], np.uint64),
    np.array([1.0, 2.0]),
    np.array([True, False]),
    np.array([[1, 2], [3, 4]]),
]


@pytest.mark.parametrize("tokens", bad_tokens)
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_bad_tokens_raise_what_the_reference_raises(tokens, name):
    turns = [Turn([1, 2], [3, 4], [-1.0, -1.0]) for _ in range(2)]
    setattr(turns[1], name, tokens)
    with pytest.raises(ValueError, match=rf"group 0, trajectory 0, turn 1: {name}\[\d\]") as ours:
        rows_of(*turns)
    group = TrajectoryGroup([Trajectory(turns)])
    with pytest.raises(ValueError, match="turn 1") as theirs:
        reference.training_rows([group], [[1.0]])
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    "logprobs",
    [
        [-1.0, float("nan")],
        [-1.0, float("-inf")],
        [-1.0, -1e39],
        [-1.0, None],
        [-1.0, "-1"],
        [-1.0, True],
        np.array([-1.0, np.nan]),
        np.array([-1.0, -1e39]),
        np.array([True, True]),
    ],
)
def test_bad_logprobs_raise_what_the_reference_raises(logprobs):
    turn = Turn([1], [2, 3], logprobs)
    with pytest.raises(ValueError, match=r"group 0, trajectory 0, turn 0: logprobs\[\d\]") as ours:
        rows_of(turn)
    with pytest.raises(ValueError, match="turn 0") as theirs:
        reference.training_rows([TrajectoryGroup([Trajectory([turn])])], [[1.0]])
    assert str(ours.value) == str(theirs.value)


def test_counts_are_checked_or_padded(caplog):
    turns = [Turn([1], [2, 3, 4], np.array([-1.0, -2.0])), Turn([1], [2], [-1.0, -9.0])]
    with pytest.raises(ValueError, match="turn 0: 3 completion_tokens but 2 logprobs"):
        rows_of(*turns)
    rows = rows_of(*turns, on_logprob_mismatch="pad")
    assert rows.logprobs.tolist() == [0, -1, -2, 0, 0, -1]
    assert "2 turns" in caplog.text


def test_what_has_no_place_is_counted():
    rows = rows_of(
        Turn([1, 2], [], []),
        Turn([], [9], [-1.0]),
        Turn([], [5, 6], [-1.0, -2.0]),
        Turn([], [], []),
    )
    assert len(rows) == 1
    assert rows.account.as_dict() == {
        "captured": 3,
        "trained": 1,
        "masked": {},
        "dropped": {"no_context": 2},
        "dropped_turns": {"empty_completion": 2, "no_context": 1},
    }


def test_merged_rows_and_where_they_break():
    turns = [
        Turn([1, 2], [3], [-0.1]),
        Turn([1, 2, 3, 4], [], []),
        Turn([1, 2, 3, 4, 5], [6], [-0.2]),
        Turn([1, 2, 393, 9], [10], [-0.3]),
    ]
    rows = rows_of(*turns, rows="merged")
    assert rows.offsets.tolist() == [0, 6, 11]
    assert rows.tokens.tolist() == [1, 2, 3, 4, 5, 6, 1, 2, 393, 9, 10]
    assert rows.turn.tolist() == [0, 3]


@pytest.mark.parametrize("prefix", [[1, 2, True], [1.0, 2, 3], [1, 2.0, 3]])
def test_a_repeated_prefix_is_checked_too(prefix):
    turns = [Turn([1, 2], [prefix[2] if prefix[2] is not True else 1], [-0.1])]
    turns.append(Turn([*prefix, 4], [5], [-0.2]))
    with pytest.raises(ValueError, match=r"turn 1: prompt_tokens\[\d\]"):
        rows_of(*turns, rows="merged")


def test_views_into_one_array_merge_without_being_compared():
    tokens = np.arange(100, dtype=np.int32)
    logprobs = -np.ones(100, np.float32)
    spans = [(2, 5), (9, 20), (30, 100)]
    turns = [Turn(tokens[:a], tokens[a:b], logprobs[a:b]) for a, b in spans]
    rows = rows_of(*turns, rows="merged")
    np.testing.assert_array_equal(rows.tokens, tokens)
    assert np.flatnonzero(np.diff(rows.sampled)).tolist() == [1, 4, 8, 19, 29]


def test_masked_rollouts_are_counted_by_reason():
    group = TrajectoryGroup(
        [
            Trajectory([Turn([1], [2, 3], [-1.0, -1.0])], 1.0),
            Trajectory([Turn([1], [2], [])], 5.0, {"mask_reason": "lost"}, False, False),
            Trajectory([Turn([1], [2], [])], 5.0, {}, True, False),
        ]
    )
    rows = ragged_rows([group])
    assert rows.account.masked == {"lost": 1, "not_training": 1}
    assert rows.account.balanced
    assert rows.table.rewards.tolist() == [1.0, 0.0, 5.0]


def test_what_can_be_read_once_only_is_refused():
    turn = Turn([1], [2], [-1.0])
    with pytest.raises(ValueError, match="group 0, trajectory 0: turns: a generator"):
        ragged_rows([TrajectoryGroup([Trajectory(t for t in [turn])])])
    with pytest.raises(ValueError, match="group 0: trajectories: a generator"):
        ragged_rows([TrajectoryGroup(t for t in [Trajectory([turn])])])
    with pytest.raises(ValueError, match="groups: a generator"):
        ragged_rows(g for g in [])
    with pytest.raises(ValueError, match="turn 0: completion_tokens: a NoneType"):
        rows_of(Turn([1], None, []))


@pytest.mark.parametrize("kind", [deque, UserList, lambda x: np.array(x, object)])
def test_bools_hide_in_no_kind_of_sequence(kind):
    with pytest.raises(ValueError, match=r"turn 0: prompt_tokens\[1\] is True"):
        rows_of(Turn(kind([5, True]), [2], [-1.0]))
    assert rows_of(Turn(kind([5, 1]), [2], [-1.0])).tokens.tolist() == [5, 1, 2]


@pytest.mark.parametrize("tokens", [{1, 2}, {1: 2}, "12", b"12"])
def test_what_has_no_order_is_no_sequence(tokens):
    with pytest.raises(ValueError, match="is no sequence"):
        rows_of(Turn(tokens, [2], [-1.0]))


def test_rows_are_chosen_by_index_or_by_flags():
    rows = rows_of(*[Turn([n], [n], [-1.0]) for n in range(3)])
    assert rows.take([2, 0]).tokens.tolist() == [2, 2, 0, 0]
    assert rows.take(np.array([False, True, True])).tokens.tolist() == [1, 1, 2, 2]
    for wrong in ([-1], [3]):
        with pytest.raises(IndexError, match="of 3"):
            rows.take(wrong)


def test_a_bad_reward_is_named():
    group = TrajectoryGroup([Trajectory([], 1.0), Trajectory([], float("nan"))])
    with pytest.raises(ValueError, match="group 0, trajectory 1: reward nan"):
        ragged_rows([group])


def test_buffers_shrink_where_their_bytes_are_moved():
    rows = rows_of(*[Turn([1], [2], [-1.0]) for _ in range(4)])
    slots = np.arange(4)[:, None]
    options = {"size": 2**20, "room": 3}
    (tokens, *_), starts = rows.lay(slots, None, **options, shrink=False)
    (shrunk, *_), same = rows.lay(slots, None, **options, shrink=True)
    assert (len(tokens), len(shrunk)) == (2**20, 2**18)
    np.testing.assert_array_equal(starts, same)
    np.testing.assert_array_equal(tokens[:8], shrunk[:8])


@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.sampled_from(["turns", "merged"]),
    drop=st.booleans(),
    most=st.sampled_from([1, 20, 100, 10**6]),
)
def test_parts_together_are_the_whole(seed, rows, drop, most):
    groups = random_groups(seed)
    whole = ragged_rows(groups, rows=rows, drop_constant=drop)
    parts = list(iter_ragged_rows(groups, max_tokens=most, rows=rows, drop_constant=drop))
    sizes = [int(part.lengths.sum()) for part in parts]
    assert len(parts) <= len(groups)
    for part in parts:
        tokens = [
            turn for g in set(part.table.group) for t in groups[g].trajectories for turn in t.turns
        ]
        held = sum(len(turn.prompt_tokens) + len(turn.completion_tokens) for turn in tokens)
        assert held <= most or len(set(part.table.group)) == 1
    account = TokenAccount()
    for part in parts:
        account += part.account
    assert account == whole.account
    for name in ("tokens", "sampled", "logprobs", "lengths", "group", "trajectory", "turn"):
        joined = np.concatenate([getattr(whole, name)[:0], *(getattr(p, name) for p in parts)])
        np.testing.assert_array_equal(joined, getattr(whole, name))
        assert joined.dtype == getattr(whole, name).dtype
    assert sum(sizes) == len(whole.tokens)
    for part in parts:
        batch = pack(part)
        live = np.asarray(batch.segment_row) >= 0
        expected = pack(whole.take(np.isin(whole.group, np.unique(part.group))))
        np.testing.assert_array_equal(
            np.asarray(batch.advantages)[live[:, 0]],
            np.asarray(expected.advantages)[live[:, 0]],
        )


def test_an_error_in_a_later_part_names_the_group_among_all():
    good, bad = Turn([1], [2], [-0.5]), Turn([1], [-2], [-0.5])
    groups = [TrajectoryGroup([Trajectory([turn])]) for turn in (good, good, bad)]
    parts = iter_ragged_rows(groups, max_tokens=1)
    assert [part.group.tolist() for part in (next(parts), next(parts))] == [[0], [1]]
    with pytest.raises(ValueError, match="group 2, trajectory 0, turn 0: completion_tokens"):
        next(parts)


@pytest.mark.parametrize(
    "groups", [None, {"a": 1}, (group for group in ()), [TrajectoryGroup(None)], 7]
)
def test_parts_of_what_is_no_sequence_are_refused_as_the_whole_is(groups):
    with pytest.raises(ValueError, match="no sequence"):
        list(iter_ragged_rows(groups))


def test_bad_options_are_told_without_groups_too():
    with pytest.raises(ValueError, match="rows="):
        list(iter_ragged_rows([], rows="some"))
    assert list(iter_ragged_rows([])) == []


@pytest.mark.parametrize(
    "turn, named",
    [
        (Turn(np.array([1]), np.array([2**32 + 5]), np.array([-0.5])), r"completion_tokens\[0\]"),
        (Turn(np.array([1]), np.array([2, 3]), np.array([-0.5, np.inf])), r"logprobs\[1\]"),
        (Turn(np.array([1]), np.array([2]), np.array([-np.inf])), r"logprobs\[0\]"),
        (Turn(np.array([1]), np.array([2, 3]), np.array([np.nan, -1.0])), r"logprobs\[0\]"),
        (Turn(np.array([1]), np.array([2]), np.array([3.5e38])), r"logprobs\[0\]"),
        (Turn([1], [2, 3], [-0.5, False]), r"logprobs\[1\]"),
        (Turn([1], [2, 3], [-0.5, True]), r"logprobs\[1\]"),
    ],
)
def test_what_hides_among_good_values_is_named(turn, named):
    good = Turn(np.array([1, 2]), np.array([3]), np.array([-0.5]))
    with pytest.raises(ValueError, match=f"group 0, trajectory 0, turn 1: {named}"):
        rows_of(good, turn)


def test_the_largest_logprobs_of_both_signs_pass():
    extreme = np.finfo(np.float32).max
    rows = rows_of(Turn(np.array([1]), np.array([2, 3]), np.array([extreme, -extreme])))
    assert rows.logprobs.tolist() == [0.0, extreme, -extreme]


def test_empty_arrays_of_any_kind_are_no_tokens():
    rows = rows_of(Turn(np.array([], "M8[s]"), np.array([2, 3]), np.array([-0.5, -1.0])))
    assert rows.tokens.tolist() == [2, 3]


@pytest.mark.parametrize(
    "prompt",
    [
        (1, True, 2),
        (1, 1, 2.0),
        [1, 1.0, 2, 7],
        np.array([1.0, 1.0, 2.0]),
        np.array([1, True, 2], object),
        np.ma.array([1, 1, 2], mask=[0, 1, 0]),
        [1, 1, 2, [3]],
    ],
)
@pytest.mark.parametrize("kind", [list, tuple, np.array])
def test_a_prompt_that_only_equals_the_history_is_refused(prompt, kind):
    first = Turn(kind([1]), kind([1, 2]), [-0.5, -0.5])
    with pytest.raises(ValueError, match=r"group 0, trajectory 0, turn 1: prompt_tokens\["):
        rows_of(first, Turn(prompt, kind([5]), [-1.0]), rows="merged")


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda x: [np.int64(i) for i in x]])
@pytest.mark.parametrize("other", [list, tuple, np.array, jnp.array])
def test_prompts_of_another_kind_extend_all_the_same(kind, other):
    first = Turn(kind([1]), other([1, 2]), [-0.5, -0.5])
    rows = rows_of(first, Turn(other([1, 1, 2, 3]), kind([5]), [-1.0]), rows="merged")
    assert len(rows) == 1
    assert rows.tokens.tolist() == [1, 1, 2, 3, 5]


@pytest.mark.parametrize("value", [None, 1.5, np.array(3.0), "abc", {}, set(), (x for x in ())])
@pytest.mark.parametrize("field", ["prompt_tokens", "completion_tokens", "logprobs"])
def test_a_field_that_is_no_sequence_is_named(field, value):
    turn = Turn([1], [2], [-0.5])
    setattr(turn, field, value)
    with pytest.raises(ValueError, match=f"group 0, trajectory 0, turn 1: {field}: "):
        rows_of(Turn([1], [2], [-0.5]), turn)


@pytest.mark.parametrize(
    "turn, named",
    [
        (Turn([1], [2, 3], [np.True_, -1.0]), r"logprobs\[0\]"),
        (Turn([1], np.ma.array([2, 3], mask=[0, 1]), [-1.0, -1.0]), r"completion_tokens\[1\]"),
        (Turn([1], [2, 3], np.ma.array([-1.0, -1.0], mask=[0, 1])), r"logprobs\[1\]"),
    ],
)
def test_what_only_looks_like_a_number_is_named(turn, named):
    with pytest.raises(ValueError, match=f"turn 0: {named}"):
        rows_of(turn)
