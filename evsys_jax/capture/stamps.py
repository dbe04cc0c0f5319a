"""Digests of the sequences in a token tree, to hold against the stamps of records."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

from numpy.typing import NDArray

from evsys_jax.capture.digests import WORD, digest_words
from evsys_jax.capture.tokentree import Mark, TokenTree

# Bytes to hash, from which on it pays to wake another thread: about a quarter of a millisecond.
_WORTH_A_THREAD = 1 << 19

_ALONE = ContextVar("_ALONE", default=False)

Words = NDArray[Any]


@contextmanager
def one_thread() -> Iterator[None]:
    """Hash in the calling thread alone meanwhile, for whoever shares the cores out otherwise."""
    token = _ALONE.set(True)
    try:
        yield
    finally:
        _ALONE.reset(token)


class Stamps:
    """The digest of each sequence that is asked for, computed once.

    A digest covers its whole sequence, so that those of one lineage cost its square. The tokens
    at least are turned into the words that are hashed only once.

    Args:
      tree: where the sequences are.
    """

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._words: dict[int, Words] = {}
        self._known: dict[Mark, str] = {}
        self._waiting: dict[Mark, list[Words]] = {}

    def hash_ahead(self, marks: Iterable[Mark]) -> None:
        """Let a second thread begin with digests that will be asked for, the longest first, unless
        that is switched off by `one_thread`.

        Whoever asks waits for nothing: a digest that is not there yet is computed at once, and
        the other thread does not take it any more. Hashing holds no lock of the interpreter.

        Args:
          marks: what will be asked for, in about increasing length.
        """
        if _ALONE.get():
            return
        self._waiting = {
            mark: self._pieces(mark) for mark in sorted(set(marks), key=lambda mark: mark[1])
        }
        size = WORD.itemsize * sum(length for _, length in self._waiting)
        helper = _helper() if size >= _WORTH_A_THREAD else None
        if helper is not None:
            with suppress(RuntimeError):  # an interpreter that shuts down takes no more work
                helper.submit(_hash_from_the_end, self._waiting, self._known)

    def digest(self, mark: Mark) -> str:
        """Give the digest of the sequence at a mark."""
        found = self._known.get(mark)
        if found is None:
            # To be taken by one thread only; where both come at once, both get the same.
            pieces = self._waiting.pop(mark, None) or self._pieces(mark)
            found = self._known[mark] = digest_words(pieces)
        return found

    def _pieces(self, mark: Mark) -> list[Words]:
        return [self._strand_words(index, end)[:end] for index, end in self._tree.pieces(mark)]

    def _strand_words(self, index: int, end: int) -> Words:
        words = self._words.get(index)
        if words is None or len(words) < end:
            words = self._words[index] = self._tree.strand(index).astype(WORD)
        return words


@functools.cache
def _helper() -> ThreadPoolExecutor | None:
    """The process's second thread, which lives on because a thread's start is dear."""
    if (os.cpu_count() or 1) < 2:
        return None
    # A forked child has the pool without its thread; what it hands in would pile up.
    os.register_at_fork(after_in_child=_helper.cache_clear)
    return ThreadPoolExecutor(1, thread_name_prefix="evsys-digests")


def _hash_from_the_end(waiting: dict[Mark, list[Words]], known: dict[Mark, str]) -> None:
    while waiting:
        try:
            mark, pieces = waiting.popitem()
        except KeyError:  # the other thread was faster
            return
        known[mark] = digest_words(pieces)
