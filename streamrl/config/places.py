"""Checks of the places that a configuration names: the runs' folder, Redis, the weight store, reward services and code.

Invalid addresses are reported, and passwords refused: a configuration is written to disk and into Redis. Starting a run
with a configuration permits what it names (`granted`).
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from difflib import get_close_matches
from urllib.parse import SplitResult, urlsplit

from streamrl.config.explain import Problem
from streamrl.config.schema import (
    SERVICES,
    CodeReward,
    Config,
    Environment,
    FunctionReward,
    HttpReward,
    JudgeReward,
    Tests,
)
from streamrl.permissions import Permissions
from streamrl.protocol.transport.address import FORMS, PASSWORD, SCHEMES, has_secret, masked
from streamrl.recipe.environments import ENVIRONMENTS, OF_A_NETWORK
from streamrl.recipe.own import FORMS as CODE_FORMS
from streamrl.recipe.own import is_own
from streamrl.recipe.rewards import REWARDS

LOCAL_REWARD_SERVER = "local"  # url of an http source for the run's own reward_server
EMBEDDED_REDIS = "embedded"
SANDBOX = "sandbox"  # permission for a worker to run models' programs
ADDRESS = "http://host:port with a host's name or a valid IP address"
_MAX_SCORES = 100  # the schema of a judge's answer lists each score

_SENTINELS = re.compile(r"(?P<scheme>[a-z]+\+sentinel)://[^/]+/+[^/]")  # several hosts, and a service name
_SOCKET = re.compile(r"unix://([^/@]+@)?/")
_NO_ADDRESS = re.compile(r"[\s\x00-\x1f\x7f]")  # which urlsplit partly strips, and clients refuse
_DOTTED = re.compile(r"[0-9]+(\.[0-9]+)+")
_NO_PASSWORD = "a configuration is written to disk and into Redis, so it must not hold a password"
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:(/|\Z)", re.IGNORECASE)  # of a URL; as a path it has lost a slash
_OBJECT_STORE = re.compile(r"(?P<scheme>[a-z][a-z0-9+-]*)://[^/\s]\S*\Z")


def granted(config: Config) -> Permissions:
    """Return the permissions for what it names: user code (built-ins need none) with its network and environment,
    judges' environment, and `name:port` of each service, replicas included, except the run's own reward server."""
    code: list[FunctionReward | Environment] = [
        one for one in config.rewards.values() if isinstance(one, FunctionReward)
    ]
    code += [] if config.environment is None else [config.environment]
    urls = [url for one in config.rewards.values() if isinstance(one, SERVICES) for url in one.urls]
    urls += [] if config.environment is None else config.environment.urls
    urls += [] if config.teacher is None else config.teacher.urls
    sandbox = {SANDBOX for one in config.rewards.values() if isinstance(one, CodeReward)}
    judges = [judge for one in config.rewards.values() if isinstance(one, JudgeReward) for judge in one.judges.values()]
    variables = [name for one in code for name in one.environment]
    variables += [judge.token_env for judge in judges if judge.token_env is not None]
    return Permissions(
        reward_code=(*(one.target for one in code if one.target and ":" in one.target), *sandbox),
        reward_network=tuple(one.target for one in code if one.target and one.network),
        reward_environment=tuple(dict.fromkeys(variables)),
        hosts=tuple(urlsplit(url).netloc for url in urls if url != LOCAL_REWARD_SERVER),
    )


def judge_base(url: str) -> str:
    """Return the base URL of a judge, to which clients add a path; one without a path gets /v1."""
    base = url.rstrip("/")
    return base if urlsplit(base).path else f"{base}/v1"


def teacher_base(url: str) -> str:
    """Return the root of a teacher's server, which may be given as OpenAI's clients want it, with /v1."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


def is_object_store(url: str) -> bool:
    """Return whether it is a URL that fsspec may know as a writable store."""
    match = _OBJECT_STORE.match(url)
    return match is not None and match["scheme"] not in ("file", "http", "https", "redis", "rediss", "unix")


def check_rewards(config: Config) -> Iterator[Problem]:
    if not config.rewards and config.environment is None and config.teacher is None:
        remedy = "set at least one reward source, an environment that gives rewards, or a teacher"
        yield Problem(key="rewards", remedy=remedy)
    if config.environment is not None:
        yield from _check_environment(config, config.environment)
    for name, source in config.rewards.items():
        if isinstance(source, HttpReward):
            yield from _check_service(config, name, source)
        elif isinstance(source, JudgeReward):
            yield from _check_judges(name, source)
        elif isinstance(source, FunctionReward):
            yield from _check_function(name, source)
    if config.reward_server is not None and not any(isinstance(r, HttpReward) for r in config.rewards.values()):
        remedy = f"no reward source uses this server; add one of type http with url: {LOCAL_REWARD_SERVER}"
        yield Problem(key="reward_server.model", remedy=remedy)


