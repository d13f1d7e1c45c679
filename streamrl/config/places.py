"""The places that a configuration names: Redis, the store of weights, reward services and code.

What is no address is told, and what holds a password is refused: a configuration is written to disk and into Redis.
Whoever starts a run with a configuration has thereby allowed what it names (`granted`).

The files that a configuration names: there, readable, and what they should be. Looked at before a run starts
anything, so that a wrong path costs a second and not a minute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from streamrl.config.explain import Problem
from streamrl.config.schema import Config, Dataset, Environment, FunctionReward, HttpReward, NamedDataset
from streamrl.data.dataset import MADE, SOURCES
from streamrl.data.prompts import read_prompts
from streamrl.errors import DataError
from streamrl.permissions import Permissions
from streamrl.protocol.transport.address import FORMS, PASSWORD, SCHEMES, has_secret, masked
from streamrl.recipe.environments import ENVIRONMENTS, OF_A_NETWORK
from streamrl.recipe.own import FILES, is_own
from streamrl.recipe.own import FORMS as CODE_FORMS
from streamrl.recipe.rewards import REWARDS

LOCAL_REWARD_SERVER = "local"  # the url of an http source that means the run's own reward_server
EMBEDDED_REDIS = "embedded"

_SENTINELS = re.compile(r"(?P<scheme>[a-z]+\+sentinel)://[^/]+/+[^/]")  # several hosts, and a service
_SOCKET = re.compile(r"unix://([^/@]+@)?/")
_NO_PASSWORD = "a configuration is written to disk and into Redis, so it must not hold a password"
_OBJECT_STORE = re.compile(r"(?P<scheme>[a-z][a-z0-9+-]*)://[^/\s]\S*\Z")


def granted(config: Config) -> Permissions:
    """What it names: the user's functions and environment (what is built in needs nobody's word), what those want of
    their worker's machine, and `name:port` of each service that is asked, replicas too; not the run's own reward
    server."""
    code: list[FunctionReward | Environment] = [
        one for one in config.rewards.values() if isinstance(one, FunctionReward)
    ]
    code += [] if config.environment is None else [config.environment]
    urls = [url for one in config.rewards.values() if isinstance(one, HttpReward) for url in one.urls]
    urls += [] if config.environment is None else config.environment.urls
    return Permissions(
        reward_code=tuple(one.target for one in code if one.target and ":" in one.target),
        reward_network=tuple(one.target for one in code if one.target and one.network),
        reward_environment=tuple(dict.fromkeys(name for one in code for name in one.environment)),
        hosts=tuple(urlsplit(url).netloc for url in urls if url != LOCAL_REWARD_SERVER),
    )


def is_object_store(url: str) -> bool:
    """Whether it is the URL of a place that fsspec may know, and that can be written to."""
    match = _OBJECT_STORE.match(url)
    return match is not None and match["scheme"] not in ("file", "http", "https", "redis", "rediss", "unix")


def check_rewards(config: Config) -> Iterator[Problem]:
    if not config.rewards and config.environment is None:
        remedy = "name at least one source of rewards, or an environment that gives them"
        yield Problem(key="rewards", remedy=remedy)
    if config.environment is not None:
        yield from _check_environment(config, config.environment)
    for name, source in config.rewards.items():
        if isinstance(source, HttpReward):
            yield from _check_service(config, name, source)
        elif source.target not in REWARDS and not is_own(source.target):
            nearest = get_close_matches(source.target, REWARDS, n=1)
            remedy = f"must be one of {', '.join(REWARDS)}, or code of yours as {CODE_FORMS}"
            remedy += f"; did you mean {nearest[0]!r}?" if nearest else ""
            yield Problem(key=f"rewards.{name}.target", value=source.target, remedy=remedy)
    if config.reward_server is not None and not any(isinstance(r, HttpReward) for r in config.rewards.values()):
        remedy = f"no reward source asks this server; add one of type http with url: {LOCAL_REWARD_SERVER}"
        yield Problem(key="reward_server.model", remedy=remedy)


def _check_environment(config: Config, environment: Environment) -> Iterator[Problem]:
    if environment.target is None:
        yield from _check_players(environment)
    elif environment.urls:
        remedy = f"rollouts are those of target = {environment.target!r}; set one of the two to its default"
        yield Problem(key="environment.urls", value=list(environment.urls), remedy=remedy)
    elif environment.target not in ENVIRONMENTS and not is_own(environment.target):
        remedy = f"must be one of {', '.join(ENVIRONMENTS)}, or a class of yours as {CODE_FORMS}"
        yield Problem(key="environment.target", value=environment.target, remedy=remedy)
    if environment.target in OF_A_NETWORK and not environment.network:
        yield Problem(key="environment.network", remedy=f"{OF_A_NETWORK[environment.target]}, so it must be true")
    if "environment" in config.rewards:
        remedy = "is the name of what the environment gives: call this source otherwise"
        yield Problem(key="rewards.environment", remedy=remedy)


def _check_players(environment: Environment) -> Iterator[Problem]:
    """A service's addresses."""
    if not environment.urls:
        remedy = f"name one of {', '.join(ENVIRONMENTS)}, code of yours as {CODE_FORMS}, or by `urls` a service"
        yield Problem(key="environment.target", remedy=remedy)
    if environment.options:
        remedy = "a service has its options from who begins it; take them away"
        yield Problem(key="environment.options", remedy=remedy)
    for url in environment.urls:
        parts = _split(url, ("http", "https"))
        if parts is None or parts.username is not None or parts.query:
            remedy = "must be http://host:port, with no user and no query; token_file names a file with a bearer token"
            yield Problem(key="environment.urls", value=url, remedy=remedy)


