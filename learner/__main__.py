"""`python -m learner`, in a checkout: the program is `streamrl.learner`, under one name however it is started."""

import sys

from streamrl.learner.main import main

if __name__ == "__main__":
    sys.exit(main())
