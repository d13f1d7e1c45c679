"""Rich's console for commands that print to stdout: a reader that has gone ends them as it ends all others."""

from __future__ import annotations

from rich import console


class Console(console.Console):
    def on_broken_pipe(self) -> None:
        """Called within the handler of the error; rich itself would exit with 1, which means something else."""
        raise
