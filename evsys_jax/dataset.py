"""Training rows on disk: one Parquet row per Datum, readable by pandas, DuckDB and datasets.

Needs pyarrow (the `cli` extra). A file appears under its name only when it is whole.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from evsys_jax.account import TokenAccount
from evsys_jax.ragged import RaggedRows
from evsys_jax.trajectories import TrajectoryTable

if TYPE_CHECKING:
    from evsys_jax.batch import TokenBatch

SCHEMA = pa.schema(
    [
        ("input_tokens", pa.list_(pa.int32())),
        ("target_tokens", pa.list_(pa.int32())),
        ("logprobs", pa.list_(pa.float32())),
        ("advantages", pa.list_(pa.float32())),
        ("mask", pa.list_(pa.bool_())),
        ("rollout_id", pa.string()),
        ("group", pa.int32()),
        ("trajectory", pa.int32()),
        ("turn", pa.int32()),
        ("reward", pa.float64()),
        ("advantage", pa.float32()),
    ]
)
"""One row per sequence; the lists are target-aligned and of one length."""

MAX_GROUPS = 2**24
"""More groups than anyone has; a larger number would take its memory along."""

_LISTS = ("input_tokens", "target_tokens", "logprobs", "advantages", "mask")


class Written(NamedTuple):
    """What `RowWriter.write_parts` wrote.

    Args:
      rows: rows.
      positions: their positions.
      padded: padded positions of the batches on their way.
      account: where every completion token of the parts went.
    """

    rows: int
    positions: int
    padded: int
    account: TokenAccount


class RowWriter:
    """Writes batches to a Parquet file, one row group each, and renames it into place at the end.

    A context manager: where its block raises, nothing is left behind. A batch is encoded by a
    second thread while the caller makes the next one; what goes wrong there is raised by the next
    `write`, or at the end.
    """

    def __init__(self, path: str | PathLike[str]) -> None:
        """Choose a temporary file beside `path`; the first write opens it."""
        self.path = Path(path)
        self._partial = _beside(self.path)
        self._writer: pq.ParquetWriter | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="evsys-parquet")
        self._encoding: Future[None] | None = None

    def write(self, batch: TokenBatch, rows: RaggedRows) -> None:
        """Append the rows of a batch, in the batch's order.

        Args:
          batch: what `pack` made of `rows`.
          rows: where the rollout ids and rewards are.
        """
        lengths = np.asarray(batch.segment_lengths)
        line, segment = np.nonzero(lengths)
        real = np.asarray(batch.segment_ids) > 0
        offsets = np.concatenate([[0], np.cumsum(lengths[line, segment])]).astype(np.int32)
        columns: dict[str, Any] = {}
        flat = {name: np.asarray(getattr(batch, name))[real] for name in _LISTS}
        # A mask that was narrowed on the way takes its advantages with it.
        flat["advantages"] = np.where(flat["mask"], flat["advantages"], np.float32(0.0))
        for name, values in flat.items():
            columns[name] = pa.ListArray.from_arrays(_column(offsets), _column(values))
        trajectory = rows.row_trajectory[np.asarray(batch.segment_row)[line, segment]]
        ids = [rows.table.rollout_ids[n] for n in trajectory.tolist()]
        columns["rollout_id"] = _text_column(ids)
        for name in ("group", "trajectory", "turn"):
            place = np.asarray(getattr(batch, f"segment_{name}"))
            columns[name] = _column(place[line, segment])
        columns["reward"] = _column(rows.table.rewards[trajectory])
        columns["advantage"] = _column(_first_live(flat["advantages"], flat["mask"], offsets))
        table = pa.table(columns, schema=SCHEMA)
        self._wait()
        self._encoding = self._thread.submit(self._write, table)

    def write_parts(
        self,
        parts: Iterable[RaggedRows],
        *,
        normalize: bool = True,
        on_group: Callable[[int], None] | None = None,
    ) -> Written:
        """Pack and write rows in order, a part of them at a time, until all are encoded.

        Args:
          parts: what `iter_ragged_rows` yields.
          normalize: as in `pack`.
          on_group: called with the number of groups done, after each part.
        """
        from evsys_jax.batch import iter_packed

        rows = positions = padded = 0
        account = TokenAccount()
        for part in parts:
            for chosen, batch in iter_packed(part, normalize=normalize):
                self.write(batch, chosen)
                padded += batch.shape[0] * batch.shape[1]
            rows += len(part)
            positions += int((part.lengths - 1).sum())
            account += part.account
            if on_group is not None:
                on_group(len(part.table.group_sizes))
        self._wait()
        return Written(rows, positions, padded, account)

    def _wait(self) -> None:
        """Wait until all that was handed in is encoded, and raise what went wrong."""
        if self._encoding is not None:
            self._encoding.result()

    def _write(self, table: pa.Table) -> None:
        # Opened inside the block, so that whatever interrupts it finds the file cleaned up.
        if self._writer is None:
            # A dictionary of tokens costs time, and hides from zstd that turns repeat each other.
            self._writer = pq.ParquetWriter(
                self._partial, SCHEMA, compression="zstd", use_dictionary=["rollout_id"]
            )
        self._writer.write_table(table)

    def __enter__(self) -> RowWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self._thread.shutdown()
            if kind is None:
                self._wait()
            if kind is None and self._writer is None:
                self._write(SCHEMA.empty_table())
            if self._writer is not None:
                self._writer.close()
            if kind is None:
                with self._partial.open("rb") as whole:
                    os.fsync(whole.fileno())
                self._partial.replace(self.path)
        finally:
            self._partial.unlink(missing_ok=True)


@contextmanager
def staged(path: Path) -> Iterator[Path]:
    """Yield a temporary name beside `path`; what is there in the end takes the name `path`.

    Where the block raises, nothing is left behind.
    """
    partial = _beside(path)
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    """Name a file that is hidden, in the same folder, and of this process alone."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def read_rows(path: str | PathLike[str]) -> RaggedRows:
    """Read training rows back, with their advantages, without making Python numbers of tokens.

    Args:
      path: a file that `RowWriter` or `evsys-jax build` wrote.

    Returns:
      The rows in file order. `pack` takes the stored advantages. The table holds only the
      trajectories that have rows, so group means can't be taken anew from it.

    Raises:
      ValueError: not such a file: a column is missing or of another type, a row has no
        position, or its lists differ in length.
      OSError: the file cannot be read.
    """
    file = pq.ParquetFile(path)
    missing = [name for name in SCHEMA.names if name not in file.schema_arrow.names]
    if missing:
        raise ValueError(f"{path}: no column {missing[0]!r}; not a file of training rows")
    for field in SCHEMA:
        stored = file.schema_arrow.field(field.name).type
        if stored != field.type:
            raise ValueError(f"{path}: column {field.name!r} is {stored}, not {field.type}")
    parts = [_flat_part(path, batch) for batch in file.iter_batches(columns=SCHEMA.names)]
    parts = parts or [_flat_part(path, pa.RecordBatch.from_pylist([], schema=SCHEMA))]
    flat: dict[str, Any] = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    lengths = flat.pop("lengths")
    places = np.stack([flat.pop("group"), flat.pop("trajectory")])
    if places.size and not 0 <= places.min() <= places.max() < MAX_GROUPS:
        raise ValueError(f"{path}: group or trajectory outside [0, {MAX_GROUPS})")
    ids, rewards = flat.pop("rollout_id"), flat.pop("reward")
    unique, first, row_trajectory = np.unique(
        places, axis=1, return_index=True, return_inverse=True
    )
    sizes = np.bincount(unique[0]) if unique.size else np.zeros(0)
    mask_total = int(flat["sampled"].sum())
    return RaggedRows(
        **flat,
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        row_trajectory=row_trajectory.reshape(-1).astype(np.int32),
        table=TrajectoryTable(
            group=unique[0].astype(np.int32),
            place=unique[1].astype(np.int32),
            rewards=rewards[first],
            votes=np.ones(len(first), bool),
            trains=np.ones(len(first), bool),
            group_sizes=sizes.astype(np.int32),
            rollout_ids=tuple(ids[first].tolist()),
        ),
        account=TokenAccount(captured=mask_total, trained=mask_total),
    )


