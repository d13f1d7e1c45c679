"""`streamrl quickstart`: make a small model, and watch it learn on this machine."""

from __future__ import annotations

import click

from streamrl.ops.cli.arguments import takes_overrides


@click.command()
@takes_overrides
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, in the last line.")
def quickstart(overrides: tuple[str, ...], as_json: bool) -> int:
    """Make a small model and train it by reinforcement learning, with all that a large run has, in some minutes.

    It begins anew each time. `seed=2` gives other data, another warm-up and another run; conf/quickstart.yaml has the
    settings.
    """
    from streamrl.demos.quickstart import QUICKSTART
    from streamrl.demos.run import run_showcase

    return run_showcase(QUICKSTART, overrides, as_json=as_json)
