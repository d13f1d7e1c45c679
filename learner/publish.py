"""Weights out: every rank encodes what it holds, rank 0 announces the whole.

    parameters ─ cast ─ encode against the base ─ put blob ─┐ every rank, its own runs only
                                                            ▼
         canary ─ gather records ─ manifest ─ announce      rank 0, one fenced script
                                                │
           advance the base  ◄── all ranks ok ──┴── else: keep the base, try again in the next round

A publish that fails anywhere changes nothing anywhere: the base stays, the number is never used again, and the next
attempt is made against the same base with whatever the weights are by then. Blocks on the store, on Redis and on the
other ranks, each within its own bounds; `give_up_after_s` bounds how long attempts may fail before the run ends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
import torch

from learner.distributed import World
from learner.lora import merged_parameters
from learner.model import Policy, evaluating, probe
from learner.packing import pack
from learner.sweep import Sweeper
from learner.tensors import held
from streamrl.config import schema
from streamrl.errors import Fenced, StreamrlError, TrainingError
from streamrl.transport.types import Announcement
from streamrl.versions import make_version, show
from streamrl.weights.encoder import ShardEncoder
from streamrl.weights.format import HeldRange, TensorMeta
from streamrl.weights.manifest import Canary, Manifest, ShardRecord, decode_record, encode_manifest, encode_record
from streamrl.weights.stores import BlobStore

log = structlog.get_logger(__name__)


class Announcer(Protocol):
    """What publishing needs of rank 0's stream."""

    def announce(self, announcement: Announcement, *, keep: list[int]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    version: int
    step: int
    num_bytes: int
    changed_fraction: float


class Publisher:
    """On every rank; `publish` is a collective."""

    def __init__(
        self,
        *,
        policy: Policy,
        config: schema.Config,
        world: World,
        run_uid: str,
        epoch: int,
        store: BlobStore,
        announcer: Announcer | None,  # rank 0 has one
        canary_ids: npt.NDArray[np.int32],  # [T]
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._settings, self._world = policy, config.weights, world
        self._run_uid, self._epoch = run_uid, epoch
        self._store, self._announcer, self._clock = store, announcer, clock
        self._canary_ids = canary_ids
        self._encoder = ShardEncoder()
        self._sweeper = Sweeper(store=store, run_uid=run_uid, epoch=epoch, clock=clock) if world.is_main else None
        self._next_n = 0
        self._tensors = tuple(
            TensorMeta(name=name, dtype=config.weights.dtype, shape=tuple(parameter.shape))
            for name, parameter in merged_parameters(policy.model)
        )
        self._num_deltas = 0  # since the last anchor
        self._failing_since: float | None = None
        self.latest: Published | None = None

    @property
    def last_n(self) -> int:
        """The last number used, successful or not."""
        return self._next_n - 1

    @property
    def failing(self) -> bool:
        """The last attempt failed: try again soon."""
        return self._failing_since is not None

    def publish(self, step: int) -> Published | None:
        """One attempt; None when it failed somewhere, which all ranks then know."""
        version = make_version(self._epoch, self._next_n)
        self._next_n += 1
        base = self.latest if self._num_deltas + 1 < self._settings.anchor_every else None
        canary = self._canary()
        mine = self._store_shard(version, anchor=base is None)
        records = self._world.gather_bytes(b"" if mine is None else encode_record(mine))
        announced = all(records) and self._announce(version, step, base, records, canary)
        if not self._world.all_agree(announced):
            self._note_failure(version)
            return None
        self._encoder.advance()
        self._failing_since = None
        self._num_deltas = 0 if base is None else self._num_deltas + 1
        self.latest = _summary(version, step, records)
        return self.latest

    def _store_shard(self, version: int, *, anchor: bool) -> ShardRecord | None:
        """Encode and put this rank's share; None when that did not work this time."""
        try:
            shard = self._encoder.encode(list(self._ranges()), anchor=anchor)
            record = shard.record(run_uid=self._run_uid, version=version, rank=self._world.rank)
            self._store.put(record.blob_name, shard.blob)
        except StreamrlError as error:
            log.warning("weights not stored", version=show(version), error=str(error))
            return None
        return record

    def _announce(self, version: int, step: int, base: Published | None, records: list[bytes], canary: Canary) -> bool:
        """Rank 0 tells the workers; elsewhere there is nothing that could fail."""
        if self._announcer is None or self._sweeper is None:
            return True
        manifest = Manifest(
            version=version,
            base=base.version if base else 0,
            step=step,
            run_uid=self._run_uid,
            tensors=self._tensors,
            shards=tuple(decode_record(record) for record in records),
            canary=canary,
        )
        keep = self._sweeper.kept_with(manifest)
        announcement = Announcement(version=version, base=manifest.base, step=step, manifest=encode_manifest(manifest))
        try:
            self._announcer.announce(announcement, keep=sorted(keep))
        except Fenced:
            raise
        except StreamrlError as error:
            log.warning("weights not announced", version=show(version), error=str(error))
            return False
        self._sweeper.announced(manifest)
        return True

    def _note_failure(self, version: int) -> None:
        now = self._clock()
        if self._failing_since is None:
            self._failing_since = now
        failing_s = now - self._failing_since
        log.warning("publish failed; the next attempt has the same base", version=show(version), failing_s=failing_s)
        if failing_s > self._settings.give_up_after_s:
            raise TrainingError(
                f"no weights could be published for {failing_s:.0f} s (weights.give_up_after_s = "
                f"{self._settings.give_up_after_s:.0f}); is weights.store {self._settings.store!r} there, with room?"
            )

    def _ranges(self) -> Iterator[HeldRange]:
        dtype = getattr(torch, self._settings.dtype)
        for name, parameter in merged_parameters(self._policy.model):
            run = held(parameter, shape=parameter.shape)
            if len(run.values):
                # A copy: the encoder keeps it, the optimizer goes on writing to the parameter.
                served = run.values.to(device="cpu", dtype=dtype, copy=True)
                integers = torch.int16 if dtype == torch.bfloat16 else torch.int32
                bits = served.view(integers).numpy()
                yield HeldRange(tensor=name, start=run.start, bits=bits.view(f"<u{bits.itemsize}"))

    def _canary(self) -> Canary:
        """What the learner itself thinks of a few tokens: a forward pass in fp32 on all ranks, since FSDP gathers."""
        with evaluating(self._policy):
            [batch] = pack([probe(self._canary_ids)], max_tokens=len(self._canary_ids), shape=self._policy.shape)
            logprobs = self._policy(batch.to(self._world.device), raw=True).logp.clamp(max=0)
        return Canary(token_ids=tuple(self._canary_ids.tolist()), logprobs=tuple(logprobs.tolist()))


def _summary(version: int, step: int, records: list[bytes]) -> Published:
    shards = [decode_record(record) for record in records]
    ranges = [r for shard in shards for r in shard.ranges]
    return Published(
        version=version,
        step=step,
        num_bytes=sum(shard.num_bytes for shard in shards),
        changed_fraction=sum(r.num_changed for r in ranges) / max(1, sum(r.length for r in ranges)),
    )
