"""Rollout records joined with their captured calls, wherever these lie and however they fail."""

from __future__ import annotations

import asyncio
import gc
import pickle
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import numpy as np
import pytest

from evsys_jax import capture_jobs, shared_jobs
from evsys_jax.batch import pack
from evsys_jax.capture import (
    TokenCaptureSnapshot,
    TokenCaptureStore,
    TokenEntry,
    stamp_continuation,
    stamp_lineage,
)
from evsys_jax.capture.build import CallSpan
from evsys_jax.capture.builder import CallReport
from evsys_jax.capture.sources import build_from_directories
from evsys_jax.collect import collect
from evsys_jax.ragged import ragged_rows
from evsys_jax.reference import compute_advantages

ASKED = [{"role": "user", "content": "go"}]


def call(rollout_id, name, prompt, generation, parent=None, text=None):
    """A stamped record; its response id is `resp-{name}`, its words are its own."""
    words = f"{rollout_id} {name}" if text is None else text
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=name,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        generation_log_probs=[-0.1 * (k + 1) for k in range(len(generation))],
        output_items=[{"type": "message", "role": "assistant", "content": words}],
        token_item_index=0,
        response_id=f"resp-{name}",
    )
    stamp_lineage(entry, parent, parent_resolution="resolved" if parent else "root")
    return stamp_continuation(entry, ASKED)


def two_turns(rollout_id):
    """Five sampled tokens in a chain of two calls, `a` and `b`."""
    return [
        call(rollout_id, "a", [1, 2], [3, 4]),
        call(rollout_id, "b", [1, 2, 3, 4, 5], [6, 7, 8], "a"),
    ]


def two_roots(rollout_id):
    """The chain of `a` and `b`, and a sub-agent `s` with a root of its own."""
    return [*two_turns(rollout_id), call(rollout_id, "s", [9], [9, 9])]


def fill(root, rollouts):
    """Store calls by rollout id."""
    store = TokenCaptureStore(root)
    for entries in rollouts.values():
        for entry in entries:
            store.append(entry)
    return store


def record(rollout, task=0, reward=None, **more):
    """A record of text only, which names no call."""
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "reward": float(rollout) if reward is None else reward,
        "response": {"id": "resp-unknown", "model": "m", "output": []},
        **more,
    }


def ending(name):
    """A response whose id is that of a call."""
    return {"id": f"resp-{name}", "output": []}


class Memory:
    """Calls in memory, as a source; it counts what it was asked."""

    def __init__(self, rollouts, incomplete=(), delay=0.0):
        self.rollouts = rollouts
        self.incomplete = incomplete
        self.delay = delay
        self.frozen = []
        self.loops = set()

    async def freeze(self, rollout_id):
        self.frozen.append(rollout_id)
        self.loops.add(asyncio.get_running_loop())
        await asyncio.sleep(self.delay)
        entries = self.rollouts[rollout_id]  # a KeyError where there are none
        lost = rollout_id in self.incomplete
        return TokenCaptureSnapshot(rollout_id, tuple(entries), lost, "snapshot", 1)

    async def drop(self, rollout_id, *, snapshot_id, version):
        raise AssertionError("collect drops nothing")

    async def close(self):
        raise AssertionError("a source is closed by those who opened it")


def plain(groups):
    """Everything that a group holds, as plain values; a snapshot's id is no part of it."""
    return [
        [
            (
                [
                    [list(map(float, field)) for field in (t.prompt_tokens, t.completion_tokens)]
                    + [t.logprobs.tobytes()]
                    for t in trajectory.turns
                ],
                trajectory.reward,
                trajectory.votes,
                trajectory.trains,
                trajectory.metadata,
            )
            for trajectory in group.trajectories
        ]
        for group in groups
    ]


def check_account(groups, report):
    rows = ragged_rows(groups)
    account = report.account_of(rows)
    assert account.balanced
    assert report.account.balanced
    assert account.as_dict() == report.account.as_dict()
    assert account.trained == int(np.asarray(pack(groups).mask).sum())
    return account


