"""Resolves `dtype: auto` when a configuration is read; nothing after `load` sees it.

    a run that has started here ─► the dtype that it started with
    a new one                   ─► bfloat16 if the GPUs or cores that compute have native support; else float32

The learner that starts a run decides for all: the result is saved in the run's folder and sent to the workers. Reading
the same file on another machine, for example to check it, shows what it would mean there.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from streamrl.config.schema import Config
from streamrl.config.source import Node, parse
from streamrl.gpus import gpus_here
from streamrl.host import computes_in_bfloat16

AUTO = "auto"
_COMPUTES = {"model": "learner", "weights": "worker"}  # section -> the section with the GPUs that compute in its dtype
MAY_BE_AUTO = frozenset(f"{section}.dtype" for section in _COMPUTES)


def resolve_dtypes(tree: Node) -> Node:
    """Return the tree with each `auto` replaced by a dtype, whose origin says why it was chosen."""
    automatic = [section for section in _COMPUTES if _plain(tree, section, "dtype") == AUTO]
    if not automatic or not isinstance(tree.value, dict):
        return tree
    saved = _saved_dtypes(tree)
    entries = dict(tree.value)
    for section in automatic:
        settings, node = entries[section], tree.find(section, "dtype")
        assert node is not None, "it is auto"
        assert isinstance(settings.value, dict), "it has a dtype"
        dtype, why = saved.get(section) or _of_this_machine(tree, section)
        resolved = Node(value=dtype, origin=f"{node.origin}: auto; {why}")
        entries[section] = replace(settings, value={**settings.value, "dtype": resolved})
    return replace(tree, value=entries)


def _saved_dtypes(tree: Node) -> dict[str, tuple[str, str]]:
    """Return what the run of this name has saved, by section; empty if there is none."""
    folder, name = (_plain(tree, key) or Config.model_fields[key].default for key in ("dir", "name"))
    saved = Path(str(folder)) / str(name) / "config.yaml"
    if not saved.is_file():
        return {}
    saved_tree = parse(saved.read_text(encoding="utf-8"), name=str(saved), numbered=True)
    dtypes = {section: _plain(saved_tree, section, "dtype") for section in _COMPUTES}
    return {section: (str(dtype), f"the run started with it ({saved})") for section, dtype in dtypes.items() if dtype}


def _of_this_machine(tree: Node, section: str) -> tuple[str, str]:
    gpus = gpus_here() if _plain(tree, _COMPUTES[section], "gpus") != 0 else ()
    if old := [gpu for gpu in gpus if not gpu.has_bfloat16]:
        return "float32", f"GPU {old[0].name} ({old[0].model}) has no native bfloat16"
    if gpus:
        return "bfloat16", "this machine's GPUs support it natively"
    if computes_in_bfloat16():
        return "bfloat16", "this CPU supports it natively"
    return "float32", "this CPU has no native bfloat16"


def _plain(tree: Node, *path: str) -> str | int | None:
    node = tree.find(*path)
    plain = None if node is None else node.plain()
    return plain if isinstance(plain, str | int) else None
