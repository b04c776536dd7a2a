"""The command line, as `python -m rockmate`."""

import sys

from rockmate.cli import main

if __name__ == "__main__":
    sys.exit(main())