def _flat_part(path: Any, batch: pa.RecordBatch) -> dict[str, NDArray[Any]]:
    """Undo the shift of one record batch: per row one token more than positions."""
    for name in SCHEMA.names:
        column = batch.column(name)
        inner = column.flatten().null_count if name in _LISTS else 0
        if column.null_count or inner:
            raise ValueError(f"{path}: column {name!r} holds a null")
    lists = {name: batch.column(name) for name in _LISTS}
    offsets = lists["input_tokens"].offsets.to_numpy()
    lengths = np.diff(offsets)
    for name, column in lists.items():
        if not np.array_equal(np.diff(column.offsets.to_numpy()), lengths):
            raise ValueError(f"{path}: {name} and input_tokens differ in length")
    if not (lengths > 0).all():
        raise ValueError(f"{path}: a row without positions")
    values = {
        name: column.flatten().to_numpy(zero_copy_only=False) for name, column in lists.items()
    }
    starts = np.cumsum(lengths) - lengths
    shifted = np.delete(values["input_tokens"], starts) == np.delete(
        values["target_tokens"], starts + lengths - 1
    )
    if not shifted.all():
        raise ValueError(f"{path}: target_tokens are not input_tokens shifted by one")
    for name in ("input_tokens", "target_tokens"):
        if (values[name] < 0).any():
            raise ValueError(f"{path}: {name} holds a negative id")
    for name in ("logprobs", "advantages"):
        if not np.isfinite(values[name]).all():
            raise ValueError(f"{path}: {name} holds what is not finite")
    # Row r begins r tokens later than its positions do, since every row before has one more.
    targets = np.arange(lengths.sum()) + np.repeat(np.arange(len(lengths)), lengths) + 1
    total = int(lengths.sum()) + len(lengths)
    heads = np.cumsum(lengths + 1) - (lengths + 1)
    tokens = np.empty(total, np.int32)
    tokens[targets] = values["target_tokens"]
    tokens[heads] = values["input_tokens"][np.cumsum(lengths) - lengths]
    flat: dict[str, NDArray[Any]] = {
        "tokens": tokens,
        "sampled": _behind(targets, values["mask"], total),
        "logprobs": _behind(targets, values["logprobs"], total),
        "advantages": _behind(targets, values["advantages"], total),
        "lengths": lengths + 1,
    }
    for name in ("group", "trajectory", "turn", "reward"):
        flat[name] = batch.column(name).to_numpy()
    flat["rollout_id"] = np.array(batch.column("rollout_id").to_pylist(), object)
    return flat


