"""Contradictions between settings are refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamrl.config.check import check_config, max_time_s
from streamrl.config.load import load_config
from streamrl.errors import ConfigError
from tests.config_world import GOOD, problems


def test_the_defaults_contradict_nothing(good: Path) -> None:
    assert problems(good) == []


@pytest.mark.parametrize(
    ("override", "starts", "names"),
    [
        ("sampling.num_samples=1", "sampling.num_samples = 1: ", "at least 2"),
        ("sampling.temperature=0.001", "sampling.temperature = 0.001: ", "at least 0.01"),
        ("sampling.temperature=0.009", "sampling.temperature = 0.009: ", "at least 0.01"),
        ("sampling.temperature=2.1", "sampling.temperature = 2.1: ", "at most 2.0, the highest that vLLM samples at"),
        (
            "validation.sampling={temperature: 3, greedy: false}",
            "validation.sampling.temperature = 3.0: ",
            "or set worker.engine=transformers",
        ),
        ("sampling.stop=['.', '']", "sampling.stop = ['.', '']: ", "remove the empty text"),
        ("validation.sampling.stop=['']", "validation.sampling.stop = ['']: ", "remove the empty text"),
        ("validation.sampling.temperature=0.7", "validation.sampling.temperature = 0.7: ", "greedy sampling ignores"),
        ("validation.sampling.top_k=5", "validation.sampling.top_k = 5: ", "validation.sampling.greedy=false"),
        ("worker.engine_args={max_model_len: 1500}", "worker.engine_args.max_model_len = 1500: ", "allow 2048 tokens"),
        (
            "rewards.j={type: judge, rubric: good, judges: {gpt-4.1: {url: 'http://j:1', model: m}}}",
            "rewards.j.judges = 'gpt-4.1': ",
            "letters",
        ),
        ("worker.engine_args={skip_tokenizer_init: true}", "worker.engine_args.skip_tokenizer_init = True: ", "remove"),
        ("worker.min_survivors=1", "worker.min_survivors = 1: ", "at least 2"),
        ("worker.min_survivors=5", "worker.min_survivors = 5: ", "sampling.num_samples = 4"),
        ("sampling.greedy=true", "sampling.greedy = True: ", "validation.sampling"),
        ("algorithm.routing_replay=first_pass", "algorithm.routing_replay = 'first_pass': ", "reinforce_epochs = 1"),
        (
            "validation.sampling.num_samples=8",
            "validation.sampling.num_samples = 8: ",
            "set validation.sampling.greedy=false",
        ),
        ("sampling.top_p=0.9", "sampling.top_p = 0.9: ", "sampling.accept_mismatch=true"),
        ("sampling.top_k=50", "sampling.top_k = 50: ", "sampling.accept_mismatch=true"),
        ("sampling.repetition_penalty=1.1", "sampling.repetition_penalty = 1.1: ", "sampling.accept_mismatch=true"),
        ("sampling.min_tokens=2000", "sampling.min_tokens = 2000: ", "sampling.max_tokens = 1024"),
        ("validation.sampling.min_tokens=2000", "validation.sampling.min_tokens = 2000: ", "max_tokens = 1024"),
        ("sampling.num_samples=1025", "sampling.num_samples = 1025: ", "at most 1024"),
        ("sampling.max_tokens=1965825", "sampling.max_tokens = 1965825: ", "at most 1048576"),
        (
            "validation.sampling={num_samples: 2048, greedy: false}",
            "validation.sampling.num_samples = 2048: ",
            "at most 1024",
        ),
        ("data.max_prompt_tokens=1048577", "data.max_prompt_tokens = 1048577: ", "at most 1048576"),
        ("data.train={a b: {path: x.jsonl}}", "data.train = 'a b': ", "letters, digits"),
        ("data.train={a: {weight: 1}}", "data.train.a.path = nothing: ", "set one of hub, reasoning_gym"),
        ("data.train={path: x.jsonl, hub: a/b}", "data.train.hub = 'a/b': ", "set one to null"),
        (
            "data.train={path: x.jsonl, split: test}",
            "data.train.split = 'test': ",
            "a dataset with hub; this one has path",
        ),
        ("data.train={reasoning_gym: gcd, textarena: x}", "data.train.textarena = 'x': ", "reasoning_gym = 'gcd'; set"),
        ("data.train={path: x.jsonl, size: 3}", "data.train.size = 3: ", "a dataset with reasoning_gym or textarena"),
        (
            "data.train={textarena: x, level: 3}",
            "data.train.level = 3: ",
            "this one has textarena",
        ),
        (
            "data.train={path: x.jsonl, prompt: q, fields: {messages: history}}",
            "data.train.fields.messages = 'history': ",
            "pass `history` under another name",
        ),
        ("environment={target: textarea}", "environment.target = 'textarea': ", "must be one of textarena"),
        ("environment={target: openenv}", "environment.network = False: ", "it must be true"),
        ("environment={target: verifiers}", "environment.network = False: its programs ask", "it must be true"),
        ("environment={max_turns: 2}", "environment.target = nothing: ", "or set `urls` to a service"),
        ("environment={target: textarena, urls: ['http://h:1']}", "environment.urls = ", "set one of the two"),
        ("environment={urls: ['h:1']}", "environment.urls = 'h:1': ", "must be http://host:port"),
        ("environment={urls: ['http://h:1'], options: {a: 1}}", "environment.options = ", "remove them"),
        ("data.validation={path: x.jsonl, weight: 2}", "data.validation.weight = 2.0: ", "uses each prompt once"),
        ("data.validation=null", "validation.every_steps = 10: ", "data.validation"),
        (
            "data.validation={a: {path: x.jsonl, weight: 2}}",
            "data.validation.a.weight = 2.0: ",
            "uses each prompt once",
        ),
        ("data.validation={a b: {path: x.jsonl}}", "data.validation = 'a b': ", "letters, digits"),
        ("validation.pass_by=judge", "validation.pass_by = 'judge': ", "must be one of the reward sources"),
        ("validation.answer=x", "validation.answer = 'x': ", "set validation.pass_by to the reward source"),
        ("checkpoint.best_by=val_rollouts/reward", "checkpoint.best_by = ", "did you mean 'val_rollouts/rewards'?"),
        (
            "checkpoint.best_by=foo",
            "checkpoint.best_by = 'foo': ",
            "validation; must be one of val_rollouts/fraction_of",
        ),
        ("checkpoint.best_by=val_rollouts/pass_at/1", "checkpoint.best_by = ", "not a metric of"),
        ("algorithm.kl.estimator=k2", "algorithm.kl.estimator = 'k2': ", "must be k1"),
        ("algorithm.kl.placement=loss", "algorithm.kl.estimator = 'k1': ", "must be k2 or k3"),
        ("algorithm.loss=truncatd", "algorithm.loss = 'truncatd': ", "must be one of truncated, tis, icepop"),
        ("algorithm.loss=own.py", "algorithm.loss = 'own.py': ", "`path/to/file.py:function`"),
        ("algorithm.loss_args.low=0.5", "algorithm.loss_args.low = 0.5: ", "used by icepop, sequence_mask"),
        ("algorithm.loss_args.clamp=true", "algorithm.loss_args.clamp = True: ", "a number above 0"),
        ("algorithm.loss_args.clamp=0", "algorithm.loss_args.clamp = 0: ", "a number above 0"),
        (
            "algorithm.advantages=gae",
            "algorithm.advantages = 'gae': ",
            "must be one of leave_one_out, group_mean, turns, tokens, none, or your own code",
        ),
        ("algorithm.advantages=none", "algorithm.advantages = 'none': ", "nothing would be trained"),
        ("teacher={weight: 2.0}", "teacher.path = nothing: ", "set teacher.urls to the vLLM servers"),
        ("teacher={path: t, urls: ['http://h:1']}", "teacher.urls = ", "set one of the two"),
        ("teacher={urls: ['h:1']}", "teacher.urls = 'h:1': ", "must be http://host:port"),
        ("algorithm.advantages_args.x=1", "algorithm.advantages_args.x = 1: ", "takes no arguments"),
        ("optimizer.min_lr=1", "optimizer.min_lr = 1.0: ", "optimizer.lr = 9e-07"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas = [0.9, 1.0]: ", "less than 1"),
        ("training.max_steps=0", "training.max_steps = 0: ", "at least 1, or -1"),
        ("training.max_time=3h", "training.max_time = '3h': ", "DD:HH:MM:SS"),
        ("training.max_time=00:00:00:00", "training.max_time = '00:00:00:00': ", "DD:HH:MM:SS"),
        ("lag.max_steps=65", "lag.max_steps = 65: ", "lag.hard_limit_steps = 64"),
        ("weights.publish_every=6", "weights.publish_every = 6: ", "at most 5"),
        ("rewards.a/b={type: function, target: exact_match}", "rewards = 'a/b': ", "metric names"),
        ("rewards.exact.target=exact_mach", "rewards.exact.target = 'exact_mach': ", "did you mean 'exact_match'?"),
        ("rewards.exact.target=not a name", "rewards.exact.target = 'not a name': ", "package.module:function"),
        ("rewards.m={type: http, url: local}", "rewards.m.url = 'local': ", "reward_server"),
        ("rewards.m={type: http, url: host}", "rewards.m.url = 'host': ", "http://host:port"),
        ("rewards.m={type: http, url: 'http://h:x'}", "rewards.m.url = 'http://h:x': ", "http://host:port"),
        ("rewards.m={type: http, url: 'http://10.0.0.256:1'}", "rewards.m.url = ", "a valid IP address"),
        ('rewards.m={type: http, url: "http://h:1\\n"}', "rewards.m.url = 'http://h:1\\n': ", "http://host:port"),
        ("rewards.j={type: judge, rubric: r, judges: {a: {url: 'http://1.2.3', model: m}}}", "rewards.j.", "valid IP"),
        ("environment={urls: ['http://10.0.0.256:1']}", "environment.urls = ", "a valid IP address"),
        ("rewards.m={type: http, url: 'http://u@h'}", "rewards.m.url = 'http://u@h': ", "rewards.m.token_file"),
        ("rewards.m={type: http, url: 'http://h?token=x'}", "rewards.m.url = 'http://h?token=***': ", "no query"),
        ("rewards.m={type: http, url: 'http://h', replicas: ['x']}", "rewards.m.replicas = 'x': ", "http://host:port"),
        ("reward_server.model=rm", "reward_server.model = 'rm': ", "url: local"),
        ("redis.url=localhost", "redis.url = 'localhost': ", "redis://host:port/0"),
        ("redis.url=redis://", "redis.url = 'redis://': ", "redis://host:port/0"),
        ("redis.url='redis+sentinel://[::1'", "redis.url = 'redis+sentinel://[::1': ", "redis://host:port/0"),
        ("redis.url=ftp+sentinel://h/service", "redis.url = 'ftp+sentinel://h/service': ", "redis://host:port/0"),
        ("weights.store=file:relative", "weights.store = 'file:relative': ", "file:/a/path"),
        ("weights.store=http://x", "weights.store = 'http://x': ", "file:/a/path"),
        ("weights.store=s3:bucket", "weights.store = 's3:bucket': ", "s3://bucket/folder"),
        ("weights.store=file:~/w", "weights.store = 'file:~/w': ", "file:/a/path"),
        (
            "weights.store='file:/shared/$USER/w'",
            "weights.store = 'file:/shared/$USER/w': ",
            "give weights.store on the command line",
        ),
        ("dir=~/runs", "dir = '~/runs': ", "or give dir on the command line with $HOME in double quotes"),
        ("dir=s3://bucket/runs", "dir = 's3:/bucket/runs': ", "a folder on a disk"),
        ("dir='${SCRATCH}/runs'", "dir = '${SCRATCH}/runs': ", "write the path out"),
    ],
)
def test_a_contradiction_is_one_line_with_key_value_and_remedy(
    good: Path, override: str, starts: str, names: str
) -> None:
    [problem] = problems(good, override)

    assert problem.startswith(starts)
    assert names in problem


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("redis.url=redis://user:secret@host:1", "STREAMRL_REDIS_PASSWORD_FILE"),
        ("redis.url=redis+sentinel://:secret@a:1,b:2/service", "STREAMRL_REDIS_PASSWORD_FILE"),
        ("redis.url=redis://user:and/secret@host:1", "redis://user@host"),
        ("redis.url=redis://user:and@secret@host:1", "STREAMRL_REDIS_PASSWORD_FILE"),
        ("redis.url=redis://host:1/0?password=secret", "STREAMRL_REDIS_PASSWORD_FILE"),
        ("redis.url=rediss://user@host:1/0?ssl_keyfile=x&ssl_password=secret", "STREAMRL_REDIS_PASSWORD_FILE"),
        ("redis.url=unix:///run/redis.sock?password=secret", "STREAMRL_REDIS_PASSWORD_FILE"),
        ("weights.store=s3://bucket/folder?access_token=secret", "each machine's environment"),
        ("rewards.m={type: http, url: 'http://user:secret@host'}", "rewards.m.token_file"),
        ("weights.store=sftp://user:secret@host/folder", "each machine's environment"),
    ],
)
def test_a_password_is_refused_and_not_shown(good: Path, override: str, remedy: str) -> None:
    loaded = load_config(good, [override])

    with pytest.raises(ConfigError) as caught:
        check_config(loaded.config, loaded.origin)

    assert remedy in str(caught.value)
    assert "***" in str(caught.value)
    assert "secret" not in str(caught.value)


def test_a_teacher_alone_has_no_rewards_for_a_curriculum_to_go_by(good: Path) -> None:
    alone = ["teacher={path: t}", "algorithm.advantages=none", "algorithm.drop_zero_variance=false"]
    assert problems(good, *alone) == []
    [problem] = problems(good, *alone, "data.curriculum=true")
    assert problem.startswith("data.curriculum = True: ")
    assert "prompts whose rewards differ within a group" in problem


def test_a_prompts_own_messages_may_be_named_among_its_fields(good: Path) -> None:
    for prompt in ("", "prompt: messages, "):
        dataset = f"{{path: x.jsonl, {prompt}fields: {{messages: messages, answer: answer}}}}"
        assert problems(good, f"data.train={dataset}") == []


def test_a_kl_in_a_reward_that_is_not_trained_on_is_refused_where_it_is_ones_own(good: Path) -> None:
    alone = ["teacher={path: t}", "algorithm.advantages=none", "algorithm.drop_zero_variance=false"]
    for kl in ("{coefficient: 0.05}", "{reduction: sum}"):
        [problem] = problems(good, *alone, f"algorithm.kl={kl}")
        assert problem.startswith("algorithm.kl.placement = 'reward': ")
        assert "set none, or loss with algorithm.kl.estimator k2 or k3" in problem
    for kl in ("{placement: none, coefficient: 0.05}", "{placement: loss, estimator: k3}", "{coefficient: 0}"):
        assert problems(good, *alone, f"algorithm.kl={kl}") == []
    assert problems(good, "algorithm.kl.coefficient=0.05", "extends=recipes/distillation.yaml", alone[0]) == []


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.7), ("min_tokens", 2)])
def test_what_a_teachers_servers_would_not_compute_is_refused_and_left_to_the_learner(
    good: Path, key: str, value: float
) -> None:
    override = f"sampling.{key}={value}"
    assert problems(good, override, "teacher={path: t}") == []
    [problem] = problems(good, override, "teacher={urls: ['http://h:1']}")
    assert problem.startswith(f"sampling.{key} = {value}: ")
    assert "set 1, or use teacher.path" in problem


@pytest.mark.parametrize("key", ["sampling.num_samples", "worker.min_survivors"])
def test_samples_without_others_of_their_prompt_suit_own_advantages_where_their_groups_are_kept(
    good: Path, key: str
) -> None:
    raw = ["algorithm.advantages=my.py:raw", "algorithm.normalize_batch=true", "algorithm.kl.placement=none"]
    lone = [*raw, "worker.min_survivors=1", f"{key}=1"]
    assert problems(good, *lone, "algorithm.drop_zero_variance=false") == []
    [problem] = problems(good, *lone)
    assert problem.startswith("algorithm.drop_zero_variance = True: ")
    assert f"{key} = 1" in problem


@pytest.mark.parametrize("how", ["advantages=turns", "advantages=tokens", "normalize_sources=true"])
def test_where_equal_sums_teach_a_curriculum_that_goes_by_sums_is_refused(good: Path, how: str) -> None:
    overrides = [f"algorithm.{how}", "algorithm.drop_zero_variance=false"]
    assert problems(good, *overrides) == []
    [problem] = problems(good, *overrides, "data.curriculum=true")
    assert problem.startswith("data.curriculum = True: ")
    assert "equal sums teach, too" in problem


def test_penalties_that_are_sums_over_what_a_mask_leaves_are_refused(good: Path) -> None:
    [problem] = problems(good, "extends=recipes/rloo.yaml", "lag.stale=mask")
    assert problem.startswith("lag.stale = 'mask': ")
    assert "algorithm.kl.reduction=mean" in problem


@pytest.mark.parametrize(
    "overrides",
    [
        ["sampling.top_p=0.9", "sampling.accept_mismatch=true"],
        ["sampling.top_p=0.9", "algorithm.name=rejection_sampling"],  # no ratio in it that could be wrong
        ["sampling.num_samples=1", "worker.min_survivors=1", "algorithm.name=rejection_sampling"],
        ["validation.sampling.top_p=0.9", "validation.sampling.greedy=false"],
        ["sampling.temperature=2.0"],
        ["sampling.temperature=3.0", "worker.engine=transformers"],
        ["worker.engine_args={max_model_len: 2048}"],
        ["data.curriculum=true", "algorithm.advantages=turns"],
        ["lag.stale=mask", "algorithm.kl.reduction=mean"],
        ["data.validation=null", "validation.every_steps=0"],
        ["algorithm.kl={placement: loss, estimator: k3}"],
        ["algorithm.kl={placement: none, estimator: k3}"],
        ["algorithm.loss=decoupled", "algorithm.loss_args={clamp: 3, low: 0.9, high: 1.1}"],
        ["algorithm.loss=my.module:loss", "algorithm.loss_args={anything: text}"],
        ["algorithm.advantages=path/to/mine.py:advantages", "algorithm.advantages_args={scale: 2}"],
        ["algorithm.loss=ppo", "algorithm.reinforce_epochs=4", "algorithm.discount_factor=0.99"],
        ["algorithm.name=rejection_sampling", "algorithm.loss=none", "algorithm.reinforce_epochs=2"],
        ["algorithm.name=rejection_sampling", "algorithm.kl={placement: none, estimator: k3, coefficient: 0.5}"],
        ["algorithm.name=rejection_sampling", "algorithm.kl.coefficient=0"],
        ["algorithm.kl.coefficient=0.5", "extends=recipes/rejection_sampling.yaml"],
        ["optimizer.min_lr=1", "optimizer.schedule=constant"],
        ["lag.max_steps=0"],
        ["rewards.m={type: http, url: local}", "reward_server.model=rm"],
        ["rewards.m={type: http, url: 'https://host'}"],
        ["rewards.m={type: http, url: 'http://10.0.0.25:1', replicas: ['http://[::1]:1', 'http://10.host/score']}"],
        ["rewards.m={type: function, target: 'my/rewards.py:score'}"],
        ["redis.url=unix:///tmp/redis.sock"],
        ["redis.url=rediss://user@host:6380/0"],
        ["redis.url=redis+sentinel://user@a:1,b:2/service/0"],
        ["weights.store=file:/shared"],
        ["weights.store=s3://bucket/folder"],
        ["weights.store=abfs://$web@account.dfs.core.windows.net/weights"],
        ["training.max_time=01:02:03:04"],
    ],
)
def test_what_belongs_together_is_accepted(good: Path, overrides: list[str]) -> None:
    assert problems(good, *overrides) == []


def test_a_reward_that_an_agent_names_may_decide_what_passes_and_which_checkpoint_is_best(good: Path) -> None:
    named = ("validation.pass_by=environment.right", "checkpoint.best_by=val_rollouts/rewards/environment.right")
    assert problems(good, *named, "environment={target: agent.py:rollout}") == []
    for other in ("environment={urls: ['http://h:1']}", "environment=null"):
        refused = problems(good, *named, other)
        assert [one.partition(" = ")[0] for one in refused] == ["validation.pass_by", "checkpoint.best_by"], other
    [refused] = problems(good, "validation.pass_by=environment.", "environment={target: agent.py:rollout}")
    assert "must be one of the reward sources: exact, environment, environment.NAME" in refused


PAIRWISE = "{type: judge, form: pairwise, rubric: good, judges: {a: {url: 'http://j:1', model: m}}"


def test_checkpoints_are_not_ranked_by_comparisons_within_a_group(good: Path) -> None:
    alone = ("rewards.exact=null", f"rewards.j={PAIRWISE}}}")
    beside = ("rewards.exact.weight=0", f"rewards.j={PAIRWISE}}}")
    both = f"rewards.j={PAIRWISE}}}"
    of_judge = "checkpoint.best_by=val_rollouts/rewards/j"
    for refused in (alone, beside, (both, of_judge)):
        [problem] = problems(good, *refused)
        assert problem.startswith("checkpoint.best_by = 'val_rollouts/rewards")
        assert "the mean over a group is 0.5 whatever the model" in problem
        assert "`against`" in problem
    accepted = [
        (*alone, "checkpoint.keep_best=0"),
        (*alone, "validation.every_steps=0"),
        (*alone, "checkpoint.best_by=val_rollouts/fraction_of_samples_properly_ended"),
        (*alone, "environment={target: game.py:Game}"),
        ("rewards.exact=null", f"rewards.j={PAIRWISE}, against: answer}}"),
        (both,),
        (*beside, "checkpoint.best_by=val_rollouts/rewards/exact"),
    ]
    for overrides in accepted:
        assert problems(good, *overrides) == [], overrides


def test_problems_name_the_place_where_the_value_was_written_and_all_are_told_at_once(good: Path) -> None:
    good.write_text(GOOD + "sampling:\n  num_samples: 1\n")
    loaded = load_config(good, ["optimizer.min_lr=1"])

    with pytest.raises(ConfigError) as caught:
        check_config(loaded.config, loaded.origin)

    first, second = str(caught.value).splitlines()
    assert first.startswith(f"{good}:6: sampling.num_samples = 1: ")
    assert second.startswith("override 'optimizer.min_lr=1': optimizer.min_lr = 1.0: ")


def test_adapters_of_a_model_that_is_frozen_in_bfloat16_are_served_in_it(good: Path) -> None:
    assert problems(good, "model.lora={rank: 4}") == []
    assert problems(good, "model.lora={rank: 4}", "weights.dtype=float32", "model.dtype=float32") == []

    [problem] = problems(good, "model.lora={rank: 4}", "weights.dtype=float32")

    assert problem.startswith("weights.dtype = 'float32': ")
    assert "model.dtype=float32" in problem


def test_activations_wait_on_the_host_only_where_checkpointing_keeps_inputs_of_layers(good: Path) -> None:
    assert problems(good, "model.activations=cpu") == []
    [problem] = problems(good, "model.activations=cpu", "model.gradient_checkpointing=false")
    assert problem.startswith("model.activations = 'cpu': ")
    assert "model.gradient_checkpointing" in problem


@pytest.mark.parametrize("other", ["learner.layout.context=2", "learner.layout.tensor=2", "model.lora={rank: 4}"])
def test_layers_are_compiled_only_where_a_rank_has_them_whole_and_without_adapters(good: Path, other: str) -> None:
    assert problems(good, "model.compile=true") == []
    assert problems(good, other) == []
    [problem] = problems(good, "model.compile=true", other)
    assert problem.startswith("model.compile = True: ")
    assert f"{other.partition('=')[0]} is set; set it to false" in problem


def test_max_time_counts_days_hours_minutes_and_seconds() -> None:
    assert max_time_s("01:02:03:04") == 24 * 3600 + 2 * 3600 + 3 * 60 + 4
    for text in ("1:2:3:4", "00:24:00:00", "00:00:60:00", "12:00:00", "", "00:00:00:00\n"):
        with pytest.raises(ValueError, match="DD:HH:MM:SS"):
            max_time_s(text)


@pytest.mark.parametrize("name", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_a_vllm_that_sees_no_whole_route_is_refused_where_routes_are_wanted(good: Path, name: str) -> None:
    overrides = ("algorithm.routing_replay=rollout", f"worker.engine_args={{{name}: 2, tensor_parallel_size: 2}}")
    [told] = problems(good, *overrides)
    assert told.startswith(f"worker.engine_args.{name} = 2: ")
    assert "algorithm.routing_replay=none" in told
    assert not problems(good, *overrides, "worker.engine=transformers")
    assert not problems(good, "algorithm.routing_replay=none", overrides[1])
