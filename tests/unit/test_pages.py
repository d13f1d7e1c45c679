"""The commands and configurations of the pages: each block is tagged, and what is cheap is run as it stands."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.recipe.advantages import ADVANTAGES
from streamrl.recipe.algorithms import ALGORITHMS
from streamrl.recipe.losses import KL_ESTIMATES, LOSSES
from tests.pages import COMMANDS, LANGUAGES, PAGES, ROOT, Block, blocks, follow, lay_out, programs, tagged
from tests.tiny_models import make_model

ALL = [block for page in PAGES for block in blocks(page)]
OF_COMMANDS = [block for block in ALL if block.language in COMMANDS]
PROGRAM = re.compile(
    r"^ *(?:\$ |sudo |[A-Z_]+=\S+ )*(?:streamrl|make|pip|uv|python3?|kubectl|docker|vllm|curl|hf|redis-cli|git) [\w./-]"
)
# Their tests know what else such a configuration needs.
WITH_TESTS_OF_THEIR_OWN = ("recipes.md", "rewards.md", "reward-services.md")
CONFIGURATIONS = [
    block
    for block in ALL
    if block.language == "yaml" and not block.note and block.page.name not in WITH_TESTS_OF_THEIR_OWN
]
PLAIN = {
    "model": "model: {path: sft}",
    "data": "data: {train: prompts.jsonl, validation: held-out.jsonl}",
    "rewards": "rewards: {right: {type: function, target: exact_match}}",
}


def test_every_fence_is_a_block_of_a_known_language() -> None:
    for page in PAGES:
        fences = len(re.findall(r"^ *```", page.read_text(), re.MULTILINE))
        assert fences == 2 * len(blocks(page)), f"{page}: a fence that does not open or close a block"
    assert [str(block) for block in ALL if block.language not in LANGUAGES] == []


def test_no_command_hides_in_a_block_of_text() -> None:
    assert PROGRAM.match("$ streamrl why runs/big")
    assert PROGRAM.match("STREAMRL_REDIS=redis://x streamrl top")
    hidden = [str(b) for b in ALL if b.language == "text" for line in b.text.splitlines() if PROGRAM.match(line)]
    assert hidden == []


def test_every_block_of_commands_says_who_runs_it_or_why_nobody_does() -> None:
    assert len(OF_COMMANDS) > 15
    assert [str(block) for block in OF_COMMANDS if block.tag not in ("run", "long", "never")] == []
    assert [str(block) for block in OF_COMMANDS if block.tag == "never" and not block.note] == []


@pytest.mark.parametrize("block", [b for b in OF_COMMANDS if b.tag != "never" and b.note], ids=str)
def test_the_test_that_a_tag_names_knows_the_command(block: Block) -> None:
    """It reads the page, or names each command as a word of its own."""
    text = (ROOT / block.note).read_text()
    words = re.findall(r"^(?:\$ )?(?:streamrl|make) (\w+)|([\w-]+\.sh)\b", block.text, re.MULTILINE)
    named = [f'"{command or script}"' in text for command, script in words]
    assert (named and all(named)) or (block.page.name in text and "blocks(" in text)
    assert ("pytest.mark.long" in text) == (block.tag == "long")


@pytest.mark.parametrize("block", tagged("run"), ids=str)
def test_a_command_does_what_the_page_says(block: Block, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    lay_out(folder, block.page)
    if "sft" in block.text:
        make_model(folder / "sft", positions=1024)  # the configuration's sequences have 768 tokens
    follow(block, folder, programs(tmp_path / "bin"))


def test_a_command_that_fails_or_shows_something_else_is_found(tmp_path: Path) -> None:
    def written(text: str) -> Block:
        page = tmp_path / "page.md"
        page.write_text(text)
        return blocks(page)[0]

    variables = programs(tmp_path / "bin")
    follow(written("<!-- run -->\n\n    ```console\n    $ echo a\n    a\n    ```\n"), tmp_path, variables)
    for wrong in ("sh\nfalse", "sh\nfalse\ntrue", "console\n$ echo a\nb", "console\n$ echo a; false\na"):
        with pytest.raises(AssertionError, match=r"page.md:2:"):
            follow(written(f"<!-- run -->\n```{wrong}\n```\n"), tmp_path, variables)


@pytest.mark.parametrize("block", CONFIGURATIONS, ids=str)
def test_a_configuration_is_one(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lay_out(tmp_path, block.page)
    sections = set(re.findall(r"^(\w+):", block.text, re.MULTILINE))
    plain = [] if "extends" in sections else [text for name, text in PLAIN.items() if name not in sections]
    Path("run.yaml").write_text("\n".join([block.text, *plain]))
    loaded = load_config("run.yaml")
    check_config(loaded.config, loaded.origin)


def test_the_page_of_algorithms_names_what_is_built_in_with_its_bounds() -> None:
    text = (ROOT / "docs" / "algorithms.md").read_text()
    assert {*LOSSES, *ADVANTAGES, *ALGORITHMS, *KL_ESTIMATES} - {"reinforce"} <= set(re.findall(r"\w+", text))
    texts = {
        "decoupled": text,
        **{name: (ROOT / "conf" / "recipes" / f"{name}.yaml").read_text() for name in ("icepop", "gspo")},
    }
    for loss, written in texts.items():
        bounds = {name: p.default for name, p in inspect.signature(LOSSES[loss]).parameters.items() if name != "batch"}
        arguments = ", ".join(f"{name}: {value}" for name, value in bounds.items())
        assert f"loss: {loss}\n  loss_args: {{{arguments}}}" in written


def test_the_figures_of_lag_are_those_that_were_measured() -> None:
    text, results = (ROOT / "docs" / "lag.md").read_text(), (ROOT / "bench" / "RESULTS.md").read_text()
    bought, cost, pretrained = (
        table.splitlines()[2:] for table in re.findall(r"^\| lag \|.*?(?=\n\n)", text, re.M | re.DOTALL)
    )
    for lag, gain, busy, found in ([cell.strip() for cell in row.strip("|").split("|")] for row in bought):
        (measured,) = re.findall(rf"^  64 GPUs, lag {lag} (.*)$", results, re.MULTILINE)
        ratio, _, _, at_work, *lags = measured.split()
        assert (gain, busy, found) == (f"{float(ratio):.2f} x", f"{float(at_work):.0f} %", ", ".join(lags))
    for lag, *rewards in ([cell.strip() for cell in row.strip("|").split("|")] for row in cost):
        for loss, reward in zip(("truncated", "tis", "icepop", "none"), rewards, strict=True):
            assert re.search(rf"^  {loss}, lag {lag} +{reward} ", results, re.MULTILINE), (loss, lag)
    of_model = results.partition("python -m bench stale-llm")[2]
    [(cells, right)] = re.findall(r"^ +(truncated, lag 0  .*)\n  right +(.*)$", of_model, re.MULTILINE)
    measured_share = dict(zip(re.split(" {2,}", cells), right.split(), strict=True))
    for lag, *shares in ([cell.strip() for cell in row.strip("|").split("|")] for row in pretrained):
        for loss, share in zip(("truncated", "none"), shares, strict=True):
            assert not share or measured_share[f"{loss}, lag {lag}"] == share, (loss, lag)


def test_a_page_that_one_test_follows_says_so_once(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- all long: tests/x.py -->\n\n```sh\na\n```\n\n<!-- never: why -->\n```sh\nb\n```\n")
    assert [(block.tag, block.note) for block in blocks(page)] == [("long", "tests/x.py"), ("never", "why")]
