"""The program that plays or generates tasks of verifiers. It runs in an interpreter that has verifiers and none of
streamrl's packages, and exchanges JSON lines over stdin and stdout.

    tasks    {"env", "first", "count"} ──► rows, or {"error"}
    play     {"env"} ──► {} or {"error"}
             {"id", "session", "task"} ──► {"id", "rewards"} or {"id", "error"}
             {"cancel": id}

It uses the exported API of verifiers: `EnvServer` plays, and `EnvClient` talks to it over a socket in a private folder.
The server's harnesses query their model over OpenAI's API, served by the rollout's session. The program ends when its
stdin closes: rollouts are cancelled, and `_END_S` later it exits in any case.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

_END_S = 10.0
_MAX_ERROR_CHARS = 500
_NO_KEY = "STREAMRL_HAS_NO_SUCH_VARIABLE"  # each rollout has its own key, sent in a header instead


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # tasksets may print anything
    sys.path[0] = os.getcwd()  # a taskset may be there; this file's own folder is of no use
    setup = json.loads(sys.stdin.readline())
    try:
        config = _config(setup["env"])
        if sys.argv[1] == "tasks":
            for row in _rows(config, setup["first"], setup["count"]):
                _send(answers, row)
            return
    except Exception as error:  # noqa: BLE001 - a taskset may raise anything
        _send(answers, {"error": _error_text(error)})
        return
    asyncio.run(_play(config, answers))


def _config(env: dict[str, Any]) -> Any:
    """Resolve the configuration as verifiers does, with safer defaults. Unless its author or the user says otherwise, a
    role runs in a process of this machine with only the tools of its task: the usual default, a shell for the model,
    must not run on a worker without being asked for."""
    import verifiers.v1 as vf

    taskset = {"id": env["taskset"]} if isinstance(env["taskset"], str) else dict(env["taskset"])
    env = {**env, "taskset": taskset}
    for name, field in vf.env_config_type(taskset.get("id", ""), env.get("id", "")).model_fields.items():
        if not isinstance(field.default, vf.AgentConfig):
            continue
        role = env[name] = dict(env.get(name, {}))
        if "runtime" not in field.default.model_fields_set:
            role.setdefault("runtime", {"type": "subprocess"})
        if field.default.harness is None and vf.default_harness_id(taskset["id"]) == "bash":
            role.setdefault("harness", {"id": "null"})
    return vf.resolve_env_config(env)


def _rows(config: Any, first: int, count: int) -> Iterator[dict[str, Any]]:
    import verifiers.v1 as vf

    for task in itertools.islice(vf.load_taskset(config.taskset), first, first + count):
        data = task.data.model_dump(mode="json", exclude_defaults=True)
        yield {"messages": _messages(task.data), "verifiers": data}


def _messages(data: Any) -> list[dict[str, str]]:
    """Return the messages for people and rewards; the harness decides what the model is really asked."""
    from verifiers.v1.types import content_text

    messages = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
    if isinstance(data.prompt, str):
        messages.append({"role": "user", "content": data.prompt})
    else:
        messages += [{"role": message.role, "content": content_text(message.content)} for message in data.prompt or ()]
    return messages or [{"role": "user", "content": data.name or f"task {data.idx}"}]


async def _play(config: Any, answers: TextIO) -> None:
    from verifiers.v1.serve import EnvClient, EnvServer

    with tempfile.TemporaryDirectory(prefix="streamrl-", dir="/tmp") as folder:  # a path short enough for a socket
        try:
            server = EnvServer(config, address=f"ipc://{folder}/server")
        except Exception as error:  # noqa: BLE001 - as above
            _send(answers, {"error": _error_text(error)})
            return
        serving = asyncio.create_task(server.run())
        client = EnvClient(server.address)
        await client.wait_for_server_startup(interval=0.1)
        _send(answers, {})
        asking = asyncio.create_task(_answer_calls(client, answers))
        await asyncio.wait([serving, asking], return_when=asyncio.FIRST_COMPLETED)
        for task in (asking, serving):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        await client.close()


async def _answer_calls(client: Any, answers: TextIO) -> None:
    calls: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    threading.Thread(target=_listen, args=(loop, calls), daemon=True).start()
    running: dict[int, asyncio.Task[None]] = {}

    async def answer(call: dict[str, Any]) -> None:
        try:
            outcome = await _rollout(client, call)
        except Exception as error:  # noqa: BLE001 - it fails only this rollout
            outcome = {"error": _error_text(error)}
        finally:
            del running[call["id"]]
        _send(answers, {"id": call["id"], **outcome})

    while line := await calls.get():
        call = json.loads(line)
        if "cancel" not in call:
            running[call["id"]] = asyncio.create_task(answer(call))
        elif call["cancel"] in running:
            running[call["cancel"]].cancel()


def _listen(loop: asyncio.AbstractEventLoop, calls: asyncio.Queue[str]) -> None:
    while line := sys.stdin.readline():
        loop.call_soon_threadsafe(calls.put_nowait, line)
    loop.call_soon_threadsafe(calls.put_nowait, "")
    time.sleep(_END_S)
    os._exit(1)


async def _rollout(client: Any, call: dict[str, Any]) -> dict[str, Any]:
    import verifiers.v1 as vf

    session = call["session"]
    endpoint = vf.EvalClientConfig(
        base_url=session["base_url"], api_key_var=_NO_KEY, headers={"x-api-key": session["api_key"]}
    )
    episode = await client.run(
        client=endpoint, model=session["model"], sampling=vf.SamplingConfig(), task_data=call["task"]
    )
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        last = f"{errors[-1].type}: {errors[-1].message}" if errors else "verifiers reported a failure without a reason"
        return {"error": last[:_MAX_ERROR_CHARS]}
    rewards: dict[str, float] = {}
    for trace in episode.traces:
        for name, reward in trace.rewards.items():
            if reward is not None:
                rewards[name] = rewards.get(name, 0.0) + reward.value
    return {"rewards": rewards} if rewards else {"error": "the task returned no reward"}


def _error_text(error: Exception) -> str:
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == "verifiers":
        remedy = f"`uv pip install --python {sys.executable} verifiers==0.4.0 uv`"
        return f"{sys.executable} has no verifiers 0.4 ({error}): {remedy}"
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:_MAX_ERROR_CHARS]


def _send(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main()
