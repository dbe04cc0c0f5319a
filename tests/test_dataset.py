"""Training rows on disk: other readers can use them, and they come back as they went."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from generators import random_groups

from evsys_jax import reference
from evsys_jax.batch import pack
from evsys_jax.dataset import RowWriter, read_rows
from evsys_jax.parts import iter_ragged_rows
from evsys_jax.ragged import ragged_rows
from evsys_jax.rollouts import Trajectory, TrajectoryGroup, Turn


def write(path, groups, parts=1, **options):
    rows = ragged_rows(groups, **options)
    with RowWriter(path) as writer:
        for index in np.array_split(np.arange(len(rows)), parts):
            chosen = rows.take(index)
            writer.write(pack(chosen), chosen)
    return rows


@pytest.mark.parametrize("rows", ["turns", "merged"])
def test_pandas_reads_what_the_reference_says(tmp_path, rows):
    groups = random_groups(7)
    write(tmp_path / "rows.parquet", groups, parts=3, rows=rows)
    frame = pd.read_parquet(tmp_path / "rows.parquet")
    wanted = reference.training_rows(groups, reference.compute_advantages(groups), rows=rows)
    assert len(frame) == len(wanted)
    for record, row in zip(frame.to_dict("records"), wanted, strict=True):
        assert record["input_tokens"].tolist() == row.input_tokens
        assert record["target_tokens"].tolist() == row.target_tokens
        assert record["mask"].tolist() == row.mask
        np.testing.assert_array_equal(record["logprobs"], np.array(row.logprobs, np.float32))
        assert (record["group"], record["trajectory"], record["turn"]) == (
            row.group,
            row.trajectory,
            row.turn,
        )
        live = row.advantages[row.mask.index(True)]
        assert record["advantage"] == pytest.approx(live, rel=1e-6)
        member = groups[row.group].trajectories[row.trajectory]
        assert record["reward"] == member.reward


def test_writing_does_not_load_pandas(tmp_path):
    script = """
import sys
from evsys_jax import Trajectory, TrajectoryGroup, Turn, ragged_rows
from evsys_jax.dataset import RowWriter
group = TrajectoryGroup([Trajectory([Turn([1], [2], [-1.0])], 1.0, {"rollout_id": "é"})])
with RowWriter(sys.argv[1]) as writer:
    writer.write_parts([ragged_rows([group])])
