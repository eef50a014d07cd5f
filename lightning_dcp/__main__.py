"""``python -m lightning_dcp`` is the command ``lightning-dcp``."""

import sys

from lightning_dcp.cli import main

if __name__ == "__main__":
    sys.exit(main())
