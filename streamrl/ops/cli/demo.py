"""`streamrl demo`: a pretrained model learns on this machine."""

from __future__ import annotations

import click

from streamrl.ops.cli.arguments import takes_overrides


@click.command()
@takes_overrides
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, in the last line.")
def demo(overrides: tuple[str, ...], as_json: bool) -> int:
    """Train a pretrained model of 135M parameters on sums, by reinforcement learning, in about a quarter of an hour.

    It begins anew each time, but for the model, which it makes once. `seed=2` gives other sums and another run;
    conf/demo.yaml has the settings, and conf/pretrained.yaml those for a model of yours.
    """
    from streamrl.demos.pretrained import DEMO
    from streamrl.demos.run import run_showcase

    return run_showcase(DEMO, overrides, as_json=as_json)
