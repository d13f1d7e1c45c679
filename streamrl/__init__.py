"""streamrl: asynchronous, off-policy, streaming reinforcement learning for language models.

    import streamrl

    def near(prompt, completion, token_ids, fields):
        return -abs(len(completion) - 20)

    settings = {"model.path": "./sft", "data.train": "prompts.jsonl", "data.validation": "held-out.jsonl"}
    with streamrl.start("pretrained.yaml", settings, rewards=[near]) as run:
        for step in run:
            print(step.number, step.reward)

This package is the shared library: configuration, wire schema, transport, weights, telemetry and the command
line. It imports neither torch nor vLLM nor transformers; `workers` and `learner` are the two applications on top of it.
`docs/python.md` says more about runs from Python; whatever it does not name is not a stable API.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamrl.errors import StreamrlError, UserError
from streamrl.misfits import do_without

if TYPE_CHECKING:
    from streamrl.ops.python.run import Result, Run, attach, start
    from streamrl.ops.python.steps import Step

__all__ = ["Result", "Run", "Step", "StreamrlError", "UserError", "attach", "start"]
__version__ = "0.1.0"

do_without()  # here, because every process of ours imports this package first, forked and spawned ones included

_FOUND_IN = {"Step": "streamrl.ops.python.steps"} | dict.fromkeys(
    ("Result", "Run", "attach", "start"), "streamrl.ops.python.run"
)


def __getattr__(name: str) -> Any:
    """Import lazily: every child process that runs a reward function imports this package."""
    if name not in _FOUND_IN:
        raise AttributeError(f"module 'streamrl' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_FOUND_IN[name]), name)
