"""The overview of the commands, which needs no package: `evsys-jax --help` is there at once."""

from __future__ import annotations

import sys

ABOUT = "Exact, JAX-vectorized training rows from recorded rollouts."

COMMANDS = {
    "build": "Turn rollouts into training rows on disk, and account for every token.",
    "verify": "Compute every row plainly and as arrays, and compare field by field.",
    "inspect": "List what became of every rollout, or show one whole.",
}


def print_overview() -> None:
    """Print what the command line's own help would say."""
    lines = [
        "Usage: evsys-jax [OPTIONS] COMMAND [ARGS]...",
        f"\n  {ABOUT}",
        "\nOptions:\n  --help  Show this message and exit.",
        "\nCommands:",
        *(f"  {name:8} {summary}" for name, summary in COMMANDS.items()),
    ]
    try:
        print("\n".join(lines), flush=True)
    except OSError as error:  # standard output is closed or full
        print(f"evsys-jax: {error}", file=sys.stderr)
        sys.exit(2)