def _check_service(config: Config, name: str, source: HttpReward) -> Iterator[Problem]:
    for index, url in enumerate(source.urls):
        key = f"rewards.{name}.replicas" if index else f"rewards.{name}.url"
        if url == LOCAL_REWARD_SERVER:
            if config.reward_server is None:
                yield Problem(key=key, value=url, remedy="there is no reward_server section that it could mean")
            elif source.form not in ("streamrl", "openrlhf"):
                remedy = "the run's own reward_server answers the forms streamrl and openrlhf"
                yield Problem(key=f"rewards.{name}.form", value=source.form, remedy=remedy)
            continue
        parts = _split(url, ("http", "https"))
        if parts is None:
            remedy = f"must be http://host:port, or {LOCAL_REWARD_SERVER} for the run's own reward_server"
            yield Problem(key=key, value=url, remedy=remedy)
        elif parts.username is not None or parts.query:
            remedy = f"must name no user and no query; a file with a bearer token is named by rewards.{name}.token_file"
            yield Problem(key=key, value=url, remedy=remedy)


def check_redis(config: Config) -> Iterator[Problem]:
    url = config.redis.url
    if url == EMBEDDED_REDIS:
        return
    if not _is_server(url):
        yield Problem(key="redis.url", remedy=f"must be {FORMS}, or {EMBEDDED_REDIS}")
    elif has_secret(url):
        remedy = f"{_NO_PASSWORD}; leave the user only, and name a file that holds the password in the environment: "
        yield Problem(key="redis.url", remedy=f"{remedy}{PASSWORD}_FILE")


def check_store(config: Config) -> Iterator[Problem]:
    store = config.weights.store
    if store != "redis:" and not store.removeprefix("file:").startswith("/") and not is_object_store(store):
        remedy = "must be redis:, file:/a/path that all machines share, or an object store such as s3://bucket/folder"
        yield Problem(key="weights.store", remedy=remedy)
    elif masked(store) != store:
        remedy = f"{_NO_PASSWORD}; each machine's environment has the credentials of the store"
        yield Problem(key="weights.store", remedy=remedy)


def _is_server(url: str) -> bool:
    if _SOCKET.match(url):
        return True
    if match := _SENTINELS.match(url):
        return match["scheme"] in SCHEMES
    return _split(url, SCHEMES) is not None


def _split(text: str, schemes: tuple[str, ...]) -> SplitResult | None:
    """None when it is no URL of one of these schemes with a host, and a port that one can connect to if any."""
    try:
        parts = urlsplit(text)
        return parts if parts.scheme in schemes and parts.hostname and parts.port != 0 else None
    except ValueError:  # a port that is no number, a bracket that is not closed
        return None


_LFS_POINTER = b"version https://git-lfs"
# One of these makes a folder a tokenizer's.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "tekken.json")


# Settings that datasets of one kind alone have.
_OF_SOURCES = {
    **dict.fromkeys(("name", "split", "revision"), ("hub",)),
    **dict.fromkeys(("size", "seed", "options"), MADE),
    "level": ("reasoning_gym",),
}