print("pandas" in sys.modules)
"""
    path = tmp_path / "rows.parquet"
    command = [sys.executable, "-c", script, str(path)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
    assert pd.read_parquet(path)["rollout_id"].tolist() == ["é"]


@pytest.mark.parametrize("seed", range(6))
def test_rows_come_back(tmp_path, seed):
    groups = random_groups(seed)
    rows = write(tmp_path / "rows.parquet", groups, parts=2)
    again = read_rows(tmp_path / "rows.parquet")
    np.testing.assert_array_equal(again.offsets, rows.offsets)
    np.testing.assert_array_equal(again.tokens, rows.tokens)
    before, after = pack(rows, width=64), pack(again, width=64)
    for one, other in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(one, other)


def test_rollout_ids_and_rewards(tmp_path):
    turn = Turn([1], [2], [-1.0])
    members = [Trajectory([turn], float(n), {"rollout_id": f"0-{n}"}) for n in range(3)]
    members[1].trains = False
    write(tmp_path / "rows.parquet", [TrajectoryGroup(members)])
    table = pq.read_table(tmp_path / "rows.parquet")
    assert table["rollout_id"].to_pylist() == ["0-0", "0-2"]
    assert table["advantage"].to_pylist() == [-1.0, 1.0]
    again = read_rows(tmp_path / "rows.parquet")
    assert again.table.rollout_ids == ("0-0", "0-2")
    assert again.table.rewards.tolist() == [0.0, 2.0]
    assert again.advantages.tolist() == [0, -1, 0, 1]


def test_a_file_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"yesterday's")
    rows = ragged_rows([TrajectoryGroup([Trajectory([Turn([1], [2], [-1.0])])])])

    def fail_half_way():
        with RowWriter(path) as writer:
            writer.write(pack(rows), rows)
            raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        fail_half_way()
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.parquet"]
    assert path.read_bytes() == b"yesterday's"


def test_a_narrowed_mask_takes_its_advantages_with_it(tmp_path):
    rows = ragged_rows([TrajectoryGroup([Trajectory([Turn([1], [2, 3], [-1.0] * 2)], 1.0)])])
    batch = pack(rows)
    with RowWriter(tmp_path / "rows.parquet") as writer:
        writer.write(replace(batch, mask=batch.mask & (batch.positions > 0)), rows)
    stored = pq.read_table(tmp_path / "rows.parquet")
    assert stored["advantages"].to_pylist() == [[0.0, 1.0]]
    assert stored["advantage"].to_pylist() == [1.0]


def test_a_column_of_another_type_is_named(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = ragged_rows([TrajectoryGroup([Trajectory([Turn([1], [2], [-1.0])])])])
    with RowWriter(path) as writer:
        writer.write(pack(rows), rows)
    table = pq.read_table(path)
    wide = table["logprobs"].cast(pa.list_(pa.float64()))
    pq.write_table(table.set_column(2, "logprobs", wide), path)
    with pytest.raises(ValueError, match=r"column 'logprobs' is list<.*double>, not list<.*float>"):
        read_rows(path)


def test_files_of_another_kind_are_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    path.write_bytes(b"not parquet")
    with pytest.raises(ValueError, match=r"."):
        read_rows(path)
    pq.write_table(pa.table({"input_tokens": [[1]]}), path)
    with pytest.raises(ValueError, match="no column 'target_tokens'"):
        read_rows(path)


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("input_tokens", [[-5, 2]], "input_tokens holds a negative id|shifted"),
        ("target_tokens", [[9, 3]], "target_tokens are not input_tokens shifted"),
        ("logprobs", [[0.0, float("nan")]], "logprobs holds what is not finite"),
        ("advantages", [[0.0, float("inf")]], "advantages holds what is not finite"),
        ("mask", [None], "column 'mask' holds a null"),
        ("input_tokens", [[1, None]], "column 'input_tokens' holds a null"),
        ("group", [None], "column 'group' holds a null"),
        ("group", [2**30], "group or trajectory outside"),
        ("group", [-1], "group or trajectory outside"),
    ],
)
def test_altered_rows_are_refused(tmp_path, column, values, message):
    path = tmp_path / "rows.parquet"
    rows = ragged_rows([TrajectoryGroup([Trajectory([Turn([1, 2], [3], [-1.0])])])])
    with RowWriter(path) as writer:
        writer.write(pack(rows), rows)
    table = pq.read_table(path)
    place = table.column_names.index(column)
    altered = pa.array(values, table.schema.field(column).type)
    pq.write_table(table.set_column(place, column, altered), path)
    with pytest.raises(ValueError, match=message) as error:
        read_rows(path)
    assert "rows.parquet" in str(error.value)


def test_a_file_without_rows_is_empty(tmp_path):
    with RowWriter(tmp_path / "rows.parquet"):
        pass
    assert len(read_rows(tmp_path / "rows.parquet")) == 0


def test_a_target_that_cannot_be_replaced_leaves_nothing(tmp_path):
    (tmp_path / "rows.parquet").mkdir()
    with pytest.raises(OSError), RowWriter(tmp_path / "rows.parquet"):
        pass
    assert [entry.name for entry in tmp_path.iterdir()] == ["rows.parquet"]


@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_batch_that_cannot_be_encoded_is_raised_and_nothing_is_left(tmp_path, monkeypatch, bad):
    rows = ragged_rows(random_groups(3))
    real, done = RowWriter._write, []

    def write(writer, table):
        done.append(table)
        if len(done) == bad + 1:
            raise OSError(28, "No space left on device")
        real(writer, table)

    monkeypatch.setattr(RowWriter, "_write", write)
    with (
        pytest.raises(OSError, match="No space left"),
        RowWriter(tmp_path / "rows.parquet") as writer,
    ):
        for _ in range(3):
            writer.write(pack(rows), rows)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("most", [1, 40, 10**6])
def test_rows_written_in_parts_are_those_of_the_whole(tmp_path, most):
    groups, done = random_groups(6), []
    whole = ragged_rows(groups)
    with RowWriter(tmp_path / "parts.parquet") as writer:
        parts = iter_ragged_rows(groups, max_tokens=most)
        written = writer.write_parts(parts, on_group=done.append)
    with RowWriter(tmp_path / "whole.parquet") as writer:
        writer.write(pack(whole), whole)
    parts, one = (pq.read_table(tmp_path / f"{name}.parquet") for name in ("parts", "whole"))
    assert parts.equals(one)
    assert written.rows == len(whole)
    assert written.positions == int((whole.lengths - 1).sum()) < written.padded
    assert written.account == whole.account
    assert done[-1] == len(groups)
    assert done == sorted(set(done))
    assert len(done) > 1 or most > 40


def test_parts_are_encoded_when_they_count_as_written(tmp_path, monkeypatch):
    def fail(writer, table):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowWriter, "_write", fail)
    with RowWriter(tmp_path / "rows.parquet") as writer:
        with pytest.raises(OSError, match="No space left"):
            writer.write_parts(iter_ragged_rows(random_groups(3)))
        monkeypatch.undo()
        writer._encoding = None
