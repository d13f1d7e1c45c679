"""Like `sandbox_keeper`, at normal priority: on a busy machine tests should not wait for idle CPUs."""

from __future__ import annotations

from streamrl.workers.confined.sandbox_keeper import main

if __name__ == "__main__":
    main(step_back=lambda: None)
