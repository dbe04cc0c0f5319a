"""Torn ends: is a line that cannot be read the beginning of one that a crash cut short?"""

from __future__ import annotations

import codecs
import json
import re

# Deeper lines cannot be read when whole either, so their beginnings are damage, too.
_MAX_DEPTH = 900

_SPACE = re.compile(r"[ \t\n\r]*")
# Possessive, so that a long text costs one pass.
_STRING_BODY = re.compile(r'(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+')
_PARTIAL_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_PARTIAL_NUMBER = re.compile(
    r"-?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?(?:(?<=[0-9])[eE][+-]?[0-9]*)?)?\Z"
)
_WORDS = ("true", "false", "null")


def is_torn(line: bytes) -> bool:
    """Tell whether a line is an unfinished record, which more bytes could still complete.

    A line of nothing but NUL bytes is torn, and NUL bytes behind a beginning are what some
    file systems leave of a write. Everything else that cannot be read is damage: garbage, a
    finished object with something behind it, invalid bytes, and a torn record with another
    one glued to it, also where that one stands like a value: an inner object that ends with
    the line and has a `model_call_id`. NeMo Gym 0.7 cuts off any last line that fails.

    Args:
      line: the line, stripped of white space.
    """
    body = line.rstrip(b"\0")
    if not body:
        return True
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        text = decoder.decode(body)
    except UnicodeDecodeError:
        return False
    pending = decoder.getstate()[0]
    if pending[:1] == b"\xed" and pending[1:] >= b"\xa0":
        # The decoder waits for the end of a surrogate, which UTF-8 does not have.
        return False
    return _Scanner(text).is_beginning(cut_inside_character=bool(pending))


class _Unfinished(Exception):
    """The text ends where a token could go on; `in_text` if that token is a string."""

    def __init__(self, in_text: bool = False) -> None:
        self.in_text = in_text


class _Damage(Exception):
    """The text cannot be the beginning of an object."""


class _Scanner:
    """A JSON grammar without recursion that tells "too short" from "wrong"."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        # One frame per open container: the bracket, and whether a key is the call id's.
        self.open: list[list[str | bool]] = []
        self.call_closed_at = -1
        # Whether the innermost container has no element yet.
        self.fresh = True

    def is_beginning(self, cut_inside_character: bool) -> bool:
        try:
            self._scan()
        except _Unfinished as end:
            if cut_inside_character and not end.in_text:
                return False
            return self.call_closed_at != len(self.text.rstrip(" \t\n\r"))
        except _Damage:
            return False
        # The object is finished, and what stands behind it is no part of it.
        return False

    def _scan(self) -> None:
        if self._next() != "{":
            raise _Damage
        self._enter("{")
        while self.open:
            if self._after_value_or_start():
                self._value()

    def _after_value_or_start(self) -> bool:
        """Move to the next value of the innermost container, or close it and give False."""
        bracket = self.open[-1][0]
        char = self._next()
        fresh = self.fresh
        if char == ("}" if bracket == "{" else "]"):
            self._leave()
            return False
        if not fresh:
            if char != ",":
                raise _Damage
            self.at += 1
            char = self._next()
        self.fresh = False
        if bracket == "{":
            if char != '"':
                raise _Damage
            if self._string() == "model_call_id":
                self.open[-1][1] = True
            if self._next() != ":":
                raise _Damage
            self.at += 1
        return True

    def _value(self) -> None:
        char = self._next()
        if char == '"':
            self._string()
        elif char in "{[":
            self._enter(char)
        elif char in "-0123456789":
            self._number()
        else:
            self._word()

    def _next(self) -> str:
        match = _SPACE.match(self.text, self.at)
        self.at = match.end() if match else self.at
        if self.at == len(self.text):
            raise _Unfinished
        return self.text[self.at]

    def _enter(self, bracket: str) -> None:
        if len(self.open) >= _MAX_DEPTH:
            raise _Damage
        self.open.append([bracket, False])
        self.at += 1
        self.fresh = True

    def _leave(self) -> None:
        _, is_call = self.open.pop()
        self.at += 1
        self.fresh = False
        if is_call:
            self.call_closed_at = self.at

    def _string(self) -> str:
        start = self.at
        match = _STRING_BODY.match(self.text, start + 1)
        self.at = match.end() if match else start + 1
        rest = self.text[self.at : self.at + 7]
        if rest.startswith('"'):
            self.at += 1
            return str(json.loads(self.text[start : self.at]))
        if not rest:
            raise _Unfinished(in_text=True)
        if _PARTIAL_ESCAPE.match(rest):
            # A character of several bytes cannot stand inside an escape.
            raise _Unfinished
        raise _Damage

    def _number(self) -> None:
        match = _NUMBER.match(self.text, self.at)
        end = match.end() if match else self.at
        if end == len(self.text) or _PARTIAL_NUMBER.match(self.text, self.at):
            raise _Unfinished
        if match is None:
            raise _Damage
        self.at = end

    def _word(self) -> None:
        rest = self.text[self.at : self.at + 5]
        for word in _WORDS:
            if rest.startswith(word):
                self.at += len(word)
                return
            if len(self.text) - self.at < len(word) and word.startswith(rest):
                raise _Unfinished
        raise _Damage