def _behind(targets: NDArray[np.int64], values: NDArray[Any], total: int) -> NDArray[Any]:
    """Lay target-aligned values over tokens; the first token of a row has none."""
    out = np.zeros(total, values.dtype)
    out[targets] = values
    return out


def _column(values: NDArray[Any]) -> pa.Array:
    """Wrap an array without a look at what it is, for which `pa.array` would load pandas."""
    bits = np.packbits(values, bitorder="little") if values.dtype == bool else values
    buffer = pa.py_buffer(np.ascontiguousarray(bits))
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, buffer])


def _text_column(texts: list[str]) -> pa.StringArray:
    encoded = [text.encode() for text in texts]
    ends = np.cumsum([0, *map(len, encoded)]).astype(np.int32)
    return pa.StringArray.from_buffers(
        len(texts), pa.py_buffer(ends), pa.py_buffer(b"".join(encoded))
    )


def _first_live(
    advantages: NDArray[np.float32], mask: NDArray[np.bool_], offsets: NDArray[np.int32]
) -> NDArray[np.float32]:
    """Return each row's advantage at its first live target."""
    live = np.append(np.flatnonzero(mask), len(mask))
    first = live[np.searchsorted(live, offsets[:-1])]
    found = first < offsets[1:]
    return np.where(found, advantages[np.where(found, first, 0)], np.float32(0.0))
