"""Rollouts as people read them: everything that matters is there, and nothing that a terminal would obey."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from streamrl.errors import ConfigError
from streamrl.ops.record.export import to_json
from streamrl.ops.record.recorded import is_entry_id
from streamrl.ops.record.view import lines_of
from streamrl.protocol.transport.types import Entry
from streamrl.protocol.wire.branches import Branch
from streamrl.protocol.wire.group import Group
from streamrl.protocol.wire.sample import Span
from streamrl.protocol.wire.turns import told_of
from streamrl.versions import make_version
from tests.helpers import make_group, make_sample, make_ticket

ENTRY = Entry(id="1000-0", number=7, run_uid="uid", header=b"", body=b"")


class Letters:
    """Token i is the i-th of these."""

    def __init__(self, letters: Sequence[str]) -> None:
        self._letters = letters

    def decode(self, token_ids: Any) -> str:
        return "".join(self._letters[int(token)] for token in token_ids)


def two_versions(num_tokens: int, at: int) -> tuple[Span, ...]:
    first, second = make_version(1, 4), make_version(1, 5)
    return (
        Span(version=first, step=4, start=0, end=at),
        Span(version=second, step=5, start=at, end=num_tokens),
    )


def shown(group: Group, decoder: Any = None, *, colour: bool = False, width: int = 80, **more: Any) -> list[Any]:
    return list(lines_of(ENTRY, group, decoder, width=width, colour=colour, max_lines=more.get("max_lines")))


def text(*arguments: Any, **settings: Any) -> str:
    return "\n".join(line.plain for line in shown(*arguments, **settings))


def test_a_sample_shows_its_rewards_by_source_and_how_it_ended() -> None:
    sample = make_sample(reward=0.5, rewards={"exact": 1.0, "length": -0.5}, finish_reason="length")

    told = text(make_group(make_ticket(7), samples=(sample,)))

    assert "ticket 7   1000-0   worker worker/test" in told
    assert "sample 1   reward 0.5 (exact 1, length -0.5)   4 tokens, cut off" in told


def test_without_colour_a_mark_stands_where_another_version_took_over() -> None:
    sample = make_sample(num_tokens=6, spans=two_versions(6, 4))

    told = text(make_group(make_ticket(7), samples=(sample,)), Letters("abcdef"))

    assert "versions 1.4 (4 tokens) 1.5 (2 tokens)" in told
    assert "abcd⟨1.5⟩ef" in told


def test_what_was_given_between_two_turns_is_told_from_what_was_said() -> None:
    said = Span(version=make_version(1, 4), step=4, start=0, end=2)
    again = said._replace(start=4, end=5)
    sample = make_sample(num_tokens=6, mask_runs=(2, 2, 1, 1), spans=(said, again))

    told = text(make_group(make_ticket(7), samples=(sample,)), Letters("abcdef"))

    assert [line.strip() for line in told.splitlines()][4:] == [
        *("turn 1 by 1.4, 2 tokens", "ab", "given, 2 tokens", "cd"),
        *("turn 2 by 1.4, 1 token", "e", "given, 1 token", "f"),
    ]


class Pieces:
    """Tokens below 256 are bytes, others words after a space, which is dropped at the start as sentencepiece does."""

    def decode(self, token_ids: Any) -> str:
        data = b"".join(bytes([token]) if token < 256 else f" w{token}".encode() for token in map(int, token_ids))
        return data.decode(errors="replace").removeprefix(" ")


@pytest.mark.parametrize("size", [3, 100])
def test_a_part_keeps_its_first_space_and_its_characters_however_long_the_text_before_it(size: int) -> None:
    character = list("漢".encode())
    said, given = [*range(300, 300 + size), *character], [*range(500, 500 + size), *character[:1]]
    token_ids = np.array([*said, *given, *character[1:], *said], dtype=np.int32)
    first = Span(version=make_version(1, 4), step=4, start=0, end=len(said))
    again = first._replace(start=len(said) + len(given), end=len(token_ids))
    sample = make_sample(num_tokens=len(token_ids), token_ids=token_ids, spans=(first, again))

    parts = [part["text"] for part in told_of(sample, Pieces().decode)]

    words = "".join(f" w{word}" for word in range(300, 300 + size))
    begun = "".join(f" w{word}" for word in range(500, 500 + size))
    assert parts[:2] == [f"{words.removeprefix(' ')}漢", f"{begun}\ufffd"]
    assert parts[2] == f"\ufffd\ufffd{words}漢"  # as its tokens alone are decoded: its first bytes end a character


def test_a_rollout_is_shown_as_a_conversation_with_its_rows_versions_and_calls() -> None:
    letters = Letters(["a", "b", '<tool_call>{"name": "add", "arguments": {}}</tool_call>', "d", "e", "f"])
    spans = (*two_versions(3, 1), Span(version=make_version(1, 5), step=5, start=4, end=6))
    sample = make_sample(num_tokens=6, mask_runs=(3, 1, 2), spans=spans, branches=(Branch(start=3, row=0, keep=4),))

    told = text(make_group(make_ticket(7), samples=(sample,)), letters)
    assert "ended by itself after 2 turns" in told
    assert "turn 1 by 1.4 then 1.5, calls add, 3 tokens" in told
    assert "a⟨1.5⟩b" in told
    assert "given   row 1: continues after 4 tokens of row 0, 1 token" in told
    [first, given, second] = to_json(ENTRY, make_group(make_ticket(7), samples=(sample,)), letters)["samples"][0][
        "turns"
    ]
    assert (first["by"], first["versions"], first["tool_calls"]) == ("model", ["1.4", "1.5"], ["add"])
    assert (given["by"], given["behind"], given["text"]) == ("given", {"row": 0, "tokens": 4}, "d")
    assert (second["row"], second["text"]) == (1, "ef")


def test_what_a_turn_has_earned_stands_above_it() -> None:
    said = Span(version=make_version(1, 4), step=4, start=0, end=1)
    spans = (said, said._replace(version=make_version(1, 5), start=1, end=2), said._replace(start=4, end=6))
    sample = make_sample(num_tokens=6, mask_runs=(2, 2, 2), spans=spans, turn_rewards=(0.25, -1.0))

    told = text(make_group(make_ticket(7), samples=(sample,)), Letters("abcdef"))

    assert "turn 1 by 1.4 then 1.5, reward 0.25, 2 tokens" in told
    assert "turn 2 by 1.4, reward -1, 2 tokens" in told


def test_in_colour_tokens_of_one_version_look_alike_and_those_of_another_different() -> None:
    sample = make_sample(num_tokens=6, spans=two_versions(6, 4))

    lines = shown(make_group(make_ticket(7), samples=(sample,)), Letters("abcdef"), colour=True)

    [response] = [line for line in lines if line.plain.strip() == "abcdef"]
    styles = [(response.plain[span.start : span.end], span.style) for span in response.spans if span.style]
    assert [piece for piece, _ in styles] == ["abcd", "ef"]
    assert len({style for _, style in styles}) == 2


def test_what_the_model_wrote_cannot_command_the_terminal() -> None:
    letters = Letters(["a", "\x1b[2J", "\n", "\x9b31m", "b", "\r"])
    sample = make_sample(num_tokens=6)

    told = text(make_group(make_ticket(7), samples=(sample,), worker="w\x1b[31m"), letters)

    assert not any((ord(letter) < 32 and letter != "\n") or 127 <= ord(letter) < 160 for letter in told)
    assert "\n   31mb" in told  # a line break in the text is one on the screen


@pytest.mark.parametrize("width", [40, 80])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    decoder = Letters(["many words here ", "漢字漢字", "averyverylongwordwithoutanyspaceinit" * 3, "x"])
    sample = make_sample(num_tokens=4)
    rewards = {f"source{i}": 0.123456 for i in range(9)}

    lines = shown(make_group(make_ticket(7), samples=(sample, make_sample(rewards=rewards))), decoder, width=width)

    assert max(line.cell_len for line in lines) <= width
    assert "漢" in "".join(line.plain for line in lines)


def test_long_texts_are_cut_and_say_by_how_much() -> None:
    decoder = Letters(["line\n"] * 4)

    told = text(make_group(make_ticket(7), samples=(make_sample(num_tokens=4),)), decoder, max_lines=2)

    assert "… 3 more lines" in told


def test_a_failed_ticket_shows_why() -> None:
    assert "failed: the engine said no" in text(make_group(make_ticket(7), samples=(), error="the engine said no"))


def test_a_piece_that_decodes_differently_alone_is_shown_as_what_it_adds() -> None:
    class Joined:
        def decode(self, token_ids: Any) -> str:
            return " ".join("abcdef"[int(token)] for token in token_ids)  # no space before the first

    sample = make_sample(num_tokens=6, spans=two_versions(6, 4))

    assert "a b c d⟨1.5⟩ e f" in text(make_group(make_ticket(7), samples=(sample,)), Joined())


@pytest.mark.parametrize(("word", "is_id"), [("57", False), ("1700-0", True)])
def test_a_group_is_named_by_its_ticket_or_its_id(word: str, is_id: bool) -> None:
    assert is_entry_id(word) is is_id


@pytest.mark.parametrize("word", ["x", "-1", "1-", "1-2-3", "", "٣"])
def test_anything_else_names_no_group(word: str) -> None:
    with pytest.raises(ConfigError, match=r"neither a ticket number, such as 57, nor a group id"):
        is_entry_id(word)
