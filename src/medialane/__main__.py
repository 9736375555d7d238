"""`python -m medialane`."""

import sys

from medialane.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
