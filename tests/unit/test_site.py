"""The documentation as a site: it builds strictly, every link in it leads somewhere, and it needs no other host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from tests.pages import PAGES, ROOT

LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}


@dataclass
class Page(HTMLParser):
    """What a built page links to, what it loads, and the places in it that can be linked to."""

    file: Path
    links: list[str] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    ids: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.ids |= {found["id"]} if "id" in found else set()
        if tag == "a" and "href" in found:
            self.links.append(found["href"])
        if LOADED.get(tag) in found:
            self.loads.append(found[LOADED[tag]])


def build(folder: Path, root: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [root / ".ci" / "docs", folder],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("docs")
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return {file: Page(file) for file in sorted((folder / "site").rglob("*.html")) if file.name != "404.html"}


def test_every_page_is_built_and_in_the_navigation(site: dict[Path, Page]) -> None:
    nav = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text())["project"]["nav"]
    named = set(re.findall(r"[\w/.-]+\.md", str(nav)))
    assert {str(page.relative_to(ROOT)) for page in PAGES} <= named
    listed = re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "docs" / "README.md").read_text())
    there = {(ROOT / "docs" / path).resolve() for path in listed}
    assert {page for page in PAGES if page.resolve() not in there} == {ROOT / "docs" / "README.md"}
    assert len(site) >= len(named)


def test_every_link_leads_somewhere(site: dict[Path, Page]) -> None:
    assert [
        f"{file.name}: {link}" for file, page in site.items() for link in page.links if not leads(site, file, link)
    ] == []
    assert [
        f"{file.name}: {link}" for file, page in site.items() for link in page.loads if not leads(site, file, link)
    ] == []


def leads(site: dict[Path, Page], file: Path, link: str) -> bool:
    parts = urlsplit(link)
    if parts.netloc:
        return True  # another site's
    target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
    target = target / "index.html" if target.is_dir() else target
    return target.is_file() and (not parts.fragment or unquote(parts.fragment) in site[target].ids)


@pytest.mark.parametrize("link", ["nowhere.md", "glossary.md#nowhere"])
def test_a_link_that_leads_nowhere_fails_the_build(tmp_path: Path, link: str) -> None:
    for part in (".ci", "docs", "conf"):
        shutil.copytree(ROOT / part, tmp_path / part)
    for part in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "LICENSE", "k8s/README.md", "bench/RESULTS.md"):
        (tmp_path / part).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / part, tmp_path / part)
    with (tmp_path / "docs" / "models.md").open("a") as page:
        page.write(f"\n[lost]({link})\n")
    assert build(tmp_path / "build", tmp_path).returncode != 0


def test_nothing_is_loaded_from_another_host(site: dict[Path, Page]) -> None:
    loaded = {
        link for page in site.values() for link in page.loads if urlsplit(link).netloc or link.startswith("data:")
    }
    assert loaded == set()
    folder = next(iter(site)).parent
    for sheet in folder.rglob("*.css"):
        assert not re.search(r"(?:@import|url\()\s*[\"']?(?:https?:)?//", sheet.read_text()), sheet
    # What the theme's script would fetch for them: diagrams, GitHub's count of stars, and versions of the site.
    for file in site:
        text = file.read_text()
        assert not re.search(r'class="(?:mermaid|arithmatex|glightbox|md-source__)|pyodide', text), file


def test_lists_and_blocks_within_them_are_what_a_code_host_makes_of_them(site: dict[Path, Page]) -> None:
    for file in site:
        text = re.sub(r"<pre>.*?</pre>|<script.*?</script>", "", file.read_text(), flags=re.DOTALL)
        assert "```" not in text, file
        assert not re.search(r"^ *(?:[-*]|\d+\.) +(?:<|\w)", text, re.MULTILINE), file