def verdict_of(one, captures, **options):
    groups, report = collect([one], captures=captures, **options)
    assert report.account.balanced
    (verdict,) = report.verdicts
    return verdict, groups[0].trajectories[0]


@pytest.mark.parametrize("kind", [str, lambda path: path, lambda path: [path]])
def test_a_directory(tmp_path, kind):
    fill(tmp_path, {name: two_turns(name) for name in ("0-0", "0-1")})
    groups, report = collect([record(0), record(1)], captures=kind(tmp_path))
    assert [v.trains for v in report.verdicts] == [True, True]
    assert [(v.turns, v.tokens) for v in report.verdicts] == [(2, 5), (2, 5)]
    first, second = groups[0].trajectories[0].turns
    assert first.prompt_tokens.tolist() == [1, 2]
    assert first.completion_tokens.tolist() == [3, 4]
    assert second.prompt_tokens.tolist() == [1, 2, 3, 4, 5]
    assert second.completion_tokens.tolist() == [6, 7, 8]
    assert second.logprobs.dtype == np.float32
    np.testing.assert_array_equal(second.logprobs, np.float32([-0.1, -0.2, -0.1 * 3]))
    assert np.shares_memory(first.prompt_tokens, second.completion_tokens.base)
    assert compute_advantages(groups) == [[-0.5, 0.5]]
    assert check_account(groups, report).trained == 10


def test_two_directories_that_share_the_work(tmp_path):
    fill(tmp_path / "one", {"0-0": two_turns("0-0")})
    fill(tmp_path / "two", {"0-1": two_turns("0-1")})
    groups, report = collect(
        [record(0), record(1), record(2)], captures=[tmp_path / "one", tmp_path / "two"]
    )
    assert [v.reason for v in report.verdicts] == ["", "", "no_records"]
    check_account(groups, report)


def test_a_rollout_that_two_directories_know_is_masked_and_both_are_named(tmp_path):
    fill(tmp_path / "one", {name: two_turns(name) for name in ("0-0", "0-1")})
    fill(tmp_path / "two", {"0-1": two_turns("0-1")})
    before = {path: path.read_bytes() for path in tmp_path.glob("*/0-1.*")}
    groups, report = collect(
        [record(0), record(1)], captures=[tmp_path / "one", tmp_path / "two", tmp_path / "one"]
    )
    good, bad = report.verdicts
    assert (good.trains, bad.trains, bad.reason) == (True, False, "capture_not_located")
    assert str(tmp_path / "one") in bad.detail and str(tmp_path / "two") in bad.detail
    assert {path: path.read_bytes() for path in tmp_path.glob("*/0-1.*")} == before
    check_account(groups, report)


@pytest.mark.parametrize("count", [1, 8, 20])
def test_a_source(count):
    rollouts = {f"0-{n}": two_turns(f"0-{n}") for n in range(count)}
    source = Memory(rollouts, incomplete={"0-0"})
    groups, report = collect([record(n) for n in range(count)], captures=source)
    assert [v.reason for v in report.verdicts] == ["incomplete_capture"] + [""] * (count - 1)
    assert [v.rollout_id for v in report.verdicts] == list(rollouts)
    assert source.frozen == list(rollouts)
    assert len(source.loops) == 1
    check_account(groups, report)


def test_a_source_and_a_directory_give_the_same(tmp_path):
    rollouts = {f"0-{n}": two_roots(f"0-{n}") for n in range(10)}
    records = [record(n, response=ending("b" if n % 3 else "s")) for n in range(11)]
    store = fill(tmp_path, rollouts)
    by_directory, report = collect(records, captures=tmp_path)
    by_source, other = collect(records, captures=Memory(rollouts))
    by_store, third = collect(records, captures=store)
    assert plain(by_directory) == plain(by_store)
    assert plain(by_directory)[0][:10] == plain(by_source)[0][:10]
    assert report.verdicts == third.verdicts
    assert report.verdicts[:10] == other.verdicts[:10]
    assert [r.verdicts[10].reason for r in (report, other)] == ["no_records", "capture_unreadable"]


