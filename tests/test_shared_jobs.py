"""Jobs shared between processes: in order, nothing lost whoever fails, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from itertools import islice

import pytest

from evsys_jax import shared_jobs
from evsys_jax.shared_jobs import share_jobs


def square(n):
    return n * n, os.getpid()


def fail_elsewhere(n):
    if multiprocessing.parent_process() is not None:
        raise RuntimeError("only at home")
    return n * n


def exit_elsewhere(n):
    if multiprocessing.parent_process() is not None:
        sys.exit(3)
    return n * n


def die_elsewhere(n):
    if multiprocessing.parent_process() is not None:
        os._exit(1)
    return n * n


def linger_elsewhere(n):
    if multiprocessing.parent_process() is not None:
        time.sleep(0.02)
    return square(n)


def dawdle_elsewhere(n):
    if multiprocessing.parent_process() is not None:
        time.sleep(0.5)
    return n * n


def tell_mask(n):
    return os.getpid(), signal.pthread_sigmask(signal.SIG_BLOCK, [])


def hand_back_a_function(n):
    return lambda: n * n


def pairs(count):
    return [(f"job {n}", n) for n in range(count)]


@pytest.fixture
def handed(tmp_path, monkeypatch):
    """The folder in which temporary folders are made."""
    folder = tmp_path / "handed"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.mark.parametrize("count", [0, 1, 2, 5, 60, 500])
def test_results_come_in_order(count):
    results = list(share_jobs(iter(pairs(count)), square, 2))
    assert [(carried, result) for carried, (result, _) in results] == [
        (f"job {n}", n * n) for n in range(count)
    ]
    if count == 500:
        home = sum(process == os.getpid() for _, (_, process) in results)
        assert 0 < home < count


def test_who_is_faster_does_more(monkeypatch):
    monkeypatch.setattr(shared_jobs, "AHEAD", 16)
    results = list(share_jobs(pairs(90), linger_elsewhere, 2))
    assert [result for _, (result, _) in results] == [n * n for n in range(90)]
    assert 54 < sum(process == os.getpid() for _, (_, process) in results) < 90


def test_three_processes_share_as_well():
    results = list(share_jobs(pairs(300), square, 3))
    assert [result for _, (result, _) in results] == [n * n for n in range(300)]
    assert len({process for _, (_, process) in results}) > 1


@pytest.mark.parametrize("work", [fail_elsewhere, die_elsewhere, exit_elsewhere])
def test_what_fails_in_a_worker_is_done_here(work, caplog):
    results = list(share_jobs(pairs(40), work, 2))
    assert [result for _, result in results] == [n * n for n in range(40)]
    assert caplog.text.count("done here, since a worker process failed") == 1


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="no signal masks here")
def test_a_worker_never_hears_ctrl_c():
    results = list(share_jobs(pairs(60), tell_mask, 2))
    masks = {process: held for _, (process, held) in results}
    assert len(masks) == 2
    for process, held in masks.items():
        assert (signal.SIGINT in held) == (process != os.getpid())


def test_a_result_that_does_not_pickle_is_made_here(caplog):
    results = list(share_jobs(pairs(20), hand_back_a_function, 2))
    assert [result() for _, result in results] == [n * n for n in range(20)]
    assert "done here" in caplog.text


def test_a_job_that_does_not_pickle_is_done_here():
    jobs = [("job", (lambda n=n: n)) for n in range(20)]
    assert [result() for _, result in share_jobs(jobs, _itself, 2)] == list(range(20))


def _itself(value):
    return value


@pytest.mark.parametrize("first", [0, 1, 3])
def test_what_cannot_be_read_is_done_here_from_there_on(monkeypatch, caplog, first):
    real, read = shared_jobs.pickle.load, []

    def load(file):
        read.append(file)
        if len(read) - 1 == first:
            raise OSError("gone")
        return real(file)

    monkeypatch.setattr(shared_jobs.pickle, "load", load)
    results = list(share_jobs(pairs(200), square, 2))
    assert [result for _, (result, _) in results] == [n * n for n in range(200)]
    assert caplog.text.count("a worker process failed: gone") == 1


def test_without_a_temporary_folder_one_process_works(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "nowhere"))
    results = list(share_jobs(pairs(4), square, 2))
    assert results == [(f"job {n}", (n * n, os.getpid())) for n in range(4)]
    assert "done by one process" in caplog.text


@pytest.mark.parametrize("taken", [1, 40])
def test_what_workers_hand_over_is_gone_afterwards(handed, taken):
    results = share_jobs(pairs(40), square, 2)
    assert [carried for carried, _ in islice(results, taken)] == [f"job {n}" for n in range(taken)]
    results.close()
    assert list(handed.iterdir()) == []


def test_who_stops_early_does_not_wait_for_what_was_lent():
    results = share_jobs(pairs(600), dawdle_elsewhere, 2)
    assert len(list(islice(results, 3))) == 3
    time.sleep(1)  # the worker has begun
    start = time.monotonic()
    results.close()
    assert time.monotonic() - start < 8


def test_files_are_written_over(handed, monkeypatch):
    monkeypatch.setattr(shared_jobs, "AHEAD", 8)
    names = set()
    for n, (_, (result, _)) in enumerate(share_jobs(pairs(400), square, 2)):
        assert result == n * n
        names.update(path.name for folder in handed.iterdir() for path in folder.iterdir())
    # Each holds two results or less: of what is written once there would be a hundred.
    assert 0 < len(names) <= 16


def test_chunks_are_cut_to_end_together_and_few_jobs_are_read_ahead(monkeypatch):
    sizes, real, read = [], shared_jobs._Chunk, []

    def record(jobs, work, warn):
        sizes.append(len(jobs))
        return real(jobs, work, warn)

    def jobs():
        for n in range(600):
            read.append(n)
            yield n, n

    monkeypatch.setattr(shared_jobs, "_Chunk", record)
    for n, _ in enumerate(share_jobs(jobs(), square, 2)):
        assert len(read) <= n + 1 + 2 * shared_jobs.AHEAD
    assert sum(sizes) == 600
    assert sizes[0] == max(sizes) == shared_jobs.LARGEST_CHUNK
    assert sizes[-1] == 1


def test_a_worker_ends_with_its_parent_and_takes_its_folder_along(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        """
import multiprocessing, os, pathlib, sys, time
from concurrent.futures import ProcessPoolExecutor
from evsys_jax.worker import begin

if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    pool = ProcessPoolExecutor(
        1, mp_context=multiprocessing.get_context("spawn"), initializer=begin,
        initargs=(str(folder),),
    )
    print(pool.submit(os.getpid).result(), pool.submit(os.getenv, "OPENBLAS_NUM_THREADS").result())
    sys.stdout.flush()
    os.kill(os.getpid(), 9)
"""
    )
    folder = tmp_path / "handed"
    folder.mkdir()
    (folder / "0").write_bytes(b"a build")
    told = tmp_path / "told"  # a file, since a pipe would stay open with the worker
    command = [sys.executable, str(script), str(folder)]
    environment = {k: v for k, v in os.environ.items() if k != "OPENBLAS_NUM_THREADS"}
    with told.open("w") as file:
        subprocess.run(command, stdout=file, env=environment, timeout=60)
    worker, threads = told.read_text().split()
    assert threads == "1"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (folder.exists() or _runs(int(worker))):
        time.sleep(0.02)
    assert not folder.exists()
    assert not _runs(int(worker))


def _runs(process):
    """Tell whether a process runs; one that nobody has waited for yet does not."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
