"""Jobs shared between this process and workers, results in the order of the jobs."""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Generic, TypeVar

from evsys_jax.worker import begin, deaf_to_interrupts

AHEAD = 128
"""Jobs per process that may be read before an earlier one is done."""

LARGEST_CHUNK = 32
"""Jobs handed to a worker at a time, at most."""

STOP = "stop"
"""Name of a file beside those of the results: workers begin no further job."""

Job = TypeVar("Job")
Result = TypeVar("Result")

logger = logging.getLogger(__name__)


def share_jobs(
    jobs: Iterable[tuple[Any, Job]], work: Callable[[Job], Result], workers: int
) -> Iterator[tuple[Any, Result]]:
    """Work on jobs in this process and in `workers` - 1 others, ahead of what is asked for.

    Starting a process takes as long as dozens of jobs, and this one would only wait.

    Args:
      jobs: (anything, job) pairs.
      work: does a job; pickles, with its results. What fails in a worker is done again here.
      workers: processes, this one among them.

    Yields:
      (what came with the job, its result), in order.
    """
    try:
        folder = TemporaryDirectory(prefix="evsys-jax-")
    except OSError as error:
        logger.warning("done by one process, since there is no temporary folder: %s", error)
        for carried, job in jobs:
            yield carried, work(job)
            del carried, job
        return
    # A fresh interpreter: a fork would take over JAX's threads in an unknown state.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers - 1, mp_context=context, initializer=begin, initargs=(folder.name,)
    )
    with folder, pool:
        try:
            yield from _in_order(iter(jobs), work, workers, pool, Path(folder.name))
        finally:
            with suppress(OSError):  # the folder is full or gone
                Path(folder.name, STOP).touch()


def _in_order(
    jobs: Iterator[tuple[Any, Job]],
    work: Callable[[Job], Result],
    workers: int,
    pool: ProcessPoolExecutor,
    folder: Path,
) -> Iterator[tuple[Any, Result]]:
    """Cut what is ahead into chunks: one at a time for this process, two for each other, so that
    one is at hand when one is done."""
    ahead: deque[tuple[Any, Job]] = deque()
    chunks: deque[_Chunk[Job, Result]] = deque()
    paths = map(folder.joinpath, map(str, count()))
    free: list[Path] = []  # have been read; to write over them is cheaper than new pages
    failed: list[BaseException] = []

    def warn(error: BaseException) -> None:
        if not failed:  # of many alike one is enough
            logger.warning("done here, since a worker process failed: %s", error)
        failed.append(error)

    def cut() -> _Chunk[Job, Result]:
        # In the end smaller ones, for all processes to end at once.
        size = max(1, min(len(ahead) // (4 * workers), LARGEST_CHUNK))
        chunks.append(_Chunk([ahead.popleft() for _ in range(size)], work, warn))
        return chunks[-1]

    while True:
        held = len(ahead) + sum(len(chunk.jobs) for chunk in chunks)
        ahead.extend(islice(jobs, AHEAD * workers - held))
        own = next((chunk for chunk in chunks if chunk.is_own), None)
        if own is None and ahead:
            own = cut()
        lent = sum(chunk.is_lent for chunk in chunks)
        while lent < 2 * (workers - 1) and ahead:
            # Behind the next one of this process, so that it is done when its turn comes.
            if sum(chunk.is_own for chunk in chunks) < 2:
                cut()
            if ahead:
                cut().lend(pool, free.pop() if free else next(paths))
                lent += 1
        if not chunks:
            return
        if own is not None and chunks[0].is_lent:
            own.do_one()
            continue
        yield chunks[0].take()
        if not chunks[0].jobs:
            path = chunks.popleft().path
            free += [] if path is None else [path]


class _Chunk(Generic[Job, Result]):
    """Consecutive jobs, and their results in that order.

    Each is done here when it is asked for, or earlier; or a worker does them all and leaves the
    results in a file. Unless a worker is slow few results are held here at a time, whose memory
    stays in a cache.

    Args:
      jobs: what is still to be taken, with what came with each job.
      work: does a job.
      warn: told what failed in a worker.
    """

    def __init__(
        self,
        jobs: Iterable[tuple[Any, Job]],
        work: Callable[[Job], Result],
        warn: Callable[[BaseException], None],
    ) -> None:
        self.jobs = deque(jobs)
        self.path: Path | None = None
        self._work = work
        self._warn = warn
        self._results: deque[Result] = deque()
        self._future: Future[None] | None = None
        self._position = 0

    @property
    def is_own(self) -> bool:
        """It is no worker's, and there is something left to do."""
        return self._future is None and len(self._results) < len(self.jobs)

    @property
    def is_lent(self) -> bool:
        """A worker is busy with it, or will be."""
        return self._future is not None and not self._future.done()

    def lend(self, pool: ProcessPoolExecutor, path: Path) -> None:
        """Hand it to a worker, if there is one left, who writes the results to a file."""
        self.path = path
        with suppress(BrokenProcessPool):  # then it is done here, when its turn comes
            jobs = [job for _, job in self.jobs]
            with deaf_to_interrupts():  # as the process will be that this may start
                self._future = pool.submit(_work_into, str(path), jobs, self._work)

    def do_one(self) -> None:
        """Do the next job here."""
        _, job = self.jobs[len(self._results)]
        self._results.append(self._work(job))

    def take(self) -> tuple[Any, Result]:
        """Return what came with the next job and its result, which a worker may have to finish."""
        if self._future is not None and self.path is not None:
            self._read(self._future, self.path)
        if not self._results:
            self.do_one()
        carried, _ = self.jobs.popleft()
        return carried, self._results.popleft()

    def _read(self, future: Future[None], path: Path) -> None:
        """Read one result from the worker's file; from a failure on, they are made here."""
        # The worker died, or what it needs does not pickle, or its result does not.
        error = future.exception()
        if error is None:
            try:
                with path.open("rb") as file:
                    file.seek(self._position)
                    self._results.append(pickle.load(file))
                    self._position = file.tell()
            except Exception as unreadable:
                error = unreadable
        if error is not None:
            self._warn(error)
            self._future = None


def _work_into(path: str, jobs: list[Job], work: Callable[[Job], Any]) -> None:
    """Do jobs and leave the results in a file, one after another.

    A pipe holds a few results at a time: the worker would stand still until whoever started it
    had a turn to read.
    """
    stop = Path(path).with_name(STOP)
    with open(path, "wb", opener=_open_as_it_is) as file:
        for job in jobs:
            if stop.exists():
                return
            pickle.dump(work(job), file, pickle.HIGHEST_PROTOCOL)


def _open_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o600)
