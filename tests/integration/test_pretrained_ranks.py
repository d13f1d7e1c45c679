"""A pretrained model, SmolLM2-135M, whose nine heads two or three ranks share, or whose samples (gloo, FSDP2, float64):
what one rank learns, to 1e-9."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from streamrl.demos.pretrained import converter, find_gguf, make_model
from tests.integration.pretrained_ranks import ALONE
from tests.warm import run_ranks

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The model, and what one rank learns of it: two GB, which go at the end."""
    folder = tmp_path_factory.mktemp("pretrained")
    model = make_model(find_gguf(), folder, converter(folder / "logs", print))
    ranks(1, model, folder, 1, 1)
    yield model, folder
    (folder / ALONE).unlink()


def ranks(size: int, model: Path, out: Path, tensor: int, context: int) -> None:
    words = (str(model), str(out), str(tensor), str(context))
    run_ranks("tests.integration.pretrained_ranks", *words, size=size, out=out / "logs", timeout_s=420)


@pytest.mark.parametrize(
    ("tensor", "context"), [(3, 1), (1, 3), (1, 2)], ids=["tensor", "context", "one head of two ranks is empty"]
)
def test_ranks_learn_of_a_pretrained_model_what_one_learns(
    made: tuple[Path, Path], tensor: int, context: int, record_property: Callable[[str, object], None]
) -> None:
    model, out = made
    ranks(tensor * context, model, out, tensor, context)
    one, more = (json.loads((out / f"{name}.json").read_text()) for name in ("alone", f"{tensor}x{context}"))
    told = f"gradients {more['gradient']:.1e} apart of {one['most']:.1e}, weights {more['weight']:.1e}"
    record_property("figure", f"SmolLM2-135M, tensor {tensor}, context {context}, float64: {told}")
    assert one["most"] > 1e-3
    assert max(more["gradient"], more["weight"]) <= 1e-9
    assert more["loss"] == pytest.approx(one["loss"], abs=1e-9, rel=0)
    assert more["grad_norm"] == pytest.approx(one["grad_norm"], abs=1e-9, rel=1e-9)
