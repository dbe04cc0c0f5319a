"""Cases from the field with known answers: what the reference says is right."""

from __future__ import annotations

import math

import pytest

from evsys_jax import reference
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def rows_of(*turns, advantage=1.5, **options):
    group = TrajectoryGroup([Trajectory(list(turns))])
    return reference.training_rows([group], [[advantage]], **options)


def group_of(rewards, masked=()):
    members = [Trajectory([Turn([1], [2], [-0.5])], reward) for reward in rewards]
    for i in masked:
        members[i].votes = members[i].trains = False
    return TrajectoryGroup(members)


def test_a_turn_is_shifted_by_one():
    (row,) = rows_of(Turn([10, 11], [12, 13], [-0.1, -0.2]))
    assert row.input_tokens == [10, 11, 12]
    assert row.target_tokens == [11, 12, 13]
    assert row.logprobs == [0.0, -0.1, -0.2]
    assert row.advantages == [0.0, 1.5, 1.5]
    assert row.mask == [False, True, True]


def test_an_empty_prompt_trains_from_its_second_token_with_its_own_logprob():
    (row,) = rows_of(Turn([], [5, 6, 7], [-1.0, -2.0, -3.0]))
    assert row.input_tokens == [5, 6]
    assert row.target_tokens == [6, 7]
    assert row.logprobs == [-2.0, -3.0]
    assert row.advantages == [1.5, 1.5]


def test_the_shortest_row_and_the_turns_without_one():
    (row,) = rows_of(Turn([7], [2], [-1.0]), Turn([1, 2], [], []), Turn([], [9], [-1.0]))
    assert (row.input_tokens, row.target_tokens) == ([7], [2])


def test_a_prompt_that_holds_the_generated_tokens_already_stays_masked():
    (row,) = rows_of(Turn([1, 5, 6, 2, 1], [5, 6, 2], [-1.0, -1.0, -1.0]))
    assert row.mask == [False] * 4 + [True] * 3


@pytest.mark.parametrize(
    ("completion", "logprobs"), [([2, 3, 4], [-1.0, -2.0]), ([2], [-1.0, -9.0])]
)
def test_other_counts_of_logprobs_are_an_error_with_both_counts(completion, logprobs):
    counts = f"{len(completion)} completion_tokens but {len(logprobs)} logprobs"
    with pytest.raises(ValueError, match=f"group 0, trajectory 0, turn 0: {counts}"):
        rows_of(Turn([1], completion, logprobs))


def test_padding_of_logprobs_is_asked_for_and_counted(caplog):
    rows = rows_of(
        Turn([1], [2, 3, 4], [-1.0, -2.0]),
        Turn([1], [2], [-1.0, -9.0]),
        Turn([1], [2], [-4.0]),
        on_logprob_mismatch="pad",
    )
    assert [row.logprobs for row in rows] == [[-1.0, -2.0, 0.0], [-1.0], [-4.0]]
    assert "2 turns" in caplog.text


@pytest.mark.parametrize("token", [-1, 2**31, 2**32 + 5, 2**63, 3.0, 2.5, True, "12", None])
@pytest.mark.parametrize("name", ["prompt_tokens", "completion_tokens"])
def test_a_bad_token_is_named(token, name):
    turn = Turn([1, 2], [3, 4], [-1.0, -1.0])
    getattr(turn, name)[1] = token
    with pytest.raises(ValueError, match=rf"group 0, trajectory 0, turn 0: {name}\[1\]"):
        rows_of(turn)


@pytest.mark.parametrize("logprob", [math.nan, math.inf, -math.inf, -1e39, None, "-1", True])
def test_a_bad_logprob_is_named(logprob):
    with pytest.raises(ValueError, match=r"group 0, trajectory 0, turn 1: logprobs\[2\]"):
        rows_of(Turn([1], [2], [-1.0]), Turn([1], [2, 3, 4], [-1.0, -9999.0, logprob]))


def test_merged_turns_begin_a_new_row_where_history_was_tokenised_again():
    turns = [
        Turn([1, 2], [3], [-0.1]),
        Turn([1, 2, 3, 4], [], []),
        Turn([1, 2, 3, 4, 5], [6], [-0.2]),
        Turn([1, 2, 393, 9], [10], [-0.3]),
    ]
    first, second = rows_of(*turns, rows="merged")
    assert first.input_tokens == [1, 2, 3, 4, 5]
    assert first.mask == [False, True, False, False, True]
    assert first.logprobs == [0.0, -0.1, 0.0, 0.0, -0.2]
    assert (second.target_tokens, second.turn) == ([2, 393, 9, 10], 3)


