"""A learner without training: makes a run, publishes models from folders as versions, issues tickets, reads groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import redis
import transformers
from safetensors.numpy import load_file

from streamrl.config import schema
from streamrl.config.dump import config_to_json
from streamrl.transport.keys import Keys
from streamrl.transport.learner import LearnerStream
from streamrl.transport.types import START, Announcement
from streamrl.weights.format import TensorMeta
from streamrl.weights.manifest import Manifest, encode_manifest
from streamrl.weights.stores import open_store
from streamrl.wire.group import Group, decode_body, decode_header
from streamrl.wire.ticket import Purpose, Ticket
from tests.helpers import make_ticket, wait_until
from tests.weights_world import RUN_UID, State, World
from workers.model import read_model

EPOCH = 1


class MadeUpLearner:
    def __init__(
        self, client: redis.Redis, keys: Keys, config: schema.Config, *, fingerprint: str | None = None
    ) -> None:
        self.config = config
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
        facts = read_model(config.model.path, trust_remote_code=False)
        self.stream = LearnerStream(client, keys, run_uid=RUN_UID, epoch=EPOCH, holder="job", lease_s=600.0)
        self.stream.claim(config_json=config_to_json(config), fingerprint=fingerprint or facts.fingerprint, wait_s=0.0)
        self.stream.restore(cursor=START)
        weights = load_file(Path(config.model.path) / "model.safetensors")
        tensors = [TensorMeta(name=n, dtype="float32", shape=tuple(w.shape)) for n, w in sorted(weights.items())]
        self._world = World(open_store("redis:", client, keys), tensors=tensors, epoch=EPOCH)
        self._cursor: dict[Purpose, str] = {"train": START, "eval": START}

    def publish(self, folder: Path, *, anchor: bool = False) -> Manifest:
        manifest = self._world.publish(_bits(folder), anchor=anchor)
        announcement = Announcement(
            version=manifest.version, base=manifest.base, step=manifest.step, manifest=encode_manifest(manifest)
        )
        self.stream.announce(announcement, keep=list(self._world.manifests))
        return manifest

    def issue(self, *texts: str, first: int = 0, **changes: Any) -> list[Ticket]:
        tickets = [
            make_ticket(
                first + i,
                run_uid=RUN_UID,
                prompt=text,
                token_ids=np.asarray(self.tokenizer(text)["input_ids"], dtype=np.int32),
                **changes,
            )
            for i, text in enumerate(texts)
        ]
        self.stream.issue(tickets)
        return tickets

    def groups(self, count: int, *, purpose: Purpose = "train", timeout_s: float = 60.0) -> list[Group]:
        """The next so many groups."""
        found: list[Group] = []

        def enough() -> bool:
            for entry in self.stream.read(purpose, after=self._cursor[purpose], count=count, block_ms=0):
                self._cursor[purpose] = entry.id
                found.append(decode_body(decode_header(entry.header), entry.body))
            return len(found) >= count

        wait_until(enough, description=f"{count} {purpose} groups", timeout_s=timeout_s)
        return found

    def let_go(self) -> None:
        """What was read may leave the stream."""
        cursor = self._cursor["train"]
        self.stream.commit(step=0, cursor=cursor, trim_below=cursor)


def _bits(folder: Path) -> State:
    return {name: weight.ravel().view(np.uint32) for name, weight in load_file(folder / "model.safetensors").items()}
