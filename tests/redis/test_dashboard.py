"""The dashboard: its answers, who gets them, and the page itself in a real Chromium."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import axe_core_python
import pytest
import redis
import redis.asyncio

from streamrl.ops.cli.main import main
from streamrl.protocol.transport.keys import Keys
from streamrl.versions import make_version
from tests.browser_world import Page, chromium, find_chromium
from tests.dashboards import showing
from tests.redis.monitor_world import Watched
from tests.redis.run_world import RunWorld
from tests.terminal_world import in_terminal

NUM_STEPS = 60
_METRICS = (
    *("timers/rollout", "timers/train", "timers/publish", "policy/ratio_mean", "policy/ess"),
    *("policy/fresh_mismatch", "policy/fresh_mismatch_kl"),
    *("train_optim/loss", "train_optim/grad_norm", "train_optim/lr", "policy/entropy", "lag/mean", "lag/max"),
)


@pytest.fixture
async def run(
    tmp_path: Path, client: redis.Redis, async_client: redis.asyncio.Redis, keys: Keys, redis_url: str
) -> Watched:
    """With curves, a validation, workers and groups to browse."""
    run = Watched(RunWorld(tmp_path, client=client, async_client=async_client, keys=keys, url=redis_url))
    await run.world.train_steps(1)
    learner = run.world.learner
    await run.world.answer_all()
    for step in range(1, NUM_STEPS):
        learner.step = step
        more = dict.fromkeys(_METRICS, 0.5 + step / 100)
        more |= {"train_rollouts/init_policy_kl": step / 1e3, "throughput/tokens_per_s": 100.0 * step}
        more |= {"timers/checkpoint": 2.0} if step in (25, 50) else {}
        run.record(**{"train_rollouts/rewards": step / NUM_STEPS, "train_rollouts/response_lengths": 40.0, **more})
    learner.stream.record(30, {"val_rollouts/rewards": 0.4, "val_rollouts/response_lengths": 38.0})
    parts(run)
    return run


def parts(run: Watched) -> None:
    run.learner("train", state="working")
    for number in range(6):
        version = {"version": make_version(1, number % 2), "step": number, "tokens_per_s": 90, "in_flight": 4}
        run.worker(name=f"host-{number}", detail=version)
    run.worker("tickets", name="idle", state="waiting")


@contextmanager
def dashboard(run: Watched, *arguments: str) -> Iterator[str]:
    """Its URL; a process of its own, as people start it."""
    target = ["--redis", run.world.url, "--run", run.world.keys.name, "--port", "0"]
    command = [sys.executable, "-m", "streamrl.ops.cli.main", "dashboard", *target, *arguments]
    with showing(command) as url:
        yield url


def get(url: str, **headers: str) -> Any:
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=240) as reply:
        body = reply.read().decode()
        return json.loads(body) if "json" in reply.headers["content-type"] else body


def status_of(url: str, **headers: str) -> int:
    try:
        get(url, **headers)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def test_it_tells_view_curves_rollouts_and_metrics(run: Watched) -> None:
    with run.alive(), dashboard(run) as url:
        assert url.startswith("http://127.0.0.1:")
        told = get(f"{url}api/view")
        assert (told["view"]["run"]["name"], told["error"]) == (run.world.keys.name, "")
        assert told["versions"]["worker/host-1"][0][1] == "1.1"
        assert told["idle"]["series"]["waits for tickets"][0] == 1
        charts = {chart["name"]: chart for chart in get(f"{url}api/history")["charts"]}
        assert all(points for chart in charts.values() for points in chart["series"].values() if chart["name"] != "lag")
        assert charts["reward"]["series"]["trained"][-1][0] == NUM_STEPS - 1
        assert charts["reward"]["series"]["held out"] == [[30, 0.4]]
        first = get(f"{url}api/rollouts")[0]
        opened = get(f"{url}api/rollouts/{first['id']}")
        assert [len(opened["samples"]), opened["ticket"]] == [2, first["ticket"]]
        assert status_of(f"{url}api/rollouts/0-1") == 404
        assert f'streamrl_up{{run="{run.world.keys.name}"}} 1' in get(f"{url}metrics")


def test_a_page_of_another_site_reaches_nothing(run: Watched) -> None:
    """By a name that leads to loopback, as in DNS rebinding."""
    with dashboard(run) as url:
        assert status_of(f"{url}api/view", Host="evil.example") == 421
        assert status_of(f"{url}api/view", Host="localhost:1234") == 200
        assert status_of(f"{url}api/view", **{"Sec-Fetch-Site": "cross-site"}) == 403
        assert status_of(f"{url}api/view", Origin="http://evil.example") == 403


def test_with_a_token_only_who_has_it_sees_the_run(run: Watched, tmp_path: Path) -> None:
    token = "a-token-of-this-test"
    (tmp_path / "token").write_text(token)
    with dashboard(run, "--token-file", str(tmp_path / "token")) as base:
        assert run.world.keys.name not in get(base)
        for path in ("api/view", "api/history", "api/rollouts", "metrics"):
            assert status_of(base + path) == 401
            assert status_of(base + path, Host="127.0.0.1/#") == 421
            assert status_of(base + path, Authorization="Bearer wrong") == 401
            assert status_of(base + path, Authorization=f"Bearer {token}") == 200


def test_a_token_is_shown_on_a_terminal_and_nowhere_else(run: Watched, tmp_path: Path) -> None:
    token = "a-token-of-this-test"
    (tmp_path / "token").write_text(token)
    arguments = ["--redis", run.world.url, "--run", run.world.keys.name, "--port", "0"]
    arguments = ["dashboard", *arguments, "--token-file", str(tmp_path / "token")]
    command = [sys.executable, "-m", "streamrl.ops.cli.main", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        told = line + process.stdout.read()
    assert str(tmp_path / "token") in told
    assert token not in told
    with in_terminal(arguments, width=200) as terminal:
        terminal.shows(f"#token={token}")


def test_a_token_that_nobody_would_see_is_not_made_up(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dashboard", "--redis", run.world.url, "--run", run.world.keys.name, "--token"]) == 2
    assert "--token-file FILE" in capsys.readouterr().err


def test_beyond_loopback_a_token_is_needed(run: Watched, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["dashboard", "--redis", run.world.url, "--run", run.world.keys.name, "--host", "0.0.0.0"]
    assert main(arguments) == 2
    assert "--token" in capsys.readouterr().err


@pytest.fixture
def page() -> Iterator[Page]:
    program, why_not = find_chromium()
    if program is None:
        pytest.skip(f"no Chromium on PATH, and {why_not}: `apt-get install chromium` runs the tests of the page")
    with chromium(program) as browser:
        yield browser.page()


_HAS_DATA = """
[...document.querySelectorAll('#charts section')].length >= 8
  && [...document.querySelectorAll('#charts section')].every(one => one.querySelector('polyline, polygon'))
  && document.querySelectorAll('#workers tbody tr').length === 7
  && document.querySelectorAll('#versions polyline').length >= 6
  && document.querySelector('#idle polygon, #idle polyline, #idle svg') !== null
  && document.querySelectorAll('#rollouts button').length > 0
