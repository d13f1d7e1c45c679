"""The bench of the peers without the peers: its task, what it reads from runs, and what it says of them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import safetensors.torch

from bench.measure import Say
from bench.peers import Outcome, Plan, lines, measure
from bench.peers_curve import Curve, Step, Target, read_streamrl, read_trl
from bench.peers_grades import Grade, Grades, Snapshot, grade
from bench.peers_model import write_prompts
from bench.peers_sides import Limits, Side, Watched, memory_of, run, streamrl_command
from bench.peers_task import LONGEST, Example, demonstrate, examples, is_held_out, reward
from bench.peers_terms import Terms
from bench.peers_trl_side import Settings, trl_command
from bench.report import Bar
from bench.resume import Done
from streamrl.config.check import check_config
from streamrl.config.load import load_config
from streamrl.demos.quickstart import write_base_model
from streamrl.errors import ResourceError
from streamrl.ops.launch.processes import Command

TARGET = Target(reward=0.5, window=2)
TERMS = Terms(model=Path("model"))
STEPS_SCRIPT = """
import json, sys, time
with open(sys.argv[1], "w", buffering=1) as file:
    print(json.dumps({"began": 1.0}), file=file)
    for number in (1, 2, 3):
        line = {"step": number, "at": 1.0 + number, "reward": 0.3 * number, "num_samples": 4, "num_tokens": 40}
        print(json.dumps(line), file=file)
    input()
