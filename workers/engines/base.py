"""The seam between a worker and what generates: samples out, weights in, both at the same time.

    start ──► load (a version) ──► generate, many at once ◄── load (a newer version, in mid-generation) ──► stop

A `load` pauses generation only while it lasts; samples in flight go on under the new weights, and their spans say which
token came from which version. What becomes of keys and values made before it is said with it (`weights.kv_cache`):

  salt   samples in flight keep theirs; a sample asked for after the load never reads any of them
  clear  nothing of them is read any more: samples in flight have theirs computed anew, under the new weights
  keep   samples in flight keep theirs, and a later sample with the same prompt may begin with them

Log-probs are always those of the distribution that a token was really sampled from, so that pi / mu is right under
each. What differs is what a version's name on a token tells. clear: a plain forward pass of that version gives the
same log-prob. salt: so it does for all samples begun since the load. keep: for no sample for certain, since the
prompt's keys may be of any older version, which its spans do not name.

EngineError from any call means the engine is of no more use: stop it and start another. SampleError concerns one
sample.
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
from streamrl.errors import ConfigError
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
    urgent: bool = False  # before all that is not: somebody waits for the answers of an evaluation


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    token_ids: npt.NDArray[np.int32]  # [T] the response, its end token included
    logprobs: npt.NDArray[np.float32]  # [T] of the distribution really sampled from, temperature and masks included
    text: str  # without special tokens, and without the stop string that ended it
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # cover [0, T) without gap
    routes: Routes | None = None  # [P + T - 1, ...] of prompt and response, where the run asks for them; none of T = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadBack:
    """By the engine's own names of its parameters; of one that several processes share, each looks at its own part."""

    num_read: int
    wrong: tuple[str, ...] = ()
    unreadable: tuple[str, ...] = ()  # kept in a form that only the engine's kernels can read


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    in_flight: int  # samples asked for and not finished
    num_made: int  # tokens, those of unfinished samples too: it stands still when the engine does
    num_waiting: int  # samples of those in flight that the engine has not taken up yet
    kv_used: float  # share of the room for keys and values, 0 to 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A version to be served."""

    weights: Path  # a safetensors file
    version: int
    step: int
    kv_cache: KvCache = "salt"
    changed: Changed | None = None  # where it differs from the version before; who makes no use of it reads all


class Engine(Protocol):
    async def start(self) -> None:
        """Be ready to `load`, within `worker.start_timeout_s`. UserError or EngineError where that fails."""

    async def load(self, load: Load) -> None:
        """Serve these weights from now on; their file does not change until this returns."""

    async def generate(self, request: SampleRequest) -> Generated:
        """One sample, to its end. May be called many times at once; cancelling the call abandons the sample."""

    async def load_decoy(self, weights: Path) -> None:
        """Take in weights each element of which differs from this file's: what a later load leaves behind shows. No
        sample may be asked for before that load."""

    async def read_back(self, weights: Path, *, number: int, num_parts: int) -> ReadBack:
        """Compare what the model computes with to this file: of every `num_parts` layers the one whose turn it is at
        this number."""
        ...

    async def logprobs(self, token_ids: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """[T-1] plain log-probs of each token but the first, by the weights being served and nothing cached."""
        ...

    async def check_alive(self) -> None:
        """Return soon, or raise EngineError: an engine that hangs counts as dead."""

    async def stop(self) -> None:
        """End it and whatever it started; may be called in any state, and more than once."""

    def stats(self) -> EngineStats: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """One host's place in an engine over several."""

    address: str  # on the first host: where the ranks of all meet
    port: int
    own: str  # our own address, as the others reach it
    node: int = 0  # our number; 0: the first host


class FurtherHosts(Protocol):
    """Those that have ranks of this worker's engine, as the engine sees them."""

    async def begin(self, seed: int) -> Meeting:
        """Wait for them all, and have their ranks start. EngineError: some did not come in time."""
        ...

    async def lost(self) -> str:
        """Returns when one of them is lost: which, and why. The engine that was begun is of no use from then on."""
        ...

    def end(self) -> None:
        """Their ranks end; nothing where none was begun."""

    def named(self, node: int) -> str:
        """How an error names the host of this number, after a rank of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What an engine is made from: the run's configuration, and this worker's own word."""

    model: ModelFacts
    config: schema.Config
    seed: int  # of all sampling in this engine; another one at each start
    gpu_memory: float | None = None  # share of its GPUs' memory, where others use them too
    hosts: FurtherHosts | None = None  # where the engine has ranks besides this host's (`worker.hosts`)

    @property
    def max_length(self) -> int:
        """Tokens of the longest sequence that a ticket can ask for, prompt included."""
        responses = {"sampling.max_tokens": self.config.sampling.max_tokens}
        if self.config.environment is not None:
            responses = {"environment.max_tokens": self.config.environment.max_tokens}
        elif self.config.data.validation is not None:
            responses["validation.sampling.max_tokens"] = self.config.validation.sampling.max_tokens
        key = max(responses, key=responses.__getitem__)
        longest = self.config.data.max_prompt_tokens + responses[key]
        known = self.model.max_positions
        if known is not None and longest > known:
            raise ConfigError(
                f"data.max_prompt_tokens and {key} allow sequences of {longest} tokens together; the model at "
                f"{self.model.path!r} knows positions up to {known}"
            )
        return longest


def make_engine(settings: EngineSettings) -> Engine:
    """The one that `worker.engine` names, not yet started."""
    module, _, name = ENGINES[settings.config.worker.engine].target.partition(":")
    kind: Callable[[EngineSettings], Engine] = getattr(import_module(module), name)
    return kind(settings)
