"""A sandbox service, in SandboxFusion's form: what it is asked, and that its failures are never a score."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.errors import ConfigError, RewardError
from tests.http_reward_world import connect
from tests.tiny_rewards import make_item

Answer = Callable[[dict[str, Any]], dict[str, Any]]
SUMS = [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]


def ran(stdout: str = "", *, code: int = 0, stderr: str = "", status: str = "Finished") -> dict[str, Any]:
    result = {"status": status, "execution_time": 0.1, "return_code": code, "stdout": stdout, "stderr": stderr}
    return {"status": "Success" if code == 0 else "Failed", "message": "", "compile_result": None, "run_result": result}


def service(answer: Answer, **settings: Any) -> tuple[Any, list[dict[str, Any]]]:
    asked: list[dict[str, Any]] = []

    def respond(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/run_code"
        asked.append(json.loads(request.content))
        return httpx.Response(200, json=answer(asked[-1]))

    return connect(respond, form="sandbox-fusion", **settings), asked


def adds(question: dict[str, Any]) -> dict[str, Any]:
    return ran(f"{sum(map(int, question['stdin'].split()))}\n")


def to_the_end(question: dict[str, Any]) -> dict[str, Any]:
    """Of a test behind the program: it prints what stands in its last line."""
    [word] = re.findall(r"print\('(\w+)', flush=True\)\n\Z", question["code"])
    return ran(f"something\n{word}\n")


async def test_each_test_is_a_request_in_the_services_own_form() -> None:
    reward, asked = service(adds, tests={"time_s": 3.0, "memory_mb": 128})

    assert await reward.score(make_item("```python\nprint(3)\n```", tests=SUMS)) == 1.0

    limits = {"run_timeout": 3.0, "compile_timeout": 3.0, "memory_limit_MB": 128}
    assert asked == [{"code": "print(3)\n", "language": "python", "stdin": one["input"], **limits} for one in SUMS]
    await reward.close()


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (adds, 0.5),
        (lambda question: ran(code=1, stderr="Traceback\nValueError: no"), 0.0),
        (lambda question: ran(code=-9, status="TimeLimitExceeded"), 0.0),
    ],
)
async def test_a_program_that_fails_has_a_low_score(answer: Answer, score: float) -> None:
    reward, _ = service(answer, tests={"partial": True})

    assert await reward.score(make_item(tests=[SUMS[0], {"input": "2 2", "output": "5"}])) == score
    await reward.close()


@pytest.mark.parametrize(("answer", "score"), [(to_the_end, 1.0), (lambda question: ran("something"), 0.0)])
async def test_a_test_behind_the_program_must_come_to_its_end(answer: Answer, score: float) -> None:
    reward, _ = service(answer)

    assert await reward.score(make_item("exit()", tests=["assert f(1) == 2"])) == score
    await reward.close()


NO_RESULT = "the answer has no run result"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (
            {"status": "SandboxError", "message": "no container", "run_result": None},
            "answered SandboxError: no container",
        ),
        ({"status": "Success"}, NO_RESULT),
        ({"status": "Success", "run_result": {"status": "Error", "return_code": None}}, NO_RESULT),
        ({"status": "Success", "run_result": {"status": "Finished", "return_code": None}}, NO_RESULT),
        ({"status": "Success", "run_result": 3}, NO_RESULT),
        ({"nonsense": True}, NO_RESULT),
    ],
)
async def test_what_the_service_could_not_do_is_asked_again_and_never_a_score(
    answer: dict[str, Any], reason: str
) -> None:
    reward, asked = service(lambda question: answer, attempts=2)
    with pytest.raises(RewardError, match=reason):
        await reward.score(make_item(tests=SUMS))
    assert len(asked) == 2
    await reward.close()

    answers = iter([answer, ran("3"), ran("4")])
    reward, asked = service(lambda question: next(answers), attempts=2)
    assert await reward.score(make_item(tests=SUMS)) == 1.0
    await reward.close()


async def test_a_row_without_tests_asks_nobody() -> None:
    reward, asked = service(adds)
    with pytest.raises(RewardError, match="no field 'tests'"):
        await reward.score(make_item())
    assert asked == []
    await reward.close()


def test_tests_of_a_service_that_runs_no_programs_are_a_mistake() -> None:
    words = "rewards={judge: {type: http, url: 'http://127.0.0.1:1', tests: {time_s: 1}}}"
    loaded = load_config("conf/reinforce.yaml", ["model.path=x", words, "reward_server=null"])
    with pytest.raises(ConfigError, match=r"rewards\.judge\.tests = a map: apply only to form = sandbox-fusion"):
        check_config(loaded.config, loaded.origin)


@pytest.mark.parametrize(("time_s", "timeout_s"), [(30.0, 30.0), (40.0, 30.0)])
def test_a_program_that_loops_must_have_its_time_before_its_request_is_given_up(
    time_s: float, timeout_s: float
) -> None:
    limits = f"tests: {{time_s: {time_s}}}, timeout_s: {timeout_s}"
    words = f"rewards={{right: {{type: http, url: 'http://h:1', form: sandbox-fusion, {limits}}}}}"
    loaded = load_config("conf/reinforce.yaml", ["model.path=x", words, "reward_server=null"])
    with pytest.raises(ConfigError, match=rf"rewards\.right\.timeout_s = {timeout_s}: .*tests\.time_s = {time_s:g}"):
        check_config(loaded.config, loaded.origin)
