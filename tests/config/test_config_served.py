"""The keys of verl's scripts for reward models and teachers in inference engines arrive at these engines."""

from dataclasses import replace

import pytest

from hybridrl.config import load_config, validate
from hybridrl.config.roles import ROLES
from hybridrl.config.served import served_reward_model, served_teachers
from hybridrl.errors import ConfigError

TEACHER = "distillation.teacher_models.teacher_model"


def test_a_reward_model_in_an_engine_by_verls_keys_old_and_new() -> None:
    settings = {"name": "vllm", "tensor_model_parallel_size": 2, "gpu_memory_utilization": 0.8, "max_num_seqs": 64}
    settings |= {"dtype": "bfloat16", "enforce_eager": False, "max_model_len": 4096}
    for where in ("reward_model", "reward.reward_model"):
        words = [f"{where}.enable=True", f"{where}.model.path=x", f"{where}.rollout.engine_kwargs.vllm.swap_space=2"]
        words += [f"{where}.rollout.{name}={value}" for name, value in settings.items()]
        (found,) = served_reward_model(load_config("ppo_trainer", words))
        assert (found.engine, found.devices, found.needs, found.task) == ("vllm", 2, 4096, "score")
        assert {name: getattr(found.rollout, name) for name in settings} == settings
        assert found.rollout.engine_kwargs.vllm == {"swap_space": 2} and found.rollout.engine_kwargs.sglang == {}


def test_a_teacher_in_an_engine_by_verls_keys() -> None:
    words = [
        "distillation.enabled=True",
        "distillation.nnodes=1",
        "distillation.n_gpus_per_node=4",
        f"{TEACHER}.model_path=x",
        f"{TEACHER}.num_replicas=2",
        f"{TEACHER}.inference.name=vllm",
        f"{TEACHER}.inference.tensor_model_parallel_size=2",
        f"{TEACHER}.inference.gpu_memory_utilization=0.3",
        f"{TEACHER}.inference.max_model_len=4096",
        f"{TEACHER}.inference.engine_kwargs.vllm.max_logprobs=64",
        "distillation.distillation_loss.loss_mode=forward_kl_topk",
        "distillation.distillation_loss.topk=64",
        "actor_rollout_ref.rollout.temperature=0.7",
    ]
    (found,) = served_teachers(load_config("ppo_trainer", words))
    assert (found.engine, found.replicas, found.devices, found.top) == ("vllm", 2, 2, 64)
    assert (found.temperature, found.needs, found.rollout.gpu_memory_utilization) == (0.7, 4096, 0.3)
    assert found.rollout.engine_kwargs.vllm == {"max_logprobs": 64} and found.rollout.dtype == "auto"
    (tokens,) = served_teachers(load_config("ppo_trainer", [*words, "distillation.distillation_loss.loss_mode=k3"]))
    assert tokens.top == 0


def test_engines_and_arguments_of_every_served_role_are_checked(monkeypatch) -> None:
    """Of the library's reward model, and of a role of a user's own."""

    def served(config):
        (model,) = served_reward_model(config)
        return (replace(model, where="roles.own", arguments={"vllm": {"swap_space": 2}, "trtllm": {"x": 1}}),)

    monkeypatch.setitem(ROLES, "own", replace(ROLES["reward_model"], name="own", served=served))
    words = ["reward.reward_model.enable=True", "reward.reward_model.model.path=x"]
    words += ["reward.reward_model.rollout.name=nowhere", "reward.reward_model.rollout.engine_kwargs.sglang.y=1"]
    with pytest.raises(ConfigError) as caught:
        validate(load_config("ppo_trainer", words))
    for where in ("reward.reward_model.rollout", "roles.own"):
        assert [one for one in caught.value.faults if one.startswith(f"{where}.name=nowhere: unknown")]
    (arguments,) = [one for one in caught.value.faults if "engine_kwargs" in one]
    assert arguments.startswith("roles.own.engine_kwargs.trtllm=")