def _check_function(name: str, source: FunctionReward) -> Iterator[Problem]:
    if source.target not in REWARDS and not is_own(source.target):
        nearest = get_close_matches(source.target, REWARDS, n=1)
        remedy = f"must be one of {', '.join(REWARDS)}, or your own code as {CODE_FORMS}"
        remedy += f"; did you mean {nearest[0]!r}?" if nearest else ""
        yield Problem(key=f"rewards.{name}.target", value=source.target, remedy=remedy)
    elif source.of_group and source.target in REWARDS:
        remedy = f"must be false: {source.target} scores one sample at a time"
        yield Problem(key=f"rewards.{name}.of_group", remedy=remedy)
    elif source.per_token and (source.of_group or source.target in REWARDS):
        remedy = "must be false: only your own functions return a number per token, and only without of_group"
        yield Problem(key=f"rewards.{name}.per_token", remedy=remedy)


def _check_environment(config: Config, environment: Environment) -> Iterator[Problem]:
    if environment.target is None:
        yield from _check_service_environment(environment)
    elif environment.urls:
        remedy = f"environment.target = {environment.target!r} is set as well; set one of the two to its default"
        yield Problem(key="environment.urls", value=list(environment.urls), remedy=remedy)
    elif environment.target not in ENVIRONMENTS and not is_own(environment.target):
        remedy = f"must be one of {', '.join(ENVIRONMENTS)}, or your own class as {CODE_FORMS}"
        yield Problem(key="environment.target", value=environment.target, remedy=remedy)
    if environment.target in OF_A_NETWORK and not environment.network:
        yield Problem(key="environment.network", remedy=f"{OF_A_NETWORK[environment.target]}, so it must be true")
    if "environment" in config.rewards:
        remedy = "`environment` is the name of the environment's own rewards: rename this source"
        yield Problem(key="rewards.environment", remedy=remedy)


def check_teacher(config: Config) -> Iterator[Problem]:
    """Check that the teacher has exactly one place."""
    teacher = config.teacher
    if teacher is None:
        return
    if teacher.path is None and not teacher.urls:
        remedy = "set it to a model, or set teacher.urls to the vLLM servers that serve it"
        yield Problem(key="teacher.path", remedy=remedy)
    elif teacher.path is not None and teacher.urls:
        remedy = f"teacher.path = {teacher.path!r} is set as well; set one of the two to its default"
        yield Problem(key="teacher.urls", value=list(teacher.urls), remedy=remedy)
    yield from _service_urls("teacher.urls", teacher.urls)


def _service_urls(key: str, urls: tuple[str, ...]) -> Iterator[Problem]:
    for url in urls:
        parts = split_address(url)
        if parts is None or parts.username is not None or parts.query:
            remedy = f"must be {ADDRESS}, without user and query; put a bearer token in a file (token_file)"
            yield Problem(key=key, value=url, remedy=remedy)


def _check_service_environment(environment: Environment) -> Iterator[Problem]:
    """Check an environment that is a service."""
    if not environment.urls:
        remedy = f"must be one of {', '.join(ENVIRONMENTS)}, or your code as {CODE_FORMS}; or set `urls` to a service"
        yield Problem(key="environment.target", remedy=remedy)
    if environment.options:
        remedy = "a service gets its options where it is started; remove them"
        yield Problem(key="environment.options", remedy=remedy)
    yield from _service_urls("environment.urls", environment.urls)


def _check_service(config: Config, name: str, source: HttpReward) -> Iterator[Problem]:
    if source.tests != Tests() and source.form != "sandbox-fusion":
        remedy = f"apply only to form = sandbox-fusion, and this source has {source.form}; remove them"
        yield Problem(key=f"rewards.{name}.tests", remedy=remedy)
    elif source.form == "sandbox-fusion" and source.timeout_s <= source.tests.time_s:
        remedy = f"must be more than rewards.{name}.tests.time_s = {source.tests.time_s:g}: a program that runs for so "
        remedy += "long scores 0 only if the service can still say so; otherwise its sample fails"
        yield Problem(key=f"rewards.{name}.timeout_s", remedy=remedy)
    for index, url in enumerate(source.urls):
        key = f"rewards.{name}.replicas" if index else f"rewards.{name}.url"
        if url == LOCAL_REWARD_SERVER:
            if config.reward_server is None:
                yield Problem(key=key, value=url, remedy="there is no reward_server section; add one, or set a URL")
            elif source.form not in ("streamrl", "openrlhf"):
                remedy = "the run's own reward_server supports the forms streamrl and openrlhf only"
                yield Problem(key=f"rewards.{name}.form", value=source.form, remedy=remedy)
            continue
        parts = split_address(url)
        if parts is None:
            remedy = f"must be {ADDRESS}, or {LOCAL_REWARD_SERVER} for the run's own reward_server"
            yield Problem(key=key, value=url, remedy=remedy)
        elif parts.username is not None or parts.query:
            remedy = f"must have no user and no query; put a bearer token in a file (rewards.{name}.token_file)"
            yield Problem(key=key, value=url, remedy=remedy)


