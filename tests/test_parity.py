"""The array path against the reference, on generated rollouts of every shape."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from generators import random_groups
from hypothesis import given
from hypothesis import strategies as st

from evsys_jax import reference, verify
from evsys_jax.batch import pack
from evsys_jax.data_processing import assemble_training_data, compute_advantages
from evsys_jax.ragged import ragged_rows
from evsys_jax.verify import compare

seeds = st.integers(0, 2**32 - 1)


def assert_rows_equal(batch, rows):
    """Hold a padded batch to the reference's rows, position by position."""
    lengths = np.asarray(batch.segment_lengths)[:, 0]
    assert lengths[: len(rows)].tolist() == [len(row.mask) for row in rows]
    assert not lengths[len(rows) :].any()
    for b, row in enumerate(rows):
        real = slice(0, len(row.mask))
        assert np.asarray(batch.input_tokens)[b, real].tolist() == row.input_tokens
        assert np.asarray(batch.target_tokens)[b, real].tolist() == row.target_tokens
        assert np.asarray(batch.mask)[b, real].tolist() == row.mask
        logprobs = np.asarray(batch.logprobs)[b, real]
        np.testing.assert_array_equal(logprobs, np.array(row.logprobs, np.float32))
        wanted = np.array(row.advantages, np.float32)
        np.testing.assert_array_max_ulp(np.asarray(batch.advantages)[b, real], wanted, maxulp=1)
        place = [np.asarray(batch.segment_group)[b, 0], np.asarray(batch.segment_trajectory)[b, 0]]
        assert [*place, np.asarray(batch.segment_turn)[b, 0]] == [
            row.group,
            row.trajectory,
            row.turn,
        ]


@pytest.mark.parametrize("seed", range(200))
def test_assembled_datums_equal_the_reference(seed):
    groups = random_groups(seed)
    advantages = reference.compute_advantages(groups)
    rows = reference.training_rows(groups, advantages)
    datums, metadata = assemble_training_data(groups, advantages)
    assert len(datums) == len(metadata) == len(rows)
    for datum, place, row in zip(datums, metadata, rows, strict=True):
        assert (place.group_idx, place.traj_idx, place.turn_idx) == (
            row.group,
            row.trajectory,
            row.turn,
        )
        assert datum.model_input.to_ints() == row.input_tokens
        inputs = datum.loss_fn_inputs
        assert list(inputs) == ["target_tokens", "logprobs", "advantages"]
        assert inputs["target_tokens"].tolist() == row.target_tokens
        for name in ("logprobs", "advantages"):
            wanted = np.array(getattr(row, name), np.float32)
            np.testing.assert_array_equal(inputs[name].to_numpy(), wanted)


