"""`streamrl quickstart` and `streamrl demo`: a small model, or a pretrained one, learns on this machine."""

from __future__ import annotations

import click

from streamrl.ops.cli.arguments import takes_overrides

_takes_json = click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON, in the last line.")


@click.command()
@takes_overrides
@_takes_json
def quickstart(overrides: tuple[str, ...], as_json: bool) -> int:
    """Make a small model and train it by reinforcement learning, with all that a large run has, in some minutes.

    It begins anew each time. `seed=2` gives other data, another warm-up and another run; conf/quickstart.yaml has the
    settings.
    """
    from streamrl.demos.quickstart import QUICKSTART
    from streamrl.demos.run import run_showcase

    return run_showcase(QUICKSTART, overrides, as_json=as_json)


@click.command()
@takes_overrides
@_takes_json
def demo(overrides: tuple[str, ...], as_json: bool) -> int:
    """Train a pretrained model of 135M parameters on sums, by reinforcement learning, in about a quarter of an hour.

    It begins anew each time, but for the model, which it makes once. `seed=2` gives other sums and another run;
    conf/demo.yaml has the settings, and conf/pretrained.yaml those for a model of yours.
    """
    from streamrl.demos.pretrained import DEMO
    from streamrl.demos.run import run_showcase

    return run_showcase(DEMO, overrides, as_json=as_json)
