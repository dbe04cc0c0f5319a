"""The command line: rollouts to training rows, and the proof of parity on one's own data.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from evsys_jax.collect import CollectReport
    from evsys_jax.ragged import RaggedRows
    from evsys_jax.rollouts import TrajectoryGroup

MAX_POSITIONS = 2**20
"""Padded positions on the device at a time, about 25 MB."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # plain help: loading rich takes longer than all the rest
    context_settings={"max_content_width": 100},
)


class Rows(StrEnum):
    """What one training row is."""

    turns = "turns"
    merged = "merged"


Rollouts = Annotated[Path, typer.Argument(help="NeMo Gym rollout records, one JSON object a line.")]
RowsOption = Annotated[
    Rows, typer.Option("--rows", help="One row per turn, or turns merged where they extend.")
]
Normalize = Annotated[
    bool, typer.Option("--normalize/--no-normalize", help="Subtract each group's mean reward.")
]
CapturesOption = Annotated[
    list[Path] | None,
    typer.Option("--captures", help="Directory of captured calls; may be given more than once."),
]
Workers = Annotated[int, typer.Option("--workers", min=1, help="Processes that read captures.")]
KeepIncomplete = Annotated[
    bool,
    typer.Option(
        "--keep-incomplete-when-attributed",
        help="Keep a rollout that lost a call, if the chain of its scored call is whole.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def main() -> None:
    """Run the command line."""
    app()


@app.callback()
def _about() -> None:
    """Exact, JAX-vectorized training rows from recorded rollouts."""


@app.command()
def build(
    rollouts: Rollouts,
    out: Annotated[Path, typer.Option("--out", help="Directory for rows.parquet, report.json.")],
    captures: CapturesOption = None,
    rows: RowsOption = Rows.turns,
    normalize: Normalize = True,
    drop_constant: Annotated[
        bool, typer.Option("--drop-constant", help="Leave out groups whose rewards are all equal.")
    ] = False,
    workers: Workers = 1,
    keep_incomplete: KeepIncomplete = False,
    as_json: AsJson = False,
) -> None:
    """Turn rollouts into training rows on disk, and account for every token.

    Exit code 0: rows were written. 1: nothing trains. 2: bad usage or unreadable input.
    """
    started = time.monotonic()
    with _progress("collecting", "rollouts") as advance:
        groups, report = _collect(rollouts, captures, workers, keep_incomplete, advance)
    from evsys_jax.ragged import ragged_rows

    ragged = ragged_rows(groups, rows=rows.value, drop_constant=drop_constant)
    try:
        out.mkdir(parents=True, exist_ok=True)
        with _progress("packing", "rows", len(ragged)) as advance:
            padded = _write_rows(ragged, out, normalize, advance) if len(ragged) else 0
        summary = _summary(report, ragged, groups, padded, time.monotonic() - started)
        _write_json(out / "report.json", {**summary, "verdicts": _verdicts(report)})
    except OSError as error:
        _fail(f"{out}: {error.strerror or error}")
    _print_summary(summary, as_json)
    if not len(ragged):
        raise typer.Exit(1)


@app.command()
def verify(
    rollouts: Rollouts,
    captures: CapturesOption = None,
    rows: RowsOption = Rows.turns,
    normalize: Normalize = True,
    workers: Workers = 1,
    keep_incomplete: KeepIncomplete = False,
    as_json: AsJson = False,
) -> None:
    """Compute every row twice, plainly and as arrays, and compare field by field.

    Exit code 0: identical. 1: differences, the first of which are printed. 2: bad usage or
    unreadable input.
    """
    with _progress("collecting", "rollouts") as advance:
        groups, _ = _collect(rollouts, captures, workers, keep_incomplete, advance)
    from evsys_jax.verify import compare

    with _progress("comparing", "rows") as advance:
        found = compare(groups, rows=rows.value, normalize=normalize, on_rows=advance)
    if as_json:
        print(
            json.dumps(
                {
                    "rows": found.rows,
                    "positions": found.positions,
                    "differing_rows": found.differing,
                    "differences": found.differences,
                }
            )
        )
    else:
        verdict = "identical" if found.identical else f"{found.differing:,} rows differ"
        print(f"{found.rows:,} rows, {found.positions:,} positions: {verdict}")
        for difference in found.differences:
            print(difference)
    if not found.identical:
        raise typer.Exit(1)


def _collect(
    rollouts: Path,
    captures: list[Path] | None,
    workers: int,
    keep_incomplete: bool,
    advance: Callable[[int], None],
) -> tuple[list[TrajectoryGroup], CollectReport]:
    """Read the records, or end with one line and exit code 2."""
    from evsys_jax.collect import collect

    for directory in captures or ():
        if not directory.is_dir():
            _fail(f"{directory}: no such directory of captures")
    try:
        groups, report = collect(
            rollouts,
            captures=captures or None,
            workers=workers,
            mask_incomplete_when_attributed=not keep_incomplete,
            on_record=advance,
        )
    except OSError as error:
        _fail(f"{rollouts}: {error.strerror or error}")
    if not report.verdicts:
        _fail(f"{rollouts}: no rollout record in it")
    if all(verdict.reason == "unreadable_record" for verdict in report.verdicts):
        first = report.verdicts[0]
        _fail(f"{rollouts}: no rollout record in it; line {first.record}: {first.detail}")
    return groups, report


def _write_rows(
    ragged: RaggedRows, out: Path, normalize: bool, advance: Callable[[int], None]
) -> int:
    """Pack and write the rows in order; return the padded positions that took."""
    import numpy as np

    from evsys_jax.batch import pack
    from evsys_jax.dataset import RowWriter
    from evsys_jax.plans import in_order

    padded = 0
    with RowWriter(out / "rows.parquet") as writer:
        for part in in_order(ragged.lengths - 1, MAX_POSITIONS):
            chosen = ragged.take(np.arange(part.start, part.stop))
            batch = pack(chosen, normalize=normalize)
            writer.write(batch, chosen)
            padded += batch.shape[0] * batch.shape[1]
            advance(part.stop)
    return padded


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_name(f".{path.name}.tmp")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def _summary(
    report: CollectReport,
    ragged: RaggedRows,
    groups: list[TrajectoryGroup],
    padded: int,
    seconds: float,
) -> dict[str, Any]:
    """Gather what a run amounts to, as plain values."""
    account = report.account_of(ragged)
    if not account.balanced:
        _fail(f"the token account does not add up: {account.as_dict()}", code=1)
    positions = int((ragged.lengths - 1).sum())
    return {
        "rollouts": len(report.verdicts),
        "groups": len(groups),
        "masked_rollouts": dict(sorted(report.masked.items())),
        "rows": len(ragged),
        "positions": positions,
        "tokens": account.as_dict(),
        "padding": round(1 - positions / padded, 4) if padded else 0.0,
        "seconds": round(seconds, 3),
    }


def _verdicts(report: CollectReport) -> list[dict[str, Any]]:
    from dataclasses import asdict

    return [asdict(verdict) for verdict in report.verdicts]


def _print_summary(summary: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(summary))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("", "count", show_header=False, box=None)
    tokens = summary["tokens"]
    table.add_row("rollouts", f"{summary['rollouts']:,}")
    for reason, count in summary["masked_rollouts"].items():
        table.add_row(f"  masked: {reason}", f"{count:,}")
    table.add_row("groups", f"{summary['groups']:,}")
    table.add_row("rows", f"{summary['rows']:,}")
    table.add_row("tokens captured", f"{tokens['captured']:,}")
    table.add_row("  trained", f"{tokens['trained']:,}")
    for kind in ("masked", "dropped"):
        for reason, count in tokens[kind].items():
            table.add_row(f"  {kind}: {reason}", f"{count:,}")
    for reason, count in tokens["dropped_turns"].items():
        table.add_row(f"turns without a row: {reason}", f"{count:,}")
    table.add_row("padding", f"{summary['padding']:.1%}")
    table.add_row("seconds", f"{summary['seconds']:.2f}")
    table.columns[1].justify = "right"
    Console(soft_wrap=True).print(table)


@contextmanager
def _progress(doing: str, unit: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal, and nothing elsewhere; yields a function that takes the count."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn(doing),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn(unit),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done: bar.update(task, completed=done)


def _fail(message: str, code: int = 2) -> NoReturn:
    """End with one line."""
    print(f"evsys-jax: {message}", file=sys.stderr)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
