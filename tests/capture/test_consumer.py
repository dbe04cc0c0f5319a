"""The consumer: which directory, what masks, what tests may replace, and nothing that raises."""

import asyncio
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evsys_jax.capture import build as build_module
from evsys_jax.capture import consumer
from evsys_jax.capture.build import build_rollout
from evsys_jax.capture.builder import BuildOutput, Chain, ChainLink, prefix_merging
from evsys_jax.capture.protocols import TokenCaptureSnapshot
from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.sources import build_from_directories, build_from_source, find_directory
from evsys_jax.capture.store import TokenCaptureStore


def _calls(count: int = 2, rollout_id: str = "r", **fields: Any) -> list[TokenEntry]:
    calls = []
    prompt = [1]
    for number in range(count):
        link: dict[str, Any] = {"parent_resolution": "root"}
        if number:
            link = {"parent_resolution": "resolved", "parent_call_id": f"c{number - 1}"}
        calls.append(
            TokenEntry(
                rollout_id=rollout_id,
                model_call_id=f"c{number}",
                prompt_token_ids=prompt,
                generation_token_ids=[2, 3],
                generation_log_probs=[-0.5, -0.25],
                response_id=f"r{number}",
                **link,
                **fields,
            )
        )
        prompt = [*prompt, 2, 3, 4]
    return calls


def _store(path: Path, *entries: TokenEntry) -> TokenCaptureStore:
    store = TokenCaptureStore(path)
    for entry in entries:
        store.append(entry)
    return store


class _Source:
    def __init__(self, *entries: TokenEntry, incomplete: bool = False) -> None:
        self.snapshot = TokenCaptureSnapshot("r", tuple(entries), incomplete, "s" * 32, 3)

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        return self.snapshot

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        return True

    async def close(self) -> None:
        pass


def test_without_a_directory_or_source_there_is_no_result() -> None:
    assert consumer.trajectories_for_rollout("r", []) is None
    assert asyncio.run(consumer.trajectories_from_source("r", None)) is None


def test_the_directory_that_knows_the_rollout_is_used_and_no_other_created(tmp_path: Path) -> None:
    _store(tmp_path / "b", *_calls())
    dirs = [tmp_path / "a", tmp_path / "b", str(tmp_path / "b"), tmp_path / "b" / ".." / "b"]
    result = consumer.trajectories_for_rollout("r", dirs)
    assert result is not None and not result["mask_sample"]
    assert not (tmp_path / "a").exists()
    for alone in (tmp_path / "b", str(tmp_path / "b")):
        assert build_from_directories("r", alone).trains
    both = [tmp_path / "b", _store(tmp_path / "c", *_calls()).root]
    result = consumer.trajectories_for_rollout("r", both)
    assert result is not None and result["mask_sample"]
    assert str(tmp_path / "b") in result["error"] and str(tmp_path / "c") in result["error"]
    assert build_from_directories("r", both).reason == "capture_not_located"


