"""The command line, as a user runs it: exit codes, one clear line, and nothing half-written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from evsys_jax import __main__ as entry
from evsys_jax import reference, stopping
from evsys_jax.cli import app
from evsys_jax.collect import collect
from evsys_jax.dataset import RowWriter, read_rows

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "rollouts" / "rollouts.jsonl")


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("rows", ["turns", "merged"])
def test_build_writes_the_references_rows(tmp_path, rows):
    result = invoke("build", EXAMPLE, "--out", tmp_path, "--rows", rows)
    assert result.exit_code == 0, result.output
    groups, _ = collect(EXAMPLE)
    wanted = reference.training_rows(groups, reference.compute_advantages(groups), rows=rows)
    frame = pd.read_parquet(tmp_path / "rows.parquet")
    assert [t.tolist() for t in frame.target_tokens] == [row.target_tokens for row in wanted]
    for stored, row in zip(frame.advantages, wanted, strict=True):
        np.testing.assert_array_equal(stored, np.array(row.advantages, np.float32))
    assert "masked: broken_prefix" in result.stdout


def test_the_account_adds_up(tmp_path):
    result = invoke("build", EXAMPLE, "--out", tmp_path, "--json", "--drop-constant")
    summary = json.loads(result.stdout)
    tokens = summary["tokens"]
    parts = [tokens["trained"], *tokens["masked"].values(), *tokens["dropped"].values()]
    assert tokens["captured"] == sum(parts)
    assert tokens["dropped"]["constant_group"] > 0
    assert tokens["trained"] == int(read_rows(tmp_path / "rows.parquet").sampled.sum())
    items = [
        item
        for line in Path(EXAMPLE).read_text().splitlines()
        for item in json.loads(line)["response"]["output"]
    ]
    assert tokens["captured"] == sum(len(item.get("generation_token_ids", ())) for item in items)
    stored = json.loads((tmp_path / "report.json").read_text())
    assert len(stored["verdicts"]) == summary["rollouts"] == 64
    assert {v["reason"] for v in stored["verdicts"]} == {"", *summary["masked_rollouts"]}


def test_no_normalize_keeps_the_rewards(tmp_path):
    invoke("build", EXAMPLE, "--out", tmp_path, "--no-normalize")
    frame = pd.read_parquet(tmp_path / "rows.parquet")
    assert (frame.advantage == frame.reward).all()


def test_nothing_trains(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1}\n')
    result = invoke("build", path, "--out", tmp_path / "out")
    assert result.exit_code == 1
    assert "no_generation" in result.stdout
    assert len(read_rows(tmp_path / "out" / "rows.parquet")) == 0


def test_a_run_that_trains_nothing_leaves_no_stale_rows(tmp_path):
    assert invoke("build", EXAMPLE, "--out", tmp_path).exit_code == 0
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"_ng_task_index": 0, "_ng_rollout_index": 0, "reward": 1}\n')
    assert invoke("build", path, "--out", tmp_path).exit_code == 1
    assert len(read_rows(tmp_path / "rows.parquet")) == 0


@pytest.mark.parametrize("command", ["build", "verify"])
@pytest.mark.parametrize("content", [None, "", "\n\n", "not json\n", "[1, 2]\n"])
def test_unreadable_input_is_one_line(tmp_path, command, content):
    path = tmp_path / "rollouts.jsonl"
    if content is not None:
        path.write_text(content)
    out = ["--out", tmp_path / "out"] if command == "build" else []
    result = invoke(command, path, *out)
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert "rollouts.jsonl" in result.stderr
    assert not (tmp_path / "out").exists()


def test_an_output_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    result = invoke("build", EXAMPLE, "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_large_reward_masks_its_rollout_alone(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = Path(EXAMPLE).read_text().splitlines()
    spoiled = json.loads(lines[0])
    spoiled["reward"] = 1e300
    path.write_text("\n".join([json.dumps(spoiled), *lines[1:]]))
    result = invoke("build", path, "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["masked_rollouts"]["bad_reward"] == 1
    assert invoke("verify", path).exit_code == 0


def test_rewards_below_what_float32_holds_are_identical(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    record = json.loads(Path(EXAMPLE).read_text().splitlines()[0])
    path.write_text(json.dumps({**record, "reward": 1e-40}) + "\n")
    assert invoke("verify", path).exit_code == 0


@pytest.mark.parametrize("name", ["rows.parquet", "report.json"])
def test_outputs_that_are_directories_or_the_input_are_refused(tmp_path, name):
    out = tmp_path / "out"
    (out / name).mkdir(parents=True)
    result = invoke("build", EXAMPLE, "--out", out)
    assert result.exit_code == 2
    assert [entry.name for entry in out.iterdir()] == [name]
    (out / name).rmdir()
    shutil.copy(EXAMPLE, out / name)
    result = invoke("build", out / name, "--out", out)
    assert result.exit_code == 2
    assert name in result.stderr
    assert (out / name).read_text() == Path(EXAMPLE).read_text()


def test_text_of_another_encoding_is_one_line(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text(Path(EXAMPLE).read_text(), encoding="utf-16")
    result = invoke("verify", path)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_a_full_output_is_one_line():
    command = [sys.executable, "-m", "evsys_jax", "verify", EXAMPLE]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr


def test_a_reader_that_went_away_is_no_verdict():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "evsys_jax", "verify", EXAMPLE]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True)
    os.close(writing)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_without_standard_error_a_command_does_its_work():
    command = f"exec {sys.executable} -m evsys_jax verify {EXAMPLE} 2>&-"
    done = subprocess.run(["sh", "-c", command], stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0
    assert done.stdout.endswith("positions: identical\n")


def test_what_a_request_to_stop_raises_in_vain_is_not_reported(monkeypatch):
    reported = []
    monkeypatch.setattr(sys, "unraisablehook", reported.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(stopping, "_asked", [])
    stopping.listen()
    end, fault = SimpleNamespace(exc_type=SystemExit), SimpleNamespace(exc_type=ValueError)
    sys.unraisablehook(end)
    stopping._asked.append(signal.SIGINT)
    sys.unraisablehook(end)
    sys.unraisablehook(fault)
    assert reported == [end, fault]


def test_a_request_to_stop_leaves_no_rows(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    lines = Path(EXAMPLE).read_text().splitlines()
    with path.open("w") as file:
        for repeat in range(150):
            for line in lines:
                record = json.loads(line)
                record["_ng_task_index"] += 8 * repeat
                file.write(json.dumps(record) + "\n")
    command = [sys.executable, "-m", "evsys_jax", "build", str(path), "--out", str(tmp_path / "o")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any((tmp_path / "o").glob(".rows*")):
        time.sleep(0.01)
    process.terminate()
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 143
    assert b"Traceback" not in stderr
    assert not any((tmp_path / "o").iterdir())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["build"], "rollouts"),
        (["build", EXAMPLE], "--out"),
        (["build", EXAMPLE, "--out", "x", "--rows", "both"], "both"),
        (["verify", EXAMPLE, "--workers", "0"], "--workers"),
        (["no-such-command"], "no-such-command"),
        (["verify", "none.jsonl"], "none.jsonl"),
    ],
)
def test_bad_usage_is_one_line_that_names_it(arguments, named):
    command = [sys.executable, "-m", "evsys_jax", *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


def test_without_a_command_there_is_help():
    done = subprocess.run([sys.executable, "-m", "evsys_jax"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "Commands:" in done.stdout + done.stderr


def test_bad_usage():
    assert invoke("build", EXAMPLE).exit_code == 2
    assert invoke("build", EXAMPLE, "--out", "x", "--rows", "both").exit_code == 2
    assert invoke("no-such-command").exit_code == 2


@pytest.mark.parametrize("rows", ["turns", "merged"])
def test_verify_says_identical(rows):
    result = invoke("verify", EXAMPLE, "--rows", rows)
    assert result.exit_code == 0
    assert result.stdout.endswith("positions: identical\n")


def test_verify_shows_the_first_differences(monkeypatch):
    real = reference._shift

    def spoil(sequence, advantage, group, trajectory):
        row = real(sequence, advantage, group, trajectory)
        if (group, trajectory) == (2, 1):
            row.target_tokens[-1] += 1
        return row

    monkeypatch.setattr(reference, "_shift", spoil)
    result = invoke("verify", EXAMPLE)
    assert result.exit_code == 1
    assert "rows differ" in result.stdout
    assert "(group 2, trajectory 1, turn 0): target_tokens[" in result.stdout
    found = json.loads(invoke("verify", EXAMPLE, "--json").stdout)
    assert found["differing_rows"] == len(found["differences"]) > 0


def test_rows_that_cannot_be_encoded_leave_the_report_as_it_was(tmp_path, monkeypatch):
    assert invoke("build", EXAMPLE, "--out", tmp_path).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def fail(writer, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowWriter, "_write", fail)
    assert invoke("build", EXAMPLE, "--out", tmp_path, "--rows", "merged").exit_code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_overview_is_the_help_of_the_commands(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evsys-jax", "--help"])
    entry.main()
    told = CliRunner().invoke(app, ["--help"], prog_name="evsys-jax", terminal_width=100)
    assert capsys.readouterr().out == told.stdout


def test_an_overview_that_cannot_be_printed_is_one_line(monkeypatch, capsys):
    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def flush(self):
            pass

    monkeypatch.setattr(sys, "argv", ["evsys-jax", "--help"])
    monkeypatch.setattr(sys, "stdout", Full())
    with pytest.raises(SystemExit, match="2"):
        entry.main()
    assert capsys.readouterr().err == "evsys-jax: [Errno 28] No space left on device\n"


def test_without_standard_output_there_is_one_line():
    command = f"exec {sys.executable} -m evsys_jax inspect {EXAMPLE} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2
    assert done.stderr == "evsys-jax: there is no standard output\n"


def test_a_stop_that_python_dropped_is_caught_up_with(monkeypatch):
    monkeypatch.setattr(stopping, "_asked", [])
    stopping.keep_on(1)
    with pytest.raises(SystemExit, match="143"):
        stopping._stop(signal.SIGTERM, None)
    stopping._stop(signal.SIGTERM, None)  # asked again, while the first is under way
    stopping._stop(signal.SIGINT, None)
    with pytest.raises(SystemExit, match="143"):
        stopping.keep_on(1)


@pytest.mark.parametrize("first", ["report", "rows"])
def test_rows_and_report_take_their_names_together(tmp_path, monkeypatch, first):
    assert invoke("build", EXAMPLE, "--out", tmp_path).exit_code == 0
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    real, names = Path.replace, []

    def replace(path, target):
        names.append(Path(target).name)
        if first == "rows" and names[-1] == "rows.parquet":
            raise OSError(28, "No space left on device")
        return real(path, target)

    monkeypatch.setattr(Path, "replace", replace)
    if first == "report":
        monkeypatch.setattr(Path, "write_text", _full)
    assert invoke("build", EXAMPLE, "--out", tmp_path, "--rows", "merged").exit_code == 2
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert names == ([] if first == "report" else ["rows.parquet"])


def _full(*_, **__):
    raise OSError(28, "No space left on device")
