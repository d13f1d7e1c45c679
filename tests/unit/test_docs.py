"""The pages for users are true to what there is: each command, setting, cause, variable and path in them exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import click
import pytest

from streamrl.config.explain import known_keys
from streamrl.config.load import load_config
from streamrl.config.schema import Config, HttpReward
from tests.helpers import wait_until
from tests.pages import PAGES, ROOT, blocks, prose
from tests.recipes_page import edits, recipes
from tests.unit.test_manifests_programs import command_of

SCRIPTS = sorted((ROOT / "docs" / "hosts").glob("*.sh"))
SOURCES = "".join(
    path.read_text() for part in ("streamrl", "workers", "learner") for path in (ROOT / part).rglob("*.py")
)
# What recipes have their reader make.
MADE = [edit for recipe in recipes() for edit in edits(recipe)]
MADE_FILES = {edit.file for edit in MADE if edit.name is None}
MADE_COMMANDS = {
    name for edit in MADE if edit.name == "COMMANDS" for name in re.findall(r'"(\w+)": CommandEntry', edit.text)
}
COMMAND = re.compile(
    r"(?:^|[\s(=\"'])(?<!-n )(?<!namespace )((?:streamrl|streamrl worker)(?: [^\n|;&>`]*)?)", re.MULTILINE
)


def code(page: Path) -> list[str]:
    """What stands in code on a page, a line or a phrase each; of a script all of it but comments."""
    if page.suffix == ".sh":
        lines = page.read_text().replace("\\\n", " ").splitlines()
        return [line for line in lines if not re.search(r"^ *[#:]|printf|echo", line)]
    shown = "".join(block.text for block in blocks(page)).replace("\\\n", " ")
    return [*shown.splitlines(), *(" ".join(phrase.split()) for phrase in re.findall(r"`([^`]+)`", prose(page)))]


def commands(page: Path) -> list[list[str]]:
    found = [words for line in code(page) for words in COMMAND.findall(line)]
    split = [[word.strip("'\"") for word in words.split(" #")[0].split()] for words in found]
    return [words for words in split if len(words) > 1]


def parse(words: list[str]) -> None:
    """click.UsageError where one of them is no option of the command."""
    command, rest = command_of(words)
    command.make_parser(click.Context(command, **command.context_settings)).parse_args(rest)


def alternatives(words: list[str]) -> list[list[str]]:
    """`streamrl pause|resume` is two commands."""
    return [[words[0], word, *words[2:]] for word in words[1].split("|")] if words[0] == "streamrl" else [words]


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: page.name)
def test_every_command_exists_with_its_options(page: Path) -> None:
    for words in commands(page):
        for each in alternatives(words):
            if each[1] not in MADE_COMMANDS:
                parse(each)


def test_the_commands_are_found() -> None:
    assert sum(len(commands(page)) for page in PAGES) > 30
    assert all(len(commands(script)) >= 3 for script in SCRIPTS)
    with pytest.raises(click.NoSuchOption):
        parse(["streamrl", "learn", "x.yaml", "--no-such-option"])


def test_a_command_that_is_shown_names_each_file_that_its_shipped_configuration_leaves_to_you() -> None:
    shown = [" ".join(words) for page in PAGES for words in commands(page)]
    for path in [*(ROOT / "streamrl/ops/cli").rglob("*.py"), *(ROOT / "conf").glob("*.yaml")]:
        text = re.sub(r" \\+\n#? +", " ", path.read_text())
        shown += re.findall(r"^(?:#  )? +(streamrl .*)$", text, re.MULTILINE)
    started = [re.match(r"streamrl (?:up|learn|doctor|config check) (conf/[\w.]+\.yaml)", words) for words in shown]
    configs = [(found.string, ROOT / found[1]) for found in started if found]
    wanted = [(words, files_of_yours(load_config(path).config)) for words, path in configs if path.exists()]
    missing = [(words, key) for words, keys in wanted for key in keys if f" {key}=" not in words]
    assert missing == []
    assert sum(bool(keys) for _, keys in wanted) >= 5


def files_of_yours(config: Config) -> set[str]:
    """Settings that name a file which neither a hub nor a demonstration provides."""
    server, data = config.reward_server, config.data
    named = {
        "model.path": config.model.path,
        "data.train": data.train,
        "data.validation": data.validation,
        "reward_server.model": None if server is None else server.model,
    }
    return {key for key, value in named.items() if isinstance(value, str) and re.match(r"\./|[^/]+\.jsonl$", value)}


def _first_column(table: re.Match[str]) -> str:
    return "\n".join(line.split(" | ")[0] for line in table[0].splitlines())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_setting_exists(page: Path) -> None:
    # In a table that begins with `here`, all but the first column is what others call a setting.
    tables = re.sub(r"^\| here .*?\n\n", _first_column, page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = re.findall(r"`([a-z_]+\.[a-z_.]+)(?:[:=][^`]*)?`", tables)
    # `learner.error` is a file in the run's folder, and `data.py` one of ours.
    keys = [key for key in named if key != "learner.error" and not key.endswith(".py")]
    settings = [key for key in keys if key.split(".")[0] in Config.model_fields]
    assert set(settings) - set(known_keys()) == set()
    assert {"outage_s", "token_file", "max_abs"} <= set(HttpReward.model_fields)


@pytest.mark.parametrize("page", [*PAGES, *SCRIPTS], ids=lambda page: page.name)
def test_every_variable_and_path_exists(page: Path) -> None:
    text = page.read_text()
    scripts = "".join(script.read_text() for script in SCRIPTS)
    for name in re.findall(r"\bSTREAMRL_\w+", text):
        assert name in SOURCES or name.removesuffix("_FILE") in SOURCES, name
    for name in re.findall(r"^([A-Z_]+)=", "\n".join(code(page)), re.MULTILINE):
        assert f"${{{name}" in scripts or name in SOURCES or name.startswith("STREAMRL"), name
    for path in re.findall(r"\b((?:docs|k8s|docker|conf|bench|tests|streamrl|workers|learner)/[\w./-]+\w)", text):
        assert (ROOT / path).exists() or path in MADE_FILES, path


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_a_script_is_one_and_says_what_it_misses(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=240)
    done = subprocess.run(
        ["bash", script], capture_output=True, text=True, timeout=240, check=False, env={"PATH": "/bin"}
    )
    assert done.returncode != 0
    assert "usage" in done.stderr or "the configuration of the run" in done.stderr


def test_the_settings_that_scripts_override_exist(tmp_path: Path) -> None:
    wanted = {found for script in SCRIPTS for found in re.findall(r"\b(rewards\.model\.\w+)=", script.read_text())}
    assert wanted == {"rewards.model.url", "rewards.model.token_file"}
    loaded = load_config(ROOT / "conf" / "gpu_qwen_32b.yaml", [f"{key}=http://x" for key in sorted(wanted)])
    assert loaded.config.rewards["model"].type == "http"


def run_ssh_script(folder: Path, *, streamrl: str, learners: str, **more: str) -> None:
    """With an ssh that runs everything here, this program for streamrl and python, and no pauses."""
    tools = folder / "tools"
    tools.mkdir()
    for name in ("streamrl", "python"):
        (tools / name).write_text(streamrl)
    (tools / "ssh").write_text('#!/bin/bash\nshift\nexport STUB_HOST=$1\nshift\neval "$*"\n')
    (tools / "sleep").write_text("#!/bin/bash\n")
    for tool in tools.iterdir():
        tool.chmod(0o755)
    variables = {
        "PATH": f"{tools}:/usr/bin:/bin",
        "LEARNERS": learners,
        "WORKERS": "c",
        "REWARD": "e",
        "RUN_NAME": "big",
        "MODEL": "/models/a policy",
        "REWARD_MODEL": "/models/reward",
        "STREAMRL_REDIS": "redis://worker@host:6379",
        **more,
    }
    script = ROOT / "docs" / "hosts" / "ssh.sh"
    subprocess.run(
        ["bash", script, "run.yaml"], env=variables, cwd=folder, check=True, timeout=240, capture_output=True
    )


def started_by_ssh(tmp_path: Path, **variables: str) -> dict[str, list[str]]:
    """What the script starts, by host: by programs that write down their words."""
    told = tmp_path / "told"
    # One write each: four of them append to the file at once.
    line = 'line=$(printf "%s\\t" "$STUB_HOST" "$(basename "$0")" "$@"; echo .)'
    said = f'#!/bin/bash\n{line}\necho "${{line%.}}" >> {told}\n'
    run_ssh_script(tmp_path, streamrl=said, learners="a b", **variables)
    wait_until(lambda: told.exists() and told.read_text().count("\n") == 4, description="all four have started")
    lines = [line.split("\t")[:-1] for line in told.read_text().splitlines()]
    return {line[0]: line[1:] for line in lines}


def test_the_ssh_script_starts_each_part_where_it_belongs(tmp_path: Path) -> None:
    started = started_by_ssh(tmp_path)
    assert set(started) == {"a", "b", "c", "e"}
    assert started["e"][:3] == ["streamrl", "reward", "serve"]
    assert started["a"] == started["b"]
    assert started["a"][:5] == ["streamrl", "learn", "run.yaml", "name=big", "dir=runs"]
    assert started["a"][-4:] == ["--nodes", "1:2", "--rendezvous", "a:29400"]
    assert started["c"][started["c"].index("--model") + 1] == "/models/a policy"
    for words in started.values():
        parse(words)


def test_the_ssh_script_starts_learners_that_need_each_other(tmp_path: Path) -> None:
    assert started_by_ssh(tmp_path, LEAST_LEARNERS="2")["b"][-4:-2] == ["--nodes", "2:2"]


# The first learner dies of something; the second finds what no restart would mend, and says so where it is told to.
_LEARNER = """#!/bin/bash
[ "$1" = learn ] || exit 0
echo started >> starts
folder=.
for word; do case $word in dir=*) folder=${word#dir=}/big ;; esac; done
if [ "$(wc -l < starts)" = 2 ]; then echo {} > "$folder/learner.error"; fi
exit 1
"""


@pytest.mark.parametrize("shared", [None, "shared runs"])
def test_the_ssh_script_starts_a_learner_again_until_no_restart_would_help(tmp_path: Path, shared: str | None) -> None:
    run_ssh_script(tmp_path, streamrl=_LEARNER, learners="a", **({} if shared is None else {"DIR": shared}))

    def has_ended() -> bool:
        return not any(cwd == tmp_path for cwd in map(folder_of, Path("/proc").glob("[0-9]*")))

    wait_until(lambda: (tmp_path / "starts").exists() and has_ended(), description="nobody is started any more")
    assert (tmp_path / "starts").read_text().count("started") == 2


def folder_of(process: Path) -> Path | None:
    try:
        return (process / "cwd").readlink()
    except OSError:  # it has just ended
        return None


def named_places(page: Path) -> list[tuple[Path, str]]:
    """Each function or class that a table of the page places in a file: (the file, its name with dots)."""
    found: list[tuple[Path, str]] = []
    for line in page.read_text().splitlines():
        if not line.startswith("| "):
            continue
        file = None
        for word in re.findall(r"`([^`]+)`", line.split(" | ")[-1]):
            if word.endswith(".py"):
                file = ROOT / word if "/" in word else file and file.with_name(word)
            elif file is not None and re.fullmatch(r"[\w.]+", word):
                found.append((file, word))
    return found


def test_the_ways_through_the_code_name_what_is_there() -> None:
    places = named_places(ROOT / "docs" / "architecture.md")
    assert len(places) > 20
    missing = [
        f"{file.relative_to(ROOT)}: {name}"
        for file, name in places
        for part in name.split(".")
        if not re.search(rf"^\s*(?:async def|def|class) {part}\b", file.read_text(), re.MULTILINE)
    ]
    assert missing == []


def test_each_module_outside_of_a_room_is_in_the_map() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    modules = [path.name for path in sorted((ROOT / "streamrl").glob("*.py")) if path.name != "__init__.py"]
    assert [name for name in modules if not re.search(rf"[`/]{re.escape(name)}`", page)] == []
