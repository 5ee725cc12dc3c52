"""How surely each sabotage is found: ``python tests/sim/measure.py [number of seeds] [name ...]``.

For each sabotage the simulator is run from eight different first seeds with the options that its
test uses.  One seed says little: any change of the product reshuffles all runs.  What counts
is that all first seeds find it, with CPU time to spare.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from broken import LIMIT, Broken
from sabotages import SABOTAGES

BASES = tuple(range(10_000, 18_000, 1000))
"""First seeds, other than those of the tests."""


def main(names: list[str]) -> int:
    weak = 0
    bases = BASES
    if names and names[0].isdecimal():
        bases, names = BASES[: int(names[0])], names[1:]
    with tempfile.TemporaryDirectory() as folder:
        broken = Broken(Path(folder))
        for sabotage in SABOTAGES:
            if names and sabotage.name not in names:
                continue
            told = []
            for base in bases:
                root = broken.with_one(sabotage)
                status, said, spent = broken.simulate(root, sabotage, first_seed=base)
                found = status == 1 and "violation" in said and spent <= LIMIT
                told.append(f"{spent:.1f}" if found else "-")
            hits = sum(t != "-" for t in told)
            weak += hits < len(bases)
            sys.stdout.write(f"{sabotage.name:<34}{hits}/{len(bases)}  {' '.join(told)}\n")
            sys.stdout.flush()
    return 1 if weak else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