"""


def curve(rewards: Sequence[float]) -> Curve:
    """A step at each second, of four samples with ten tokens each."""
    steps = (
        Step(number=at, at=100.0 + at, reward=value, num_samples=4, num_tokens=40)
        for at, value in enumerate(rewards, 1)
    )
    return Curve(began=100.0, steps=tuple(steps))


def grades(seconds: float, accuracies: Sequence[float]) -> list[dict[str, float]]:
    """The accuracy of one snapshot after another, each for so many seconds and a thousand tokens."""
    return [
        {"seconds": n * seconds, "tokens": 1000.0 * n, "accuracy": value, "trained": 0.0}
        for n, value in enumerate(accuracies)
    ]


def outcome(**changes: Any) -> Outcome:
    fields = {
        "samples_per_s": 10.0,
        "tokens_per_s": 100.0,
        "target_s": 60.0,
        "num_steps": 20,
        "ready_s": 5.0,
        "peak_bytes": 1 << 30,
        "points": (),
        "grades": grades(10.0, [0.0, 1.0]),
    }
    return Outcome(**{**fields, **changes})


def test_answers_count_down_by_ones_and_by_twos() -> None:
    for example in islice(examples(random.Random(0)), 200):
        numbers = [int(example.answer[at : at + 2]) for at in range(1, len(example.answer), 2)]
        start, step = map(int, example.prompt.split(">"))
        assert example.answer[0] == str(step)
        assert numbers == list(range(start - step, -1, -step))


def test_answers_fit_and_their_lengths_have_a_long_tail() -> None:
    lengths = [len(example.answer) + 1 for example in islice(examples(random.Random(1)), 4000)]
    assert max(lengths) <= LONGEST
    longest = [max(lengths[at : at + 16]) for at in range(0, 4000, 16)]
    assert mean(longest) > 4 * mean(lengths)


def test_most_demonstrations_by_twos_go_by_ones() -> None:
    rng = random.Random(2)
    by_twos = [example for example in islice(examples(rng), 1000) if example.prompt.endswith("2")]
    assert mean(demonstrate(example, rng) == example.answer for example in by_twos) == pytest.approx(0.3, abs=0.05)


@pytest.mark.parametrize(
    ("completion", "right"),
    [("20605", 1.0), ("106", 0.5), ("2060504", 2 / 3), ("20506", 0.0), ("0605", 0.0), ("", 0.0)],
)
def test_the_reward_is_the_share_of_numbers_in_their_place(completion: str, right: float) -> None:
    assert reward("", completion, [], {"answer": "20605"}) == pytest.approx(right)


def test_a_run_s_prompts_are_decided_by_its_seed(tmp_path: Path) -> None:
    for name, seed in (("one", 1), ("same", 1), ("other", 2)):
        write_prompts(tmp_path / name, seed=seed, num_prompts=20)
    one, same, other = ((tmp_path / name).read_text() for name in ("one", "same", "other"))
    assert one == same != other
    assert Example(**json.loads(one.splitlines()[0])).prompt


def test_the_target_is_reached_when_a_whole_window_is_good_enough() -> None:
    found = curve([0.1, 0.7, 0.2, 0.6, 0.4, 0.9]).until(TARGET)
    assert found is not None
    assert [step.number for step in found.steps] == [1, 2, 3, 4, 5]
    assert found.seconds == 5.0


def test_a_target_that_is_not_reached_is_not_made_up() -> None:
    assert curve([0.1, 0.2, 0.8]).until(Target(reward=0.6, window=2)) is None
    assert curve([0.9]).until(TARGET) is None


def test_rates_leave_the_first_steps_out() -> None:
    slow_start = Curve(began=0.0, steps=(*curve([0.0]).steps, *curve([0.0] * 5).steps[1:]))
    assert slow_start.rates(after=1) == (pytest.approx(4.0), pytest.approx(40.0))


def test_the_steps_of_trl_are_read_while_it_writes(tmp_path: Path) -> None:
    assert read_trl(tmp_path) == Curve(began=None, steps=())
    line = {"step": 1, "at": 8.0, "reward": 0.5, "num_samples": 4, "num_tokens": 40}
    (tmp_path / "steps.jsonl").write_text(f'{json.dumps({"began": 7.0})}\n{json.dumps(line)}\n{{"step": 2, "a')
    found = read_trl(tmp_path)
    assert found.began == 7.0
    assert found.steps == (Step(number=1, at=8.0, reward=0.5, num_samples=4, num_tokens=40),)


def test_the_steps_of_streamrl_are_those_of_its_metrics(tmp_path: Path) -> None:
    assert read_streamrl(tmp_path) == Curve(began=None, steps=())
    of_rollouts = {"rollout_size": 8.0, "rewards": 0.25, "response_lengths": 12.5}
    record = {
        "step": 3,
        "term": 1,
        "at": 1000.0,
        **{f"train_rollouts/{name}": value for name, value in of_rollouts.items()},
    }
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    (tmp_path / "logs").mkdir()
    events = [
        {"event": "starting", "timestamp": "1970-01-01T00:10:00Z"},
        {"event": "version_loaded", "timestamp": "1970-01-01T00:15:00.5Z"},
        {"event": "version_loaded", "timestamp": "1970-01-01T00:16:00Z"},
    ]
    (tmp_path / "logs" / "worker-0.log").write_text("".join(json.dumps(event) + "\n" for event in events))
    found = read_streamrl(tmp_path)
    assert found.began == 900.5
    assert found.steps == (Step(number=3, at=1000.0, reward=0.25, num_samples=8, num_tokens=100),)


def test_peers_are_compared_within_a_round() -> None:
    ours = [outcome(samples_per_s=30.0, grades=grades(2.0, [0.0, 1.0]), ready_s=4.0), outcome(samples_per_s=20.0)]
    theirs = [
        outcome(samples_per_s=10.0, grades=grades(20.0, [0.0, 1.0]), ready_s=2.0),
        outcome(samples_per_s=5.0, target_s=50.0, grades=grades(20.0, [0.0, 0.2, 0.4])),
    ]
    found = {line.name: line for line in lines({"a": ours, "b": theirs}, ours="a", theirs="b", with_target=True)}
    speed, time = found["samples/s / TRL's"], found["time to a held-out accuracy of 0.45 / TRL's"]
    with_start = found["time to a held-out accuracy of 0.45, with starting / TRL's"]
    assert isinstance(speed, Bar)
    assert isinstance(time, Bar)
    assert isinstance(with_start, Bar)
    assert (speed.value, speed.ok) == (3.5, True)
    assert (time.value, time.ok) == (pytest.approx(0.095), True), (
        "0.9 of 9 s, and 4.5 of the 50 s of a run that never reached it"
    )
    assert (with_start.value, with_start.ok) == (pytest.approx(mean([4.9 / 11, 9.5 / 55])), False)
    learned = [found[f"{name}: runs that learned it"] for name in "ab"]
    assert [(line.value, isinstance(line, Bar) and line.ok) for line in learned] == [(2, True), (1, False)]


def test_accuracies_are_compared_at_equal_tokens() -> None:
    slow, fast = outcome(grades=grades(1.0, [0.0, 0.5])), outcome(grades=grades(1.0, [0.0, 1.0, 0.2]))
    found = {line.name: line for line in lines({"a": [slow], "b": [fast]}, ours="a", theirs="b", with_target=True)}
    line = found["held-out accuracy by tokens, beyond TRL's"]
    assert isinstance(line, Bar)
    assert (line.value, line.ok) == (pytest.approx(-0.5 * mean(part / 10 for part in range(1, 11))), False)


def test_no_prompt_of_the_training_starts_at_a_number_that_is_held_out(tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts", seed=1, num_prompts=500)
    rows = [json.loads(line) for line in (tmp_path / "prompts").read_text().splitlines()]
    assert {int(row["prompt"][:2]) % 5 for row in rows} == {0, 1, 2, 4}
    assert not any(is_held_out(Example(**row)) for row in rows)


def test_the_weights_of_both_are_graded_at_the_cost_of_their_step(tmp_path: Path) -> None:
    write_base_model(tmp_path / "model", seed=1, num_positions=256)
    weights = safetensors.torch.load_file(tmp_path / "model" / "model.safetensors")
    snapshots = [Snapshot(step=step, weights={n: w * 0 for n, w in weights.items()}) for step in (2, 3, 9)]
    found = grade(tmp_path / "model", curve([0.1] * 4), snapshots, num_prompts=2, max_tokens=4)
    assert [(point.seconds, point.tokens) for point in found.points] == [(0.0, 0), (2.0, 80), (3.0, 120)]


def test_without_a_target_only_rates_are_compared() -> None:
    found = lines({"a": [outcome()], "b": [outcome()]}, ours="a", theirs="b", with_target=False)
    assert [line.name for line in found if isinstance(line, Bar)] == ["samples/s / TRL's"]


def test_a_run_that_never_reached_the_target_counts_with_all_its_time() -> None:
    low = Grades(points=[Grade(seconds=at, tokens=at, accuracy=at / 50, trained=0.0) for at in (0.0, 5.0)])
    found = Outcome.of(Watched(curve=curve([0.1] * 6), ready_s=3.0, peak_bytes=1), TARGET, low)
    assert (found.reached, found.accurate_s, found.target_s, found.num_steps) == (False, 6.0, 6.0, 6)
    rising = Watched(curve=curve([0.1, 0.5, 0.5, 0.9]), ready_s=3.0, peak_bytes=1)
    assert Outcome.of(rising, TARGET, low).target_s == 3.0


def test_both_curves_are_told_as_far_as_runs_went() -> None:
    short = outcome(points=[(float(at), 0.1) for at in range(1, 40)])
    long = outcome(points=[(2.0 * at, 0.1 if at < 20 else 0.3) for at in range(40)])
    found = list(lines({"a": [short, long], "b": [short, short]}, ours="a", theirs="b", with_target=True))
    told = {line.name: pytest.approx(line.value) for line in found if "reward after" in line.name}
    assert told == {
        "a: reward after 20 steps, 29 s": 0.1,
        "a: reward after 40 steps, 78 s": 0.3,
        "b: reward after 20 steps, 20 s": 0.1,
    }


def test_what_streamrl_is_told_is_a_configuration(tmp_path: Path) -> None:
    command = streamrl_command(TERMS, tmp_path / "prompts.jsonl", tmp_path, 5)
    loaded = load_config(Path(command.arguments[-1]), ())
    check_config(loaded.config, loaded.origin)
    assert loaded.config.optimizer.lr == TERMS.lr
    assert loaded.config.training.groups_per_step * loaded.config.sampling.num_samples == 128


def test_trl_s_processes_make_a_step_together(tmp_path: Path) -> None:
    for settings in (Settings(processes=2, micro_batches=4), Settings(processes=1)):
        command = trl_command(Path("python"), settings, TERMS, tmp_path / "prompts.jsonl", tmp_path, 5)
        task = json.loads(Path(command.arguments[-1]).read_text())
        assert settings.processes * task["micro_batches"] * task["micro_batch"] == 128
        assert task["samples_per_step"] == 128
        assert ("torch.distributed.run" in command.arguments) == (settings.processes > 1)


def fake(script: str, name: str = "fake") -> Side:
    def prepare(terms: Terms, prompts: Path, folder: Path, seed: int) -> Command:
        arguments = (sys.executable, "-c", script, str(folder / "steps.jsonl"))
        return Command(name="fake", arguments=arguments, log=folder / "fake.log")

    return Side(name=name, prepare=prepare, read=read_trl, snapshots=lambda folder: iter(()))


def run_fake(script: str, folder: Path) -> Curve:
    limits = Limits(target=TARGET, num_steps=100, seconds=20.0)
    side = fake(script)
    return run(side, TERMS, prompts=folder, folder=folder / "run", seed=0, limits=limits, say=Say("peers")).curve


def test_a_run_is_ended_when_it_has_reached_the_target(tmp_path: Path) -> None:
    waiting_for_ever = STEPS_SCRIPT.replace("input()", "time.sleep(1000)")
    found = run_fake(waiting_for_ever, tmp_path)
    assert [step.number for step in found.steps] == [1, 2, 3]


def test_a_run_that_is_interrupted_leaves_no_process(tmp_path: Path) -> None:
    started: list[int] = []

    def interrupted(folder: Path) -> Curve:
        found = read_trl(folder)
        if found.steps:
            started.append(int((folder / "steps.jsonl.pid").read_text()))
            raise KeyboardInterrupt
        return found

    telling_its_pid = "import os, sys\nopen(sys.argv[1] + '.pid', 'w').write(str(os.getpid()))\n"
    script = telling_its_pid + STEPS_SCRIPT.replace("input()", "time.sleep(1000)")
    side = replace(fake(script), read=interrupted)
    limits = Limits(target=None, num_steps=100, seconds=20.0)
    with pytest.raises(KeyboardInterrupt):
        run(side, TERMS, prompts=tmp_path, folder=tmp_path / "run", seed=0, limits=limits, say=Say("peers"))
    assert not Path(f"/proc/{started[0]}").exists()


def test_a_run_that_dies_early_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"(?s)ended with exit code 1.*EOFError"):
        run_fake(STEPS_SCRIPT.replace("(1, 2, 3)", "(1,)"), tmp_path)


def test_a_bench_that_was_broken_off_goes_on_with_the_runs_that_are_missing(tmp_path: Path) -> None:
    limits = Limits(target=TARGET, num_steps=100, seconds=20.0)
    plan, path = Plan(limits=limits, num_rounds=2, warm_up=False, graded=False), tmp_path / "outcomes.jsonl"
    done = Done(path, of="this")
    for name in ("quick 0", "broken 0", "quick 1"):
        done.add(name, asdict(outcome(num_steps=99)))
    peers = (fake("raise SystemExit(7)", "quick"), fake(STEPS_SCRIPT.replace("input()", ""), "broken"))
    measure(plan, TERMS, peers, folder=tmp_path, done=Done(path, of="this"), say=Say("peers"))
    again = Done(path, of="this")
    assert [again[name]["num_steps"] for name in ("quick 0", "broken 0", "quick 1", "broken 1")] == [99, 99, 99, 3]


def test_the_memory_of_a_process_is_that_of_all_below_it() -> None:
    alone = memory_of(os.getpid())
    script = "import sys; held = bytearray(64 << 20); print(len(held), flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = memory_of(os.getpid())
        child.communicate(b"")
    assert both - alone > 64 << 20
