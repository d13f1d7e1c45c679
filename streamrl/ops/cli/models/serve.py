"""`streamrl serve RUN|CHECKPOINT|MODEL`: serve a run's model over OpenAI's protocol, with vLLM's own server."""

from __future__ import annotations

from contextlib import ExitStack

import click

from streamrl.errors import ConfigError
from streamrl.extras import need
from streamrl.held_folders import scratch_folder
from streamrl.ops.cli.models.subject import find_subject, takes_base


@click.command(context_settings={"ignore_unknown_options": True})
@click.argument("subject", metavar="RUN|CHECKPOINT|MODEL")
@takes_base
@click.option("--name", metavar="NAME", help="The model's name for clients; default: as given here.")
@click.option(
    "--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0: for other machines too."
)
@click.option("--port", type=click.IntRange(1, 65535), default=8000, show_default=True)
@click.argument("vllm_options", metavar="[VLLM'S OPTIONS]...", nargs=-1, type=click.UNPROCESSED)
def serve(
    subject: str, model: str | None, name: str | None, host: str, port: int, vllm_options: tuple[str, ...]
) -> None:
    """Serve a model over OpenAI's protocol, with vLLM's own server, until Ctrl-C.

    \b
        streamrl serve runs/mine                           its export or, before it has finished, its newest checkpoint
        streamrl serve runs/mine@120      runs/mine@best   another checkpoint
        streamrl serve ./sft --port 8001 --max-model-len 4096

    Other options are passed on to vLLM. Unlike `vllm serve` it starts with any build of vLLM, ignores packages built
    for another torch, ignores the sampling defaults of the model's generation_config.json, and uses 1 GiB for the KV
    cache on a CPU. It listens on this machine only, and requires no key unless the variable VLLM_API_KEY holds one;
    everybody who may list processes sees what --api-key holds.
    """
    if subject.startswith("-"):  # click takes an option that it does not know as the first argument
        raise ConfigError(f"{subject}: an option of vLLM's comes after the model: streamrl serve MODEL {subject} ...")
    found = find_subject(subject, exported=True, base=model)
    need("serving", "vllm", "torch", "transformers", extra="worker-cpu", or_extra="worker-gpu")
    from streamrl.workers.engines.vllm.serve import serve as serve_with_vllm

    with ExitStack() as stack:
        folder = found.name
        if found.checkpoint is not None:
            click.echo(f"writing {found.name} as a model folder", err=True)
            from streamrl.ops.cli.models.model_folder import write_folder

            folder = str(write_folder(found, stack.enter_context(scratch_folder()) / "model"))
        serve_with_vllm(folder, name=name or subject, host=host, port=port, further=vllm_options)
