"""A model that is one GGUF file, made into the folder that a hub would hold.

    python -m streamrl.learner.loading.from_gguf

    file.gguf ─► transformers reads and dequantises it ─► a plain model of the same configuration ─► output/

transformers treats a model read from GGUF as quantised and refuses to save it, so the weights move to a plain model
first. Tokenizer and chat template are saved too. Blocks only on computing, on the host's processors.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import transformers
from torch import nn

from streamrl.encoding import FROM_FILES
from streamrl.errors import DataError, UserError


def convert(file: Path, output: Path, report: Callable[[str], None]) -> None:
    if not file.is_file():
        raise DataError(f"{file}: no such file")
    report("step 1 of 3, the tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, **FROM_FILES)
    report("step 2 of 3, the weights")
    read = transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    model = plain(read)
    report("step 3 of 3, writing")
    nn.Module.to(model, torch.bfloat16)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output)


def plain(read: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The same weights in a model without quantisation settings."""
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):  # skips half a minute of random initialisation
        model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
    model.load_state_dict(read.state_dict(), assign=True)
    model.tie_weights()
    return model


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m streamrl.learner.loading.from_gguf", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--gguf", type=Path, required=True, help="the file")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model")
    arguments = parser.parse_args(argv)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        convert(arguments.gguf, arguments.output, lambda text: print(text, flush=True))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
