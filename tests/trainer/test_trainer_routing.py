"""Router replay in whole GRPO runs (`actor.router_replay.mode`)."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from raising import raises_with
from routed_models import LAYERS, TOP_K, write_routed_model
from tensordict import TensorDict
from trainer_tools import trained

from hybridrl.config import load_config
from hybridrl.errors import ConfigError, ModelError, RolloutError
from hybridrl.protocol import DataProto
from hybridrl.rollout.inference_engine import inference_engine_class
from hybridrl.rollout.select import resolve_rollout
from hybridrl.trainer.phases import PhaseTimer
from hybridrl.trainer.ppo.learner import MODEL_INPUTS
from hybridrl.trainer.ppo.run_requirements import RunRequirements
from hybridrl.trainer.ppo.trainer import RayPPOTrainer
from hybridrl.workers.losses import check_router_replay

REWARD = Path(__file__).parents[2] / "recipes" / "smoke_reward.py"
ACTOR = "actor_rollout_ref.actor"
R2, R3 = f"{ACTOR}.router_replay.mode=R2", f"{ACTOR}.router_replay.mode=R3"
ECHO = Path(__file__).parents[1] / "agents" / "echo_tools.py"


@pytest.fixture(scope="module")
def routed_model(tmp_path_factory: pytest.TempPathFactory, micro_model: Path) -> Path:
    folder = tmp_path_factory.mktemp("routed")
    shutil.copytree(micro_model, folder, dirs_exist_ok=True)
    return write_routed_model(folder)


@pytest.fixture(scope="module")
def grpo(routed_model: Path, sort_data: Path) -> list[str]:
    """Four updates per step on two ranks, with rows in another order than they were recorded in."""
    return [
        f"actor_rollout_ref.model.path={routed_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={REWARD}",
        "actor_rollout_ref.model.share_prefixes=False",  # what is replayed never shares, and runs are compared
        "actor_rollout_ref.rollout.name=hf",
        "actor_rollout_ref.rollout.n=4",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=4",
        "data.max_prompt_length=24",
        "data.max_response_length=7",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.ppo_epochs=2",
        f"{ACTOR}.shuffle=True",
        f"{ACTOR}.optim.optimizer=SGD",
        f"{ACTOR}.use_kl_loss=True",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.threads_per_worker=1",
        "trainer.save_last=False",
        "trainer.total_training_steps=1",
    ]


@pytest.mark.slow
def test_updates_use_the_recorded_experts(ray_session: None, grpo: list[str], tmp_path: Path) -> None:
    """Without a change of the weights nothing changes; with one, the routers alone would choose other experts."""
    found: dict[tuple[float, str], dict[str, float]] = {}
    for lr in (0.0, 30.0):
        for mode in ("disabled", "R2", "R3") if lr else ("disabled", "R2"):
            words = [f"{ACTOR}.optim.lr={lr}", f"{ACTOR}.router_replay.mode={mode}"]
            with trained(*grpo, *words, f"trainer.default_local_dir={tmp_path / f'{mode}_{lr}'}") as (trainer, result):
                found[lr, mode] = {name: v for name, v in result.metrics.items() if name.startswith("actor/")}
                fields = result.batch.batch
                assert ("routed_experts" in fields.keys()) == (mode != "disabled")
                if mode != "disabled":
                    assert fields["routed_experts"].shape == (*fields["input_ids"].shape, LAYERS, TOP_K)
                    assert not fields["routed_experts"][fields["attention_mask"] == 0].any()
                    assert set(fields["routed_experts"].unique().tolist()) == {0, 1, 2, 3}
                if mode == "R3":
                    assert_only_the_policy_replays(trainer, fields)
    assert found[0.0, "R2"] == pytest.approx(found[0.0, "disabled"], rel=1e-5, abs=1e-7)
    assert found[0.0, "R2"]["actor/grad_norm"] > 0
    assert found[30.0, "R2"]["actor/ppo_kl"] != pytest.approx(found[30.0, "disabled"]["actor/ppo_kl"], rel=1e-3)
    assert found[30.0, "R3"] == pytest.approx(found[30.0, "R2"], rel=1e-3, abs=1e-6)  # with the sampler's numerics


@pytest.mark.slow
def test_sessions_with_tools_replay_the_samplers_experts(ray_session: None, grpo: list[str], tmp_path: Path) -> None:
    words = [
        R3,
        f"actor_rollout_ref.model.external_lib={ECHO}",
        "data.max_prompt_length=700",
        "data.max_response_length=120",
        "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.rollout.multi_turn.enable=True",
        f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ECHO}",
        "actor_rollout_ref.rollout.multi_turn.format=every_turn",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns=2",
        f"actor_rollout_ref.rollout.stop=[{','.join('ABCDEFGHIJKLMNOPQ')}]",  # a random model rarely ends a turn
        f"trainer.default_local_dir={tmp_path}",
    ]
    with trained(*grpo, *words) as (trainer, result):
        assert max(result.batch.non_tensor_batch["__num_turns__"]) > 3
        assert_only_the_policy_replays(trainer, result.batch.batch, within=2e-4)  # rows of hundreds of tokens


def assert_only_the_policy_replays(trainer: RayPPOTrainer, fields: TensorDict, within: float = 1e-5) -> None:
    """With the sampler's experts its log-probabilities come out, with others different ones; the reference's stay."""
    mask = fields["response_mask"].bool()
    torch.testing.assert_close(
        fields["old_log_probs"][mask], fields["rollout_log_probs"][mask], atol=within, rtol=within
    )
    kept = {name: fields[name] for name in (*MODEL_INPUTS, "prompts", "routed_experts", "token_level_scores")}
    others = {**kept, "routed_experts": (fields["routed_experts"] + 1) % 4}
    computed = []
    for given in (kept, others):
        batch = DataProto.from_dict(dict(given), meta_info={"temperature": 1.0})
        batch.non_tensor_batch["uid"] = np.array([str(row) for row in range(len(batch))], dtype=object)
        trainer.learner.evaluate(batch, PhaseTimer())
        computed.append(batch.batch)
    assert float((computed[1]["old_log_probs"] - computed[0]["old_log_probs"])[mask].abs().max()) > 1e-3
    assert torch.equal(computed[1]["ref_log_prob"], fields["ref_log_prob"])
    del kept["routed_experts"]
    with raises_with(RolloutError, "router_replay.mode", "routed_experts"):
        trainer.learner.evaluate(DataProto.from_dict(kept), PhaseTimer())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([f"{ACTOR}.strategy=megatron"], r"mode=R2 with .*strategy=megatron needs .*ReplaysRouting.*mode=disabled"),
        (["algorithm.rollout_correction.bypass_mode=True"], r"mode=R2 replays .*bypass_mode=True"),
        (["actor_rollout_ref.model.share_prefixes=True"], r"mode=R2: .*share_prefixes=True"),
        ([f"{ACTOR}.fsdp_config.ulysses_sequence_parallel_size=2"], r"ulysses_sequence_parallel_size=2"),
        ([f"{ACTOR}.use_torch_compile=True"], r"use_torch_compile=True"),
        (["actor_rollout_ref.model.path=DENSE"], r"mode=R2: .*Qwen2ForCausalLM of transformers has no layers with exp"),
    ],
)
def test_what_cannot_be_replayed_is_refused(grpo: list[str], micro_model: Path, words: list[str], message: str) -> None:
    given = [word.replace("DENSE", str(micro_model)) for word in words]
    for mode in (R2, R3):
        check_router_replay(load_config("ppo_trainer", [*grpo, mode]))
        if mode == R3 and "bypass_mode" in message:  # the record is the sampler's, as the log-probabilities are
            check_router_replay(load_config("ppo_trainer", [*grpo, mode, *given]))
            continue
        with pytest.raises(ModelError, match=message.replace("mode=R2", mode.split(".")[-1])):
            check_router_replay(load_config("ppo_trainer", [*grpo, mode, *given]))


def test_engines_that_do_not_return_the_experts_are_refused(grpo: list[str]) -> None:
    assert resolve_rollout(load_config("ppo_trainer", [*grpo, R3]).actor_rollout_ref, use_gpu=False) == "hf"
    config = load_config("ppo_trainer", [*grpo, R3, "actor_rollout_ref.rollout.name=plain_engine:PlainEngine"])
    with raises_with(RolloutError, "mode=R3", "PlainEngine", "rollout.name", "hf"):
        resolve_rollout(config.actor_rollout_ref, use_gpu=False)


@pytest.mark.parametrize(
    ("name", "words", "on_gpu", "message"),
    [
        ("vllm", [], False, r"on a CPU vLLM refuses it .*rollout\.name to sglang or hf"),
        ("vllm", ["enable_prefix_caching=False"], True, r"enable_prefix_caching=False .*R3.*set it to True"),
        ("vllm", ["pipeline_model_parallel_size=2"], True, r"pipeline_model_parallel_size=2 .*set it to 1"),
        ("sglang", ["enable_chunked_prefill=False"], False, r"enable_chunked_prefill=False .*set it to True"),
        ("sglang", ["pipeline_model_parallel_size=2"], False, r"pipeline_model_parallel_size=2 .*set it to 1"),
        ("sglang", ["DENSE"], False, r"Qwen2ForCausalLM of transformers has no layers with experts"),
    ],
)
def test_what_engines_cannot_record_is_refused(
    grpo: list[str], micro_model: Path, name: str, words: list[str], on_gpu: bool, message: str
) -> None:
    model = [f"actor_rollout_ref.model.path={micro_model}"] if "DENSE" in words else []
    given = [f"actor_rollout_ref.rollout.{word}" for word in words if word != "DENSE"]
    config = load_config("ppo_trainer", [*grpo, R3, *model, *given]).actor_rollout_ref
    with pytest.raises((RolloutError, ModelError), match=message):
        inference_engine_class(name).check_routing(config.rollout, config.model, on_gpu)


def test_the_settings_that_record_are_taken(grpo: list[str]) -> None:
    config = load_config("ppo_trainer", [*grpo, R3]).actor_rollout_ref
    inference_engine_class("vllm").check_routing(config.rollout, config.model, on_gpu=True)
    inference_engine_class("sglang").check_routing(config.rollout, config.model, on_gpu=False)


def test_the_pass_that_records_is_not_left_out(grpo: list[str]) -> None:
    once = [*grpo, f"{ACTOR}.ppo_epochs=1", f"{ACTOR}.ppo_mini_batch_size=4"]
    assert not RunRequirements.of(load_config("ppo_trainer", once)).old_log_probs
    assert RunRequirements.of(load_config("ppo_trainer", [*once, R2])).old_log_probs
    assert not RunRequirements.of(load_config("ppo_trainer", [*once, R3])).old_log_probs


@pytest.mark.parametrize(
    ("word", "message"),
    [
        (f"{ACTOR}.router_replay.record_file=x", r"router_replay\.record_file.*travel in the batch"),
        ("actor_rollout_ref.ref.router_replay.mode=R2", r"ref\.router_replay\.mode.*own routers"),
    ],
)
def test_what_is_not_built_is_refused_by_name(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config("ppo_trainer", [word])
