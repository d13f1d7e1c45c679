"""Threads beside the loop: one that lasts as long as a block, and one that runs submitted jobs."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import copy_context
from functools import partial
from typing import Protocol, TypeVar

T = TypeVar("T")

_POLL_EVERY_S = 0.2  # poll for the end; a job starts at once


@contextmanager
def background_loop(
    target: Callable[[], None], *, name: str, stopped: threading.Event, join_s: float | None = None
) -> Iterator[None]:
    """Run `target` in a thread for as long as the block lasts.

    It must watch `stopped`, which is set on exit, and bound its other waits; otherwise set `join_s`, after which the
    thread is left to die with the process.
    """
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(join_s)


class Jobs(Protocol):
    """Runs jobs that the loop does not wait for, in the order of submission."""

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        """Run jobs while the block lasts; a job still running at the end gets `join_s`, and later ones do not start."""
        ...

    def submit(self, job: Callable[[], T]) -> Future[T]: ...


class BackgroundThread:
    """Runs jobs in one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        return background_loop(self._work, name=self._name, stopped=self._stopped, join_s=join_s)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        run = copy_context().run  # crash points armed for the submitter hold for the job too
        self._jobs.put(partial(run, _settle, future, job))
        return future

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                run = self._jobs.get(timeout=_POLL_EVERY_S)
            except queue.Empty:
                continue
            run()


class BackgroundThreadDouble:
    """The double of `BackgroundThread`: `submit` runs the job at once."""

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _settle(future, job)
        return future


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - raised by the future
        future.set_exception(error)
