"""Capture builds for a stream of rollouts: in this process, in worker processes, or awaited.

Results come in the order of the jobs, and only a window of them is held at a time.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import islice
from os import PathLike
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, TypeAlias

from evsys_jax.capture.build import RolloutBuild
from evsys_jax.capture.protocols import TokenSource
from evsys_jax.capture.sources import build_from_directories, build_from_source
from evsys_jax.capture.stamps import one_thread
from evsys_jax.worker import begin

Captures: TypeAlias = str | PathLike[str] | Sequence[str | PathLike[str]] | TokenSource

CHUNK = 8
"""Rollouts handed to a worker process, or awaited, at a time; more, when there are many."""

_LARGEST_CHUNK = 32
_AHEAD = 8
"""Chunks per process that may wait for an earlier one."""


logger = logging.getLogger(__name__)


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
            yield from _share_builds(jobs, directories, workers, freeze)
        else:
            yield from _build_all(jobs, directories, freeze)


def _build(job: CaptureJob | None, directories: list[Path], freeze: bool) -> RolloutBuild | None:
    if job is None:
        return None
    return build_from_directories(job.rollout_id, directories, freeze=freeze, **job.options)


def _build_all(
    jobs: Iterable[tuple[Any, CaptureJob | None]], directories: list[Path], freeze: bool
) -> Iterator[tuple[Any, RolloutBuild | None]]:
    for carried, job in jobs:
        yield carried, _build(job, directories, freeze)
        del carried, job


def _build_chunk(
    jobs: list[CaptureJob | None], directories: list[Path], freeze: bool
) -> list[RolloutBuild | None]:
    with one_thread():  # the other cores have work of their own
        return [_build(job, directories, freeze) for job in jobs]


def _build_chunk_into(path: str, *arguments: Any) -> None:
    """Build a chunk and leave it in a file.

    A pipe holds a few builds at a time: the worker would stand still until whoever started it had
    a turn to read.
    """
    with open(path, "wb") as file:
        pickle.dump(_build_chunk(*arguments), file, pickle.HIGHEST_PROTOCOL)


def _share_builds(
    jobs: Iterable[tuple[Any, CaptureJob | None]],
    directories: list[Path],
    workers: int,
    freeze: bool,
) -> Iterator[tuple[Any, RolloutBuild | None]]:
    """Share chunks between this process and `workers` - 1 others, ahead of what is asked for.

    Starting a process takes as long as dozens of builds, and this one would only wait.
    """
    try:
        folder = TemporaryDirectory(prefix="evsys-jax-")
    except OSError as error:
        logger.warning("built by one process, since there is no temporary folder: %s", error)
        yield from _build_all(jobs, directories, freeze)
        return
    stream = iter(jobs)
    waiting: deque[_Shared] = deque()
    taken = 0
    common = (directories, freeze)
    # A fresh interpreter: a fork would take over JAX's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    with (
        folder,
        ProcessPoolExecutor(
            workers - 1, mp_context=context, initializer=begin, initargs=(folder.name,)
        ) as pool,
    ):
        while True:
            while len(waiting) < _AHEAD * workers:
                # Small ones first, for a few rollouts to be shared; later a chunk is worth its way.
                chunk = list(islice(stream, min(CHUNK + taken // 16, _LARGEST_CHUNK)))
                if not chunk:
                    break
                waiting.append(_Shared(chunk, Path(folder.name, str(taken))))
                taken += len(chunk)
            if not waiting:
                return
            # Two for each process, so that one is at hand when one is done.
            begun = sum(each.future is not None and not each.future.done() for each in waiting)
            free = [each for each in waiting if each.future is None and each.builds is None]
            for each in free[1 : 1 + max(0, 2 * (workers - 1) - begun)]:
                with suppress(BrokenProcessPool):  # then it is built here, when its turn comes
                    each.future = pool.submit(_build_chunk_into, str(each.path), each.jobs, *common)
            head = waiting[0]
            if free and not head.done():
                free[0].builds = _build_chunk(free[0].jobs, *common)
            else:
                waiting.popleft()
                yield from zip(head.carried, head.result(*common), strict=True)


class _Shared:
    """A chunk of jobs, and its builds: made here, or by a worker that leaves them in a file."""

    def __init__(self, chunk: list[tuple[Any, CaptureJob | None]], path: Path) -> None:
        self.carried = [carried for carried, _ in chunk]
        self.jobs = [job for _, job in chunk]
        self.path = path
        self.future: Future[None] | None = None
        self.builds: list[RolloutBuild | None] | None = None

    def done(self) -> bool:
        """Tell whether `result` has nothing to wait for."""
        return self.builds is not None or (self.future is not None and self.future.done())

    def result(self, *common: Any) -> list[RolloutBuild | None]:
        """Wait for the builds; make them here where a worker could not."""
        if self.builds is None and self.future is not None:
            try:
                self.future.result()
                with open(self.path, "rb") as file:
                    self.builds = pickle.load(file)
            except Exception as error:
                # A build never raises: the worker died, or what it needs does not pickle.
                logger.warning("built here, since a worker process failed: %s", error)
            finally:
                self.path.unlink(missing_ok=True)
        return _build_chunk(self.jobs, *common) if self.builds is None else self.builds


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
