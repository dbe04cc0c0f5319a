"""The command's entry: the overview, and the way to the commands.

The overview needs no package, so that it is there at once, and also where the command line's
packages are not.
"""

from __future__ import annotations

import sys

ABOUT = "Exact, JAX-vectorized training rows from recorded rollouts."

COMMANDS = {
    "build": "Turn rollouts into training rows on disk, and account for every token.",
    "verify": "Compute every row plainly and as arrays, and compare field by field.",
    "inspect": "List what became of every rollout, or show one whole.",
}


def main() -> None:
    """Run the command line, or end with one line that tells how to install it."""
    if sys.argv[1:] == ["--help"]:
        _print_overview()
        return
    try:
        from evsys_jax.cli import main as run
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("evsys_jax"):
            raise
        hint = "pip install 'evsys_jax[cli]'"
        print(f"evsys-jax: the command line needs {error.name}: {hint}", file=sys.stderr)
        raise SystemExit(2) from None
    run()


def _print_overview() -> None:
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


if __name__ == "__main__":
    main()
