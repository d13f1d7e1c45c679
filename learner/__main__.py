"""Entry point of `python -m learner` in a checkout; runs `streamrl.learner`, so modules keep one name."""

import sys

from streamrl.learner.main import main

if __name__ == "__main__":
    sys.exit(main())
