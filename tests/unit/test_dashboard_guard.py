"""Who gets an answer of the dashboard: by Host, by what browsers say of a page, by the token; whatever bytes come."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrl.ops.monitor.web.guard import Guard, Refusal, headers_for
from streamrl.ops.monitor.web.server import read_page

HERE, OPEN = Guard(listens_on="127.0.0.1"), Guard(listens_on="0.0.0.0", token="right", names=("board.example",))
RIGHT = {"authorization": "Bearer right"}


def status(guard: Guard, path: str = "/api/view", **headers: str) -> int:
    given = {name.replace("_", "-"): text for name, text in headers.items()}
    refused = guard.refusal(path, {"host": "127.0.0.1:8420", **given})
    return refused.status if refused else 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.1:8420", "localhost:1", "[::1]:8420", "LOCALHOST"])
def test_on_loopback_it_answers_to_loopback(host: str) -> None:
    assert status(HERE, host=host) == 200


FOREIGN = ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8420", "", "127.0.0.1:8420/#", "[", "a b"]


@pytest.mark.parametrize("path", ["/", "/api/view", "/metrics"])
@pytest.mark.parametrize("host", [*FOREIGN, "10.0.0.1", "board.example"])
def test_on_loopback_a_name_that_leads_there_is_refused(host: str, path: str) -> None:
    assert status(HERE, path, host=host) == 421


@pytest.mark.parametrize("host", ["10.0.0.1:8420", "[fd00::1]:8420", "board.example", "0.0.0.0:8420", "localhost"])
def test_beyond_loopback_it_answers_to_addresses_and_to_names_that_were_allowed(host: str) -> None:
    assert status(OPEN, host=host, **RIGHT) == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_beyond_loopback_a_name_that_was_not_allowed_is_refused(host: str) -> None:
    assert status(OPEN, host=host, **RIGHT) == 421


@pytest.mark.parametrize("host", ["127.0.0.1/#", "127.0.0.1/?", "127.0.0.1:8420?x=", "localhost#", "127.0.0.1\\"])
def test_no_host_makes_a_path_another_one(host: str) -> None:
    """By a framework's URL, made of both, the path may become that of the page, which needs no token."""
    assert status(OPEN, host=host) == 421


def test_the_token_is_needed_for_all_but_the_page() -> None:
    assert [status(OPEN, path) for path in ("/", "/api/view", "/metrics", "//", "/nothing")] == [
        200,
        401,
        401,
        401,
        401,
    ]
    assert status(OPEN, authorization="Bearer wrong") == 401
    assert status(OPEN, authorization="Bearer r\u00efght") == 401
    assert status(OPEN, **RIGHT) == 200


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"sec_fetch_site": "same-origin"}, 200),
        ({"sec_fetch_site": "none"}, 200),
        ({"sec_fetch_site": "cross-site"}, 403),
        ({"sec_fetch_site": "same-site"}, 403),
        ({"origin": "http://127.0.0.1:8420"}, 200),
        ({"origin": "http://evil.example"}, 403),
        ({"origin": "null"}, 403),
        ({}, 200),  # no browser
    ],
)
def test_what_another_sites_page_asks_for_is_refused(headers: dict[str, str], expected: int) -> None:
    assert status(HERE, **headers) == expected
    assert status(HERE, "/", **headers) == 200, "a link to the page is one"


@given(st.text(), st.dictionaries(st.sampled_from(["host", "origin", "sec-fetch-site", "authorization"]), st.text()))
def test_any_request_is_answered_or_refused(path: str, headers: dict[str, str]) -> None:
    refused = OPEN.refusal(path, headers)
    assert refused is None or isinstance(refused, Refusal)
    assert refused is not None or path == "/" or headers.get("authorization") in ("right", "Bearer right")


def test_browsers_run_the_scripts_of_the_page_and_no_others() -> None:
    page = read_page()
    policy = headers_for(page)["Content-Security-Policy"]
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    script_source = re.search(r"script-src ([^;]*)", policy)
    assert script_source
    assert "unsafe" not in script_source[1]
    assert "frame-ancestors 'none'" in policy
    assert not any("*" in text for text in headers_for(page).values())
    assert not re.search(r"<[^>]+\son[a-z]+=", page), "a handler in an attribute would not run"
