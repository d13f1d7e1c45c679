"""Built-in environments, named by `environment.target`, allowed on every worker.

Each is a class with the methods of an environment, or of an agent (see `workers.environments.own`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamrl.recipe.games import TextArena
from streamrl.recipe.openenv import OpenEnv
from streamrl.recipe.tasksets import Verifiers

ENVIRONMENTS: Mapping[str, Callable[..., Any]] = {"textarena": TextArena, "openenv": OpenEnv, "verifiers": Verifiers}

# These talk to processes elsewhere, so they need a network, and a worker that allows it.
OF_A_NETWORK = {"openenv": "openenv asks a server", "verifiers": "its programs ask the model over loopback"}