def test_a_source_within_a_running_loop():
    async def inside():
        return collect([record(0)], captures=Memory({"0-0": two_turns("0-0")}))

    _, report = asyncio.run(inside())
    assert report.verdicts[0].trains


def test_a_source_that_mixes_rollouts_up_masks_them():
    source = Memory({"0-0": two_turns("0-1"), "0-1": two_turns("0-1")})
    groups, report = collect([record(0), record(1)], captures=source)
    assert [v.reason for v in report.verdicts] == ["capture_unreadable", ""]
    assert "'0-1'" in report.verdicts[0].detail
    check_account(groups, report)


@pytest.mark.parametrize("captures", ["directory", "source"])
def test_who_stops_in_the_middle_gets_their_own_error(tmp_path, captures):
    rollouts = {f"0-{n}": two_turns(f"0-{n}") for n in range(40)}
    fill(tmp_path, {name: rollouts[name] for name in ("0-0", "0-1")})

    def stop(done):
        if done == 2:
            raise KeyboardInterrupt

    where = tmp_path if captures == "directory" else Memory(rollouts, delay=0.1)
    with pytest.raises(KeyboardInterrupt):
        collect([record(n) for n in range(40)], captures=where, on_record=stop)
    gc.collect()


def test_workers_give_what_one_process_gives(tmp_path):
    rollouts = {f"{n % 3}-{n}": two_roots(f"{n % 3}-{n}") for n in range(18)}
    store = fill(tmp_path, rollouts)
    store.path_for("1-4").write_bytes(b"garbage\n" + store.path_for("1-4").read_bytes())
    endings = ["b", "s", "unknown", "a"]
    records = [record(n, task=n % 3, response=ending(endings[n % 4])) for n in range(20)]
    records[3] = "no record"
    alone, report = collect(records, captures=tmp_path)
    shared, other = collect(records, captures=[tmp_path], workers=2)
    assert plain(shared) == plain(alone)
    assert other.verdicts == report.verdicts
    assert other.account == report.account
    assert set(report.masked) == {
        "ambiguous_chains",
        "capture_unreadable",
        "no_records",
        "unreadable_record",
    }
    check_account(shared, other)


def test_builds_are_shared_in_order_with_this_process_at_work_too(tmp_path, monkeypatch):
    names = [f"0-{n}" for n in range(30)]
    fill(tmp_path, {name: two_turns(name) for name in names})
    built_here = []

    def build(job, directories, freeze):
        built_here.append(job.rollout_id)
        return original(job, directories, freeze)

    original = capture_jobs._build
    monkeypatch.setattr(capture_jobs, "_build", build)
    monkeypatch.setattr(shared_jobs, "AHEAD", 3)
    jobs = [(name, capture_jobs.CaptureJob(name, {})) for name in names]
    results = list(capture_jobs.run_jobs(jobs, tmp_path, workers=2))
    assert [carried for carried, _ in results] == names
    assert [build.rollout_id for _, build in results] == names
    assert all(build.trains for _, build in results)
    assert 0 < len(built_here) < len(names)


def test_a_build_leaves_no_cycles_that_would_hold_its_records(tmp_path):
    fill(tmp_path, {"0-0": two_turns("0-0"), "0-1": two_roots("0-1")})
    names = ["0-0", "0-1", "unknown"]
    for name in names:  # what is loaded on the first call may hold cycles
        build_from_directories(name, [tmp_path])
    gc.collect()
    gc.disable()
    try:
        builds = [build_from_directories(name, [tmp_path]) for name in names]
        assert gc.collect() == 0
    finally:
        gc.enable()
    assert [build.trains for build in builds] == [True, False, False]


