"""How long do `import evsys_jax` and `evsys-jax --help` take, next to an empty interpreter?

Each is a process of its own, started in turn; the second runs what the installed script runs.

Run: python benchmarks/startup.py [--repeats 21]
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial

from harness import arguments, conclude, describe, measure

COMMANDS = {
    "python -c pass": ["-c", "pass"],
    "import evsys_jax": ["-c", "import evsys_jax"],
    "evsys-jax --help": ["-c", "from evsys_jax.__main__ import main; main()", "--help"],
}


def main() -> None:
    """Print one line per command."""
    options = arguments(__doc__, repeats=21)
    print(describe("typer"))
    print(f"median (minimum) of {options.repeats} interleaved repeats, in ms")
    print(f"{'':20}{'time':>16}{'ratio':>7}")
    times = measure(
        {name: partial(start, *args) for name, args in COMMANDS.items()}, options.repeats
    )
    base = times["python -c pass"][0]
    for name, (median, least) in times.items():
        cell = f"{median * 1e3:.1f} ({least * 1e3:.1f})"
        print(f"{name:20}{cell:>16}{median / base:7.2f}")
    for name in list(COMMANDS)[1:]:
        conclude(f"`{name}`", f"{times[name][0] / base:.1f}x", "time over `python -c pass`")


def start(*arguments: str) -> None:
    """Run an interpreter to its end."""
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