@given(seed=seeds, normalize=st.booleans())
def test_advantages_agree(seed, normalize):
    groups = random_groups(seed)
    wanted = reference.compute_advantages(groups, normalize=normalize)
    actual = compute_advantages(groups, normalize=normalize)
    assert [len(row) for row in actual] == [len(row) for row in wanted]
    for ours, theirs in zip(actual, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@given(seed=seeds, rows=st.sampled_from(["turns", "merged"]), normalize=st.booleans())
def test_packed_rows_agree(seed, rows, normalize):
    groups = random_groups(seed)
    advantages = reference.compute_advantages(groups, normalize=normalize)
    batch = pack(groups, rows=rows, normalize=normalize)
    assert_rows_equal(batch, reference.training_rows(groups, advantages, rows=rows))


@given(seed=seeds, rows=st.sampled_from(["turns", "merged"]))
def test_lists_and_arrays_give_the_same_batch(seed, rows):
    lists = pack(random_groups(seed, arrays=False), rows=rows)
    plain = random_groups(seed, arrays=False)
    for group in plain:
        for trajectory in group.trajectories:
            if trajectory.trains:
                for turn in trajectory.turns:
                    turn.prompt_tokens = np.array(turn.prompt_tokens, np.int32)
                    turn.completion_tokens = np.array(turn.completion_tokens, np.int64)
                    turn.logprobs = np.array(turn.logprobs, np.float64)
    arrays = pack(plain, rows=rows)
    np.testing.assert_array_equal(lists.input_tokens, arrays.input_tokens)
    np.testing.assert_array_equal(lists.logprobs, arrays.logprobs)
    np.testing.assert_array_equal(lists.advantages, arrays.advantages)


@given(seed=seeds, rows=st.sampled_from(["turns", "merged"]), drop=st.booleans())
def test_every_token_is_accounted_for(seed, rows, drop):
    groups = random_groups(seed)
    ragged = ragged_rows(groups, rows=rows, drop_constant=drop)
    batch = pack(groups, rows=rows, drop_constant=drop)
    account = ragged.account
    generated = sum(
        len(turn.completion_tokens)
        for group in groups
        for trajectory in group.trajectories
        for turn in trajectory.turns
    )
    assert account.captured == generated
    assert account.balanced
    assert account.trained == int(np.asarray(batch.mask).sum())


@given(seed=seeds)
def test_what_trains_is_what_was_captured(seed):
    groups = random_groups(seed)
    captured = Counter()
    for group in groups:
        for trajectory in group.trajectories:
            for turn in trajectory.turns if trajectory.trains else ():
                logprobs = np.asarray(turn.logprobs, np.float32).tolist()
                pairs = list(zip(list(turn.completion_tokens), logprobs, strict=True))
                captured.update(pairs[1:] if len(turn.prompt_tokens) == 0 else pairs)
    for rows in ("turns", "merged"):
        batch = pack(groups, rows=rows)
        live = np.asarray(batch.mask)
        tokens = np.asarray(batch.target_tokens)[live].tolist()
        logprobs = np.asarray(batch.logprobs)[live].tolist()
        assert Counter(zip(tokens, logprobs, strict=True)) == captured


@given(seed=seeds, order=st.randoms(use_true_random=False))
def test_permuting_rollouts_permutes_advantages(seed, order):
    groups = random_groups(seed)
    before = compute_advantages(groups)
    places = [list(range(len(group.trajectories))) for group in groups]
    for group, place in zip(groups, places, strict=True):
        order.shuffle(place)
        group.trajectories = [group.trajectories[n] for n in place]
    after = compute_advantages(groups)
    for old, new, place in zip(before, after, places, strict=True):
        np.testing.assert_allclose(new, [old[n] for n in place], rtol=1e-12, atol=1e-12)


@given(seed=seeds, rows=st.sampled_from(["turns", "merged"]))
def test_compare_finds_nothing(seed, rows):
    groups = random_groups(seed)
    found = compare(groups, rows=rows)
    assert found.identical
    assert found.rows == len(ragged_rows(groups, rows=rows))


def test_compare_finds_a_difference(monkeypatch):
    groups = random_groups(3)
    real = reference._shift

    def off_by_one(sequence, advantage, group, trajectory):
        row = real(sequence, advantage, group, trajectory)
        row.logprobs[-1] -= 1e-3
        return row

    monkeypatch.setattr(reference, "_shift", off_by_one)
    found = compare(groups)
    assert found.differing == found.rows > 0
    assert "logprobs" in found.differences[0]
    assert "row 0 (group" in found.differences[0]


@pytest.mark.parametrize("field", ["input_tokens", "target_tokens", "logprobs", "advantages"])
def test_compare_looks_at_the_unpadded_way(monkeypatch, field):
    real = verify._unpadded_rows

    def spoiled(*arguments):
        for row in real(*arguments):
            yield {**row, field: row[field] + 1}

    monkeypatch.setattr(verify, "_unpadded_rows", spoiled)
    found = compare(random_groups(3))
    assert found.differing == found.rows > 0
    assert f"{field}[0]" in found.differences[0]
    assert ", unpadded arrays" in found.differences[0]


@pytest.mark.parametrize(
    "field", ["input_tokens", "target_tokens", "logprobs", "advantages", "mask"]
)
def test_compare_looks_at_the_padded_way(monkeypatch, field):
    real = verify._padded_rows

    def spoiled(*arguments):
        for row in real(*arguments):
            yield {**row, field: ~row[field] if field == "mask" else row[field] + 1}

    monkeypatch.setattr(verify, "_padded_rows", spoiled)
    found = compare(random_groups(3))
    assert found.differing == found.rows > 0
    assert f"{field}[0]" in found.differences[0]
    assert ", arrays" in found.differences[0]


@pytest.mark.parametrize("way", ["_padded_rows", "_unpadded_rows"])
def test_compare_misses_a_row(monkeypatch, way):
    real = getattr(verify, way)
    monkeypatch.setattr(verify, way, lambda *arguments: list(real(*arguments))[:-1])
    found = compare(random_groups(3))
    assert found.differing == 1
    assert "only in the reference" in found.differences[0]
