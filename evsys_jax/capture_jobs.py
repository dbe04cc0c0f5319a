"""Capture builds for a stream of rollouts: in this process, in worker processes, or awaited.

Results come in the order of the jobs, and only a window of them is held at a time.
"""

from __future__ import annotations

import asyncio
import copyreg
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from evsys_jax.capture.build import CallSpan, RolloutBuild
from evsys_jax.capture.builder import CallReport
from evsys_jax.capture.protocols import TokenSource
from evsys_jax.capture.sources import build_from_directories, build_from_source
from evsys_jax.capture.stamps import one_thread
from evsys_jax.shared_jobs import share_jobs

Captures: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]] | TokenSource

CHUNK = 8
"""Rollouts awaited at a time."""


class CaptureJob(NamedTuple):
    """What the build of one rollout needs to know.

    Args:
      rollout_id: the rollout.
      options: of `evsys_jax.capture.build_rollout`.
    """

    rollout_id: str
    options: Mapping[str, Any]


def job_of(
    record: Mapping[str, Any], rollout_id: str, *, mask_incomplete_when_attributed: bool
) -> CaptureJob:
    """Read the terminal's names and the scored response out of a rollout record."""
    response = record.get("response")
    response = response if isinstance(response, dict) and response else None
    model = response.get("model") if response else None
    declared = record.get("terminal_response_id")
    return CaptureJob(
        rollout_id,
        {
            "model": model if isinstance(model, str) else "",
            "verified_response": response,
            "explicit_terminal_call_id": record.get("_ng_terminal_model_call_id"),
            "declared_response_id": str(declared) if declared else None,
            "mask_incomplete_when_attributed": mask_incomplete_when_attributed,
        },
    )


def run_jobs(
    jobs: Iterable[tuple[Any, CaptureJob | None]],
    captures: Captures | None,
    *,
    workers: int = 1,
    freeze: bool = True,
) -> Iterator[tuple[Any, RolloutBuild | None]]:
    """Build each job, and hand back what came with it beside the result.

    Args:
      jobs: (anything, job) pairs; a job of None builds nothing.
      captures: a capture directory, several, or a `TokenSource`; None builds nothing.
      workers: processes that build, this one among them, for directories. One that is alone
        lets a second thread hash; of several each uses one thread.
      freeze: False leaves directories as they are; a `TokenSource` can only freeze.

    Yields:
      (what came with the job, its build), in order. A build never raises; it is masked instead.

    Raises:
      NotADirectoryError: a capture directory does not exist.
    """
    if captures is None:
        for carried, _ in jobs:
            yield carried, None
            del carried
    elif isinstance(captures, TokenSource):
        yield from _await_builds(jobs, captures)
    else:
        paths = [captures] if isinstance(captures, str | PathLike) else list(captures)
        directories = [Path(path) for path in paths]
        for directory in directories:
            if not directory.is_dir():
                raise NotADirectoryError(f"{directory}: no such directory of captures")
        if workers > 1:
            work = partial(_build_in_one_thread, directories, freeze)
            yield from share_jobs(jobs, work, workers)
        else:
            for carried, job in jobs:
                yield carried, _build(job, directories, freeze)
                del carried, job


def _build(job: CaptureJob | None, directories: list[Path], freeze: bool) -> RolloutBuild | None:
    if job is None:
        return None
    return build_from_directories(job.rollout_id, directories, freeze=freeze, **job.options)


def _build_in_one_thread(
    directories: list[Path], freeze: bool, job: CaptureJob | None
) -> RolloutBuild | None:
    with one_thread():  # the other cores have work of their own
        return _build(job, directories, freeze)


def _pack(build: RolloutBuild) -> tuple[Any, ...]:
    small = {"spans": tuple(map(tuple, build.spans)), "calls": tuple(map(tuple, build.calls))}
    return _unpack, ({**vars(build), **small},)


def _unpack(fields: dict[str, Any]) -> RolloutBuild:
    fields["spans"] = tuple(map(CallSpan._make, fields["spans"]))
    fields["calls"] = tuple(map(CallReport._make, fields["calls"]))
    return RolloutBuild(**fields)


# Plain tuples are pickled in half the time that the many small named ones of a build take.
copyreg.pickle(RolloutBuild, _pack)


def _await_builds(
    jobs: Iterable[tuple[Any, CaptureJob | None]], source: TokenSource
) -> Iterator[tuple[Any, RolloutBuild | None]]:
    """Await a source's builds, a chunk together, on an event loop of its own thread."""

    async def build(job: CaptureJob | None) -> RolloutBuild | None:
        if job is None:
            return None
        return await build_from_source(job.rollout_id, source, **job.options)

    async def together(chunk: list[tuple[Any, CaptureJob | None]]) -> list[RolloutBuild | None]:
        return list(await asyncio.gather(*(build(job) for _, job in chunk)))

    # All on one loop, since a source may keep connections that belong to it.
    runner = asyncio.Runner()
    with ThreadPoolExecutor(1) as thread:
        try:
            yield from _in_order(
                jobs, lambda chunk: thread.submit(runner.run, together(chunk)), ahead=1
            )
        finally:
            # By the thread, after what it still runs: whoever reads the results may have stopped.
            thread.submit(runner.close).result()


def _in_order(
    jobs: Iterable[tuple[Any, CaptureJob | None]],
    submit: Callable[[list[tuple[Any, CaptureJob | None]]], Future[Any]],
    *,
    ahead: int,
) -> Iterator[tuple[Any, RolloutBuild | None]]:
    """Submit chunks of jobs, at most `ahead` beyond the one that is being yielded."""
    stream = iter(jobs)
    waiting: deque[tuple[list[Any], Future[Any]]] = deque()
    while True:
        while len(waiting) <= ahead and (chunk := list(islice(stream, CHUNK))):
            waiting.append(([carried for carried, _ in chunk], submit(chunk)))
        if not waiting:
            return
        carried, future = waiting.popleft()
        yield from zip(carried, future.result(), strict=True)
