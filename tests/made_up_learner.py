"""A learner that does not train: creates a run, publishes models from folders, issues tickets, reads groups."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import redis
import transformers

from streamrl.config import schema
from streamrl.protocol.transport.keys import Keys
from streamrl.protocol.transport.learner import LearnerStream
from streamrl.protocol.transport.types import START, Announcement
from streamrl.protocol.weights.format import BITS, DType, TensorMeta
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.manifest_bytes import encode_manifest
from streamrl.protocol.weights.stores import open_store
from streamrl.protocol.wire.group import Group, decode_body, decode_header
from streamrl.protocol.wire.ticket import Purpose, Ticket
from streamrl.workers.engines.model import read_model
from tests.helpers import make_ticket, wait_until
from tests.weights_world import RUN_UID, State, World, read_safetensors

EPOCH = 1
_DTYPES: Mapping[str, DType] = {"F32": "float32", "BF16": "bfloat16"}


class MadeUpLearner:
    def __init__(
        self, client: redis.Redis, keys: Keys, config: schema.Config, *, fingerprint: str | None = None
    ) -> None:
        self.config = config
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(config.model.path)
        facts = read_model(config.model.path, trust_remote_code=False)
        self.stream = LearnerStream(client, keys, run_uid=RUN_UID, term=EPOCH, holder="job", lease_s=600.0)
        self.stream.claim(
            config_json=config.model_dump_json(), fingerprint=fingerprint or facts.fingerprint, wait_s=0.0
        )
        self.stream.restore(cursor=START)
        self._world = World(open_store("redis:", client, keys), term=EPOCH)
        self._cursor: dict[Purpose, str] = {"train": START, "eval": START}

    def publish(self, folder: Path, *, anchor: bool = False) -> Manifest:
        """Publish with the dtypes of the folder's weights."""
        self._world.tensors, state = _read(folder)
        manifest = self._world.publish(state, anchor=anchor, canary_ids=tuple(range(3, 27)))
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

    def groups(self, count: int, *, purpose: Purpose = "train", timeout_s: float = 240.0) -> list[Group]:
        """Return the next groups. On busy cores a worker that has to start first takes more than a minute."""
        found: list[Group] = []

        def enough() -> bool:
            for entry in self.stream.read(purpose, after=self._cursor[purpose], count=count, block_ms=0):
                self._cursor[purpose] = entry.id
                found.append(decode_body(decode_header(entry.header), entry.body))
            return len(found) >= count

        wait_until(enough, description=f"{count} {purpose} groups", timeout_s=timeout_s)
        return found

    def let_go(self) -> None:
        """Allow the stream to drop what was read."""
        cursor = self._cursor["train"]
        self.stream.commit(step=0, cursor=cursor, trim_below=cursor)


def _read(folder: Path) -> tuple[tuple[TensorMeta, ...], State]:
    """Return names, dtypes and shapes; and the bits."""
    contents = read_safetensors(folder / "model.safetensors")
    tensors = tuple(
        TensorMeta(name=name, dtype=_DTYPES[dtype], shape=tuple(shape))
        for name, (dtype, shape, _) in sorted(contents.items())
    )
    return tensors, {t.name: np.frombuffer(contents[t.name][2], dtype=BITS[t.dtype]) for t in tensors}