def check_datasets(config: Config) -> Iterator[Problem]:
    """Each lies in one place, and has no setting that would do nothing there."""
    for one in config.data.datasets():
        dataset, key = one.dataset, one.key.removesuffix(f".{one.dataset.source}")
        named = [name for name in SOURCES if getattr(dataset, name) is not None]
        if not named:
            remedy = f"name a file of JSON Lines, or what holds prompts by one of {', '.join(SOURCES[1:])}"
            yield Problem(key=f"{key}.path", remedy=remedy)
        for name in named[1:]:
            remedy = f"the dataset is that of {named[0]} = {getattr(dataset, named[0])!r}; set one to null"
            yield Problem(key=f"{key}.{name}", remedy=remedy)
        for name, sources in _OF_SOURCES.items():
            if dataset.source not in sources and getattr(dataset, name) != Dataset().model_dump()[name]:
                remedy = f"it is of a dataset of {' or '.join(sources)}, and this one is of {dataset.source}"
                yield Problem(key=f"{key}.{name}", remedy=remedy)
    held_out = config.data.validation
    if isinstance(held_out, Dataset) and held_out.weight != 1:
        yield Problem(key="data.validation.weight", remedy="each prompt that is held out is asked once; leave it out")


def check_files(config: Config, *, trains: bool = True) -> None:
    """Refuse paths that do not hold what they should; prompts are read to their end. Who does not train needs no data
    for it."""
    problems = [*_model("model.path", config.model.path)]
    for one in config.data.datasets() if trains else filter(None, [config.data.validation_set()]):
        problems += _prompts(one, config)
    if config.reward_server is not None:
        problems += _model("reward_server.model", config.reward_server.model)
    if config.environment is not None:
        problems += _code("environment.target", config.environment.target or "")
        if config.environment.token_file is not None:
            problems += _file("environment.token_file", config.environment.token_file)
    for name, source in config.rewards.items():
        if isinstance(source, FunctionReward):
            problems += _code(f"rewards.{name}.target", source.target)
        elif source.token_file is not None:
            problems += _file(f"rewards.{name}.token_file", source.token_file)
    if problems:
        raise DataError("\n".join(problems))


def _code(key: str, target: str) -> Iterator[str]:
    file, colon, _ = target.rpartition(":")
    if colon and file.endswith(FILES):
        yield from _file(key, file)


def _model(key: str, path: str) -> Iterator[str]:
    """A folder must hold a model and its tokenizer; the name of a model on a hub is left to the hub."""
    folder = Path(path)
    if not folder.exists() and _may_be_hub_name(path):
        return
    if not folder.is_dir():
        yield f"{key} = {path!r}: there is no such folder, and the name of a model on a hub is OWNER/NAME"
    elif not (folder / "config.json").is_file():
        yield f"{key} = {path!r}: the folder holds no model (config.json)"
    elif not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield f"{key} = {path!r}: the folder holds no tokenizer ({', '.join(_TOKENIZER_FILES[:3])}, ...)"
    else:
        yield from _weights(key, folder)


def _weights(key: str, folder: Path) -> Iterator[str]:
    files = [file for kind in ("*.safetensors", "*.bin") for file in sorted(folder.glob(kind))]
    if not files:
        yield f"{key} = {str(folder)!r}: the folder holds no weights (model.safetensors, ...)"
    elif pointers := [file.name for file in files if _is_pointer(file)]:
        yield f"{key} = {str(folder)!r}: {pointers[0]} is git's pointer to a large file; `git lfs pull` brings it here"


def _is_pointer(file: Path) -> bool:
    with file.open("rb") as stream:
        return stream.read(len(_LFS_POINTER)) == _LFS_POINTER


def _may_be_hub_name(path: str) -> bool:
    """OWNER/NAME, where no folder OWNER is here that would make it a path with a typing error."""
    owner, slash, name = path.partition("/")
    return bool(owner and slash and name) and "/" not in name and owner != "~" and not Path(owner).is_dir()


def _prompts(named: NamedDataset, config: Config) -> Iterator[str]:
    try:
        read_prompts(named.dataset, malformed=config.data.malformed, key=named.key)
    except DataError as error:
        yield str(error)


def _file(key: str, path: str) -> Iterator[str]:
    if not Path(path).is_file():
        yield f"{key} = {path!r}: there is no such file"
