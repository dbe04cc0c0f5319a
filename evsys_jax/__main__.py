"""The command's entry: says what is missing where the command line's packages are not there."""

from __future__ import annotations

import gc
import sys

from evsys_jax.overview import print_overview


def main() -> None:
    """Run the command line, or end with one line that tells how to install it."""
    if sys.argv[1:] == ["--help"]:
        print_overview()
        return
    try:
        from evsys_jax.cli import main as run
    except ModuleNotFoundError as error:
        if error.name and error.name.startswith("evsys_jax"):
            raise
        hint = "pip install 'evsys_jax[cli]'"
        print(f"evsys-jax: the command line needs {error.name}: {hint}", file=sys.stderr)
        raise SystemExit(2) from None
    try:
        run()
    finally:
        # The interpreter would look for garbage once more, through all that JAX has loaded.
        gc.freeze()


if __name__ == "__main__":
    main()
