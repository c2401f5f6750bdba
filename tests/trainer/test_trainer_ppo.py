"""The PPO program on real Ray workers: what it does to the weights, against plain loops and other placements."""

import asyncio
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from trainer_tools import trained
from transformers import AutoModelForCausalLM

from hybridrl.data.preprocess.gsm8k import write_gsm8k
from hybridrl.rollout.request import Request
from hybridrl.rollout.sampling import SamplingParams

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@pytest.fixture(scope="module")
def letters_reward(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reward that differs between samples of any model: the share of characters before 'm'."""
    path = tmp_path_factory.mktemp("reward") / "letters.py"
    path.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return sum(char < 'm' for char in solution_str) / max(len(solution_str), 1)\n"
    )
    return path


@pytest.fixture(scope="module")
def base(micro_model: Path, sort_data: Path, letters_reward: Path) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"critic.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={letters_reward}",
        "data.train_batch_size=8",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "trainer.save_freq=1",
        "trainer.max_actor_ckpt_to_keep=1",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
    ]


def weights(folder: Path, role: str = "actor", step: int | None = None) -> dict[str, torch.Tensor]:
    """The exported model of that checkpoint, by default the newest."""
    step = step or int((folder / "latest_checkpointed_iteration.txt").read_text())
    files = sorted((folder / f"global_step_{step}" / role / "hf_model").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def assert_same_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor], tolerance: float) -> None:
    assert first.keys() == second.keys()
    worst = max((first[name] - second[name]).abs().max().item() for name in first)
    assert worst <= tolerance


def test_a_grpo_step_equals_a_plain_loop(base, micro_model, tmp_path) -> None:
    overrides = [*base, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=1"]
    with trained(*overrides, f"trainer.default_local_dir={tmp_path}", "trainer.n_gpus_per_node=2") as (_, result):
        batch = result.batch
    # From the samples of the run: group advantages, token-mean policy gradient, clipping and AdamW, row by row.
    model = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.01)
    tensors = batch.batch
    scores = tensors["token_level_scores"].sum(1).tolist()
    uids = batch.non_tensor_batch["uid"].tolist()
    total = int(tensors["response_mask"].sum())
    loss = torch.zeros(())
    for row, uid in enumerate(uids):
        group = [score for score, other in zip(scores, uids, strict=True) if other == uid]
        advantage = (scores[row] - np.mean(group)) / (np.std(group, ddof=1) + 1e-6)
        ids = tensors["input_ids"][row][tensors["attention_mask"][row].bool()]
        length = int(tensors["response_mask"][row].sum())
        log_probs = model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0][-length:]
        loss = loss - float(advantage) * log_probs.sum() / total
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    # Adam's first step is lr * sign(g) where |g| is large: elements with a gradient near its epsilon tell little.
    expected, found = model.state_dict(), weights(tmp_path)
    for name in found:
        certain = dict(model.named_parameters())[name].grad.abs() > 1e-6
        assert (expected[name] - found[name])[certain].abs().max() < 2e-5, name
    assert any(
        (found[name] - value).abs().max() > 5e-4
        for name, value in AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).state_dict().items()
        if name in found
    )


def test_a_client_waits_from_the_first_change_of_the_weights_to_their_update(base, tmp_path) -> None:
    """Whatever calls the learner: here no `fit` releases the rollout."""
    words = ["trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path}"]
    sampling = SamplingParams(True, 1.0, 1.0, -1, 4, ignore_eos=True)
    with trained(*base, *words) as (trainer, _):
        client = trainer.rollout.client()

        async def versions(name: str, version: int | None = None) -> list[tuple[int, int]]:
            """The weights that answer a request, which has to wait for `version` where one is given."""
            answer = asyncio.ensure_future(client.generate(Request(name, [6, 7], sampling)))
            if version is not None:
                done, _ = await asyncio.wait([answer], timeout=3)
                assert not done
                trainer.run.step = version
                await asyncio.to_thread(trainer.reshard)
            return (await answer).versions

        assert asyncio.run(versions("before")) == [(1, 4)]
        trainer.learner.learn(trainer.sampler.next())
        assert asyncio.run(versions("learned", 2)) == [(2, 4)]
        assert asyncio.run(versions("between")) == [(2, 4)]
        trainer.run.checkpoints.go_back(tmp_path / "global_step_1", trainer.learner.load)
        assert asyncio.run(versions("loaded", 3)) == [(3, 4)]


def test_ranks_and_placement_do_not_change_the_training(base, tmp_path) -> None:
    """PPO with everything that crosses ranks, in doubles of SGD so that rounding is not amplified by Adam."""
    overrides = [
        *base,
        "algorithm.adv_estimator=gae",
        "algorithm.lam=0.95",
        "actor_rollout_ref.actor.use_kl_loss=True",
        "actor_rollout_ref.actor.entropy_coeff=0.01",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=True",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
        "actor_rollout_ref.actor.optim.optimizer=SGD",
        "actor_rollout_ref.actor.optim.override_optimizer_config={}",
        "critic.optim.optimizer=SGD",
        "critic.optim.lr=1e-2",
        "critic.checkpoint.save_contents=[model,hf_model]",
        "trainer.total_training_steps=2",
    ]
    placements = {
        "one": [],
        "three": [
            "trainer.n_gpus_per_node=3",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=64",
        ],
        "apart": [
            "placement=split",
            "trainer.n_gpus_per_node=3",
            "placement.roles.ref=value",
        ],
    }
    found = {}
    for name, placement in placements.items():
        with trained(*overrides, *placement, f"trainer.default_local_dir={tmp_path / name}") as (trainer, result):
            found[name] = result.batch.batch["responses"], trainer.groups["critic"].world_size
    assert [size for _, size in found.values()] == [1, 3, 1]
    for name in ("three", "apart"):
        assert torch.equal(found[name][0], found["one"][0])
        assert_same_weights(weights(tmp_path / name), weights(tmp_path / "one"), 2e-6)
        assert_same_weights(weights(tmp_path / name, "critic"), weights(tmp_path / "one", "critic"), 2e-6)


def test_critic_warmup_is_so_many_steps_without_the_policy(base, micro_model, tmp_path) -> None:
    overrides = [*base, "algorithm.adv_estimator=gae", "trainer.critic_warmup=1", "trainer.total_training_steps=2"]
    keep = [word for word in overrides if "ckpt_to_keep" not in word]
    with trained(*keep, "critic.checkpoint.save_contents=[model,hf_model]", f"trainer.default_local_dir={tmp_path}"):
        pass

    def exported(step: int, role: str) -> dict[str, torch.Tensor]:
        (file,) = (tmp_path / f"global_step_{step}" / role / "hf_model").glob("*.safetensors")
        return load_file(file)

    first, second = (exported(step, "actor") for step in (1, 2))
    start = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).state_dict()
    assert all(torch.equal(first[name], start[name]) for name in first)
    assert any((second[name] - start[name]).abs().max() > 5e-4 for name in second)
    assert exported(1, "critic")["score.weight"].abs().max() > 0
    records = pd.read_json(tmp_path / "metrics.jsonl", lines=True)
    assert records["actor/pg_loss"].isna().tolist() == [True, False]
    assert records["critic/vf_loss"].notna().all()


def test_sparing_the_old_log_prob_pass_changes_nothing(base, tmp_path) -> None:
    overrides = [*base, "algorithm.adv_estimator=grpo", "trainer.total_training_steps=2"]
    with trained(*overrides, f"trainer.default_local_dir={tmp_path / 'auto'}") as (_, result):
        assert "old_log_probs" not in result.batch.batch.keys()
    with trained(
        *overrides,
        "actor_rollout_ref.actor.recompute_old_log_prob=always",
        f"trainer.default_local_dir={tmp_path / 'always'}",
    ) as (_, result):
        assert "old_log_probs" in result.batch.batch.keys()
    # Ratios of 1 + 1e-7 instead of 1 reach the weights only where Adam divides one tiny gradient by another.
    first, second = weights(tmp_path / "auto"), weights(tmp_path / "always")
    differences = torch.cat([(first[name] - second[name]).abs().flatten() for name in first])
    assert differences.quantile(0.99) < 1e-6


def test_the_critic_warms_up_while_the_actor_stands_still(base, micro_model, tmp_path) -> None:
    """The first token earns, whatever it is; that nothing is left to earn behind it the critic can learn alone."""
    manager = tmp_path / "pay.py"
    manager.write_text(
        "from hybridrl.reward import RewardManager\n\n\n"
        "class Pay(RewardManager):\n"
        "    def __call__(self, batch, return_dict=False):\n"
        "        result = super().__call__(batch, return_dict=True)\n"
        "        result['reward_tensor'] *= 0\n"
        "        result['reward_tensor'][:, 0] = 1\n"
        "        return result if return_dict else result['reward_tensor']\n"
    )
    warm_up = 6
    with trained(
        *base,
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=3e-3",
        "critic.ppo_mini_batch_size=4",
        "reward.reward_manager.source=importlib",
        f"reward.reward_manager.module.path={manager}",
        "reward.reward_manager.module.name=Pay",
        f"trainer.critic_warmup={warm_up}",
        f"trainer.total_training_steps={warm_up + 1}",
        f"trainer.save_freq={warm_up}",
        "trainer.max_actor_ckpt_to_keep=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ):
        pass
    records = pd.read_json(tmp_path / "run" / "metrics.jsonl", lines=True).set_index("step")
    explained = records["critic/vf_explained_var_mc"]
    assert explained[1] < 0.1 and explained[warm_up] > 0.5
    assert records["critic/advantages/var"][warm_up] < records["critic/advantages/var_constant_baseline"][warm_up]
    assert records["actor/grad_norm"][:warm_up].isna().all() and records["actor/grad_norm"][warm_up + 1] > 0
    start = AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32).state_dict()
    stood = weights(tmp_path / "run", step=warm_up)
    assert all(torch.equal(stood[name], start[name]) for name in stood)
    moved = weights(tmp_path / "run")
    assert any(not torch.equal(moved[name], start[name]) for name in moved)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_real_gsm8k_end_to_end(base, estimator, tmp_path) -> None:
    source = FIXTURES / "gsm8k"
    write_gsm8k(tmp_path / "data", source)
    rows = pd.read_parquet(tmp_path / "data" / "train.parquet")
    assert set(rows["data_source"]) == {"openai/gsm8k"}
    with trained(
        *[item for item in base if not item.startswith(("reward.", "data."))],
        f"algorithm.adv_estimator={estimator}",
        f"data.train_files={tmp_path / 'data' / 'train.parquet'}",
        f"data.val_files={tmp_path / 'data' / 'test.parquet'}",
        "data.train_batch_size=8",
        "data.max_prompt_length=700",
        "data.max_response_length=8",
        "data.filter_overlong_prompts=True",
        "trainer.total_training_steps=2",
        "trainer.test_freq=2",
        f"trainer.default_local_dir={tmp_path / 'run'}",
    ) as (trainer, result):
        assert trainer.run.step == result.step == 2
    records = pd.read_json(tmp_path / "run" / "metrics.jsonl", lines=True)
    assert records["val-core/openai/gsm8k/acc/mean@1"].notna().sum() == 2  # before the first step and after the last
    assert records["training/rollout_probs_diff_max"].max() < 1e-5
    assert records["prompt_length/mean"].min() > 100
    answers = pd.read_json(tmp_path / "run" / "validation" / "2.jsonl", lines=True)
    assert len(answers) == 40 and answers["gts"].notna().all()
