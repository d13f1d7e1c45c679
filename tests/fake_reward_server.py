"""A reward server without torch, in its own process: the real application with the double of its model.

python -m tests.fake_reward_server PORT [TOKEN_FILE]     a text's score is the sum of its characters' code points
"""

from __future__ import annotations

import sys

from streamrl.process import bind
from streamrl.workers.reward_server.batcher import Batcher, ScoringModelDouble
from streamrl.workers.reward_server.server import RewardApp, run
from streamrl.workers.rewards.http_request import read_token


def main() -> None:
    model = ScoringModelDouble()
    token = read_token(sys.argv[2], key="TOKEN_FILE") if len(sys.argv) > 2 else None
    app = RewardApp(model, Batcher(model, max_delay_s=0.001, max_batch_tokens=4096), token=token)
    with bind("127.0.0.1", int(sys.argv[1]), what="the test") as bound:
        run(app, bound, lambda: print(bound.getsockname()[1], flush=True))


if __name__ == "__main__":
    main()