def test_a_build_is_the_same_after_it_was_pickled(tmp_path):
    fill(tmp_path, {"0-0": two_turns("0-0")})
    build = build_from_directories("0-0", [tmp_path])
    again = pickle.loads(pickle.dumps(build, pickle.HIGHEST_PROTOCOL))
    assert {type(span) for span in again.spans} == {CallSpan}
    assert {type(call) for call in again.calls} == {CallReport}
    assert len(again.spans) == len(again.calls) == 2
    for name, value in vars(build).items():
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(getattr(again, name), value)
            assert getattr(again, name).dtype == value.dtype
        else:
            assert (
                tuple(getattr(again, name)) == tuple(value)
                if name == "calls"
                else (getattr(again, name) == value)
            )


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_thread_hashes_for_a_process_that_is_alone(tmp_path, monkeypatch, workers):
    fill(tmp_path, {f"0-{n}": two_turns(f"0-{n}") for n in range(4)})
    asked = []
    monkeypatch.setattr("evsys_jax.capture.stamps._WORTH_A_THREAD", 0)
    monkeypatch.setattr("evsys_jax.capture.stamps._helper", lambda: asked.append("thread"))
    collect([record(n) for n in range(4)], captures=tmp_path, workers=workers)
    assert asked == (["thread"] * 4 if workers == 1 else [])


def test_a_record_keeps_the_tokens_that_it_carries(tmp_path):
    fill(tmp_path, {"0-0": two_turns("0-0"), "0-1": two_turns("0-1")})
    carried = {
        "prompt_token_ids": [50],
        "generation_token_ids": [51, 52],
        "generation_log_probs": [-1.0, -2.0],
    }
    empty = {key: [] for key in carried}
    records = [
        record(0, response={"id": "resp-b", "output": [carried]}),
        record(1, response={"id": "resp-b", "output": [empty]}),
    ]
    groups, report = collect(records, captures=tmp_path)
    own, captured = groups[0].trajectories
    assert own.turns[0].completion_tokens.tolist() == [51, 52]
    assert "_ng_token_capture" not in own.metadata
    assert (
        not TokenCaptureStore(tmp_path).state_path_for("0-0").read_bytes().count(b'"frozen":true')
    )
    assert captured.turns[0].completion_tokens.tolist() == [3, 4]
    assert [v.tokens for v in report.verdicts] == [2, 5]
    check_account(groups, report)


terminals = [
    ({}, "ambiguous_chains", None),
    ({"_ng_terminal_model_call_id": "b"}, "", [3, 4]),
    ({"_ng_terminal_model_call_id": "s"}, "", [9, 9]),
    ({"_ng_terminal_model_call_id": "a"}, "", [3, 4]),
    ({"terminal_response_id": "resp-b"}, "", [3, 4]),
    ({"terminal_response_id": "resp-s"}, "", [9, 9]),
    ({"terminal_response_id": "resp-x"}, "declared_terminal_not_captured", None),
    ({"response": ending("s")}, "", [9, 9]),
    ({"response": {"output": [{"role": "assistant", "content": "0-0 s"}]}}, "", [9, 9]),
    ({"_ng_terminal_model_call_id": "x"}, "ambiguous_chains", None),
    ({"_ng_terminal_model_call_id": "b", "terminal_response_id": "resp-b"}, "", [3, 4]),
    (
        {"_ng_terminal_model_call_id": "b", "terminal_response_id": "resp-s"},
        "conflicting_terminal",
        None,
    ),
    ({"_ng_terminal_model_call_id": "b", "response": ending("s")}, "conflicting_terminal", None),
    ({"response": None}, "ambiguous_chains", None),
    ({"response": "text", "terminal_response_id": "resp-s"}, "", [9, 9]),
]


@pytest.mark.parametrize(("fields", "reason", "first"), terminals)
def test_the_names_of_the_scored_call(tmp_path, fields, reason, first):
    fill(tmp_path, {"0-0": two_roots("0-0")})
    verdict, trajectory = verdict_of(record(0, **fields), tmp_path)
    assert verdict.reason == reason
    assert (verdict.trains, trajectory.votes, trajectory.trains) == (not reason,) * 3
    if first is not None:
        assert trajectory.turns[0].completion_tokens.tolist() == first
    assert verdict.tokens == 7


