"""streamrl: asynchronous, off-policy, streaming reinforcement learning for language models.

This package is the shared library: configuration, wire schema, transport, weights, telemetry and the command
line. It imports neither torch nor vLLM nor transformers; `workers` and `learner` are the two applications on it.
"""

__version__ = "0.1.0"

from streamrl.misfits import do_without

do_without()  # here, for every program of ours begins with this package, those that others fork or spawn too
