"""File operations that survive a crash: durable appends, whole replacements, locks."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def locked(path: Path, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of one rollout.

    Args:
      path: the lock file, created if absent.
      shared: several readers may hold it at once.
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            # A sweep may have removed the file while this process waited for it; then another
            # process can hold a lock on the new file of that name.
            if _is_same_file(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


@contextmanager
def read_locked(path: Path) -> Iterator[None]:
    """Share the lock of one rollout, if it has one; make none.

    Args:
      path: the lock file, left as it is.
    """
    while True:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:  # no writer has come yet
            yield
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            if _is_same_file(descriptor, path):
                yield
                return
        finally:
            os.close(descriptor)


def _is_same_file(descriptor: int, path: Path) -> bool:
    try:
        named = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(descriptor), named)


def append_durably(path: Path, data: bytes, *, end_bare_line: bool = True) -> int:
    """Append to a file; when this returns, the bytes are on the disk.

    Args:
      path: the file, created if absent.
      data: what to append.
      end_bare_line: first write a line feed if the file is not empty and lacks it at its end,
        so that nothing is glued to its last line.

    Returns:
      The size of the file.

    Raises:
      OSError: the bytes could not be written; as far as possible the file is as it was.
    """
    created = not path.exists()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        if end_bare_line and size and os.pread(descriptor, 1, size - 1) != b"\n":
            data = b"\n" + data
        try:
            _write_all(descriptor, data)
            os.fsync(descriptor)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)
    if created:
        sync_directory(path.parent)
    return size + len(data)


def _write_all(descriptor: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(descriptor, rest) :]


def truncate_durably(path: Path, size: int) -> None:
    """Cut a file off; when this returns, its new end is on the disk."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_file(path: Path, data: bytes, *, prefix: str, durable: bool) -> None:
    """Replace a file as a whole: a reader sees the old content or the new one.

    Args:
      path: the file.
      data: its new content.
      prefix: begin of the temporary file's name, in the same directory.
      durable: when this returns, the new content is on the disk.

    Raises:
      OSError: the file is as it was.
    """
    descriptor, temporary = tempfile.mkstemp(prefix=prefix, dir=path.parent)
    try:
        try:
            _write_all(descriptor, data)
            if durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    if durable:
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Put the names in a directory on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def file_size(path: Path) -> int:
    """Give the size of a file, 0 without one."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