def test_a_response_id_that_is_a_number_is_read_as_text(tmp_path):
    entries = two_roots("0-0")
    entries[-1].response_id = "17"
    fill(tmp_path, {"0-0": entries})
    verdict, trajectory = verdict_of(record(0, terminal_response_id=17), tmp_path)
    assert verdict.trains
    assert trajectory.turns[0].completion_tokens.tolist() == [9, 9]


def test_what_did_not_lead_to_the_score_is_dropped_and_counted(tmp_path):
    retry = call("0-0", "retry", [1, 2], [5, 5, 5])
    empty = call("0-0", "empty", [1, 2, 3, 4, 5], [], "a")
    fill(tmp_path, {"0-0": [*two_roots("0-0"), retry, empty]})
    groups, report = collect([record(0, response=ending("b"))], captures=tmp_path)
    account = check_account(groups, report)
    assert (account.captured, account.trained) == (10, 5)
    assert account.dropped == {"quarantined": 3, "off_chain": 2}
    assert account.dropped_turns == {"quarantined": 1, "off_chain": 1, "empty_call": 1}


@pytest.mark.parametrize("lost", ["announced", "marked", "source"])
@pytest.mark.parametrize("attributed", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_a_lost_call_may_be_forgiven_where_the_scored_chain_is_whole(
    tmp_path, lost, attributed, strict
):
    rollouts = {"0-0": two_turns("0-0")}
    captures = store = fill(tmp_path, rollouts)
    if lost == "announced":
        asyncio.run(store.begin_call("0-0", "z"))
    elif lost == "marked":
        asyncio.run(store.mark_incomplete("0-0"))
    else:
        captures = Memory(rollouts, incomplete={"0-0"})
    one = record(0, response=ending("b" if attributed else "unknown"))
    verdict, trajectory = verdict_of(one, captures, mask_incomplete_when_attributed=strict)
    keeps = attributed and not strict
    # Without a name for the scored call, a single chain trains only if nothing is lost.
    assert (verdict.trains, verdict.reason) == (keeps, "" if keeps else "incomplete_capture")
    assert trajectory.metadata["_ng_token_capture"]["capture_incomplete"] is True


def test_one_unreadable_capture_masks_itself_and_nobody_else(tmp_path):
    rollouts = {f"0-{n}": two_turns(f"0-{n}") for n in range(8)}
    store = fill(tmp_path, rollouts)
    path = store.path_for("0-3")
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{garbage}\n" + second)
    path = store.path_for("0-5")
    path.unlink()
    store.state_path_for("0-5").unlink()
    groups, report = collect([record(n) for n in range(8)], captures=tmp_path)
    assert report.masked == {"capture_unreadable": 1, "no_records": 1}
    unreadable, missing = report.verdicts[3], report.verdicts[5]
    assert (unreadable.reason, missing.reason) == ("capture_unreadable", "no_records")
    assert "0-3.tokens.jsonl" in unreadable.detail
    assert "'0-5'" in missing.detail
    members = groups[0].trajectories
    assert len(members) == 8
    assert [t.metadata["mask_reason"] for t in (members[3], members[5])] == [
        "capture_unreadable",
        "no_records",
    ]
    assert members[3].metadata["_ng_token_capture"]["error"] == unreadable.detail
    voters = [0, 1, 2, 4, 6, 7]
    mean = np.mean(voters)
    assert compute_advantages(groups) == [[n - mean if n in voters else 0.0 for n in range(8)]]
    assert check_account(groups, report).trained == 6 * 5


def test_the_notes_of_a_build_come_with_its_trajectory(tmp_path):
    fill(tmp_path, {"0-0": two_roots("0-0")})
    _, trajectory = verdict_of(record(0, response=ending("b")), tmp_path)
    assert trajectory.metadata.keys() == {"rollout_id", "_ng_token_capture"}
    notes = trajectory.metadata["_ng_token_capture"]
    assert notes["n_calls"] == 3
    assert notes["terminal_attribution"]["call_id"] == "b"
    assert notes["terminal_attribution"]["chain"] == "delivered"
    assert (notes["generated_tokens_captured"], notes["generated_tokens_delivered"]) == (7, 5)
    assert "error" not in notes
    masked, trajectory = verdict_of(record(1), tmp_path)
    assert trajectory.metadata["mask_reason"] == masked.reason == "no_records"
    assert trajectory.metadata["_ng_token_capture"] == {"n_calls": 0, "error": masked.detail}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mask_sample": True}, "mask_sample"),
        ({"reward": None}, "unscored"),
        ({"reward": float("nan")}, "bad_reward"),
    ],
)
def test_a_good_capture_does_not_make_a_bad_record_good(tmp_path, fields, reason):
    fill(tmp_path, {"0-0": two_turns("0-0"), "0-1": two_turns("0-1")})
    bad = {**record(0), **fields}
    groups, report = collect([bad, record(1)], captures=tmp_path)
    assert [v.reason for v in report.verdicts] == [reason, ""]
    account = check_account(groups, report)
    assert account.masked == {reason: 5}


