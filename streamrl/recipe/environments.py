"""Environments that need no code of the user's, named by `environment.target`, and allowed everywhere.

Each is a class with the methods of every environment (see `workers.environments.own`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from streamrl.recipe.games import TextArena
from streamrl.recipe.openenv import OpenEnv

ENVIRONMENTS: Mapping[str, Callable[..., Any]] = {"textarena": TextArena, "openenv": OpenEnv}
