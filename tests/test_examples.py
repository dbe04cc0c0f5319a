"""The examples do what they say: the same rollouts as text with captures, and recorded calls."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from evsys_jax.capture import TokenCaptureStore
from evsys_jax.cli import app
from evsys_jax.collect import collect

ROOT = Path(__file__).parent.parent
INLINE = ROOT / "examples" / "rollouts" / "rollouts.jsonl"
TEXT = ROOT / "examples" / "rollouts" / "text_rollouts.jsonl"
CAPTURES = ROOT / "examples" / "captures"
MASKED = {
    "1-3": "incomplete_capture",
    "2-6": "unscored",
    "5-6": "ambiguous_chains",
    "6-2": "terminal_broken",
}


@pytest.fixture
def captures(tmp_path):
    """A copy, since reading a capture freezes it."""
    copy = tmp_path / "captures"
    copy.mkdir()
    for path in recorded_files(CAPTURES):
        shutil.copy(path, copy)
    return copy


def recorded_files(directory):
    """What the example comes with: not what its readers leave behind."""
    return sorted(
        path for path in directory.iterdir() if path.suffix not in (".lock", ".json", ".tmp")
    )


def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def build(*arguments):
    result = CliRunner().invoke(app, ["build", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.mark.parametrize("rows", ["turns", "merged"])
def test_captured_rollouts_give_the_rows_of_those_that_carry_their_tokens(tmp_path, captures, rows):
    build(INLINE, "--out", tmp_path / "inline", "--rows", rows)
    build(TEXT, "--captures", captures, "--out", tmp_path / "text", "--rows", rows)
    inline, text = (
        pd.read_parquet(tmp_path / name / "rows.parquet").set_index(["rollout_id", "turn"])
        for name in ("inline", "text")
    )
    whole = inline[~inline.index.get_level_values(0).isin(MASKED)]
    assert list(whole.index) == list(text.index)
    assert len(text.index.get_level_values(0).unique()) == 60
    for ours, theirs in zip(text.itertuples(), whole.itertuples(), strict=True):
        assert ours.Index == theirs.Index
        for mine, its in zip(ours[1:], theirs[1:], strict=True):
            np.testing.assert_array_equal(mine, its, strict=isinstance(mine, np.ndarray))


def test_every_story_has_its_verdict(captures):
    groups, report = collect(TEXT, captures=captures)
    assert {v.rollout_id: v.reason for v in report.verdicts if not v.trains} == MASKED
    assert report.account.balanced
    assert +report.account.dropped == {"quarantined": 5, "off_chain": 8}
    assert report.account.dropped_turns == {"quarantined": 1, "off_chain": 2, "empty_call": 1}
    notes = {
        trajectory.metadata["rollout_id"]: trajectory.metadata["_ng_token_capture"]
        for group in groups
        for trajectory in group.trajectories
    }
    how = {
        name: (note["terminal_attribution"]["method"], note["roots"], note["quarantined_calls"])
        for name, note in notes.items()
    }
    assert how["0-2"] == ("response_id", 1, 1)
    assert how["4-1"] == ("explicit", 2, 0)
    assert how["5-6"] == ("none", 2, 0)
    assert how["7-3"] == ("response_id", 2, 0)
    assert notes["2-1"]["empty_generation_calls"] == 1
    assert notes["2-1"]["parent_link_failures"] == {"parent_call_id_missing_recovered": 1}
    assert notes["6-2"]["parent_link_failures"] == {"parent_unresolved": 1}
    assert [name for name, note in notes.items() if "capture_incomplete" in note] == ["1-3"]


def test_a_lost_call_outside_the_scored_chain_can_be_forgiven(captures):
    _, report = collect(TEXT, captures=captures, mask_incomplete_when_attributed=False)
    assert not {v.reason for v in report.verdicts} & {"incomplete_capture"}
    assert sum(v.trains for v in report.verdicts) == 61


def test_the_records_are_stamped_as_a_servers_are(captures):
    entries = {
        path.name.partition(".tokens")[0]: TokenCaptureStore(captures).read_entries(
            path.name.partition(".tokens")[0]
        )
        for path in captures.glob("*.jsonl")
    }
    assert len(entries) == 64
    for entry in (entry for calls in entries.values() for entry in calls):
        assert entry.digest and entry.continuation_fingerprint and entry.parent_resolution
    assert [entry.prompt_is_delta for entry in entries["3-4"]] == [False, True, True]


def test_the_scripts_write_the_same_bytes_again(tmp_path):
    for name in ("make_rollouts.py", "make_captures.py"):
        (tmp_path / "rollouts").mkdir(exist_ok=True)
        shutil.copy(INLINE.parent / name, tmp_path / "rollouts")
        run_python(tmp_path / "rollouts" / name)
    for path in (INLINE, TEXT):
        assert (tmp_path / "rollouts" / path.name).read_bytes() == path.read_bytes()
    again = list((tmp_path / "captures").iterdir())
    assert sorted(path.name for path in again) == [path.name for path in recorded_files(CAPTURES)]
    for path in again:
        assert path.read_bytes() == (CAPTURES / path.name).read_bytes(), path.name


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_the_readmes_command_leaves_a_clone_clean(tmp_path):
    for name in (".gitignore", "examples"):
        source = ROOT / name
        copy = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, tmp_path / name)
    quiet = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}

    def git(*arguments):
        return subprocess.run(
            ["git", *arguments], cwd=tmp_path, env=quiet, capture_output=True, text=True, check=True
        ).stdout

    git("init", "-q")
    git("add", ".")
    rollouts, captured = tmp_path / TEXT.relative_to(ROOT), tmp_path / CAPTURES.relative_to(ROOT)
    build(rollouts, "--captures", captured, "--out", tmp_path / "out" / "captured")
    assert (captured / "0-0.tokens.state.json").exists()
    assert git("ls-files", "--modified", "--others", "--exclude-standard") == ""
    again = tmp_path / "out" / "again"
    build(rollouts, "--captures", captured, "--out", again)
    frames = [
        pd.read_parquet(again.with_name(name) / "rows.parquet") for name in ("again", "captured")
    ]
    pd.testing.assert_frame_equal(*frames)


def test_the_readme_shows_what_the_command_prints(tmp_path, captures):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## From captured calls\n")[2].partition("\n## ")[0]
    command, sample = section.split("```")[1], section.split("```")[3]
    assert "examples/rollouts/text_rollouts.jsonl --captures examples/captures" in command
    printed = build(TEXT, "--captures", captures, "--out", tmp_path / "out")
    promised = [line.split() for line in sample.splitlines()[1:] if line]
    shown = [line.split() for line in printed.splitlines()]
    assert promised[-1][0] == shown[-1][0] == "seconds"
    assert promised[:-1] == shown[:-1]
    assert len(promised) > 10


def test_calls_of_ones_own_engine(tmp_path):
    printed = run_python(ROOT / "examples" / "record_calls.py", tmp_path / "captures")
    masked, trained = printed.splitlines()
    assert re.fullmatch(r"32 rollouts, masked: {.*'incomplete_capture'.*}", masked)
    (counts,) = re.findall(r"^(\d+) of (\d+) sampled tokens train$", trained)
    assert 0 < int(counts[0]) < int(counts[1])
    lines = (ROOT / "examples" / "record_calls.py").read_text(encoding="utf-8").splitlines()
    assert len(lines) < 100
