"""Run all benchmarks, or those named, and write what they print into README.md.

    python benchmarks/all.py [NAME ...] [--readme PATH] [--quick]

Each is a process of its own, one after the other. A BLAS kernel pinned by the environment is unset.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
NAMES = (
    "assemble",
    "pack",
    "layouts",
    "compilations",
    "capture",
    "workers",
    "memory",
    "scaling",
    "startup",
    "steps",
)
ROW = "| "
TABLE = ["| benchmark | measure | figure | meaning |", "|---|---|---|---|"]
PINNED = ("OPENBLAS_CORETYPE", "OPENBLAS_L2_SIZE")


def main() -> None:
    """Run, and replace the marked places of the README."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}")
    parser.add_argument("--readme", type=Path)
    parser.add_argument("--quick", action="store_true", help="a trial run, for no README")
    options = parser.parse_args()
    unknown = set(options.names) - set(NAMES)
    if unknown:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    readme = options.readme or (None if options.quick else HERE / "README.md")
    for name in options.names or NAMES:
        start = time.perf_counter()
        output = run(name, ["--quick"] if options.quick else [])
        print(f"## {name}, {time.perf_counter() - start:.0f} s\n{output}", flush=True)
        if readme is not None:
            # After each, so that a long run that ends early has not been for nothing.
            text = readme.read_text(encoding="utf-8")
            readme.write_text(record(text, name, output), encoding="utf-8")


def run(name: str, options: list[str]) -> str:
    """Return what one benchmark prints."""
    environment = {key: value for key, value in os.environ.items() if key not in PINNED}
    path = os.pathsep.join(filter(None, [str(HERE.parent), environment.get("PYTHONPATH")]))
    return subprocess.run(
        [sys.executable, str(HERE / f"{name}.py"), *options],
        env=environment | {"PYTHONPATH": path},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def record(readme: str, name: str, output: str) -> str:
    """Put the tables of one benchmark into its place, and its results into the common table."""
    lines = output.strip().splitlines()
    text = "\n".join(line for line in lines if not line.startswith(ROW))
    readme = _replace(readme, name, f"```text\n{text}\n```")
    heads = {each: f"| [{each}]({each}.py) " for each in NAMES}
    known = _between(readme, "results").splitlines()
    rows = {each: [row for row in known if row.startswith(head)] for each, head in heads.items()}
    rows[name] = [heads[name] + line for line in lines if line.startswith(ROW)]
    table = [*TABLE, *(row for each in NAMES for row in rows[each])]
    return _replace(readme, "results", "\n".join(table))


def _replace(readme: str, place: str, content: str) -> str:
    """Replace what stands between two markers."""
    begin, _, end = _cut(readme, place)
    return f"{begin}\n\n{content}\n\n{end}"


def _between(readme: str, place: str) -> str:
    return _cut(readme, place)[1]


def _cut(readme: str, place: str) -> tuple[str, str, str]:
    """Cut a text at two markers, which stay with the ends.

    Raises:
      ValueError: the markers are not there, once each.
    """
    begin, end = f"<!-- {place} -->", f"<!-- end of {place} -->"
    if readme.count(begin) != 1 or readme.count(end) != 1:
        raise ValueError(f"the README has no place for {place!r}")
    before, _, rest = readme.partition(begin)
    inside, _, after = rest.partition(end)
    return before + begin, inside, end + after


if __name__ == "__main__":
    main()
