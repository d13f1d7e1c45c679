"""Single-player games of textarena, by name: the rows that start them, and the environment that plays them.

    {"messages": [...], "opening", "textarena": {"game", "seed", "options"}}

The row holds the game and its seed, so the rules in the prompt are those of the game that is played, and all samples of
a prompt play the same one.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Mapping
from difflib import get_close_matches
from typing import Any

_RAW = "-raw"  # the variant that sends each message once; others repeat the whole game each time


def game_rows(
    *, name: str, size: int, seed: int, level: None, options: Mapping[str, Any], asks: bool
) -> Iterator[dict[str, Any]]:
    """Yield rows; with `asks` each is a chat that starts with the rules. ValueError for what the library lacks."""
    for number in range(seed, seed + size):
        game: dict[str, Any] = {"game": name, "seed": number, "options": dict(options)}
        opening = _Table(**game).opening
        chat = {"messages": [{"role": "user", "content": opening}]} if asks else {}
        yield {**chat, "opening": opening, "textarena": game}


class TextArena:
    """Plays the row's game. The reward comes at the end of a game: what the library gives its player."""

    def reset(self, row: Mapping[str, Any]) -> None:
        if "textarena" not in row:
            raise ValueError("the prompt's row has no field 'textarena': its dataset is not from textarena")
        self._table = _Table(**row["textarena"])  # the prompt has already shown its opening

    def step(self, completion: str) -> tuple[str, float, bool]:
        return self._table.step(completion)


class _Table:
    """One game. The library draws from the interpreter's global random generator, which concurrent games would disturb;
    so each game has its own state, swapped in while it moves."""

    _moving = threading.Lock()

    def __init__(self, *, game: str, seed: int, options: Mapping[str, Any]) -> None:
        self._luck = random.Random(seed).getstate()
        self._game = self._alone(lambda: _make(game, options))
        try:
            self._alone(lambda: self._game.reset(num_players=1, seed=seed))
        except AssertionError as error:
            raise ValueError(f"not a single-player game: {error}") from None
        self.opening = self._new_messages()

    def step(self, move: str) -> tuple[str, float, bool]:
        done, _ = self._alone(lambda: self._game.step(move))
        if not done:
            return self._new_messages(), 0.0, False
        rewards, _ = self._game.close()
        return "", float(rewards[0]), True

    def _new_messages(self) -> str:
        """Return the new messages to the player, without its own."""
        from textarena import ObservationType

        _, messages = self._alone(self._game.get_observation)
        return "\n".join(str(text) for _, text, kind in messages if kind is not ObservationType.PLAYER_ACTION)

    def _alone(self, call: Callable[[], Any]) -> Any:
        with self._moving:
            before = random.getstate()
            random.setstate(self._luck)
            try:
                return call()
            finally:
                self._luck = random.getstate()
                random.setstate(before)


def _make(name: str, options: Mapping[str, Any]) -> Any:
    import textarena
    from textarena.envs.registration import ENV_REGISTRY

    if name not in ENV_REGISTRY:
        near = " or ".join(map(repr, get_close_matches(name, ENV_REGISTRY, n=3)))
        raise ValueError(f"textarena has no game {name!r}" + (f"; did you mean {near}?" if near else ""))
    return textarena.make(name if name.endswith(_RAW) else name + _RAW, **options)
