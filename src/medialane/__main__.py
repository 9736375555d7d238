"""`python -m medialane`."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:
    del sys.path[0]  # -m has put it there: nothing is imported from the working directory

from medialane.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
