"""`strategy=megatron` in the programs: the results of fsdp2 in any layout, resumed exactly, and with other layouts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from safetensors.torch import load_file
from test_trainer_sft import configured, conversations  # noqa: F401 (a fixture)
from trainer_tools import trained

from hybridrl.config import load_config
from hybridrl.errors import ConfigError, ModelError, RolloutError
from hybridrl.models.tiny import build_tiny_model
from hybridrl.trainer.ppo.run_ppo import run_ppo
from hybridrl.trainer.supervised.run_supervised import run_supervised

pytestmark = [pytest.mark.usefixtures("ray_session"), pytest.mark.timeout(600)]

ROLLOUT = "actor_rollout_ref.rollout"
MEGATRON = "actor_rollout_ref.actor.megatron"
#: tensor parallelism for the actor, and with it the reference; pipeline parallelism for the critic
PARALLEL = (
    "actor_rollout_ref.actor.strategy=megatron",
    f"{MEGATRON}.tensor_model_parallel_size=2",
    "critic.megatron.pipeline_model_parallel_size=2",
)
#: scores also depend on the prompt: were all of them equal, returns would vary by the rounding of KL penalties alone,
#: and what compares their variance with that of the values would compare rounding
LETTERS = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    early = sum(char < 'm' for char in solution_str) / max(len(solution_str), 1)\n"
    "    return early + sum(map(ord, str(ground_truth))) % 5 / 10\n"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose heads of keys and values can be split over two ranks."""
    return build_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, heads=2, kv_heads=2)


@pytest.fixture(scope="module")
def base(model: Path, sort_data: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    reward = tmp_path_factory.mktemp("reward") / "letters.py"
    reward.write_text(LETTERS)
    engine = Path(__file__).parents[1] / "rollout" / "plain_engine.py"
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={reward}",
        f"{ROLLOUT}.name={engine}:PlainEngine",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        "trainer.logger=[file]",
    ]


@pytest.fixture(scope="module")
def ppo(base: list[str]) -> list[str]:
    """PPO with critic and reference policy. Greedy responses depend on the weights alone."""
    return [
        *base,
        f"{ROLLOUT}.do_sample=False",
        "algorithm.adv_estimator=gae",
        "algorithm.use_kl_in_reward=True",
        "algorithm.kl_penalty=full",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.kl_loss_type=full",
        "actor_rollout_ref.actor.kl_loss_coef=0.3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "critic.optim.lr=1e-3",
        # Adam divides by the gradient's size: without this, rounding errors of tiny gradients become whole steps
        "actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-3",
        "critic.optim.override_optimizer_config.eps=1e-3",
        "trainer.total_training_steps=3",
        "trainer.save_freq=1",
    ]


