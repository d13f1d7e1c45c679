"""vLLM serves families of models, each in a forked process: two loads of published weights, the second in mid flight.

    python -m tests.integration.vllm_families OUTPUT FAMILY[:kept]...

`kept`: experts keep the kernel that they have, as vLLM by itself would have it.

The truth is a plain forward pass of transformers in fp32. Parameters go by the names that the model gives them in
memory, as they are published, and not by those of its files. One JSON line for each family.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
import transformers

from bench.proofs_engine import EngineHere, import_vllm
from streamrl.learner.loading.build import load_model
from streamrl.learner.parallel.dtensors import persistent_buffers
from streamrl.workers.engines.base import Load, ReadBack
from tests.tiny_families import make_family

IDS = np.random.default_rng(3).integers(3, 45, 21, dtype=np.int32)
_FORK = multiprocessing.get_context("fork")  # vLLM is imported once
_TIMEOUT_S = 120.0
_TOKENS = 48  # of each sample in flight


def published(folder: Path) -> Path:
    path = folder / "published.safetensors"
    model = load_model(str(folder))
    tensors = {name: p.detach().clone() for name, p in (*model.named_parameters(), *persistent_buffers(model))}
    safetensors.torch.save_file(tensors, path)
    return path


def truth(folder: Path) -> np.ndarray[Any, Any]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    ids = torch.from_numpy(IDS).long()
    with torch.no_grad():
        logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0, :-1]
    found: np.ndarray[Any, Any] = logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0].numpy()
    return found


async def serve(family: str, folder: Path) -> dict[str, Any]:
    folders = [make_family(folder / str(number), family, seed=number) for number in range(3)]
    weights, truths = [published(one) for one in folders], [truth(one) for one in folders]
    engine = EngineHere(folders[0], "float32")
    await engine.load_decoy(weights[1])
    off, reads = [], []
    for number in (1, 2):
        if number == 2:
            begin_samples(engine)
        await engine.load(Load(weights=weights[number], version=number, step=number))
        reads.append(await engine.read_back(weights[number], number=number, num_parts=1))
        if number == 2:
            finish_samples(engine)
        off.append(float(np.abs(await engine.logprobs(IDS) - truths[number]).max()))
    return {"family": family, "off": max(off), **told(reads)}


def told(reads: list[ReadBack]) -> dict[str, Any]:
    return {
        "num_read": reads[-1].num_read,
        "wrong": [name for read in reads for name in read.wrong],
        "unreadable": list(reads[-1].unreadable),
    }


def begin_samples(engine: EngineHere) -> None:
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    params = SamplingParams(max_tokens=_TOKENS, min_tokens=_TOKENS, detokenize=False)
    for number in range(4):
        prompt = np.random.default_rng(number).integers(3, 45, 12).tolist()
        engine.llm.llm_engine.add_request(f"sample-{number}", TokensPrompt(prompt_token_ids=prompt), params)
    for _ in range(6):
        engine.llm.llm_engine.step()


def finish_samples(engine: EngineHere) -> None:
    assert engine.llm.llm_engine.has_unfinished_requests(), "the load came in mid flight"
    for _ in range(4 * _TOKENS):
        engine.llm.llm_engine.step()
    assert not engine.llm.llm_engine.has_unfinished_requests()


def work(word: str, sender: Connection) -> None:
    family, _, harm = word.partition(":")
    if harm == "kept":
        importlib.import_module("streamrl.workers.proofs.read_back")  # it packs aside all the same
        transfer = importlib.import_module("streamrl.workers.engines.vllm.loading.transfer")
        vars(transfer)["packed_once"] = lambda model: []
    with tempfile.TemporaryDirectory() as folder:
        try:
            row = {**asyncio.run(serve(family, Path(folder))), "family": word}
        except Exception as error:  # noqa: BLE001 - of vLLM, whose errors share no base: the row says it
            row = {"family": word, "failed": f"{type(error).__name__}: {error}"[:500]}
    sender.send(row)


def main(output: Path, families: list[str]) -> None:
    torch.set_num_threads(1)
    import_vllm()
    for family in families:
        receiver, sender = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=work, args=(family, sender))
        process.start()
        sender.close()
        row = {"family": family, "failed": "no answer"}
        if receiver.poll(_TIMEOUT_S):
            row = receiver.recv()
        process.kill()
        process.join()
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
