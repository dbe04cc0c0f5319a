"""Prompts of a record file that begin with the text of an earlier one: only the rest is read."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

_COMMA = b","[0]
_RECENT = 4
_SHORT = 256

Ids = NDArray[np.int32]


class Prompt:
    """A prompt whose ids are known once its own part has been read.

    Args:
      before: the prompt that it continues, if any.
    """

    __slots__ = ("_before", "_count", "_trunk")

    def __init__(self, before: Prompt | None) -> None:
        self._before = before
        self._trunk: _Trunk | None = None
        self._count = 0

    def ids(self, fresh: Ids) -> Ids:
        """Give all ids, read-only.

        Args:
          fresh: the ids that it has behind `before`, whose own were asked for already. Looked
            at the first time only.
        """
        if self._trunk is None:
            if self._before is None:
                self._trunk = _Trunk(fresh, fresh.size)
            else:
                assert self._before._trunk is not None, "prompts are read in order"
                self._trunk = self._before._trunk.extended(self._before._count, fresh)
                self._count = self._before._count
            self._count += fresh.size
            self._before = None
        return self._trunk.view(self._count)


class RecentPrompts:
    """The last long prompts of a file with their texts, the latest first."""

    def __init__(self) -> None:
        # Views of the files: a copy of each would be as much as the whole prompts of a file.
        self._known: deque[tuple[memoryview, Prompt]] = deque(maxlen=_RECENT)

    def find(self, data: bytes, begin: int, end: int) -> tuple[Prompt, bytes] | None:
        """Find what a prompt continues, and remember it.

        Args:
          data: the file.
          begin: where the text between the brackets begins.
          end: where it ends.

        Returns:
          The prompt, and the text of the ids that it needs read; None for a comma at the end.
        """
        for text, known in self._known:
            behind = begin + len(text)
            if not data.startswith(text, begin, end):
                continue
            if behind == end:
                return known, b""
            if data[behind] == _COMMA:
                fresh = data[behind + 1 : end]
                if not fresh:
                    return None
                return self._remember(data, begin, end, known), fresh
        long = end - begin >= _SHORT
        return self._remember(data, begin, end, None) if long else Prompt(None), data[begin:end]

    def _remember(self, data: bytes, begin: int, end: int, before: Prompt | None) -> Prompt:
        prompt = Prompt(before)
        self._known.appendleft((memoryview(data)[begin:end], prompt))
        return prompt

    def forget(self) -> None:
        """Forget them all: the ids of some could not be read."""
        self._known.clear()


class _Trunk:
    """A growing array; prompts that continue each other are views of its beginning."""

    def __init__(self, buffer: Ids, used: int) -> None:
        self.buffer = buffer
        self.used = used

    def view(self, count: int) -> Ids:
        view = self.buffer[:count]
        view.setflags(write=False)
        return view

    def extended(self, count: int, fresh: Ids) -> _Trunk:
        """Give a trunk of the first `count` ids and then the fresh ones: this one if it can."""
        total = count + fresh.size
        if count == self.used and total <= self.buffer.size and self.buffer.flags.writeable:
            self.buffer[count:total] = fresh
            self.used = total
            return self
        buffer = np.empty(2 * total, np.int32)
        buffer[:count] = self.buffer[:count]
        buffer[count:total] = fresh
        return _Trunk(buffer, total)
