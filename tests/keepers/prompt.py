"""As `sandbox_keeper`, but that it wants its share of a busy machine: tests are not to wait for idle processors."""

from __future__ import annotations

from streamrl.workers.confined.sandbox_keeper import main

if __name__ == "__main__":
    main(step_back=lambda: None)
