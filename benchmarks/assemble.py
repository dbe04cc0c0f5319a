"""How much faster are Datums made by the array core than by the plain reference?

Run: python benchmarks/assemble.py [--repeats 7]
"""

from __future__ import annotations

import time
from functools import partial

import tinker
from harness import SCALES, TINY, arguments, conclude, describe, make_groups, measure

from evsys_jax import reference
from evsys_jax.data_processing import assemble_training_data


def reference_datums(groups, advantages):
    """Make the same Datums the plain way: every field a list, handed to tinker."""
    return [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(row.input_tokens),
            loss_fn_inputs={
                "target_tokens": row.target_tokens,
                "logprobs": row.logprobs,
                "advantages": row.advantages,
            },
        )
        for row in reference.iter_training_rows(groups, advantages)
    ]


def main() -> None:
    """Print one line per scale."""
    options = arguments(__doc__)
    repeats = options.repeats
    print(describe("jax", "numpy", "tinker"))
    print(f"median (minimum) of {repeats} interleaved repeats, in ms")
    print(f"{'':12}{'rows':>6}{'positions':>11}  {'reference':>16}", end="")
    print(f"{'lists':>16}{'ratio':>7}{'arrays':>16}{'ratio':>7}{'compile':>9}")
    ratios: dict[str, list[str]] = {"lists": [], "arrays": []}
    for name, scale in (TINY if options.quick else SCALES).items():
        lists = make_groups(**scale, arrays=False)
        arrays = make_groups(**scale, arrays=True)
        advantages = reference.compute_advantages(lists)
        start = time.perf_counter()
        datums, _ = assemble_training_data(lists, advantages)
        first = time.perf_counter() - start
        times = measure(
            {
                "reference": partial(reference_datums, lists, advantages),
                "lists": partial(assemble_training_data, lists, advantages),
                "arrays": partial(assemble_training_data, arrays, advantages),
            },
            repeats,
        )
        positions = sum(datum.model_input.length for datum in datums)
        cells = {key: f"{a * 1e3:.1f} ({b * 1e3:.1f})" for key, (a, b) in times.items()}
        base = times["reference"][0]
        print(f"{name:12}{len(datums):6,}{positions:11,}  {cells['reference']:>16}", end="")
        for key in ("lists", "arrays"):
            ratios[key].append(f"{base / times[key][0]:.1f}x")
            print(f"{cells[key]:>16}{ratios[key][-1]:>7}", end="")
        print(f"{max(first - times['lists'][0], 0):8.2f}s")
    for key, values in ratios.items():
        conclude(
            f"`assemble_training_data`, Turns of {key}: {', '.join(SCALES)}",
            ", ".join(values),
            "speed over the plain reference, which starts from lists",
        )


if __name__ == "__main__":
    main()
