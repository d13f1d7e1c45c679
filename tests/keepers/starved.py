"""As `sandbox_keeper`, where no program ever has its time: it waits for a processor as long as it is there."""

from __future__ import annotations

import math

from streamrl.workers.confined.sandbox_keeper import main

if __name__ == "__main__":
    main(step_back=lambda: None, waited_s=lambda pid: math.inf)
