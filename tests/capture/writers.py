"""Writer processes for the durability tests: forked from one process that has all imports.

Reads one JSON request per line and answers each with one line:
  {"writers": [{"root", "rollout", "ids", "acks", "announce", "die_at"}, ...], "kill_after"}
Each writer is a process of its own that stores the calls `ids`, and notes every id in the file
`acks` as soon as `append` has returned. All are killed `kill_after` seconds later, if that is
not null; a writer with `die_at` kills itself in the middle of its nth system call that changes a
file. The answer is the list of exit statuses.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from evsys_jax.capture.records import TokenEntry
from evsys_jax.capture.store import TokenCaptureStore

CHANGING_CALLS = ("write", "fsync", "replace", "ftruncate", "unlink", "open")
FROZEN = 7


def entry_for(rollout_id: str, call_id: str) -> TokenEntry:
    """The one record of a call; its content follows from the id."""
    tokens = [ord(char) for char in call_id]
    return TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call_id,
        prompt_token_ids=[*tokens, 0, 1, 2] * 20,
        generation_token_ids=tokens,
        generation_log_probs=[-0.1 * token for token in tokens],
        output_items=[{"type": "message", "content": f"\u00e9\U0001f600 {call_id}"}],
        parent_resolution="root",
    )


def die_at(count: int) -> None:
    """Let the nth changing system call be the last; a write gets half of its bytes out."""
    left = count

    def wrap(name: str) -> None:
        real = getattr(os, name)

        def call(*args: Any, **keywords: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **keywords)

        setattr(os, name, call)

    for name in CHANGING_CALLS:
        wrap(name)


def write(request: dict[str, Any]) -> None:
    # The file of acknowledgements must not count as a changing call.
    acknowledge = os.write
    acks = os.open(request["acks"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    store = TokenCaptureStore(request["root"])
    if request.get("die_at"):
        die_at(request["die_at"])
    for call_id in request["ids"]:
        entry = entry_for(request["rollout"], call_id)
        try:
            if request.get("announce"):
                asyncio.run(store.begin_call(request["rollout"], call_id))
                acknowledge(acks, f"begin {call_id}\n".encode())
            store.append(entry)
        except RuntimeError:
            os._exit(FROZEN)
        acknowledge(acks, f"put {call_id}\n".encode())


def fork(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    try:
        write(request)
    except BaseException as error:
        print(f"writer failed: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)
    os._exit(0)


def serve() -> None:
    for line in sys.stdin:
        request = json.loads(line)
        for writer in request["writers"]:
            Path(writer["root"]).mkdir(exist_ok=True)
        children = [fork(writer) for writer in request["writers"]]
        if request.get("kill_after") is not None:
            time.sleep(request["kill_after"])
            for child in children:
                os.kill(child, signal.SIGKILL)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(statuses), flush=True)


if __name__ == "__main__":
    serve()
