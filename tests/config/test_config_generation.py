"""The trees of main_generation and main_eval: training's words are taken, others are refused with the nearest name."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hybridrl.config import ConfigError, as_dict, load_config, to_yaml, validate
from hybridrl.config.compose import compose_config
from hybridrl.config.schema.node import default_tree
from hybridrl.config.schema.root import ROOTS


def faults_of(root: str, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        validate(load_config(root, words))  # type: ignore[call-overload]
    return caught.value.faults


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Settings that a generation starts with."""
    (tmp_path / "model").mkdir()
    (tmp_path / "rows.parquet").touch()
    return [
        f"data.path={tmp_path / 'rows.parquet'}",
        f"data.output_path={tmp_path / 'out.parquet'}",
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
    ]


@pytest.mark.parametrize("root", ["generation", "evaluation"])
def test_the_shipped_file_composes_the_whole_schema_and_reads_back(root: str, tmp_path: Path) -> None:
    composed = compose_config(root)
    assert composed.tree == default_tree(ROOTS[root])
    config = load_config(root, ["data.path=[a,b]"])  # type: ignore[call-overload]
    (tmp_path / "mine.yaml").write_text(to_yaml(config))
    assert load_config(root, [], tmp_path, "mine") == config  # type: ignore[call-overload]
    assert pickle.loads(pickle.dumps(config)) == config
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(config))) == as_dict(config)


def test_the_policy_group_is_the_one_of_training() -> None:
    trace = "actor_rollout_ref.rollout.trace"  # names that follow the trainer's, which a generation does not have
    names = [f"{trace}.project_name=null", f"{trace}.experiment_name=null"]
    training, generation = load_config("ppo_trainer", names), load_config("generation")
    assert generation.actor_rollout_ref == training.actor_rollout_ref
    words = ["actor_rollout_ref.rollout.n=5", "data.max_response_length=7", "trainer.n_gpus_per_node=3"]
    config = load_config("generation", words)
    assert config.data.n_samples == 5
    assert config.actor_rollout_ref.rollout.response_length == 7
    assert config.placement.pools == {"global": [3]}


def test_words_of_training_and_of_older_versions_are_taken() -> None:
    composed = compose_config(
        "generation",
        [
            "model.path=MODEL",
            "rollout.temperature=0.6",
            "rollout.prompt_length=99",
            "rollout.response_length=98",
            "data.train_files=[a.parquet]",
            "data.trust_remote_code=true",
            "data.image_key=images",
            "actor_rollout_ref.actor.optim.lr=1e-5",
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2",
        ],
    )
    config, said = composed.config, " ".join(composed.notices)
    assert config.actor_rollout_ref.model.path == "MODEL"  # type: ignore[attr-defined]
    assert config.actor_rollout_ref.model.trust_remote_code  # type: ignore[attr-defined]
    assert config.actor_rollout_ref.rollout.temperature == 0.6  # type: ignore[attr-defined]
    assert (config.data.max_prompt_length, config.data.max_response_length) == (99, 98)  # type: ignore[attr-defined]
    assert config.data.path == ["a.parquet"]  # type: ignore[attr-defined]
    assert "rollout.prompt_length (command line) is now data.max_prompt_length" in said
    assert "actor_rollout_ref.actor.megatron.tensor_model_parallel_size" in said

    scored = compose_config(
        "evaluation",
        [
            "custom_reward_function.path=own.py",
            "data.reward_fn_key=source",
            "data.prompt_key=question",
            "ray_kwargs.ray_init.num_cpus=4",
        ],
    )
    assert scored.config.reward.custom_reward_function.path == "own.py"  # type: ignore[attr-defined]
    assert scored.config.data.data_source_key == "source"  # type: ignore[attr-defined]
    assert scored.config.data.prompt_key == "question"  # type: ignore[attr-defined]
    assert len(scored.notices) == 3


@pytest.mark.parametrize(
    ("root", "word", "nearest"),
    [
        ("generation", "data.n_sample=3", "data.n_samples"),
        ("generation", "data.output=x", "data.output_path"),
        ("generation", "actor_rollout_ref.rollout.temperatur=1", "actor_rollout_ref.rollout.temperature"),
        ("generation", "actor_rollout_ref.rollout.openai.url=x", "actor_rollout_ref.rollout.openai"),
        ("evaluation", "data.respons_key=x", "data.response_key"),
        ("evaluation", "reward.timeout=3", "reward.timeout_s"),
        ("evaluation", "actor_rollout_ref.rollout.n=3", "unknown key"),
    ],
)
def test_unknown_keys_are_refused_with_the_nearest(root: str, word: str, nearest: str) -> None:
    (fault,) = faults_of(root, word)
    assert "unknown key" in fault and nearest in fault


def test_what_cannot_work_is_refused_before_anything_starts(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    validate(load_config("generation", words))
    assert [fault.split(" is not set")[0] for fault in faults_of("generation")] == [
        "actor_rollout_ref.model.path",
        "data.path",
        "data.output_path",
    ]
    for word, message in (
        ("data.path=missing.parquet", "data.path=missing.parquet: no such file"),
        ("data.output_path=answers.json", "must name a file that ends in .parquet"),
        (f"data.output_path={tmp_path / 'rows.parquet'}", "is an input file"),
        ("actor_rollout_ref.rollout.nnodes=1", "set trainer.nnodes instead"),
        ("placement.roles.critic=global", "unknown role"),
        ("actor_rollout_ref.rollout.name=openai", "without actor_rollout_ref.rollout.openai.base_url"),
    ):
        assert any(message in fault for fault in faults_of("generation", *words, word)), word
    lengths = ["data.max_response_length=8", "actor_rollout_ref.rollout.response_length=4"]
    assert "are the same thing" in faults_of("generation", *words, *lengths)[0]
    both = ["data.n_samples=3", "actor_rollout_ref.rollout.n=2"]
    assert "are the same thing" in faults_of("generation", *words, *both)[0]
    greedy = ["data.n_samples=3", "actor_rollout_ref.rollout.do_sample=False"]
    assert "greedy samples are all alike" in faults_of("generation", *words, *greedy)[0]

    endpoint = [words[0], words[1], "actor_rollout_ref.rollout.name=openai"]
    endpoint.append("actor_rollout_ref.rollout.openai.base_url=http://localhost:8000/v1")
    validate(load_config("generation", endpoint))  # the endpoint's model need not lie here
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    (fault,) = faults_of("generation", *endpoint, "actor_rollout_ref.rollout.openai.api_key_env=NO_SUCH_KEY")
    assert "NO_SUCH_KEY: the environment variable is not set" in fault

    scored = f"data.path={tmp_path / 'rows.parquet'}"
    validate(load_config("evaluation", [scored]))
    assert "data.path is not set" in faults_of("evaluation")[0]
    assert "no such file" in faults_of("evaluation", scored, "reward.custom_reward_function.path=nowhere.py")[0]
    assert "without" in faults_of("evaluation", scored, "reward.custom_reward_function.name=own")[0]
