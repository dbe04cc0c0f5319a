"""The command line: rollouts to training rows, the proof of parity, a look at each rollout.

Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from evsys_jax import stopping
from evsys_jax.overview import ABOUT, COMMANDS

if TYPE_CHECKING:
    from evsys_jax.dataset import Written
    from evsys_jax.inspection import RolloutSummary
    from evsys_jax.rollouts import TrajectoryGroup
    from evsys_jax.verdicts import CollectReport, RolloutVerdict

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
    if sys.stdout is None:
        _complain("there is no standard output")
        sys.exit(2)
    stopping.listen()
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="evsys-jax", standalone_mode=False) or 0
    except SystemExit as end:
        # Click ends with 1 where a reader went away, which would be a verdict.
        code = 2 if end.code == 1 else end.code
    except OSError as error:  # standard output is closed or full
        _complain(error)
        sys.exit(2)
    except Exception as error:
        # A wrong option or argument: one line, where typer's own printing takes four.
        if not hasattr(error, "format_message"):
            raise
        message = error.format_message()
        if message.startswith("Usage:"):
            print(message, file=sys.stderr)
        else:
            _complain(" ".join(message.split()))
        sys.exit(2)
    sys.exit(code)


def _complain(problem: object) -> None:
    if sys.stderr is not None:  # else it would go to standard output
        print(f"evsys-jax: {problem}", file=sys.stderr)


@app.callback(help=ABOUT)
def _about() -> None:
    pass


@app.command(short_help=COMMANDS["build"])
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
    from evsys_jax.dataset import RowWriter, staged
    from evsys_jax.parts import iter_ragged_rows

    parts = iter_ragged_rows(groups, rows=rows.value, drop_constant=drop_constant)
    targets = rows_path, report_path = out / "rows.parquet", out / "report.json"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for target in targets:
            if target.is_dir() or (target.exists() and target.samefile(rollouts)):
                _fail(f"{target}: is the input, or a directory")
        with (
            staged(report_path) as partial,
            RowWriter(rows_path) as writer,
            _progress("packing", "groups", len(groups)) as advance,
        ):
            written = writer.write_parts(parts, normalize=normalize, on_group=advance)
            summary = _summary(report, groups, written, time.monotonic() - started)
            # Before the rows take their name: a report that cannot be written leaves none.
            text = json.dumps({**summary, "verdicts": _verdicts(report)}, indent=1)
            partial.write_text(f"{text}\n", encoding="utf-8")
    except OSError as error:
        _fail(f"{out}: {error.strerror or error}")
    _print_summary(summary, as_json)
    if not written.rows:
        raise typer.Exit(1)


@app.command(short_help=COMMANDS["verify"])
def verify(
    rollouts: Rollouts,
    captures: CapturesOption = None,
    rows: RowsOption = Rows.turns,
    normalize: Normalize = True,
    workers: Workers = 1,
    keep_incomplete: KeepIncomplete = False,
    as_json: AsJson = False,
) -> None:
    """Compute every row plainly and as arrays, and compare field by field.

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


