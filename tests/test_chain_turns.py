"""Turns that share one array: a sequence like any other, and the same rows without its objects."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest

from evsys_jax import TrajectoryGroup, ragged_rows
from evsys_jax.parts import iter_ragged_rows
from evsys_jax.rollouts import ChainTurns, Trajectory

FLAT = ("tokens", "sampled", "logprobs", "offsets", "row_trajectory", "turn")


def make_chain(rng, turns, *, first=None):
    """Make a chain with empty prompts, gaps and completions among others."""
    gaps = rng.integers(0, 3, 2 * turns)
    if turns and first is not None:
        gaps[0] = first
    starts, ends = np.cumsum(gaps).astype(np.int32).reshape(-1, 2).T.copy()
    size = int(ends[-1]) if turns else 0
    tokens = rng.integers(0, 100, size + 2).astype(np.int32)[:size]
    logprobs = np.zeros(size, np.float32)
    for start, end in zip(starts, ends, strict=True):
        logprobs[start:end] = -rng.exponential(size=end - start)
    return ChainTurns(tokens, logprobs, starts, ends)


def make_group(seed, *, touched=False):
    rng = np.random.default_rng(seed)
    members = []
    for n in range(12):
        turns = make_chain(rng, int(rng.integers(0, 5)), first=0 if n % 3 == 0 else None)
        members.append(Trajectory(list(turns) if touched else turns, float(n % 2), trains=n != 7))
    return TrajectoryGroup(members)


@pytest.mark.parametrize("rows", ["turns", "merged"])
@pytest.mark.parametrize("seed", range(25))
def test_an_untouched_chain_gives_the_rows_of_its_turns(rows, seed):
    chains = [make_group(seed), make_group(seed + 100)]
    lists = [make_group(seed, touched=True), make_group(seed + 100, touched=True)]
    mixed = [chains[0], lists[1]]
    wanted = ragged_rows(lists, rows=rows)
    for groups in (chains, mixed):
        found = ragged_rows(groups, rows=rows)
        for name in FLAT:
            np.testing.assert_array_equal(getattr(found, name), getattr(wanted, name), name)
            assert getattr(found, name).dtype == getattr(wanted, name).dtype
        assert found.account == wanted.account
    parts = list(iter_ragged_rows(chains, rows=rows, max_tokens=1))
    assert len(parts) == 2
    np.testing.assert_array_equal(np.concatenate([p.tokens for p in parts]), wanted.tokens)
    assert all(each.turns.untouched for each in chains[0].trajectories)


@pytest.mark.parametrize(("rows", "parts"), [("merged", 2), ("turns", 4)])
def test_a_part_holds_as_many_tokens_as_its_rows_have(rows, parts):
    tokens, starts = np.arange(10, dtype=np.int32), np.array([1, 5, 8], np.int32)
    ends = np.array([4, 7, 10], np.int32)
    groups = [
        TrajectoryGroup([Trajectory(ChainTurns(tokens, np.zeros(10, np.float32), starts, ends))])
        for _ in range(4)
    ]
    found = list(iter_ragged_rows(groups, rows=rows, max_tokens=21))
    assert len(found) == parts
    assert all(len(part.tokens) <= 21 for part in found)


def test_the_rows_hold_every_kind_of_turn():
    accounts = [ragged_rows([make_group(seed)], rows="merged").account for seed in range(25)]
    assert {reason for a in accounts for reason in a.dropped_turns} == {
        "empty_completion",
        "no_context",
    }
    assert {reason for a in accounts for reason in a.dropped} == {"no_context"}


def test_constant_groups_are_dropped_with_the_same_account():
    groups = [make_group(3)], [make_group(3, touched=True)]
    for group in (each[0] for each in groups):
        for member in group.trajectories:
            member.reward = 1.0
    ours, theirs = (ragged_rows(each, drop_constant=True) for each in groups)
    assert len(ours) == len(theirs) == 0
    assert ours.account == theirs.account


def test_it_reads_like_a_list_of_turns():
    chain = make_chain(np.random.default_rng(0), 3)
    assert len(chain) == 3
    assert chain.untouched
    assert repr(chain) == f"<3 turns of {len(chain.tokens)} tokens>"
    assert chain.untouched
    first, second, third = chain
    assert not chain.untouched
    assert chain[-1] is third
    assert chain[1:] == [second, third]
    assert list(reversed(chain)) == [third, second, first]
    assert chain.index(second) == 1
    with pytest.raises(IndexError):
        chain[3]
    for turn, start, end in zip(chain, chain.starts, chain.ends, strict=True):
        assert np.array_equal(turn.prompt_tokens, chain.tokens[:start])
        assert np.array_equal(turn.completion_tokens, chain.tokens[start:end])
        assert np.array_equal(turn.logprobs, chain.logprobs[start:end])
        assert np.shares_memory(turn.completion_tokens, chain.tokens) or start == end
    assert not ChainTurns()
    assert list(ChainTurns()) == []


@pytest.mark.parametrize("rows", ["turns", "merged"])
def test_a_turn_that_was_changed_stays_changed(rows):
    tokens, logprobs = np.arange(4, dtype=np.int32), np.array([0, -1, 0, -2], np.float32)
    chain = ChainTurns(tokens, logprobs, np.array([1, 3], np.int32), np.array([2, 4], np.int32))
    group = TrajectoryGroup([Trajectory(chain, 1.0)])
    assert ragged_rows([group], rows=rows).tokens.max() == 3
    chain[1].completion_tokens = [9]
    assert ragged_rows([group], rows=rows).tokens.max() == 9


@pytest.mark.parametrize("again", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_it_can_be_copied(again):
    group = make_group(2)
    other = again(group)
    assert all(each.turns.untouched for each in other.trajectories)
    one, two = (ragged_rows([each], rows="merged") for each in (group, other))
    assert np.array_equal(one.tokens, two.tokens)
    shorter = replace(group.trajectories[1], turns=group.trajectories[1].turns[:1])
    assert len(shorter.turns) <= 1


def test_a_bad_value_is_named_by_turn_and_index():
    chain = make_chain(np.random.default_rng(4), 3, first=2)
    wrong = int(chain.starts[-1])
    chain.tokens[wrong] = -5
    with pytest.raises(ValueError, match=r"group 0, trajectory 0, turn 2: .*\[0\] is -5"):
        ragged_rows([TrajectoryGroup([Trajectory(chain, 1.0)])], rows="merged")


@pytest.mark.parametrize(
    ("starts", "ends", "logprobs"),
    [
        ([2], [8], 6),
        ([4], [3], 6),
        ([1, 2], [3, 4], 6),
        ([-1], [2], 6),
        ([1, 2], [2], 6),
        ([2], [4], 5),
    ],
)
def test_a_chain_whose_turns_do_not_fit_is_refused(starts, ends, logprobs):
    edges = np.array(starts, np.int32), np.array(ends, np.int32)
    with pytest.raises(ValueError, match=r"differ in length|overlap"):
        ChainTurns(np.arange(6, dtype=np.int32), np.zeros(logprobs, np.float32), *edges)
