"""What pages call long, each block as it stands, beside a run that was trained and validated."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config import schema
from streamrl.protocol.transport.embedded import EmbeddedRedis
from tests.integration.learner_world import made_up_worker, make_run, output, running_learner
from tests.pages import Block, follow, programs, tagged
from tests.tiny_models import make_model

TEMPLATE = "{% for m in messages %}{{ m['content'] }}:{% endfor %}"
QUESTIONS = "say 1\nsay 2\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, redis_server: EmbeddedRedis) -> Path:
    """With `runs/mine` in it."""
    folder = tmp_path_factory.mktemp("work")
    (make_model(folder / "model", hidden=32, positions=2048) / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "questions.txt").write_text(QUESTIONS)
    prompts = str(folder / "prompts.jsonl")
    config = make_run(
        folder,
        name="mine",
        data=schema.Data(train=prompts, validation=prompts),
        validation=schema.Validation(every_steps=3, max_prompts=5),
    )
    with made_up_worker(config, redis_server.url), running_learner(config, redis_server.url) as learner:
        assert learner.wait(240) == 0, output(config)
    return folder


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", tagged("long"), ids=str)
def test_a_command_does_what_the_page_says(block: Block, folder: Path, tmp_path: Path) -> None:
    follow(block, folder, programs(tmp_path / "bin"), timeout_s=800)
