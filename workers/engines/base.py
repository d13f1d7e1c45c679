"""The interface between a worker and its generation engine.

    start ──► load (a version) ──► generate, many at once ◄── load (a newer version, mid-generation) ──► stop

`load` pauses generation only while it runs. Samples in flight continue under the new weights, and their spans record
which version generated each token. `weights.kv_cache` decides what happens to the KV cache of older versions:

  salt   samples in flight keep their cache; samples requested after the load never read it
  clear  nothing reads it: the cache of samples in flight is recomputed under the new weights
  keep   samples in flight keep their cache, and later samples with the same prompt prefix may reuse it

Logprobs are always those of the distribution a token was actually sampled from, so pi / mu is correct in every mode.
The modes differ in what the version of a token implies. clear: a plain forward pass of that version reproduces the
logprob. salt: the same, for all samples started since the load. keep: not guaranteed for any sample, since the cached
prompt may come from any older version, which the spans do not record.

An EngineError from any call means that the engine is unusable: stop it and start another. A SampleError concerns one
sample only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from streamrl.config import schema
from streamrl.config.engines import ENGINES
from streamrl.config.of_model import longest_sequence, refuse_unseen_stops
from streamrl.protocol.weights.changes import Changed
from streamrl.protocol.wire.routes import Routes
from streamrl.protocol.wire.sample import FinishReason, Span
from streamrl.workers.engines.model import ModelFacts

KvCache = Literal["salt", "clear", "keep"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    request_id: str  # unique within the worker
    prompt_ids: npt.NDArray[np.int32]  # [P]
    sampling: schema.Sampling
    urgent: bool = False  # scheduled before other requests: an evaluation is waiting


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    token_ids: npt.NDArray[np.int32]  # [T] the response, including its end token
    logprobs: npt.NDArray[np.float32]  # [T] of the distribution actually sampled from, after temperature and masks
    text: str  # without special tokens and without the stop string that ended it
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # cover [0, T) without gaps
    routes: Routes | None = None  # [P + T - 1, ...] of prompt and response, if the run records routes and T > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """Result of `Engine.read_back`, by the engine's parameter names; each rank checks its own shard."""

    num_read: int
    wrong: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # in a layout that only the engine's kernels can read


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    in_flight: int  # samples requested and not finished
    num_made: int  # generated tokens, including those of unfinished samples; constant while the engine hangs
    num_waiting: int  # samples in flight that the engine has not scheduled yet
    kv_used: float  # fraction of the KV cache in use, 0 to 1
    is_busy: bool = False  # it loads or returns weights, and generates nothing meanwhile
    drafts_accepted: float | None = None  # fraction of speculated tokens that the model accepts; None: none are made


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A version to serve."""

    weights: Path  # a safetensors file
    version: int
    step: int
    kv_cache: KvCache = "salt"
    changed: Changed | None = None  # since the previous version; an engine may ignore it and read everything


class Engine(Protocol):
    async def start(self) -> None:
        """Become ready to `load` within `worker.start_timeout_s`, or raise UserError or EngineError."""

    async def load(self, load: Load) -> None:
        """Serve these weights from now on. The file does not change until this returns."""

    async def generate(self, request: SampleRequest) -> Generated:
        """Generate one sample to its end. Calls may run concurrently; cancelling one aborts its sample."""

    async def load_decoy(self, weights: Path) -> None:
        """Load weights that differ from this file in every element, so that anything a later load misses is detected.
        Do not request samples before that load."""

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        """Compare the weights the model computes with to this file. Layers are split into `num_parts` parts, which
        take turns by `number`."""
        ...

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """Return the [T-1] plain logprobs of all tokens but the first, under the served weights and without cache."""
        ...

    async def check_alive(self) -> None:
        """Return soon, or raise EngineError: an engine that hangs counts as dead."""

    async def stop(self) -> None:
        """End the engine and all its processes. May be called in any state, and more than once."""

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One host's place in an engine that spans several hosts."""

    address: str  # on the first host: where all ranks rendezvous
    port: int
    own: str  # this host's address, as the other hosts reach it
    node: int = 0  # this host's number; 0 is the first host


class FurtherHosts(Protocol):
    """The other hosts that run ranks of this worker's engine, as the engine sees them."""

    async def begin(self, seed: int) -> Meeting:
        """Wait until all have joined, then start their ranks. EngineError if some do not join in time."""
        ...

    async def lost(self) -> str:
        """Wait until a host is lost; return which one and why. The engine is unusable from then on."""
        ...

    def end(self) -> None:
        """End the ranks on these hosts; does nothing if none were started."""

    def named(self, node: int) -> str:
        """Return how error messages name this host, as a suffix to a rank's name."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is built from: the run's configuration and this worker's own settings. ConfigError if the model
    could never end a response at one of the run's stop strings."""

    model: ModelFacts
    config: schema.Config
    seed: int  # for all sampling in this engine; a new one at each start
    gpu_memory: float | None = None  # fraction of the GPUs' memory, if others use them too
    hosts: FurtherHosts | None = None  # set if the engine has ranks on other hosts (`worker.hosts`)

    def __post_init__(self) -> None:
        refuse_unseen_stops(self.config, self.model.tokenizer, self.model.stop_ids)

    @property
    def max_length(self) -> int:
        """Length in tokens of the longest sequence a ticket can request, including the prompt."""
        return longest_sequence(self.config, self.model.path, self.model.max_positions)


def make_engine(settings: EngineSettings) -> Engine:
    """Return the engine that `worker.engine` names, not yet started."""
    module, _, name = ENGINES[settings.config.worker.engine].target.partition(":")
    kind: Callable[[EngineSettings], Engine] = getattr(import_module(module), name)
    return kind(settings)
