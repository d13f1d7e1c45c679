"""`python -m workers` in a checkout: runs `streamrl.workers`, so that modules have the same names however it starts."""

import sys

from streamrl.workers.main import main

if __name__ == "__main__":
    sys.exit(main())
