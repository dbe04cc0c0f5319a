"""How a worker process begins, before it loads what it works with."""

from __future__ import annotations

import multiprocessing
import os
import threading


def begin() -> None:
    """Let this process end when the one that started it does, however that one ended."""
    # Reading captures needs no linear algebra, and threads for it would wait in a loop.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
