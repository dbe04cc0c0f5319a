"""Rollout records to groups: one verdict each, and no rollout that harms another."""

from __future__ import annotations

import json
import math
import re
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from evsys_jax.batch import pack
from evsys_jax.capture.config import rollout_id_of
from evsys_jax.collect import collect
from evsys_jax.ragged import ragged_rows
from evsys_jax.reference import compute_advantages

EXAMPLE = Path(__file__).parent.parent / "examples" / "rollouts" / "rollouts.jsonl"


def item(prompt, generation, logprobs=None):
    return {
        "type": "message",
        "prompt_token_ids": prompt,
        "generation_token_ids": generation,
        "generation_log_probs": [-0.5] * len(generation) if logprobs is None else logprobs,
    }


def record(task=0, rollout=0, items=None, **more):
    output = [item([1, 2], [3]), {"type": "function_call_output"}, item([1, 2, 3, 4], [5, 6])]
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "reward": 1.0,
        "response": {"output": output if items is None else items},
        **more,
    }


def verdict_of(one):
    _, report = collect([one])
    return report.verdicts[0]


def test_each_generated_item_is_a_turn_and_a_view():
    (group,), report = collect([record()])
    (trajectory,) = group.trajectories
    first, second = trajectory.turns
    assert first.prompt_tokens.tolist() == [1, 2]
    assert first.completion_tokens.tolist() == [3]
    assert second.prompt_tokens.tolist() == [1, 2, 3, 4]
    assert second.completion_tokens.tolist() == [5, 6]
    assert second.logprobs.tolist() == [-0.5, -0.5]
    assert np.shares_memory(first.prompt_tokens, second.prompt_tokens)
    assert trajectory.metadata == {"rollout_id": "0-0"}
    assert report.account.as_dict()["trained"] == 3


def test_groups_by_task_in_order_of_first_appearance():
    groups, report = collect([record(7, 1), record(3, 0), record(7, 0, reward=0)])
    assert [len(group.trajectories) for group in groups] == [2, 1]
    assert [t.metadata["rollout_id"] for t in groups[0].trajectories] == ["7-1", "7-0"]
    assert [(v.task, v.group, v.trajectory) for v in report.verdicts] == [
        (7, 0, 0),
        (3, 1, 0),
        (7, 0, 1),
    ]
    assert compute_advantages(groups) == [[0.5, -0.5], [1.0]]


@pytest.mark.parametrize(
    ("fields", "rollout_id"),
    [
        ({"_ng_task_index": 3, "_ng_rollout_index": 5}, "3-5"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 5, "_ng_attempt_index": 0}, "3-5"),
        ({"_ng_task_index": 3, "_ng_rollout_index": 5, "_ng_attempt_index": 2}, "3-5-a2"),
        ({"_ng_task_index": 3, "_ng_rollout_id": "a.b_c-1"}, "a.b_c-1"),
        ({"_ng_task_index": 3}, None),
        ({"_ng_rollout_index": 3}, None),
    ],
)
def test_rollout_ids(fields, rollout_id):
    assert rollout_id_of(fields) == rollout_id


@pytest.mark.parametrize(
    "fields",
    [
        {"_ng_rollout_id": "../x"},
        {"_ng_rollout_id": ""},
        {"_ng_rollout_id": "a\n"},
        {"_ng_rollout_id": 5},
        {"_ng_task_index": "0", "_ng_rollout_index": 0},
        {"_ng_task_index": True, "_ng_rollout_index": 0},
    ],
)
def test_bad_rollout_ids(fields):
    with pytest.raises(ValueError, match="_ng_"):
        rollout_id_of(fields)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


