"""Digests of the sequences in a token tree, to hold against the stamps of records."""

from __future__ import annotations

from typing import Any

from numpy.typing import NDArray

from evsys_jax.capture.digests import WORD, digest_words
from evsys_jax.capture.tokentree import Mark, TokenTree


class Stamps:
    """The digest of each sequence that is asked for, computed once.

    A digest covers its whole sequence, so that those of one lineage cost its square. The tokens
    at least are turned into the words that are hashed only once.

    Args:
      tree: where the sequences are.
    """

    def __init__(self, tree: TokenTree) -> None:
        self._tree = tree
        self._words: dict[int, NDArray[Any]] = {}
        self._known: dict[Mark, str] = {}

    def digest(self, mark: Mark) -> str:
        """Give the digest of the sequence at a mark."""
        found = self._known.get(mark)
        if found is None:
            found = self._known[mark] = digest_words(self._pieces(mark))
        return found

    def _pieces(self, mark: Mark) -> list[NDArray[Any]]:
        return [self._strand_words(index, end)[:end] for index, end in self._tree.pieces(mark)]

    def _strand_words(self, index: int, end: int) -> NDArray[Any]:
        words = self._words.get(index)
        if words is None or len(words) < end:
            words = self._words[index] = self._tree.strand(index).astype(WORD)
        return words
