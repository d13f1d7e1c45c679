"""Token ids as text, where the model's tokenizer is at hand.

By the package `tokenizers` alone, which every machine with a learner or a worker has, and which neither torch nor
transformers comes with. Without it, or without the model's tokenizer.json, people see token ids.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from streamrl.errors import DataError, ResourceError

_FILE = "tokenizer.json"


class Words:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def decode(self, token_ids: Any) -> str:
        """Special tokens included: where a response ended is worth seeing."""
        return str(self._tokenizer.decode([int(token) for token in token_ids], skip_special_tokens=False))


def find_words(model: str) -> Words | None:
    """Of a model folder, or of a hub name whose files are on this machine; None where there is no tokenizer."""
    path = Path(model) / _FILE if Path(model).is_dir() else _in_cache(model)
    if path is None or not path.is_file() or importlib.util.find_spec("tokenizers") is None:
        return None
    return _load(path)


def choose_words(named: str | None, model: str) -> Words | None:
    """Of the model that the user has named, where what is missing is an error; else of the run's own."""
    if named is None:
        return find_words(model)
    if importlib.util.find_spec("tokenizers") is None:
        raise ResourceError(
            "--tokenizer needs the package tokenizers, which is not installed: `pip install tokenizers`"
        )
    words = find_words(named)
    if words is None:
        raise DataError(f"--tokenizer {named}: there is no {_FILE}; give the folder of a model")
    return words


def _load(path: Path) -> Words:
    import tokenizers

    try:
        return Words(tokenizers.Tokenizer.from_file(str(path)))
    except Exception as error:  # noqa: BLE001 - the package raises nothing more special
        raise DataError(f"{path} is no tokenizer: {error}") from None


def _in_cache(name: str) -> Path | None:
    if name.count("/") != 1 or importlib.util.find_spec("huggingface_hub") is None:
        return None
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, _FILE)
    return Path(found) if isinstance(found, str) else None
