"""`python -m workers`, in a checkout: the program is `streamrl.workers`, under one name however it is started."""

import sys

from streamrl.workers.main import main

if __name__ == "__main__":
    sys.exit(main())
