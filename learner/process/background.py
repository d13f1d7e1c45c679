"""Threads beside the loop: one for as long as a block lasts, and one that does a job at a time."""

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

_LOOK_EVERY_S = 0.2  # for the end; a job is taken up at once


@contextmanager
def background_loop(
    target: Callable[[], None], *, name: str, stopped: threading.Event, join_s: float | None = None
) -> Iterator[None]:
    """Run `target` meanwhile. It must look at `stopped`, which leaving sets, and bound whatever else it waits for: by
    `join_s`, if nothing else does, after which the thread is left to end with the process."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(join_s)


class Jobs(Protocol):
    """Whom to give what the loop does not wait for; done in the order in which it was given."""

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        """A job that is under way at the end gets `join_s` to finish; those after it are not begun."""
        ...

    def submit(self, job: Callable[[], T]) -> Future[T]: ...


class BackgroundThread:
    """A thread for them."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._stopped = threading.Event()

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        return background_loop(self._work, name=self._name, stopped=self._stopped, join_s=join_s)

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        run = copy_context().run  # crash points are armed for a job as for who gives it
        self._jobs.put(partial(run, _settle, future, job))
        return future

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                run = self._jobs.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                continue
            run()


class BackgroundThreadDouble:
    """The double of `BackgroundThread`, without a thread: a job is done when it was given."""

    def working(self, *, join_s: float) -> AbstractContextManager[None]:
        return nullcontext()

    def submit(self, job: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        _settle(future, job)
        return future


def _settle(future: Future[T], job: Callable[[], T]) -> None:
    try:
        future.set_result(job())
    except BaseException as error:  # noqa: BLE001 - whoever waits for the future gets it
        future.set_exception(error)
