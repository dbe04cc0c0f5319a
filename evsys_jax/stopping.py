"""How a command ends when it is asked to: once, in good order, whatever it was at."""

from __future__ import annotations

import signal
import sys

_CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}
"""Signals that ask for an end, and the exit code that tells so."""

_asked: list[int] = []


def listen() -> None:
    """End this process in good order where SIGTERM or Ctrl-C asks for it."""
    for number in _CODES:
        signal.signal(number, _stop)
    report = sys.unraisablehook

    def report_unless_asked(dropped: sys.UnraisableHookArgs) -> None:
        if not (_asked and dropped.exc_type is SystemExit):
            report(dropped)

    sys.unraisablehook = report_unless_asked


def keep_on(done: int) -> None:
    """End where a signal asked for it and could not; to be called now and then.

    Args:
      done: of no effect; what tells of progress has a count to give.
    """
    if _asked:
        sys.exit(_CODES[signal.Signals(_asked[0])])


def _stop(number: int, _: object) -> None:
    _asked.append(number)
    # Whoever asks again while the end takes its time changes nothing. Python drops what is raised
    # amid some callbacks, so the first may be in vain: hence `keep_on`.
    if len(_asked) == 1:
        sys.exit(_CODES[signal.Signals(number)])