@pytest.mark.parametrize("hidden", [0.0, 1e9, math.nan, math.inf, "unscored", None])
def test_a_masked_sibling_moves_nobody(hidden):
    assert reference.compute_advantages([group_of([1, 0, hidden], masked=[2])]) == [[0.5, -0.5, 0]]
    (row,) = reference.compute_advantages([group_of([1, hidden, 0, 0], masked=[1])])
    assert row == pytest.approx([2 / 3, 0.0, -1 / 3, -1 / 3], abs=1e-15)


@pytest.mark.parametrize("reward", [math.nan, math.inf, None, "1", b"1", [1.0]])
def test_a_reward_that_counts_must_be_a_finite_number(reward):
    with pytest.raises(ValueError, match="group 1, trajectory 1: reward"):
        reference.compute_advantages([group_of([1.0]), group_of([0.0, reward])])


@pytest.mark.parametrize("rewards", [[0.95] * 8, [0.1] * 3, [1e8 + 0.1] * 7, [-3] * 2])
def test_a_constant_group_has_exact_zeros(rewards):
    assert reference.compute_advantages([group_of(rewards)]) == [[0.0] * len(rewards)]


def test_large_rewards_keep_their_differences():
    rewards = [1e8, 1e8 + 1, 1e8 + 2, 1e8 + 3]
    assert reference.compute_advantages([group_of(rewards)]) == [[-1.5, -0.5, 0.5, 1.5]]


def test_integers_and_bools_are_numbers():
    assert reference.compute_advantages([group_of([True, False])]) == [[0.5, -0.5]]
    assert reference.compute_advantages([group_of([3, 1])], normalize=False) == [[3.0, 1.0]]


def test_groups_of_one_and_of_none():
    alone, empty, lonely = group_of([0.7]), group_of([]), group_of([0.7, 5.0], masked=[1])
    advantages = reference.compute_advantages([alone, empty, lonely])
    assert advantages == [[0.7], [], [0.0, 0.0]]


def test_a_member_that_trains_without_a_vote_is_compared_all_the_same():
    group = group_of([1.0, 3.0, 8.0])
    group.trajectories[2].votes = False
    assert reference.compute_advantages([group]) == [[-1.0, 1.0, 6.0]]
    for member in group.trajectories:
        member.votes = False
    assert reference.compute_advantages([group]) == [[0.0, 0.0, 0.0]]


def test_groups_are_told_apart_by_themselves_not_by_their_prompts():
    groups = [group_of([0, 0]), group_of([1, 1])]
    assert reference.compute_advantages(groups) == [[0.0, 0.0], [0.0, 0.0]]


def test_metrics():
    assert reference.compute_trajectory_metrics([]) == {}
    assert reference.compute_trajectory_metrics([group_of([]), group_of([1.0], masked=[0])]) == {}
    metrics = reference.compute_trajectory_metrics([group_of([1, 2]), group_of([3, 9], masked=[1])])
    assert metrics == {
        "reward/mean": 2.0,
        "reward/std": pytest.approx(math.sqrt(2 / 3), abs=1e-15),
        "reward/n_trajectories": 3.0,
        "reward/n_groups": 2.0,
        "reward/n_masked": 1.0,
    }


@pytest.mark.parametrize(
    ("advantages", "message"),
    [
        ([[1.0]], "2 groups but 1 lists"),
        ([[1.0], [1.0, 2.0]], "group 1: 1 trajectories but 2 advantages"),
        ([[1.0], [math.nan]], "group 1, trajectory 0: advantage nan"),
        ([[1e39], [1.0]], "group 0, trajectory 0: advantage 1e"),
    ],
)
def test_advantages_must_match_the_groups(advantages, message):
    with pytest.raises(ValueError, match=message):
        reference.training_rows([group_of([1.0]), group_of([2.0])], advantages)


def test_options_are_checked():
    with pytest.raises(ValueError, match="rows='both' is not one of 'turns', 'merged'"):
        rows_of(rows="both")
    with pytest.raises(ValueError, match="on_logprob_mismatch='cut'"):
        rows_of(on_logprob_mismatch="cut")
