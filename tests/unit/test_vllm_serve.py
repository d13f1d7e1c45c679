"""How `streamrl serve` begins vLLM's server."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from streamrl.ops.cli.main import main
from streamrl.workers.engines.vllm.serve import mistake_of, options_of
from tests.tiny_models import make_model


@pytest.mark.parametrize("on_cpu", [True, False])
def test_a_server_listens_here_alone_and_samples_as_the_model_was_trained(on_cpu: bool) -> None:
    options = options_of("runs/mine/export", name="runs/mine", host="127.0.0.1", port=8000, on_cpu=on_cpu)
    told = dict(zip(options[::2], options[1::2], strict=True))
    assert (told["--model"], told["--served-model-name"]) == ("runs/mine/export", "runs/mine")
    assert (told["--generation-config"], told["--host"], told["--port"]) == ("vllm", "127.0.0.1", "8000")
    assert (told["--config-format"], told["--tokenizer-mode"]) == ("hf", "hf")
    assert ("--kv-cache-memory-bytes" in told) is on_cpu


def test_what_is_no_model_is_told_before_vllm_is_imported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(tmp_path / "nothing")]) == 2
    assert str(tmp_path / "nothing") in capsys.readouterr().err


def test_options_that_are_not_ours_are_vllms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_model(tmp_path / "model")
    assert main(["serve", str(folder), "--port", "70000", "--max-model-len", "64"]) == 2
    assert "--port" in capsys.readouterr().err  # ours is looked at, and vLLM's is passed on


def test_what_the_user_can_mend_is_a_line_and_what_not_keeps_its_traceback() -> None:
    taken = OSError(errno.EADDRINUSE, "Address already in use")
    assert str(mistake_of(taken, model="m", port=8000)) == "port 8000 is taken; choose another with --port"
    missing = OSError("Cannot find an appropriate cached snapshot folder\nfor the specified revision")  # as hubs say it
    told = str(mistake_of(missing, model="OWNER/NAME", port=8000))
    assert told == "model 'OWNER/NAME' cannot be served: Cannot find an appropriate cached snapshot folder"
    assert mistake_of(OSError(errno.EPIPE, "Broken pipe"), model="m", port=8000) is None
