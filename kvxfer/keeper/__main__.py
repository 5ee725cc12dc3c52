"""``python -m kvxfer.keeper DESCRIPTOR PARENT``: started by an agent, never by a person."""

from __future__ import annotations

import sys

from kvxfer.keeper.process import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