@app.command(short_help=COMMANDS["inspect"])
def inspect(
    rollouts: Rollouts,
    captures: CapturesOption = None,
    rollout: Annotated[
        str | None, typer.Option("--rollout", help="Show this rollout whole; by its id.")
    ] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="List the rollouts that don't train.")
    ] = False,
    group: Annotated[
        int | None, typer.Option("--group", min=0, help="List the group with this index.")
    ] = None,
    reason: Annotated[
        str | None, typer.Option("--reason", help="List the rollouts masked for this reason.")
    ] = None,
    tokens: Annotated[
        bool, typer.Option("--tokens", help="With --rollout: print ids, and logprobs if sampled.")
    ] = False,
    workers: Workers = 1,
    keep_incomplete: KeepIncomplete = False,
    as_json: AsJson = False,
) -> None:
    """List what became of every rollout, or show one whole: calls, chain, tokens.

    Captures are read and never changed, so that a rollout still being written goes on.

    Exit code 0: fine. 2: bad usage, unreadable input or no such rollout.
    """
    if rollout is None and tokens:
        _fail("--tokens goes with --rollout")
    if rollout is not None and (masked or group is not None or reason is not None):
        _fail("--masked, --group and --reason choose from the list; --rollout shows one rollout")
    from evsys_jax import inspection, inspection_view

    _check_directories(captures)
    reading: dict[str, Any] = {
        "captures": captures or None,
        "mask_incomplete_when_attributed": not keep_incomplete,
    }
    value: Any
    if rollout is None:
        with _opening(rollouts), _progress("reading", "rollouts") as advance:
            summaries = inspection.summarize_rollouts(
                rollouts, workers=workers, on_record=advance, **reading
            )
        _check_readable(rollouts, summaries)
        chosen = inspection.select_rollouts(summaries, masked=masked, group=group, reason=reason)
        value = [inspection_view.summary_values(each) for each in chosen] if as_json else None
        lines = inspection_view.list_lines(chosen, colors=_wants_colors())
    else:
        with _opening(rollouts):
            picture = inspection.inspect_rollout(rollouts, rollout, **reading)
        if picture is None:
            _fail(f"{rollouts}: no rollout {rollout!r} in it")
        value = inspection_view.picture_values(picture, tokens=tokens) if as_json else None
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        lines = inspection_view.picture_lines(
            picture, tokens=tokens, colors=_wants_colors(), width=width
        )
    for line in [json.dumps(value)] if as_json else lines:
        print(line)


@contextmanager
def _opening(rollouts: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        _fail(f"{rollouts}: {error.strerror or error}")
    except ValueError as error:
        _fail(str(error))


def _wants_colors() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def _check_directories(captures: list[Path] | None) -> None:
    for directory in captures or ():
        if not directory.is_dir():
            _fail(f"{directory}: no such directory of captures")


def _check_readable(
    rollouts: Path, found: Sequence[RolloutVerdict] | Sequence[RolloutSummary]
) -> None:
    if not found:
        _fail(f"{rollouts}: no rollout record in it")
    if all(each.reason == "unreadable_record" for each in found):
        first = found[0]
        _fail(f"{rollouts}: no rollout record in it; line {first.record}: {first.detail}")


def _collect(
    rollouts: Path,
    captures: list[Path] | None,
    workers: int,
    keep_incomplete: bool,
    advance: Callable[[int], None],
) -> tuple[list[TrajectoryGroup], CollectReport]:
    """Read the records, or end with one line and exit code 2."""
    from evsys_jax.collect import collect

    _check_directories(captures)
    with _opening(rollouts):
        groups, report = collect(
            rollouts,
            captures=captures or None,
            workers=workers,
            mask_incomplete_when_attributed=not keep_incomplete,
            on_record=advance,
        )
    _check_readable(rollouts, report.verdicts)
    return groups, report


def _summary(
    report: CollectReport, groups: list[TrajectoryGroup], written: Written, seconds: float
) -> dict[str, Any]:
    """Gather what a run amounts to, as plain values."""
    account = report.account_of(written.account)
    if not account.balanced:
        _fail(f"the token account does not add up: {account.as_dict()}", code=1)
    padding = 1 - written.positions / written.padded if written.padded else 0.0
    return {
        "rollouts": len(report.verdicts),
        "groups": len(groups),
        "masked_rollouts": dict(sorted(report.masked.items())),
        "rows": written.rows,
        "positions": written.positions,
        "tokens": account.as_dict(),
        "padding": round(padding, 4),
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
    if sys.stderr is None or not sys.stderr.isatty():
        yield stopping.keep_on
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

        def advance(done: int) -> None:
            stopping.keep_on(done)
            bar.update(task, completed=done)

        yield advance


def _fail(message: str, code: int = 2) -> NoReturn:
    """End with one line."""
    _complain(message)
    raise typer.Exit(code)


if __name__ == "__main__":
    main()