@pytest.fixture(scope="module")
def parallel_run(ppo: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    return run(folder, *ppo, *PARALLEL)


def run(folder: Path, *words: str) -> Path:
    with trained(*words, f"trainer.default_local_dir={folder}"):
        return folder


def records(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step that are the same in every run of the same training."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    groups = ("actor/", "critic/", "rollout_corr/", "response_length/", "train/", "val/")
    return [{key: value for key, value in line.items() if key.startswith(groups)} for line in lines]


def weights(folder: Path, role: str) -> dict[str, torch.Tensor]:
    files = sorted((folder / "global_step_3" / role / "hf_model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_run(first: Path, second: Path, tolerance: float, roles: tuple[str, ...] = ("actor", "critic")) -> None:
    """Compare metrics relatively and weights absolutely; 0 asks for the same bits."""
    ours, theirs = records(first)[-3:], records(second)[-len(records(first)[-3:]) :]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert value == pytest.approx(other[key], rel=tolerance, abs=tolerance), key
    for role in roles:
        expected, found = weights(first, role), weights(second, role)
        assert expected.keys() == found.keys() and expected
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance, msg=name)


def test_ppo_equals_that_of_fsdp2(ppo, parallel_run, tmp_path) -> None:
    sharded = run(tmp_path, *ppo)
    assert_same_run(sharded, parallel_run, 1e-4)
    moved = weights(parallel_run, "actor")["model.layers.0.mlp.up_proj.weight"]
    start = load_file(next(Path(ppo[0].split("=")[1]).glob("*.safetensors")))["model.layers.0.mlp.up_proj.weight"]
    assert (moved - start).abs().max() > 1e-3


@pytest.mark.parametrize("layout", ["the same", "another"])
def test_a_run_resumes_from_a_checkpoint(ppo, parallel_run, tmp_path, layout) -> None:
    swapped = (
        "actor_rollout_ref.actor.strategy=megatron",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
        "critic.megatron.tensor_model_parallel_size=2",
    )
    words = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={parallel_run / 'global_step_2'}"]
    run(tmp_path, *ppo, *words, *(PARALLEL if layout == "the same" else swapped))
    exact = layout == "the same"
    assert records(tmp_path)[-1]["actor/lr"] == 1e-3
    last, expected = records(tmp_path)[-1], records(parallel_run)[-1]
    for key, value in expected.items():
        assert last[key] == (value if exact else pytest.approx(value, rel=1e-4, abs=1e-4)), key
    for role in ("actor", "critic"):
        for name, tensor in weights(parallel_run, role).items():
            found = weights(tmp_path, role)[name]
            torch.testing.assert_close(found, tensor, rtol=0, atol=0 if exact else 1e-4, msg=name)


@pytest.mark.parametrize("size", ["tensor_model", "pipeline_model", "context"])
def test_fine_tuning_equals_that_of_fsdp2(model, conversations, tmp_path, size) -> None:  # noqa: F811
    chosen = {"sharded": [], "parallel": ["engine=megatron", f"engine.{size}_parallel_size=2"]}
    eps = "optim.override_optimizer_config.eps=1e-3"
    for name, words in chosen.items():
        saved = ["trainer.test_freq=1", "trainer.save_freq=3", "checkpoint.save_contents=[model,hf_model]", eps]
        run_supervised(configured(model, conversations, tmp_path / name, 2, *saved, *words))
    first, second = (records(tmp_path / name) for name in chosen)
    assert [sorted(line) for line in first] == [sorted(line) for line in second] and len(first) == 6
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    (expected,) = (tmp_path / "sharded" / "global_step_3").rglob("hf_model/*.safetensors")
    (found,) = (tmp_path / "parallel" / "global_step_3").rglob("hf_model/*.safetensors")
    ours, theirs = load_file(expected), load_file(found)
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow(90)
def test_grpo_learns_in_a_layout_of_four_ranks(base, tmp_path) -> None:
    """The reward is the share of letters before m: it rises as with fsdp2, within the noise of sampling."""
    grpo = [
        *base,
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=8",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "trainer.total_training_steps=12",
        "trainer.save_freq=-1",
        "trainer.save_last=False",
    ]
    four = [
        "trainer.n_gpus_per_node=4",
        f"{ROLLOUT}.tensor_model_parallel_size=4",
        "actor_rollout_ref.actor.strategy=megatron",
        f"{MEGATRON}.tensor_model_parallel_size=2",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
    ]
    curves = {}
    for name, words in {"fsdp2": [], "megatron": four}.items():
        run(tmp_path / name, *grpo, *words)
        curves[name] = [line["critic/score/mean"] for line in records(tmp_path / name) if "critic/score/mean" in line]
    first, last = (sum(curves["megatron"][part]) / 3 for part in (slice(3), slice(-3, None)))
    assert last > first + 0.15, curves
    assert last == pytest.approx(sum(curves["fsdp2"][-3:]) / 3, abs=0.15), curves


def test_generation_with_the_training_weights_is_refused(base) -> None:
    words = [*base, *PARALLEL, f"{ROLLOUT}.name=hf"]
    with raises_with((RolloutError, ModelError), "rollout.name=hf", "GeneratesInPlace"):
        run_ppo(load_config("ppo_trainer", words))


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (
            [f"{MEGATRON}.tensor_model_parallel_size=3"],
            "actor_rollout_ref.actor.megatron.*tensor_model_parallel_size=3",
        ),
        ([f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"], "virtual_pipeline_model_parallel_size=2"),
        ([f"{MEGATRON}.expert_model_parallel_size=2"], "expert_model_parallel_size=2.*experts"),
        ([f"{MEGATRON}.override_transformer_config.recompute_granularty=full"], "nearest: recompute_granularity"),
        (["critic.megatron.tensor_model_parallel_size=4", "trainer.n_gpus_per_node=4"], r"critic\.megatron.*heads"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused_before_the_workers_load(base, words, named) -> None:
    critic = ["algorithm.adv_estimator=gae", "actor_rollout_ref.actor.strategy=megatron"]
    with pytest.raises((ConfigError, ModelError), match=named):
        run_ppo(load_config("ppo_trainer", [*base, *critic, *words]))
