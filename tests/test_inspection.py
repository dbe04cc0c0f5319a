"""The look at rollouts: what it shows, on a terminal and elsewhere, and that it changes nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from evsys_jax import cli
from evsys_jax.calltree import arrange_calls
from evsys_jax.capture.build import RolloutBuild
from evsys_jax.capture.builder import CallReport
from evsys_jax.capture.peek import lost_calls, peek_capture
from evsys_jax.capture.records import TokenEntry, stamp_lineage
from evsys_jax.capture.store import TokenCaptureStore
from evsys_jax.collect import collect
from evsys_jax.data_processing import compute_advantages
from evsys_jax.inspection import inspect_rollout, select_rollouts, summarize_rollouts
from evsys_jax.inspection_view import list_lines, picture_lines, picture_values
from evsys_jax.ragged import ragged_rows

EXAMPLE = Path(__file__).parent.parent / "examples" / "rollouts" / "rollouts.jsonl"
CONTROL = "\x1b[31mred\n"


class Recorder:
    """Records the calls of one rollout as a model server does."""

    def __init__(self, root, rollout_id):
        self.store = TokenCaptureStore(root)
        self.rollout_id = rollout_id
        self.sequences = {}

    def call(self, call_id, prompt, generation, parent=None, *, claim=None, delta=False):
        """Store a call; `prompt` is what comes behind the parent's sequence."""
        above = self.sequences.get(parent, [])
        self.sequences[call_id] = [*above, *prompt, *generation]
        claimed = claim or parent
        entry = TokenEntry(
            rollout_id=self.rollout_id,
            model_call_id=call_id,
            prompt_token_ids=prompt if delta else [*above, *prompt],
            generation_token_ids=generation,
            generation_log_probs=[-0.25 * (k + 1) for k in range(len(generation))],
            prompt_is_delta=delta,
            parent_call_id=claimed,
            parent_resolution="resolved" if claimed else "root",
            response_id=f"resp-{call_id}",
        )
        stamp_lineage(
            entry,
            claimed,
            parent_resolution="resolved" if claimed else "root",
            cumulative=self.sequences[call_id],
        )
        self.store.append(entry)

    def announce(self, call_id):
        asyncio.run(self.store.begin_call(self.rollout_id, call_id))