"""


_CUT_OFF = """
[...document.querySelectorAll('svg text')].filter(one => {
  const text = one.getBBox(), box = one.ownerSVGElement.viewBox.baseVal;
  return text.x < 0 || text.y < 0 || text.x + text.width > box.width || text.y + text.height > box.height;
}).map(one => one.textContent)
"""


@pytest.mark.parametrize(
    ("width", "height", "is_phone", "is_dark"), [(1280, 900, False, False), (390, 844, True, True)]
)
def test_the_page_shows_the_run_at_any_size(
    run: Watched, page: Page, tmp_path: Path, width: int, height: int, is_phone: bool, is_dark: bool
) -> None:
    with run.alive(), dashboard(run) as url:
        page.look(width=width, height=height, is_phone=is_phone, is_dark=is_dark)
        page.open(url)
        page.wait_for(_HAS_DATA)
        assert page.evaluate("document.getElementById('name').textContent") == run.world.keys.name
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), "it scrolls sideways"
        assert "working" in page.evaluate("document.getElementById('facts').textContent")
        assert page.evaluate(_CUT_OFF) == []
        page.evaluate("document.querySelector('#rollouts button').click()")
        page.wait_for("document.querySelectorAll('#rollout pre').length === 3")
        axe = Path(axe_core_python.__file__).with_name("axe.min.js").read_text()
        page.call("Runtime.evaluate", expression=axe)
        found = page.evaluate("axe.run().then(r => r.violations.map(v => [v.impact, v.id, v.nodes.map(n => n.html)]))")
        assert found == []
        page.screenshot(tmp_path / "page.png")
        assert page.complaints == []
        assert {request for request in page.requests if not request.startswith((url, "data:"))} == set()


def test_a_reader_looks_closer_and_is_told_what_is_shown(run: Watched, page: Page) -> None:
    with run.alive(), dashboard(run) as url:
        page.open(url)
        page.wait_for(_HAS_DATA)
        marks = "document.querySelectorAll('#chart-time path').length"
        assert page.evaluate(marks) == 2
        assert "timers/checkpoint" in page.evaluate("document.querySelector('#chart-time details').textContent")
        assert page.evaluate("document.querySelector('#facts [title*=\"step that trains it\"]') !== null")
        page.evaluate("zoomTo(20, 30)")
        first = "document.querySelector('#chart-reward svg').textContent.includes('step 20')"
        page.wait_for(first)
        assert page.evaluate(marks) == 1
        page.evaluate("at('range').value = ''; at('range').dispatchEvent(new Event('change'))")
        page.wait_for(f"!{first}")
        assert page.complaints == []


def test_the_page_says_that_redis_is_gone(run: Watched, page: Page) -> None:
    with run.alive(), dashboard(run) as url:
        page.open(url)
        page.wait_for(_HAS_DATA)
        run.world.client.execute_command("CLIENT", "PAUSE", "5000", "ALL")
        page.wait_for("!document.getElementById('gone').hidden")
        assert "Redis is gone" in page.evaluate("document.getElementById('gone').textContent")
        page.wait_for("document.getElementById('gone').hidden")


_HANGS = """
const later = window.setTimeout;
window.setTimeout = (call, ms) => later(call, ms / 20);
window.fetch = (path, {signal}) => new Promise((_, reject) =>
  signal.addEventListener('abort', () => reject(signal.reason)));