def test_where_no_directory_knows_the_rollout_the_first_is_used(tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    assert find_directory("r", [first, second, tmp_path / "b" / ".." / "a"]) == first
    result = consumer.trajectories_for_rollout("r", [second, first, second])
    assert result is not None and result["error"].startswith("ValueError: no captured records")
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
    for file in ("jsonl", "state.json", "intents", "incomplete"):
        first.mkdir(exist_ok=True)
        (first / f"q.tokens.{file}").touch()
        assert find_directory("q", [second, first]) == first
        (first / f"q.tokens.{file}").unlink()


@pytest.mark.parametrize("rollout_id", ["../x", "a/b", "", "a\0", "a\n", "x" * 300, 5, None])
def test_an_unsafe_rollout_id_touches_nothing(rollout_id: Any, tmp_path: Path) -> None:
    result = consumer.trajectories_for_rollout(rollout_id, [tmp_path / "a"])
    assert result is not None and result["mask_sample"] and result["error"].startswith("ValueError")
    assert list(tmp_path.iterdir()) == []
    assert build_from_directories(rollout_id, [tmp_path / "a"]).error == result["error"]


def test_a_source_that_fails_or_lies_is_a_failed_result() -> None:
    class Failing(_Source):
        async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
            raise ConnectionError("gone")

    stray = _calls(1, rollout_id="other")
    for source, error in ((Failing(), "ConnectionError: gone"), (_Source(*stray), "ValueError: ")):
        result = asyncio.run(consumer.trajectories_from_source("r", source))
        assert result is not None and result["mask_sample"]
        assert result["error"].startswith(error)
        assert "_capture_snapshot" not in result and result["metrics"] == {"n_calls": 0}
        build = asyncio.run(build_from_source("r", source))
        assert (build.reason, build.trains) == ("capture_unreadable", False)
        assert build.error == result["error"]


def test_no_records_is_a_failed_result() -> None:
    result = asyncio.run(consumer.trajectories_from_source("r", _Source(incomplete=True)))
    assert result is not None and result["error"].startswith("ValueError: ")
    assert result["metrics"] == {"n_calls": 0, "capture_incomplete": True}
    assert result["_capture_snapshot"] == {"snapshot_id": "s" * 32, "version": 3}
    for incomplete in (False, True):
        build = build_rollout("r", [], incomplete=incomplete)
        assert (build.reason, build.incomplete) == ("no_records", incomplete)


def test_the_build_runs_off_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def assemble(*args: Any, **keywords: Any) -> dict[str, Any]:
        seen.append((threading.current_thread() is threading.main_thread(), keywords))
        return {"metrics": {}, "mask_sample": False}

    monkeypatch.setattr(consumer, "_assemble", assemble)
    source = _Source(*_calls(), incomplete=True)
    result = asyncio.run(
        consumer.trajectories_from_source(
            "r", source, declared_response_id="d", explicit_terminal_call_id="e"
        )
    )
    ((on_main, keywords),) = seen
    assert not on_main and keywords["declared_response_id"] == "d"
    assert result is not None and result["mask_sample"]


def test_run_builder_is_looked_up_in_the_consumer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run_builder(entries: Any, builder: str = "", terminal_call_id: Any = None) -> BuildOutput:
        asked.append((builder, terminal_call_id))
        return prefix_merging(entries, terminal_call_id)

    monkeypatch.setattr(consumer, "run_builder", run_builder)
    result = consumer._assemble("r", _calls(), "some", "m", explicit_terminal_call_id="c1")
    assert asked == [("some", "c1")] and result["builder"] == "some"
    assert result["rebuilt_response"]["model"] == "m"


@pytest.mark.parametrize("kind", [AssertionError, ValueError, KeyError, IndexError, TypeError])
def test_what_the_builder_raises_is_a_failed_result(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_builder(*args: Any, **keywords: Any) -> BuildOutput:
        raise kind("x")

    monkeypatch.setattr(consumer, "run_builder", run_builder)
    result = consumer._assemble("r", _calls(), "b", "")
    assert result["error"] == f"{kind.__name__}: {kind('x')}"
    assert result["metrics"]["n_calls"] == 2
    assert result["metrics"]["terminal_attribution"]["chain"] == "error"


def test_a_chain_with_a_bad_log_prob_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ([-0.5], [-0.5, float("nan")], [[-0.5, -0.5]]):
        calls = _calls()
        calls[0].generation_log_probs = bad
        result = consumer._assemble(
            "r", calls, "prefix_merging", "", verified_response={"id": "r1"}
        )
        assert "'c0': generation_log_probs" in result["error"]
        assert result["metrics"]["terminal_attribution"]["chain"] == "delivered"
        assert build_rollout("r", calls).reason == "build_failed"
    # A builder's own chains are checked as well, not only those made here.
    plain = [ChainLink(entry, np.empty(0, np.int32)) for entry in calls]
    chain = Chain("main", plain, np.array([1], np.int32))
    out = prefix_merging(_calls())
    monkeypatch.setattr(
        consumer, "run_builder", lambda *_, **__: BuildOutput([chain], [], out.notes)
    )
    assert "'c0'" in consumer._assemble("r", _calls(), "prefix_merging", "")["error"]


def test_attribution_that_raises_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    def resolve(*args: Any, **keywords: Any) -> Any:
        raise RuntimeError("x")

    monkeypatch.setattr(consumer, "resolve_terminal", resolve)
    result = consumer._assemble("r", _calls(), "prefix_merging", "")
    assert result["mask_sample"] and "error" not in result
    assert result["metrics"]["terminal_attribution"]["reason"] == "attribution_error"


def test_only_a_delivered_chain_survives_an_incomplete_capture() -> None:
    for chain, always, masks in (
        ("delivered", True, True),
        ("delivered", False, False),
        ("broken", False, True),
        ("", False, True),
    ):
        built = {"metrics": {"terminal_attribution": {"chain": chain}}}
        assert consumer._incomplete_masks(built, always) is masks
    assert consumer._incomplete_masks({"metrics": {}}, False)


def test_a_good_result_is_plain_json_and_leaves_the_records_alone(tmp_path: Path) -> None:
    calls = _calls(3, output_items=[{"type": "message", "content": "x"}], extra={"k": 1})
    before = [entry.to_json() for entry in calls]
    result = consumer._assemble("r", calls, "prefix_merging", "m")
    assert json.loads(json.dumps(result)) == result
    assert [entry.to_json() for entry in calls] == before


REASONS = {
    "terminal_not_captured": {"explicit_terminal_call_id": "empty"},
    "conflicting_terminal": {
        "explicit_terminal_call_id": "c0", "verified_response": {"id": "r1"},
    },
    "declared_terminal_not_captured": {"declared_response_id": "zz"},
    "declared_terminal_ambiguous": {"declared_response_id": "twice"},
    "incomplete_capture": {"incomplete": True},
    "build_failed": {"builder": "other"},
}  # fmt: skip


def _root(call_id: str, prompt: list[int], generation: list[int], **fields: Any) -> TokenEntry:
    fields.setdefault("generation_log_probs", [-0.5] * len(generation))
    return TokenEntry(
        rollout_id="r",
        model_call_id=call_id,
        prompt_token_ids=prompt,
        generation_token_ids=generation,
        parent_resolution=fields.pop("parent_resolution", "root"),
        **fields,
    )


@pytest.mark.parametrize("reason", list(REASONS))
def test_reasons_that_arguments_bring_about(reason: str) -> None:
    calls = _calls()
    calls.append(_root("empty", [1], []))
    calls.append(_root("d1", [1, 2, 3, 4, 5], [], response_id="twice"))
    calls.append(_root("d2", [1, 2, 3, 4, 6], [], response_id="twice"))
    build = build_rollout("r", calls, **REASONS[reason])
    assert (build.reason, build.trains) == (reason, False)
    assert build_rollout("r", calls).trains


@pytest.mark.parametrize(
    ("reason", "extra", "terminal"),
    [
        ("unresolved_retry", [_root("x", [1], [9]), _root("y", [1], [8])], None),
        ("contested_call", [_root("c0", [1], [7])], None),
        ("ambiguous_chains", [_root("x", [5], [9])], None),
        ("unresolved_parent", [_root("x", [5], [9], parent_resolution="unresolved")], None),
        ("terminal_broken", [_root("x", [5], [9], parent_resolution="unresolved")], "x"),
        (
            "broken_delta",
            [
                _root(
                    "x", [5], [9], parent_resolution="resolved", parent_call_id="gone",
                    prompt_is_delta=True,
                )
            ],
            None,
        ),
    ],
)  # fmt: skip
def test_reasons_that_records_bring_about(
    reason: str, extra: list[TokenEntry], terminal: str | None
) -> None:
    calls = _calls(1) if reason == "unresolved_retry" else _calls()
    build = build_rollout("r", [*calls, *extra], explicit_terminal_call_id=terminal)
    assert (build.reason, build.trains, build.error) == (reason, False, None)


def test_every_reason_is_documented() -> None:
    found = {*REASONS, "no_records", "capture_unreadable", "capture_not_located"}
    found |= {"unresolved_retry", "contested_call", "ambiguous_chains", "unresolved_parent"}
    found |= {"terminal_broken", "broken_delta", "attribution_failed"}
    assert all(f" {reason}" in (build_module.__doc__ or "") for reason in found)


def test_turns_are_views_and_cost_the_length_of_the_chain() -> None:
    build = build_rollout("r", _calls(200))
    turns = build.turns()
    assert len(turns) == 200 and build.chains == (("main", "c199"),)
    for turn, span in zip(turns, build.spans, strict=True):
        assert turn.prompt_tokens.base is build.tokens and len(turn.prompt_tokens) == span.start
        assert turn.completion_tokens.tolist() == [2, 3]
        assert turn.logprobs.tolist() == [-0.5, -0.25]
    assert len(pickle.dumps(build)) < 50 * len(build.tokens)
    assert (build.tokens.dtype, build.sampled.dtype) == (np.int32, np.bool_)
    assert build.sampled.sum() == 400 and not build.logprobs[~build.sampled].any()


def test_build_from_directories_never_raises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = _store(tmp_path, *_calls())
    assert build_from_directories("r", [tmp_path]).trains
    assert build_from_directories("r", [tmp_path], nonsense=1).reason == "build_failed"
    with store.path_for("r").open("ab") as file:
        file.write(b"garbage\n{}\n")
    build = build_from_directories("r", [tmp_path])
    assert build.reason == "capture_unreadable" and "r.tokens.jsonl:3" in (build.error or "")
    (tmp_path / "file").write_text("")
    assert build_from_directories("r", [tmp_path / "file"]).reason == "capture_unreadable"


def test_clearing_deletes_in_every_directory(tmp_path: Path) -> None:
    dirs = [tmp_path / "a", tmp_path / "b"]
    stores = [_store(each, *_calls(rollout_id="4-2-a1"), *_calls(rollout_id="r")) for each in dirs]
    records = [
        {"_ng_task_index": 4, "_ng_rollout_index": 2, "_ng_attempt_index": 1},
        {"_ng_task_index": 4},
    ]
    consumer.clear_token_captures_for_rollouts(records, dirs)
    for store in stores:
        assert store.read_entries("4-2-a1") == [] and len(store.read_entries("r")) == 2
