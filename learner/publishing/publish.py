"""Publishing: every rank encodes what it holds, rank 0 announces the version, and training continues meanwhile.

    loop      begin: copy ─► cast ───────► next step ──────► settle: the base has moved, or not ─► settle ─► begin ...
                      └─┐        └──────┐                      ▲                                    ▲
    thread              └─► encode ─ same digests? ─ put ─ gather ─ announce ─► now and then: an anchor beside it

The loop itself waits for a host copy of the weights and for the digests of a separate cast (`host_copy`). One version
is in flight at a time (`shipping`), with the anchor that may follow it. A publish that fails anywhere changes nothing
anywhere: the base stays, its number is never used again, and the next attempt encodes the then current weights against
the same base. An anchor that fails leaves its version as it is, and the next version tries to have one.

Whatever the thread waits for, `give_up_after_s` bounds how long the run continues without publishing a version, with
anchors that fail, or while one is being stored.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np

from streamrl.config import schema
from streamrl.errors import NotPublished
from streamrl.learner.model.lora import published_parameters
from streamrl.learner.model.policy import Policy
from streamrl.learner.process.background import Jobs
from streamrl.learner.process.ranks import World
from streamrl.learner.publishing.adapter_digests import AdapterDigests, metas_of
from streamrl.learner.publishing.buffers import PublishedBuffers
from streamrl.learner.publishing.copiers import Copier, copier_for
from streamrl.learner.publishing.host_copy import CastDigests, HostCopy, Part, cast_digests
from streamrl.learner.publishing.shipping import Announcer, Published, Shipper
from streamrl.learner.publishing.sweep import Sweeper
from streamrl.protocol.weights.encoder import EncodedRange
from streamrl.protocol.weights.manifest import Manifest
from streamrl.protocol.weights.retention import AnchorPace
from streamrl.protocol.weights.stores import BlobStore, budget_in_redis, refuse_too_large
from streamrl.versions import make_version

_SPARE_S = 60.0  # the loop must give up before the collective's timeout, which would not report the cause
_FINISH_S = 10.0  # for a version in flight when the loop ends early


class Publishing(Protocol):
    """The publisher's interface for the loop, on every rank; all methods are collective."""

    @property
    def latest(self) -> Published | None:
        """The newest published version."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a version or its anchor is in flight: `settle` before the next."""
        ...

    @property
    def announcing(self) -> bool:
        """Whether a version is in flight that workers cannot have yet."""
        ...

    @property
    def failing(self) -> bool:
        """Whether the last attempt failed: retry soon."""
        ...

    def working(self) -> AbstractContextManager[None]:
        """Run the background jobs within this context."""
        ...

    def begin(self, step: int, *, whole: bool = False) -> None:
        """Start publishing the current weights; `whole`: as an anchor, because the base may be lost."""
        ...

    def settle(self, *, wait_s: float = 0.0) -> Published | None:
        """Settle the version in flight and return it once published.

        None: not yet (`announcing`), failed (`failing`), or settled before. Settles its anchor too. Raises
        NotPublished, on all ranks alike, when this has taken too long.
        """
        ...


