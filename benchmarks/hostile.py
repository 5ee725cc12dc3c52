"""A million hostile messages against a live agent with keys on: what it costs, and what it breaks.

The victim, a friend that pulls from it all the time, and the attackers run on this machine; what is
sent and what is checked is told in ``kvxfer.testing.hostile``.  Figures: messages per second that
the victim takes (the sender, which makes up each message, is the slower side), its resident memory
after a tenth of them and at the end, and the friend's slowest transfer meanwhile.

Run: PYTHONPATH=. python benchmarks/hostile.py [--messages N] [--seed N] [--json FILE]
"""

from __future__ import annotations

import sys

from kvxfer.testing.hostile import main

if __name__ == "__main__":
    arguments = sys.argv[1:]
    if "--messages" not in arguments:
        arguments += ["--messages", "1000000"]
    sys.exit(main(arguments))
