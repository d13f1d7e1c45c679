"""The launcher's panel in a program: updated in place in a terminal, or in the output of a notebook's cell."""

from __future__ import annotations

import importlib
import io
import sys
import time
import uuid
from typing import Any, Protocol

from rich.console import Console

from streamrl.ops.launch.display import Display, Frame, render

_WIDTH, _HEIGHT = 100, 24
_PRE = '<pre style="line-height:1.2;font-family:monospace">{code}</pre>'


class Canvas(Protocol):
    def show(self, frame: Frame) -> None: ...
    def __enter__(self) -> Any: ...
    def __exit__(self, *_: object) -> None: ...


def canvas() -> Canvas:
    return InNotebook() if _in_notebook() else Display(Console())


def html(frame: Frame) -> str:
    console = Console(file=io.StringIO(), record=True, width=_WIDTH, force_jupyter=False, color_system="truecolor")
    console.print(render(frame, now=time.time(), width=_WIDTH, height=_HEIGHT))
    return console.export_html(inline_styles=True, code_format=_PRE)


class InNotebook:
    """One output that is redrawn repeatedly. IPython exists, since this is a notebook."""

    def __init__(self, display: Any = None) -> None:
        self._display = display or importlib.import_module("IPython.display").display
        self._id, self._is_displayed = uuid.uuid4().hex, False

    def show(self, frame: Frame) -> None:
        self._display({"text/html": html(frame)}, raw=True, display_id=self._id, update=self._is_displayed)
        self._is_displayed = True

    def __enter__(self) -> InNotebook:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def _in_notebook() -> bool:
    """Return whether this runs in a kernel, not in IPython's terminal."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and hasattr(shell, "kernel")
