"""How a worker process begins, before it loads what it works with."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def deaf_to_interrupts() -> Iterator[None]:
    """Hold Ctrl-C back meanwhile; a process that is started never hears it, from its birth on."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def begin(folder: str) -> None:
    """Let this process end when the one that started it does, however that one ended.

    Args:
      folder: goes with it.
    """
    # Ctrl-C reaches all processes of a terminal; who started this one decides what follows.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Reading captures needs no linear algebra, and threads for it would wait in a loop.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    atexit.register(gc.freeze)  # the interpreter would look for garbage once more
    threading.Thread(target=_end_with_parent, args=(folder,), daemon=True).start()


def _end_with_parent(folder: str) -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(folder, ignore_errors=True)
        os._exit(1)
