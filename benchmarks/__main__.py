"""The benchmarks of speed and memory, one after the other: `python -m benchmarks [--quick] [--results FOLDER]`.

About eleven minutes. Those of data, decompositions and training, of kernels, of files for devices (deploy), and the fit
of the cost model's constants (prices) are run by themselves.
"""

from __future__ import annotations

import time

from benchmarks import acceptance, auto, growth, lstm, memory, parallel, projection, recurrence
from benchmarks.results import Options, main


def run(options: Options) -> None:
    """`auto` comes before `projection`, which uses the choices it made."""
    start = time.perf_counter()
    for module in (auto, projection, lstm, recurrence, parallel, memory, growth, acceptance):
        module.run(options)
        options.say(f"--- {module.__name__} done after {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main(run, __doc__)
