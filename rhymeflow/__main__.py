"""`python -m rhymeflow` is the command `rhymeflow`."""

import sys

from rhymeflow.cli import main

if __name__ == "__main__":
    sys.exit(main())