nan = math.nan
DEEP = r"(a list|\[\[\[)"  # how deep a list may be to be shown depends on the interpreter
faults = [
    (record(mask_sample=True, _ng_token_capture={"error": "lost"}), "mask_sample", "lost"),
    (record(reward=None), "unscored", ""),
    (record(reward=nan), "bad_reward", "nan"),
    (record(reward="1"), "bad_reward", "'1'"),
    (record(reward=1e300), "bad_reward", "1e\\+300"),
    (record(items=[]), "no_generation", ""),
    (record(items=[item([1], [])]), "no_generation", ""),
    (record(response=None), "no_generation", ""),
    (record(items=[item([1], [2, 3], [-1.0])]), "logprob_mismatch", "item 0: 2 .* but 1"),
    (record(items=[item([1], [2]), item([1, 3], [4])]), "broken_prefix", "item 1"),
    (record(items=[item([1], [2]), item([1], [4])]), "broken_prefix", "item 1"),
    (record(items=[item([1], []), item([2], [4])]), "broken_prefix", "item 1"),
    (record(items=[item([1], [2, -1])]), "bad_tokens", r"item 0: generation_token_ids\[1\]"),
    (record(items=[item([2**31], [2])]), "bad_tokens", r"item 0: prompt_token_ids\[0\]"),
    (record(items=[item([True], [2])]), "bad_tokens", r"item 0: prompt_token_ids\[0\] is True"),
    (record(items=[item([1], [2], [nan])]), "bad_tokens", r"item 0: generation_log_probs\[0\]"),
    (record(items=[item([1], [2], ["-1"])]), "bad_tokens", r"item 0: generation_log_probs\[0\]"),
    (record(items=[{"generation_token_ids": [1]}]), "bad_item", "item 0: prompt_token_ids"),
    (record(items=[item([1], "23")]), "bad_item", "item 0: generation_token_ids"),
    (record(_ng_rollout_id="../x"), "bad_rollout_id", "'../x'"),
    (record(_ng_task_index="0"), "bad_rollout_id", "_ng_task_index"),
    (record(_ng_task_index=None), "no_task_index", ""),
    (record(_ng_rollout_index=None), "bad_rollout_id", ""),
    (record(reward=nested(5000)), "bad_reward", DEEP),
    (record(_ng_task_index=nested(5000)), "bad_rollout_id", f"_ng_task_index {DEEP}"),
    (record(_ng_rollout_index=nested(5000)), "bad_rollout_id", ""),
    (record(_ng_rollout_id=nested(5000)), "bad_rollout_id", ""),
    (record(_ng_attempt_index=nested(5000)), "bad_rollout_id", ""),
    (record(mask_sample=True, _ng_token_capture={"error": nested(5000)}), "mask_sample", DEEP),
    (record(reward=10**5000), "bad_reward", "a int"),
    (
        record(items=[item([1], [2]), {**item([1, 2], []), "generation_token_ids": None}]),
        "bad_item",
        "item 1: generation_token_ids is missing",
    ),
    (
        record(items=[item([1], [True, 4.0]), item([1, 1, 4], [5])]),
        "bad_tokens",
        r"ids\[0\] is True",
    ),
    (record(mask_sample=np.array([0, 1])), "mask_sample", ""),
    ([1, 2], "unreadable_record", "list"),
]


@pytest.mark.parametrize(("bad", "reason", "detail"), faults)
def test_one_bad_rollout_masks_itself_and_nobody_else(bad, reason, detail):
    verdict = verdict_of(bad)
    assert (verdict.reason, verdict.trains) == (reason, False)
    assert re.search(detail, verdict.detail)
    others = [record(9, n, reward=float(n)) for n in range(1, 64)]
    groups, report = collect([*others[:30], bad, *others[30:]])
    assert sum(v.trains for v in report.verdicts) == 63
    assert report.masked == {reason: 1}
    mine = [a for group in compute_advantages(groups) for a in group if a]
    alone = [a for group in compute_advantages(collect(others)[0]) for a in group if a]
    assert sorted(mine) == sorted(alone)
    rows = ragged_rows(groups)
    account = report.account_of(rows)
    assert account.balanced
    assert account.trained == int(np.asarray(pack(groups).mask).sum()) == 63 * 3
    assert report.account.as_dict() == account.as_dict()


def test_the_account_follows_what_is_masked_later():
    items = [item([1], [2, 3, 4, 5])]
    records = [
        record(),
        record(rollout=1, items=items),
        record(rollout=2, reward=None),
        record(rollout=3, mask_sample=True),
        record(rollout=4),
    ]
    groups, report = collect(records)
    groups[0].trajectories[4].trains = False
    rows = ragged_rows(groups).without_overlong(3)
    account = report.account_of(rows)
    assert account.balanced
    assert account.masked == {"unscored": 3, "mask_sample": 3, "not_training": 3, "overlong": 6}
    assert account.trained == int(np.asarray(pack(rows).mask).sum())