def text_record(task, rollout, scored=None, **more):
    response = {"id": f"resp-{scored}"} if scored else {"id": "elsewhere"}
    return {
        "_ng_task_index": task,
        "_ng_rollout_index": rollout,
        "reward": float(rollout % 2),
        "response": response,
        **more,
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Seven rollouts in two groups, each with something of its own: (records file, captures)."""
    root = tmp_path_factory.mktemp("inspection")
    captures = root / "captures"

    def recorder(rollout_id):
        made = Recorder(captures, rollout_id)
        made.call("a", [1, 2, 3], [4, 5])
        return made

    recorder("0-0").call("b", [6], [7, 8], "a")
    retry = recorder("0-1")
    retry.call("b1", [6], [7], "a")
    retry.call("b2", [6], [8, 9], "a")
    retry.call("c", [10, 11], [12], "b2")
    empty = recorder("0-2")
    empty.call("none", [6], [], "a")
    empty.call("b", [6], [7], "a", claim="none")
    delta = recorder("0-3")
    delta.call("b", [6], [7], "a", delta=True)
    delta.call("c", [8, 9], [10], "b", delta=True)
    lost = recorder("1-0")
    lost.announce("gone")
    for rollout_id in ("1-1", "1-2"):
        branch = recorder(rollout_id)
        branch.call("sub1", [6, 6], [7], "a")
        branch.call("sub2", [8], [9], "sub1")
        branch.call("b", [6], [7, 7], "a")
    records = [
        text_record(0, 0, "b"),
        text_record(0, 1, "c"),
        text_record(0, 2, "b"),
        text_record(0, 3, "c"),
        text_record(1, 0, "a"),
        text_record(1, 1, "b"),
        text_record(1, 2),
    ]
    path = root / "rollouts.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path, captures


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["inspect", *map(str, arguments)])


def lines_of(data, *arguments):
    path, captures = data
    result = invoke(path, "--captures", captures, *arguments)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


def section(lines, title):
    """Return the lines below a title, to the next blank line."""
    start = next(k for k, line in enumerate(lines) if line.startswith(title)) + 1
    end = next((k for k in range(start, len(lines)) if not lines[k]), len(lines))
    return lines[start:end]


def hashes(root):
    """Return name, kind, content and change time of everything in a directory."""
    return {
        path.name: (hashlib.sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns)
        for path in root.iterdir()
    } | {".": root.stat().st_mtime_ns}


def test_the_list(data):
    heading, *rows = (re.split(" {2,}", line.strip()) for line in lines_of(data))
    assert rows == [
        ["0-0", "0", "trains", "2", "1", "3", "1", "4", "4", "4", "0", "-0.5", "-"],
        ["0-1", "0", "trains", "4", "1", "3", "3", "5", "6", "5", "1", "0.5", "-"],
        ["0-2", "0", "trains", "3", "1", "3", "1", "3", "3", "3", "0", "-0.5", "-"],
        ["0-3", "0", "trains", "3", "1", "3", "3", "4", "4", "4", "1", "0.5", "-"],
        ["1-0", "1", "masked", "1", "1", "3", "0", "2", "2", "0", "0", "-", "incomplete_capture"],
        ["1-1", "1", "trains", "4", "2", "3", "1", "4", "6", "4", "1", "0", "-"],
        ["1-2", "1", "masked", "4", "2", "3", "1", "4", "6", "0", "0", "-", "ambiguous_chains"],
    ]
    names = "rollout group verdict calls chains prompt between sampled captured trained"
    assert heading == [*names.split(), "reward", "advantage", "reason"]


def test_the_numbers_are_those_of_a_build(data, tmp_path):
    path, captures = data
    shutil.copytree(captures, tmp_path / "copy")  # to be frozen
    for source, directories in ((path, [tmp_path / "copy"]), (EXAMPLE, None)):
        summaries = summarize_rollouts(source, captures=directories)
        groups, report = collect(source, captures=directories)
        account = report.account_of(ragged_rows(groups))
        assert sum(each.captured for each in summaries) == account.captured
        assert sum(each.trained for each in summaries) == account.trained
        shared = ("rollout_id", "record", "task", "group", "trajectory", "trains", "reason")
        for each, verdict in zip(summaries, report.verdicts, strict=True):
            for name in (*shared, "detail", "reward"):
                assert getattr(each, name) == getattr(verdict, name), name
        advantages = [a for group in compute_advantages(groups) for a in group]
        for each, advantage in zip(summaries, advantages, strict=True):
            assert each.advantage == (advantage if each.trains else None)


@pytest.mark.parametrize(
    ("options", "ids"),
    [
        (["--masked"], ["1-0", "1-2"]),
        (["--group", 0], ["0-0", "0-1", "0-2", "0-3"]),
        (["--reason", "ambiguous_chains"], ["1-2"]),
        (["--masked", "--group", 0], []),
        (["--keep-incomplete-when-attributed", "--masked"], ["1-2"]),
        (["--workers", 2, "--group", 1], ["1-0", "1-1", "1-2"]),
    ],
)
def test_filters(data, options, ids):
    assert [line.split()[0] for line in lines_of(data, *options)[1:]] == ids
    assert [each["rollout_id"] for each in json.loads(lines_of(data, *options, "--json")[0])] == ids


def test_filters_leave_the_advantages_as_they_are(data):
    (chosen,) = select_rollouts(summarize_rollouts(data[0], captures=[data[1]]), reason="", group=1)
    assert (chosen.rollout_id, chosen.advantage) == ("1-1", 0.0)


calls = {
    "0-0": [
        "* a  prompt 3  sampled 2  root",
        "* b  prompt 6  sampled 2  scored, ends main",
    ],
    "0-1": [
        "* a     prompt  3  sampled 2  root",
        "  + b1  prompt  6  sampled 1  retry, quarantined",
        "* b2    prompt  6  sampled 2  after a, retry, kept",
        "* c     prompt 10  sampled 1  scored, ends main",
    ],
    "0-2": [
        "* a       prompt 3  sampled 2  root",
        "  + none  prompt 6  sampled 0  empty",
        "* b       prompt 6  sampled 1  after a, claims none, parent_call_id_missing_recovered,"
        " scored, ends main",
    ],
    "0-3": [
        "* a  prompt 3  sampled 2  root",
        "* b  prompt 6  sampled 1",
        "* c  prompt 9  sampled 1  scored, ends main",
    ],
    "1-0": ["* a  prompt 3  sampled 2  root, scored, ends main"],
    "1-1": [
        "* a       prompt 3  sampled 2  root",
        "  + sub1  prompt 7  sampled 1",
        "  | sub2  prompt 9  sampled 1  ends branch-0",
        "* b       prompt 6  sampled 2  after a, scored, ends main",
    ],
}


@pytest.mark.parametrize("rollout_id", calls)
def test_the_tree_of_calls(data, rollout_id):
    assert section(lines_of(data, "--rollout", rollout_id), "calls") == calls[rollout_id]


def test_the_head(data):
    lines = lines_of(data, "--rollout", "1-0")
    assert lines[:7] == [
        "rollout   1-0",
        "group     1, trajectory 0, task 1, record 5",
        "verdict   masked: incomplete_capture (a call was announced or marked and is lost)",
        "reward    0",
        "tokens    prompt 3, between turns 0, sampled 2; captured 2, trained 0",
        "source    captured calls, open, calls may still come, incomplete: lost gone",
        "terminal  a, by response_id (response_has_no_output); its chain: delivered",
    ]
    assert lines_of(data, "--rollout", "1-2")[6] == (
        "terminal  none (response_id_no_match,response_has_no_output)"
    )
    assert lines_of(data, "--rollout", "1-2")[2] == "verdict   masked: ambiguous_chains"
    kept = lines_of(data, "--rollout", "1-0", "--keep-incomplete-when-attributed")
    assert kept[2] == "verdict   trains"


def test_the_strip(data):
    lines = [line.split() for line in section(lines_of(data, "--rollout", "0-1"), "chain")]
    assert lines == [
        ["0", "prompt", "3", "." * 24],
        ["3", "sampled", "2", "a", "#" * 16],
        ["5", "between", "1", "-" * 8],
        ["6", "sampled", "2", "b2", "#" * 16],
        ["8", "between", "2", "-" * 16],
        ["10", "sampled", "1", "c", "#" * 8],
    ]


def test_the_tokens(data):
    lines = lines_of(data, "--rollout", "0-1", "--tokens")
    assert lines[-12:] == [
        "prompt 3",
        "  1 2 3",
        "sampled 2, a",
        "  4:-0.2500 5:-0.5000",
        "between 1",
        "  6",
        "sampled 2, b2",
        "  8:-0.2500 9:-0.5000",
        "between 2",
        "  10 11",
        "sampled 1, c",
        "  12:-0.2500",
    ]


def test_tokens_are_coloured_by_mask_and_break_between_words(data):
    path, captures = data

    def shown(rollout_id, **more):
        picture = inspect_rollout(path, rollout_id, captures=[captures])
        lines = list(picture_lines(picture, tokens=True, colors=True, **more))
        return lines[next(k for k, line in enumerate(lines) if "prompt 3\x1b" in line) :]

    assert shown("0-0")[1] == "  \x1b[2m1 2 3\x1b[0m"
    assert shown("0-0")[3] == "  \x1b[32m4:-0.2500 5:-0.5000\x1b[0m"
    assert shown("1-0")[3] == "  \x1b[33m4:-0.2500 5:-0.5000\x1b[0m"
    broken = shown("0-0", width=12)
    assert broken[3:5] == ["  \x1b[32m4:-0.2500\x1b[0m", "  \x1b[32m5:-0.5000\x1b[0m"]
    assert shown("0-0", width=1)[1:4] == [f"  \x1b[2m{token}\x1b[0m" for token in (1, 2, 3)]


def test_json_of_one_rollout(data):
    (line,) = lines_of(data, "--rollout", "0-1", "--json", "--tokens")
    found = json.loads(line)
    assert [span["kind"] for span in found["spans"]] == [
        *("prompt", "sampled", "between", "sampled", "between", "sampled"),
    ]
    tokens = [token for span in found["spans"] for token in span["tokens"]]
    assert tokens == [1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12]
    assert found["spans"][1]["logprobs"] == [-0.25, -0.5]
    assert sum(live for span in found["spans"] for live in span["mask"]) == found["trained"] == 5
    assert [call["retry"] for call in found["call_tree"]] == ["", "quarantined", "kept", ""]
    assert found["terminal"]["model_call_id"] == "c"
    assert (found["source"], found["frozen"], found["incomplete"]) == ("captures", False, False)
    bare = json.loads(lines_of(data, "--rollout", "0-1", "--json")[0])
    assert "tokens" not in bare["spans"][0]
    # What a program reads off the list and off one rollout has the same names.
    listed = json.loads(lines_of(data, "--json")[0])[1]
    assert {**found, "advantage": 0.5, **listed} == {**listed, **found, "advantage": 0.5}


def test_a_record_that_carries_its_tokens():
    result = invoke(EXAMPLE, "--rollout", "0-0")
    lines = result.stdout.splitlines()
    assert "source    the record carries its tokens" in lines
    assert [line.split()[:3] for line in section(lines, "calls")] == [
        ["*", "item", str(k)] for k in range(3)
    ]
    picture = inspect_rollout(EXAMPLE, "0-0")
    items = json.loads(EXAMPLE.read_text().splitlines()[0])["response"]["output"]
    last = items[-1]
    whole = last["prompt_token_ids"] + last["generation_token_ids"]
    assert picture.tokens.tolist() == whole
    wrote = [token for item in items for token in item.get("generation_token_ids", ())]
    assert picture.tokens[picture.mask].tolist() == wrote
    scores = [score for item in items for score in item.get("generation_log_probs", ())]
    assert picture.logprobs[picture.mask].tolist() == np.float32(scores).tolist()


def test_records_that_carry_tokens_and_are_masked():
    # The chain of the first is whole, and worth a look; that of the second is not.
    marked = inspect_rollout(EXAMPLE, "1-3")
    assert marked.summary.reason == "mask_sample"
    assert marked.summary.sampled == marked.summary.captured == 87
    assert not marked.mask.any()
    broken = inspect_rollout(EXAMPLE, "6-2")
    lines = list(picture_lines(broken))
    assert lines[2].startswith("verdict   masked: broken_prefix (item 2: the prompt does not")
    assert [line[:8] for line in section(lines, "calls")] == ["  item 0", "  item 1", "  item 2"]
    assert lines[-1] == "chain     0 tokens"


def test_a_token_without_a_context_does_not_train():
    item = {
        "prompt_token_ids": [],
        "generation_token_ids": [7, 8],
        "generation_log_probs": [-1, -2],
    }
    record = text_record(0, 0, response={"output": [item]})
    picture = inspect_rollout([record], "0-0")
    assert picture.mask.tolist() == [False, True]
    assert picture.summary.trained == 1
    lines = list(picture_lines(picture, tokens=True, colors=True))
    assert lines[-1] == "  \x1b[33m7:-1.0000\x1b[0m \x1b[32m8:-2.0000\x1b[0m"


def test_records_without_an_id_are_listed_by_number(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"reward": 1}\nno json\n' + EXAMPLE.read_text().splitlines()[0] + "\n")
    lines = invoke(path).stdout.splitlines()
    assert [line.split()[:3] for line in lines[1:3]] == [
        ["#1", "-", "masked"],
        ["#2", "-", "masked"],
    ]
    assert lines[1].endswith("no_task_index") and lines[2].endswith("unreadable_record")
    assert invoke(path, "--rollout", "").exit_code == 2


def test_looking_changes_nothing(data):
    _, captures = data
    before = hashes(captures)
    for options in ([], ["--masked", "--json"], ["--workers", "2"]):
        lines_of(data, *options)
    for rollout_id in calls:
        lines_of(data, "--rollout", rollout_id, "--tokens")
    assert hashes(captures) == before
    assert b'"frozen":true' not in (captures / "0-0.tokens.state.json").read_bytes()


def test_looking_makes_no_lock_and_no_directory(tmp_path):
    Recorder(tmp_path / "captures", "0-0").call("a", [1], [2])
    (tmp_path / "captures" / "0-0.tokens.lock").unlink()
    before = hashes(tmp_path / "captures")
    records = [text_record(0, 0, "a"), text_record(0, 1, "a")]
    found = summarize_rollouts(records, captures=[tmp_path / "captures"])
    assert [each.reason for each in found] == ["", "no_records"]
    assert hashes(tmp_path / "captures") == before
    with pytest.raises(NotADirectoryError, match="none"):
        summarize_rollouts(records, captures=[tmp_path / "none"])
    assert peek_capture("0-0", tmp_path / "none").entries == ()
    assert not (tmp_path / "none").exists()


def outcome(read):
    """Return what a reading gives: its records and whether it is incomplete, or its error."""
    try:
        snapshot = read()
    except Exception as error:
        return type(error)
    entries = [entry.to_json() for entry in snapshot.entries]
    return entries, snapshot.incomplete, snapshot.version if snapshot.snapshot_id else None


def test_a_look_sees_what_a_freeze_would_give(tmp_path, caplog):
    origin = tmp_path / "origin"
    made = Recorder(origin, "r")
    made.announce("a")
    made.call("a", [1, 2], [3])
    state = (origin / "r.tokens.state.json").read_bytes()
    made.announce("b")
    made.call("b", [4], [5, 6], "a")
    records = (origin / "r.tokens.jsonl").read_bytes()
    first = records.index(b"\n") + 1
    cases = [(records[:size], None) for size in range(0, len(records) + 1, 7)]
    cases += [(records[:size], state) for size in range(first, len(records) + 1, 7)]
    cases += [
        (records, state.replace(b'"frozen":false', b'"frozen":true')),
        (records, state.replace(b'"retired":false', b'"retired":true')),
        (records, state.replace(b'"incomplete":false', b'"incomplete":true')),
        (records, b"{}"),
        (records, b"[]"),
        (records, b'{"frozen":true}'),
        (records[: first - 9] + b"\n" + records[first:], None),
        (records + records[:first].replace(b"[3]", b"[4]"), state),
    ]
    kinds = set()
    for number, (content, with_state) in enumerate(cases):
        root = tmp_path / str(number)
        root.mkdir()
        (root / "r.tokens.jsonl").write_bytes(content)
        shutil.copy(origin / "r.tokens.intents", root)
        if with_state is not None:
            (root / "r.tokens.state.json").write_bytes(with_state)
        before = hashes(root)
        seen = outcome(lambda root=root: peek_capture("r", root))
        assert hashes(root) == before
        frozen = outcome(lambda root=root: TokenCaptureStore(root).freeze_now("r"))
        kinds.add(frozen if isinstance(frozen, type) else len(frozen[0]))
        if isinstance(frozen, tuple):
            assert seen[:2] == frozen[:2]
            assert outcome(lambda root=root: peek_capture("r", root)) == frozen
            if b'"frozen":true' not in (with_state or b""):
                assert seen[2] is None
        else:
            assert seen == frozen
    assert kinds == {0, 1, 2, ValueError, RuntimeError, KeyError}
    assert any("is left out" in message for message in caplog.messages)


def test_lost_calls(tmp_path):
    made = Recorder(tmp_path, "r")
    for call_id in ("a", "gone", "late"):
        made.announce(call_id)
    made.call("a", [1], [2])
    for call_id in ("late", "never", ""):
        asyncio.run(made.store.mark_incomplete("r", call_id))
    assert lost_calls("r", tmp_path) == ["gone", "late", "never"]
    assert lost_calls("other", tmp_path) == []


def test_odd_calls_in_the_tree(tmp_path):
    made = Recorder(tmp_path, "0-0")
    made.call("a", [1, 2], [3])
    made.call("other", [1, 2, 3, 4], [5])
    made.call("far", [9, 9], [9], claim="a")  # does not continue what it claims
    made.sequences["hidden"] = [8, 8]
    made.call("torn", [7], [7], "hidden", delta=True)  # its parent is nowhere
    line = (tmp_path / "0-0.tokens.jsonl").read_bytes().splitlines(keepends=True)[1]
    (tmp_path / "0-0.tokens.state.json").write_bytes(b"{}")
    picture = inspect_rollout([text_record(0, 0)], "0-0", captures=[tmp_path])
    shown = section(list(picture_lines(picture)), "calls")
    assert sorted(line[2:].split()[0] for line in shown) == ["a", "far", "other", "torn"]
    assert any(re.search(r"far .* claims a, parent_digest_mismatch", line) for line in shown)
    assert any(re.search(r"torn .* no parent, claims hidden, broken delta", x) for x in shown)
    red = [x for x in picture_lines(picture, colors=True) if x.startswith("\x1b[31m")]
    assert len(red) == 2
    assert line in (tmp_path / "0-0.tokens.jsonl").read_bytes()


def reports(*rows):
    return [CallReport(call_id, claimed, parent, 1, 1) for call_id, claimed, parent in rows]


def test_the_trunk_stays_at_one_depth():
    trunk = reports(
        *((f"t{k}", None, f"t{k - 1}" if k else None) for k in range(5000)),
        *((f"s{k}", None, f"t{k}") for k in range(0, 4990, 10)),
        ("deep", None, "s0"),
        ("side", None, "s0"),
    )
    shown = arrange_calls(RolloutBuild("r", calls=trunk))
    assert {call.depth for call in shown if call.call_id[0] == "t"} == {0}
    assert {call.depth for call in shown} == {0, 1, 2}
    places = {call.call_id: k for k, call in enumerate(shown)}
    assert len(places) == len(trunk)
    assert all(c.parent_id is None or places[c.parent_id] < places[c.call_id] for c in shown)


def test_claims_that_come_round_lose_no_call():
    round_about = [
        CallReport(name, claimed, None, 0, 0, empty=True)
        for name, claimed in (("a", "b"), ("b", "c"), ("c", "a"), ("d", "d"), ("e", "b"))
    ]
    shown = arrange_calls(RolloutBuild("r", calls=round_about))
    assert sorted(call.call_id for call in shown) == ["a", "b", "c", "d", "e"]
    assert sum(call.parent_id is None for call in shown) == 2


def test_a_contested_and_an_unresolved_call(tmp_path):
    made = Recorder(tmp_path, "0-0")
    made.call("a", [1], [2])
    made.call("b1", [3], [4], "a")
    made.call("b2", [3], [5], "a")
    picture = inspect_rollout([text_record(0, 0)], "0-0", captures=[tmp_path])
    assert picture.summary.reason == "unresolved_retry"
    assert [call.retry for call in picture.calls if call.call_id != "a"] == ["unresolved"] * 2
    contested = RolloutBuild("r", calls=[CallReport("x", None, None, 1, 1, contested=True)])
    assert arrange_calls(contested)[0].contested


def test_foreign_ids_cannot_move_the_cursor(tmp_path):
    made = Recorder(tmp_path, "0-0")
    made.call(CONTROL, [1], [2])
    picture = inspect_rollout([text_record(0, 0, CONTROL)], "0-0", captures=[tmp_path])
    lines = list(picture_lines(picture, tokens=True))
    assert not any(set("\x1b\n") & set(line) for line in lines)
    assert any(r"\x1b[31mred\n" in line for line in lines)
    assert picture_values(picture)["call_tree"][0]["call_id"] == CONTROL


def test_long_ids_are_never_cut(tmp_path):
    name = "r" * 200
    Recorder(tmp_path, name).call("c" * 300, [1], [2])
    record = text_record(0, 0, "c" * 300, _ng_rollout_id=name)
    assert any(name in line for line in list_lines(summarize_rollouts([record])))
    picture = inspect_rollout([record], name, captures=[tmp_path])
    assert sum("c" * 300 in line for line in picture_lines(picture, width=40)) == 3


@pytest.mark.parametrize(
    "options",
    [
        ["--rollout", "9-9"],
        ["--rollout", "0-0", "--masked"],
        ["--rollout", "0-0", "--group", "0"],
        ["--rollout", "0-0", "--reason", "unscored"],
        ["--tokens"],
        ["--captures", "nowhere"],
    ],
)
def test_what_cannot_be_shown_is_one_line(options):
    result = invoke(EXAMPLE, *options)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [None, "", "not json\n"])
@pytest.mark.parametrize("options", [[], ["--rollout", "0-0"], ["--json"]])
def test_unreadable_input_is_one_line(tmp_path, content, options):
    path = tmp_path / "rollouts.jsonl"
    if content is not None:
        path.write_text(content)
    result = invoke(path, *options)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "rollouts.jsonl" in result.stderr


def test_bad_usage():
    assert invoke().exit_code == 2
    assert invoke(EXAMPLE, "--group", "x").exit_code == 2


def run_on_a_terminal(*arguments, **environment):
    """Return what a command writes to a terminal of its own."""
    main, sub = pty.openpty()
    command = [sys.executable, "-m", "evsys_jax", "inspect", *map(str, arguments)]
    variables = {k: v for k, v in os.environ.items() if k != "NO_COLOR"} | environment
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=sub, stderr=subprocess.PIPE, env=variables
    )
    os.close(sub)
    written = b""
    while True:
        try:
            part = os.read(main, 65536)
        except OSError:  # what Linux says at the end
            break
        if not part:
            break
        written += part
    os.close(main)
    assert process.stderr is not None
    with process.stderr as errors:
        assert errors.read() == b""
    assert process.wait(60) == 0
    return written.decode()


def test_colours_on_a_terminal_only(data):
    path, captures = data
    one = (path, "--captures", captures, "--rollout", "0-1", "--tokens")
    shown = run_on_a_terminal(*one)
    assert "\x1b[32m8:-0.2500 9:-0.5000\x1b[0m" in shown
    plain = "\n".join(lines_of(data, "--rollout", "0-1", "--tokens")) + "\n"
    assert "\x1b" not in plain
    assert plain.isascii()
    assert re.sub(r"\x1b\[\d*m", "", shown).replace("\r\n", "\n") == plain
    assert "\x1b" not in run_on_a_terminal(*one, NO_COLOR="1")
    assert "\x1b[33m1-2 " in run_on_a_terminal(path, "--captures", captures)
