"""What one rank's memory on the host comes to while it loads a model. Run by torchrun.

python -m tests.integration.memory_rank MODEL TINY OUT    OUT-<rank>: bytes that the process grew by, at most
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch

from streamrl.learner.loading.load import load_policy
from streamrl.learner.process.ranks import join_world
from tests.learner_cases import learner_config


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    model, tiny, out = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    with join_world(os.environ, timeout_s=240) as world:
        load_policy(learner_config(tiny), world, (1,))  # brings in the code
        before = peak_bytes()
        policy = load_policy(learner_config(model), world, (1,))
        Path(f"{out}-{world.rank}").write_text(str(peak_bytes() - before))
