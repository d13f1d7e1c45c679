"""Tasksets of verifiers, played by its own environment server in a separate interpreter: its pinned dependencies cannot
be installed beside vLLM.

    worker ──► its child: Verifiers ──► PYTHON taskset_server.py ──► verifiers' server ──► its harnesses, in processes
                                                                                             │ query the model
    worker's session of the rollout ◄────────────────────────────────────────────────────────┘

An agent (see `workers.environments.agents`) in the form of a class: one per child, which starts the server with itself.
The server does not outlive its child: it ends, with everything it has started, when its pipe closes. A child whose
server has died ends too, and the worker starts another.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from typing import Any, Protocol

_SERVER = Path(__file__).with_name("taskset_server.py")


class _Session(Protocol):
    base_url: str
    api_key: str
    model: str


class Verifiers:
    def __init__(self, *, python: str, taskset: str | Mapping[str, Any], **env: Any) -> None:
        """`python`: an interpreter that has verifiers and the taskset. `taskset`: its name, or its own configuration
        with the name as `id`. `env`: everything else in verifiers' own [env]."""
        self._server = _start(python, "play", {"env": {"taskset": taskset, **env}})
        self._waiting: dict[int, Future[dict[str, float]]] = {}
        self._numbers = itertools.count()
        first = _read(self._server)
        if first is None:
            raise RuntimeError(f"{python} ended while it loaded the taskset")
        if "error" in first:
            raise ValueError(first["error"])
        threading.Thread(target=self._listen, name="answers of verifiers", daemon=True).start()

    async def rollout(self, session: _Session, row: Mapping[str, Any]) -> dict[str, float]:
        if "verifiers" not in row:
            raise ValueError("the prompt's row has no field 'verifiers': make rows with `streamrl environment tasks`")
        number, answer = next(self._numbers), Future[dict[str, float]]()
        self._waiting[number] = answer
        endpoint = {"base_url": session.base_url, "api_key": session.api_key, "model": session.model}
        _send(self._server, {"id": number, "session": endpoint, "task": row["verifiers"]})
        try:
            return await asyncio.wrap_future(answer)
        except asyncio.CancelledError:
            _send(self._server, {"cancel": number})
            raise
        finally:
            del self._waiting[number]

    def _listen(self) -> None:
        while (reply := _read(self._server)) is not None:
            answer = self._waiting.get(reply["id"])
            with contextlib.suppress(InvalidStateError):  # it was cancelled at this very moment
                if answer is not None and "error" in reply:
                    answer.set_exception(RuntimeError(reply["error"]))
                elif answer is not None:
                    answer.set_result(reply["rewards"])
        print("verifiers' server exited; all its rollouts are lost", file=sys.stderr, flush=True)
        os._exit(1)


def tasks(python: str, taskset: Mapping[str, Any], *, first: int, count: int) -> Iterator[str]:
    """Yield rows for a prompt file, one line each. ValueError says what to fix."""
    maker = _start(python, "tasks", {"env": {"taskset": taskset}, "first": first, "count": count})
    with maker:
        while (row := _read(maker)) is not None:
            if "error" in row:
                raise ValueError(row["error"])
            yield json.dumps(row)
    if maker.returncode:
        raise ValueError(f"{python} ended with status {maker.returncode} while it made the tasks")


def _start(python: str, what: str, setup: Mapping[str, Any]) -> subprocess.Popen[str]:
    program = os.path.abspath(os.path.expanduser(python))  # not resolved: the link identifies the virtual environment
    path = os.pathsep.join([os.path.dirname(program), os.environ.get("PATH", os.defpath)])  # harnesses look for uv
    modules = os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")]))  # tools look for the taskset
    try:
        process = subprocess.Popen(
            [program, str(_SERVER), what],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PATH": path, "PYTHONPATH": modules},
            text=True,
            start_new_session=True,  # a kill of our process group must leave it time to end what it has started
        )
    except OSError as error:
        remedy = "make one with `uv venv FOLDER` and `uv pip install --python FOLDER/bin/python verifiers==0.4.0 uv`"
        raise ValueError(f"python = {python!r} cannot be run ({error.strerror}): {remedy}") from None
    _send(process, setup)
    return process


def _send(server: subprocess.Popen[str], message: Mapping[str, Any]) -> None:
    assert server.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # the reader notices that it has ended
        server.stdin.write(json.dumps(message) + "\n")
        server.stdin.flush()


def _read(server: subprocess.Popen[str]) -> dict[str, Any] | None:
    assert server.stdout is not None
    line = server.stdout.readline()
    return json.loads(line) if line else None