class Publisher:
    """Publishes to workers through a store and the run's stream."""

    def __init__(
        self,
        *,
        policy: Policy,
        config: schema.Config,
        world: World,
        run_uid: str,
        term: int,
        store: BlobStore,
        announcer: Announcer,
        canary_ids: tuple[int, ...],  # token IDs with which workers test their engine
        background: Jobs,
        sweeping: Jobs,  # deletes old blobs, however long the store takes for that
        copier: Copier | None = None,  # None: the device's default
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._policy, self._settings, self._world = policy, config.weights, world
        self._run_uid, self._term, self._canary_ids = run_uid, term, canary_ids
        self._background, self._sweeping, self._clock = background, sweeping, clock
        self._adapter_digests = AdapterDigests(policy.model, config.weights.dtype)
        published = metas_of(published_parameters(policy.model), config.weights.dtype)
        self._buffers = PublishedBuffers(policy.model, publishes=world.is_main)
        self._tensors = (*self._adapter_digests.pretrained, *published, *self._buffers.metas)
        max_bytes = budget_in_redis(config.weights)
        if max_bytes:
            refuse_too_large(sum(tensor.num_bytes for tensor in published), config.weights)
        self._shipper = Shipper(
            world=world.with_own_group(timeout_s=config.weights.give_up_after_s + _SPARE_S),
            store=store,
            sweeper=Sweeper(
                store=store, run_uid=run_uid, term=term, max_bytes=max_bytes, background=sweeping, clock=clock
            ),
            announcer=announcer,
        )
        self._copier = copier or copier_for(world.device)
        self._copy = HostCopy(config.weights.dtype, self._copier)
        self._pace = AnchorPace(every=config.weights.anchor_every, share=config.weights.anchor_share)
        self._next_n = 0
        self._under_way: Future[Published | None] | None = None
        self._anchor: Future[int | None] | None = None  # of the version that is, or was, in flight
        self._failed = False
        self._trying_since: float | None = None  # the first attempt after the last success
        self._anchorless_since: float | None = None  # likewise, for anchors beside a delta
        self._anchor_begun: float | None = None  # when the anchor in flight could begin: its version was done
        self.latest: Published | None = None

    @contextmanager
    def working(self) -> Iterator[None]:
        # What a sweep leaves, the next one deletes.
        with self._background.working(join_s=_FINISH_S), self._sweeping.working(join_s=0.0):
            yield

    @property
    def busy(self) -> bool:
        return self.announcing or self._anchor is not None

    @property
    def announcing(self) -> bool:
        return self._under_way is not None

    @property
    def failing(self) -> bool:
        return self._failed and not self.busy

    def begin(self, step: int, *, whole: bool = False) -> None:
        assert not self.busy, "one version is in flight at a time"
        base = None if whole or self._pace.alone else self.latest
        pending = Manifest(
            version=make_version(self._term, self._next_n),
            base=base.version if base else 0,
            step=step,
            run_uid=self._run_uid,
            tensors=self._tensors,
            shards=(),  # not encoded yet
            canary_ids=self._canary_ids,
            adapters=self._adapter_digests.adapters,
        )
        self._next_n += 1
        if self._trying_since is None:
            self._trying_since = self._clock()
        encoded = [
            self._background.submit(partial(self._encode, pending, part))
            for part in self._copy.take(self._policy.model)
        ]
        if (buffers := self._buffers.take()) is not None:
            encoded.append(self._background.submit(partial(self._encode, pending, buffers)))
        # The copy is encoded meanwhile.
        cast = None if self._copier.checks else self._cast()
        adapter_digests = self._adapter_digests.take()
        shipped = self._under_way = self._background.submit(
            lambda: self._shipper.ship(pending, encoded, cast, adapter_digests)
        )
        if base is not None and self._pace.due:
            if self._anchorless_since is None:
                self._anchorless_since = self._clock()
            self._anchor = self._background.submit(lambda: self._shipper.store_anchor() if shipped.result() else None)

    def _cast(self) -> CastDigests:
        return {**cast_digests(self._policy.model, self._settings.dtype), **self._buffers.digests()}

    def _encode(self, pending: Manifest, part: Part) -> list[EncodedRange]:
        part.check()
        return self._shipper.encode(pending, part.ranges)

    def settle(self, *, wait_s: float = 0.0) -> Published | None:
        published = None
        if self._under_way is not None:
            published, wait_s = self._settle_version(self._under_way, wait_s=wait_s), 0.0
        if self._under_way is None:
            self._settle_anchor(wait_s=wait_s)
        return published

    def _settle_version(self, under_way: Future[Published | None], *, wait_s: float) -> Published | None:
        all_done = self._is_done_everywhere(under_way, wait_s=wait_s)
        published = under_way.result() if all_done else None
        if all_done:
            self._anchor_begun = self._clock()
        if published is None:
            self._failed = all_done
            self._under_way = None if all_done else under_way
            self._give_up_in_time(self._trying_since, "weights")
            return None
        self._under_way, self._failed, self._trying_since = None, False, None
        self._copy.keep()
        self._adapter_digests.keep()
        if published.base:
            self._pace.announced(delta_bytes=published.num_bytes)
        else:
            self._note_anchor(published.num_bytes)
        self.latest = published
        return published

    def _settle_anchor(self, *, wait_s: float) -> None:
        if self._anchor is None:
            return
        all_done = self._is_done_everywhere(self._anchor, wait_s=wait_s)
        num_bytes = self._anchor.result() if all_done else None
        if all_done:
            self._anchor = None
        if num_bytes is None:  # it failed, or may hang: an earlier failure takes no time from this attempt
            self._give_up_in_time(self._anchorless_since if all_done else self._anchor_begun, "anchor of the weights")
        else:
            self._note_anchor(num_bytes)

    def _is_done_everywhere(self, job: Future[Any], *, wait_s: float) -> bool:
        """Whether the job is done on all ranks. A collective.

        An error of this rank's thread is raised at once: the other ranks' threads wait for its messages, and would only
        fail by timeout, with an error that does not name the cause.
        """
        wait([job], timeout=wait_s)
        if job.done():
            job.result()
        return self._world.all_agree(job.done())

    def _note_anchor(self, num_bytes: int) -> None:
        self._anchorless_since = None
        self._pace.anchored(anchor_bytes=num_bytes)

    def _give_up_in_time(self, trying_since: float | None, what: str) -> None:
        assert trying_since is not None, "an attempt has started"
        trying_s = float(self._world.largest(np.array([self._clock() - trying_since]))[0])
        if trying_s > self._settings.give_up_after_s:
            raise NotPublished(
                f"no {what} could be published for {trying_s:.0f} s (weights.give_up_after_s = "
                f"{self._settings.give_up_after_s:.0f}); check that weights.store "
                f"{self._settings.store!r} is reachable and has room"
            )