def test_a_second_record_of_a_rollout_builds_nothing():
    source = Memory({"0-0": two_turns("0-0")})
    groups, report = collect([record(0), record(0)], captures=source)
    assert [v.reason for v in report.verdicts] == ["", "duplicate_rollout_id"]
    assert source.frozen == ["0-0"]
    assert check_account(groups, report).captured == 5


def test_a_mistyped_directory_is_an_error(tmp_path):
    with pytest.raises(NotADirectoryError, match="mistyped: no such directory"):
        collect([], captures=tmp_path / "mistyped")
    assert not (tmp_path / "mistyped").exists()


def test_a_worker_that_dies_costs_nothing(tmp_path, monkeypatch, caplog):
    records, _ = captured(tmp_path, 24)
    wanted, _ = collect(records, captures=tmp_path)

    class Pool(ThreadPoolExecutor):
        def __init__(self, workers, **_):
            super().__init__(workers)

        def submit(self, *_):
            broken = Future()
            broken.set_exception(BrokenProcessPool("a process was terminated abruptly"))
            return broken

    monkeypatch.setattr(shared_jobs, "ProcessPoolExecutor", Pool)
    groups, report = collect(records, captures=tmp_path, workers=2)
    assert not report.masked
    assert [len(group.trajectories) for group in groups] == [
        len(group.trajectories) for group in wanted
    ]
    assert "a worker process failed" in caplog.text


def test_what_does_not_pickle_is_built_here(tmp_path):
    records, _ = captured(tmp_path, 10)
    deep = "end"
    for _ in range(700):
        deep = [deep]
    records[4]["response"] = {"output": [], "deep": deep}
    _, report = collect(records, captures=tmp_path, workers=2)
    assert not report.masked


def test_a_logprob_that_float32_cannot_hold_masks_its_rollout(tmp_path):
    records, store = captured(tmp_path, 3)
    store.append(
        stamp_lineage(
            TokenEntry(
                rollout_id="0-9",
                model_call_id="big",
                prompt_token_ids=[1],
                generation_token_ids=[2, 3],
                generation_log_probs=[-0.5, -1e39],
            ),
            None,
            parent_resolution="root",
        )
    )
    records.append({"_ng_task_index": 0, "_ng_rollout_index": 9, "reward": 1.0})
    _, report = collect(records, captures=tmp_path)
    assert report.masked == {"bad_tokens": 1}
    assert "call big: generation_log_probs[1] is -1e+39" in report.verdicts[-1].detail
    assert report.account.balanced


def captured(directory, count):
    """Record `count` rollouts of one call each; return their records and the store."""
    store = TokenCaptureStore(directory)
    records = []
    for n in range(count):
        entry = TokenEntry(
            rollout_id=f"0-{n}",
            model_call_id=f"call-{n}",
            prompt_token_ids=[1, 2],
            generation_token_ids=[3, n],
            generation_log_probs=[-0.5, -1.5],
        )
        store.append(stamp_lineage(entry, None, parent_resolution="root"))
        records.append({"_ng_task_index": 0, "_ng_rollout_index": n, "reward": float(n)})
    return records, store