def test_a_masked_rollout_keeps_its_place():
    groups, _ = collect([record(), record(rollout=1, reward=None), record(rollout=2, reward=0)])
    (group,) = groups
    masked = group.trajectories[1]
    assert (masked.votes, masked.trains) == (False, False)
    assert masked.metadata == {"rollout_id": "0-1", "mask_reason": "unscored"}
    assert compute_advantages(groups) == [[0.5, 0.0, -0.5]]


def test_the_same_rollout_twice_trains_once():
    groups, report = collect([record(), record()])
    assert [v.reason for v in report.verdicts] == ["", "duplicate_rollout_id"]
    assert report.account.captured == 6
    assert ragged_rows(groups).account.trained == 3


def test_an_empty_generation_is_a_turn_without_a_row():
    items = [
        item([1], [2]),
        item([1, 2, 3], []),
        item([1, 2, 3, 4], [5]),
        item([1, 2, 3, 4, 5, 6], []),
    ]
    groups, report = collect([record(items=items)])
    assert [len(t.completion_tokens) for t in groups[0].trajectories[0].turns] == [1, 0, 1, 0]
    assert len(ragged_rows(groups, rows="merged")) == 1
    assert report.account.as_dict() == ragged_rows(groups).account.as_dict()


def test_tokens_without_a_context_are_counted():
    groups, report = collect([record(items=[item([], [7]), item([7, 8], [9])])])
    assert report.account.as_dict() == ragged_rows(groups).account.as_dict()
    assert report.account.dropped == {"no_context": 1}


def test_a_file_with_bad_lines(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = [
        json.dumps(record()),
        "",
        '{"_ng_task_index": 0, "_ng_rol',
        json.dumps(record(rollout=1, reward=nan)),
        "\xff",
        "[" * 100_000,
    ]
    path.write_bytes("\r\n".join(lines).encode("latin-1"))
    groups, report = collect(path)
    assert [(v.record, v.reason) for v in report.verdicts] == [
        (1, ""),
        (3, "unreadable_record"),
        (4, "bad_reward"),
        (5, "unreadable_record"),
        (6, "unreadable_record"),
    ]
    assert len(groups) == 1


def test_one_parsed_record_is_held_at_a_time(tmp_path):
    # Each token is an object when it is parsed, and stays as 8 bytes.
    chain = list(range(1000, 2000))
    items = [item(chain[:end], chain[end : end + 20]) for end in range(20, 980, 20)]

    def peak(rollouts):
        path = tmp_path / f"{rollouts}.jsonl"
        path.write_text("".join(json.dumps(record(0, n, items)) + "\n" for n in range(rollouts)))
        tracemalloc.start()
        _, report = collect(path)
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert report.account.trained == rollouts * len(items) * 20
        return highest

    peak(1)  # whatever loads on first use
    assert peak(4) < 1.2 * peak(1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_text_of_another_encoding_is_refused(tmp_path, encoding):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(json.dumps(record()) + "\n", encoding=encoding)
    with pytest.raises(ValueError, match=r"rollouts\.jsonl: not UTF-8"):
        collect(path)


def test_numpy_indices_serve():
    _, report = collect([record(np.int64(3), np.int32(1))])
    assert report.verdicts[0].rollout_id == "3-1"


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        collect(tmp_path / "none.jsonl")


def test_arrays_in_records_serve():
    arrays = item(np.array([1, 2]), np.array([3]), np.array([-1.0]))
    (group,), _ = collect([record(items=[arrays])])
    assert group.trajectories[0].turns[0].logprobs.tolist() == [-1]


def test_the_example_has_what_it_says():
    groups, report = collect(EXAMPLE)
    assert [len(group.trajectories) for group in groups] == [8] * 8
    assert report.masked == {"mask_sample": 1, "unscored": 1, "broken_prefix": 1}
    constant = [g for g, group in enumerate(groups) if len(set(group.rewards)) == 1]
    assert constant == [5]
    assert report.account.balanced