def split_address(url: str) -> SplitResult | None:
    """Return the parts of a service's address; None if no client would take it. It may have a user and a query."""
    parts = _split(url, ("http", "https"))
    if parts is None or _NO_ADDRESS.search(url):
        return None
    host = parts.hostname or ""
    try:
        return parts if not _DOTTED.fullmatch(host) or ipaddress.IPv4Address(host) else None
    except ValueError:
        return None


def _check_judges(name: str, source: JudgeReward) -> Iterator[Problem]:
    key, (low, high) = f"rewards.{name}", source.scale
    if not source.judges:
        yield Problem(key=f"{key}.judges", remedy="set at least one: {big: {url: https://host/v1, model: ...}}")
    if not low < high <= low + _MAX_SCORES:
        remedy = f"must be the worst and the best score, at most {_MAX_SCORES} apart"
        yield Problem(key=f"{key}.scale", value=list(source.scale), remedy=remedy)
    if source.against is not None and source.form == "pointwise":
        remedy = "form = pointwise makes no comparisons: set form to pairwise, or show the field to judges (show)"
        yield Problem(key=f"{key}.against", value=source.against, remedy=remedy)
    for judge_name, judge in source.judges.items():
        judge_key = f"{key}.judges.{judge_name}"
        for index, url in enumerate(judge.urls):
            parts = split_address(url)
            if parts is None or parts.username is not None or parts.query:
                remedy = "must be https://host/v1 with a host's name or a valid IP address, without user and query; "
                remedy += "pass a key by token_file or token_env"
                yield Problem(key=f"{judge_key}.replicas" if index else f"{judge_key}.url", value=url, remedy=remedy)
        if judge.token_file is not None and judge.token_env is not None:
            yield Problem(key=f"{judge_key}.token_env", remedy="token_file is set as well; remove one of the two")


def check_redis(config: Config) -> Iterator[Problem]:
    url = config.redis.url
    if url == EMBEDDED_REDIS:
        return
    if not _is_server(url):
        yield Problem(key="redis.url", remedy=f"must be {FORMS}, or {EMBEDDED_REDIS}")
    elif has_secret(url):
        remedy = f"{_NO_PASSWORD}; keep the user only, and set {PASSWORD}_FILE in the environment to a file with it"
        yield Problem(key="redis.url", remedy=remedy)


def check_store(config: Config) -> Iterator[Problem]:
    store = config.weights.store
    if store != "redis:" and not store.removeprefix("file:").startswith("/") and not is_object_store(store):
        remedy = "must be redis:, file:/a/path that all machines share, or an object store such as s3://bucket/folder"
        yield Problem(key="weights.store", remedy=remedy)
    elif masked(store) != store:
        remedy = f"{_NO_PASSWORD}; put the store's credentials in each machine's environment"
        yield Problem(key="weights.store", remedy=remedy)
    elif "$" in store and not is_object_store(store):
        yield _literal("weights.store")


def check_dir(config: Config) -> Iterator[Problem]:
    folder = str(config.dir)
    if _SCHEME.match(folder):
        remedy = "must be a folder on a disk that all machines of the learner share: it is read as a path, not as a URL"
        yield Problem(key="dir", value=folder, remedy=remedy)
    elif folder.startswith("~") or "$" in folder:
        yield _literal("dir")


def _literal(key: str) -> Problem:
    """Of a folder that would be created under a name that only a shell replaces."""
    remedy = (
        f"~ and $ are taken literally: write the path out, or give {key} on the command line with $HOME in double "
        "quotes, which the shell replaces"
    )
    return Problem(key=key, remedy=remedy)


def _is_server(url: str) -> bool:
    if _SOCKET.match(url):
        return True
    if match := _SENTINELS.match(url):
        return match["scheme"] in SCHEMES
    return _split(url, SCHEMES) is not None


def _split(text: str, schemes: tuple[str, ...]) -> SplitResult | None:
    """Return the parsed URL; None unless it has one of the schemes, a host, and a usable port if any."""
    try:
        parts = urlsplit(text)
        return parts if parts.scheme in schemes and parts.hostname and parts.port != 0 else None
    except ValueError:  # a port that is not a number, an unclosed bracket
        return None