"""


def test_the_page_says_that_the_dashboard_does_not_answer(run: Watched, page: Page) -> None:
    with run.alive(), dashboard(run) as url:
        page.open(url)
        page.wait_for(_HAS_DATA)
        page.evaluate(_HANGS)
        page.wait_for("document.getElementById('gone').textContent.includes('no answer from the dashboard for 20 s')")


def test_a_choice_of_steps_that_a_browser_restores_shows_all(run: Watched, page: Page) -> None:
    with run.alive(), dashboard(run) as url:
        page.open(url)
        page.wait_for(_HAS_DATA)
        assert page.evaluate("at('range').value = 'drawn'; selected = null; historyPath()") == "/api/history"


def test_a_token_with_any_signs_opens_the_page(run: Watched, page: Page, tmp_path: Path) -> None:
    token = 'a+b/c==&d%2B#"e'
    (tmp_path / "token").write_text(token)
    with run.alive(), dashboard(run, "--token-file", str(tmp_path / "token")) as url:
        page.open(f"{url}#token={token}")
        page.wait_for(_HAS_DATA)


_INJECTED = """
const script = document.createElement('script');
script.textContent = 'window.injected = true';
document.body.append(script);
window.injected === undefined
"""


def test_a_script_that_is_not_the_pages_own_does_not_run(run: Watched, page: Page) -> None:
    with run.alive(), dashboard(run) as url:
        page.open(url)
        page.wait_for(_HAS_DATA)
        assert page.evaluate(_INJECTED)
        assert any("Content Security Policy" in complaint for complaint in map(str, page.complaints))
