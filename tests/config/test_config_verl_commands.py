"""Words that verl's own commands contain: choices of groups, base files, old names, values with another spelling."""

from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from hybridrl.config import ConfigError, load_config
from hybridrl.config.checks.check_schedule import check_schedule
from hybridrl.config.compose import compose_config
from hybridrl.config.verl.keys import Assignment, KeyBook
from hybridrl.config.verl.tables import bases, choices, programs

POLICY = "actor_rollout_ref"


def faults_of(root: str, *words: str, folder: str | None = None, name: str | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose_config(root, words, folder, name)
    return caught.value.faults


def test_choices_that_mean_what_is_there_change_nothing():
    words = ["engine=fsdp", "optim=fsdp", "model=hf_model"]
    assert load_config("sft_trainer", [*words, "optim.lr=1e-4"]) == load_config("sft_trainer", ["optim.lr=1e-4"])
    assert load_config("ppo_trainer", ["model_engine=dp", "model@actor_rollout_ref.model=hf_model"]) == load_config(
        "ppo_trainer", []
    )


@pytest.mark.parametrize("choice", choices(), ids=lambda choice: choice.groups[0])
def test_choices_of_other_engines_are_named_as_what_they_are(choice):
    for root in choice.roots:
        for group in choice.groups:
            for option, why in choice.why.items():
                (fault,) = faults_of(root, f"{group}={option}")
                assert fault.startswith(f"{group}={option}") and why in fault and choice.instead in fault


def test_an_unknown_choice_names_those_there_are():
    (fault,) = faults_of("sft_trainer", "engine=deepspeed")
    assert "engine=deepspeed" in fault and "fsdp" in fault and "megatron" in fault


@pytest.mark.parametrize("folder", ["config", "./config"])
@pytest.mark.parametrize("suffix", ["", ".yaml"])
def test_the_base_files_of_verl_stand_for_ours(folder, suffix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, base in bases().items():
        if base.why:
            (fault,) = faults_of(base.tree, folder=folder, name=name + suffix)
            assert f"--config-name {name}" in fault and base.why in fault
        else:
            words = [f"{group}={option}" for group, option in base.choices.items()]
            assert load_config(base.tree, [], folder, name + suffix) == load_config(base.tree, words)


def test_a_file_of_the_users_own_goes_before_the_base_of_its_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config").mkdir()
    (tmp_path / "config/ppo_trainer.yaml").write_text("trainer: {total_epochs: 3}\n")
    assert load_config("ppo_trainer", [], "config", "ppo_trainer").trainer.total_epochs == 3
    (fault,) = faults_of("ppo_trainer", folder="config", name="ppo_trainr")
    assert "ppo_trainr" in fault


def test_a_base_that_is_not_supported_does_not_hide_other_faults(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = faults_of("ppo_trainer", "trainer.nnode=3", folder="config", name="ppo_veomni_trainer")
    assert len(found) == 2 and any("trainer.nnode" in fault for fault in found)
    (tmp_path / "mine.yaml").write_text("defaults: [ppo_veomni_trainer, _self_]\ntrainer: {nnodes: 2}\n")
    (fault,) = faults_of("ppo_trainer", folder=".", name="mine")
    assert "ppo_veomni_trainer" in fault and "VeOmni" in fault


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        (["model.partial_pretrain=org/m"], "model.path", "org/m"),
        (["model.strategy=fsdp"], "engine.strategy", "fsdp2"),
        (["optim.lr_scheduler=cosine"], "optim.lr_scheduler_type", "cosine"),
        (["use_remove_padding=False"], "model.use_remove_padding", False),
        (["model.fsdp_config.cpu_offload=True"], "engine.offload_policy", True),
        (["model.fsdp_config.model_dtype=bf16"], "engine.model_dtype", "bfloat16"),
        (["trainer.checkpoint.save_contents=[model,hf_model]"], "checkpoint.save_contents", ["model", "hf_model"]),
        (["data.multiturn.messages_key=chat"], "data.messages_key", "chat"),
        (["data.prompt_dict_keys=['question']"], "data.prompt_dict_keys", ["question"]),
        (["optim.betas='[0.9,0.95]'"], "optim.betas", [0.9, 0.95]),
        (["optim.eps=1e-6"], "optim.override_optimizer_config", {"eps": 1e-6}),
        (["trainer.test_freq=after_each_epoch"], "trainer.test_freq", "after_each_epoch"),
        (["trainer.save_freq=7"], "trainer.save_freq", 7),
    ],
)
def test_names_and_values_of_fine_tuning(words, key, value):
    found = load_config("sft_trainer", words)
    for part in key.split("."):
        found = found[part]
    assert found == value


@pytest.mark.parametrize(
    ("words", "key", "value"),
    [
        ([f"{POLICY}.rollout.load_format=safetensors"], f"{POLICY}.rollout.load_format", "auto"),
        ([f"{POLICY}.rollout.load_format=dummy_dtensor"], f"{POLICY}.rollout.load_format", "dummy"),
        (
            [f"+{POLICY}.actor.fsdp_config.mixed_precision.param_dtype=bf16"],
            f"{POLICY}.actor.fsdp_config.dtype",
            "bfloat16",
        ),
        ([f"{POLICY}.actor.policy_loss.tau_neg=1.2"], f"{POLICY}.actor.tau_neg", 1.2),
        ([f"{POLICY}.rollout.response_length=77"], "data.max_response_length", 77),
        (["reward_manager.name=dapo"], "reward.reward_manager.name", "dapo"),
    ],
)
def test_names_and_values_of_reinforcement_learning(words, key, value):
    found = load_config("ppo_trainer", words)
    for part in key.split("."):
        found = found[part]
    assert found == value


def test_the_chunks_of_the_entropy_follow_the_actor_unless_they_are_set():
    chunking, size = "entropy_from_logits_with_chunking", "entropy_from_logits_chunk_size"
    policy = load_config(
        "ppo_trainer",
        [f"{POLICY}.actor.{chunking}=True", f"{POLICY}.actor.{size}=64", f"{POLICY}.ref.fsdp_config.{size}=32"],
    ).actor_rollout_ref
    found = [one.most_tokens for role in (policy.actor, policy.ref) for one in (role.fsdp_config, role.megatron)]
    assert found == [64, 64, 32, 64]
    apart = load_config("ppo_trainer", [f"{POLICY}.ref.{chunking}=True"]).actor_rollout_ref
    assert (apart.actor.fsdp_config.most_tokens, apart.ref.megatron.most_tokens) == (None, 2048)
    assert load_config("sft_trainer", [f"engine.{chunking}=True", f"engine.{size}=8"]).engine.most_tokens == 8


def test_the_lengths_of_generation_have_two_names():
    generated = load_config("generation", [f"{POLICY}.rollout.prompt_length=99", "rollout.response_length=33"])
    assert (generated.data.max_prompt_length, generated.actor_rollout_ref.rollout.prompt_length) == (99, 99)
    assert (generated.data.max_response_length, generated.actor_rollout_ref.rollout.response_length) == (33, 33)


@pytest.mark.parametrize(
    ("root", "word", "named"),
    [
        ("ppo_trainer", "trainer.use_legacy_worker_impl=disable", "workers"),
        ("ppo_trainer", "reward_model.use_reward_loop=False", "reward"),
        ("ppo_trainer", f"{POLICY}.actor.profiler.tool_config.nsys.discrete=True", "profile"),
        ("ppo_trainer", f"{POLICY}.ref.profiler.tool_config.npu.level=level1", "profile"),
        ("ppo_trainer", "global_profiler.profile_continuous_steps=True", "profile"),
        ("ppo_trainer", f"+{POLICY}.model.fused_kernel_options.impl_backend=triton", "Triton"),
        ("ppo_trainer", f"{POLICY}.actor.entropy_checkpointing=True", "entropy"),
        ("sft_trainer", "engine.entropy_checkpointing=True", "entropy"),
        ("ppo_trainer", f"+{POLICY}.actor.fsdp_config.mixed_precision.reduce_dtype=bf16", "float32"),
        ("sft_trainer", "trainer.seed=1111", "engine.seed"),
        ("sft_trainer", "data.ignore_input_ids_mismatch=True", "whole"),
        ("sft_trainer", "data.multiturn.enable=true", "data.messages_key"),
        ("ppo_trainer", f"{POLICY}.actor.checkpoint.strict=False", "all of its weights"),
        ("ppo_trainer", f"{POLICY}.rollout.calculate_log_probs=False", "always"),
        ("ppo_trainer", f"{POLICY}.rollout.enable_rollout_routing_replay=True", "mode=R3"),
        ("sft_trainer", "checkpoint.strict=False", "all of its weights"),
        ("sft_trainer", "profiler.tool=torch", "global_profiler"),
        ("sft_trainer", "trainer.profile_interval=[3,4]", "global_profiler.steps"),
        ("sft_trainer", "global_profiler.profile_continuous_steps=True", "profile"),
    ],
)
def test_what_has_no_effect_is_said_with_the_reason(root, word, named):
    composed, plain = compose_config(root, [word]), compose_config(root, [])
    assert composed.config == plain.config
    (notice,) = composed.notices
    assert word.lstrip("+").split("=")[0] in notice and named in notice


@pytest.mark.parametrize(
    ("root", "word"),
    [
        ("ppo_trainer", f"{POLICY}.actor.profiler.enable=False"),
        ("ppo_trainer", "reward_model.use_reward_loop=True"),
        ("ppo_trainer", f"{POLICY}.hybrid_engine=True"),
        ("ppo_trainer", f"{POLICY}.rollout.router_config_path=null"),
        ("ppo_trainer", "trainer.checkpoint_callback_class=null"),
        ("ppo_trainer", "trainer.v1.sampler.max_off_policy_threshold=null"),
        ("ppo_trainer", "transfer_queue.enable=False"),
        ("sft_trainer", "ulysses_sequence_parallel_size=1"),
    ],
)
def test_defaults_of_verl_pass(root, word):
    assert compose_config(root, [word]).config == compose_config(root, []).config


def test_the_metric_of_group_filtering_may_be_called_reward():
    from hybridrl.config.schema.choices import SCORES

    metric = load_config("ppo_trainer", ["algorithm.filter_groups.metric=reward"]).algorithm.filter_groups.metric
    assert metric == "reward" and metric in SCORES


@pytest.mark.parametrize("word", ["trainer.nnodes=", "trainer.n_gpus_per_node=x"])
def test_a_value_that_others_follow_names_its_own_key(word):
    (fault,) = faults_of("ppo_trainer", word)
    assert fault.startswith(word.split("=")[0]) and "a whole number" in fault


@pytest.mark.parametrize(
    ("wrong", "branch"),
    [
        (f"{POLICY}.rollout.val_kwargs.temp", f"{POLICY}.rollout.val_kwargs."),
        ("critic.optim.lr_warmup", "critic.optim."),
        ("reward.custom_reward_function.pat", "reward.custom_reward_function."),
        ("data.sampler.name", "data.sampler."),
    ],
)
def test_neighbours_of_an_unknown_key_come_from_its_own_branch(wrong, branch):
    (fault,) = KeyBook("ppo_trainer").rewrite([Assignment(wrong, 1)]).faults
    assert all(name.startswith(branch) for name in fault.split("nearest: ")[1].split(", "))


def test_programs_name_trees_and_modules_that_exist():
    import importlib.util

    for name, program in programs().items():
        assert name.startswith("verl.")
        if program.tree is None:
            assert program.why and program.instead
        else:
            KeyBook(program.tree)
            assert program.module is not None and importlib.util.find_spec(program.module) is not None


def test_the_tables_of_verl_are_packaged():
    folder = Path(__file__).parents[2] / "hybridrl/config/verl"
    assert {path.stem for path in folder.glob("*.yaml")} == {
        *("aliases", "bases", "choices", "idle", "no_effect", "pending", "programs"),
    }


def composed(program: str, *words: str):
    entry = programs()[f"verl.experimental.{program}"]
    return compose_config(entry.tree, words, defaults=entry.defaults)


@pytest.mark.parametrize("named_here", [False, True], ids=["verl's program", "the program here"])
@given(
    mini=st.integers(1, 64),
    parts=st.integers(1, 5),
    sync=st.integers(1, 5),
    threshold=st.sampled_from([0, 0.1, 0.5, 1, 2.5]),
    partial=st.booleans(),
    samplers=st.booleans(),
    recomputes=st.booleans(),
    total=st.integers(1, 10_000),
)
@settings(max_examples=15, deadline=None)
def test_fully_asynchronous_settings_of_verl(
    named_here, mini, parts, sync, threshold, partial, samplers, recomputes, total
) -> None:
    """By verl: P = m b k prompts between two transfers of weights, and int(P (1 + S)) drawn until the next."""
    words = [
        f"{POLICY}.actor.ppo_mini_batch_size={mini}",
        f"async_training.require_batches={parts}",
        f"async_training.trigger_parameter_sync_step={sync}",
        f"async_training.staleness_threshold={threshold}",
        f"async_training.partial_rollout={partial}",
        f"async_training.use_rollout_log_probs={samplers}",
        f"async_training.compute_prox_log_prob={recomputes}",
        "rollout.nnodes=2",
        "rollout.n_gpus_per_node=4",
        "rollout.test_freq=3",
        f"rollout.total_rollout_steps={total}",
        "data.train_batch_size=0",
        "data.gen_batch_size=1",
    ]
    if named_here:
        config = compose_config("ppo_trainer", words).config
    else:
        config = composed("fully_async_policy.fully_async_main", *words).config
    prompts = mini * parts * sync
    assert config.data.train_batch_size == prompts and config.trainer.test_freq == 3
    assert config.trainer.total_training_steps == max(1, total // prompts)
    assert (config.actor_rollout_ref.rollout.nnodes, config.actor_rollout_ref.rollout.n_gpus_per_node) == (2, 4)
    mode = config.trainer.v1
    assert mode.staleness == threshold and mode.trainer_mode == ("separate_async" if threshold else "sync")
    if threshold:
        assert mode.drain is not partial
        assert config.algorithm.rollout_correction.bypass_mode is (samplers and not recomputes)
        lot = config.data.gen_batch_size
        # A lot fits next to a whole step, so generation cannot wait for training and training for generation.
        assert int((1 + threshold) * prompts) >= prompts - 1 + lot
    assert list(check_schedule(config)) == []


def test_programs_of_verl_bring_their_own_defaults() -> None:
    one = composed("one_step_off_policy.main_ppo", "rollout.nnodes=1", "rollout.n_gpus_per_node=2").config
    assert (one.trainer.v1.trainer_mode, one.trainer.v1.staleness, one.trainer.v1.drain) == ("separate_async", 1, True)
    assert one.algorithm.rollout_correction.bypass_mode is True
    full = composed("fully_async_policy.fully_async_main", f"{POLICY}.actor.ppo_mini_batch_size=8")
    assert full.config.trainer.v1.staleness == 0.1 and full.config.data.train_batch_size == 8 * 4
    assert any("async_training.staleness_threshold=0.1" in notice for notice in full.notices)
    assert full.config.trainer.total_training_steps is None  # epochs decide
    own = composed("one_step_off_policy.main_ppo", "trainer.v1.separate_async.num_warmup_batches=2")
    assert own.config.trainer.v1.staleness == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("async_training.staleness_threshold", "-1"),
        ("async_training.staleness_threshold", "much"),
        ("async_training.require_batches", "1.5"),
        ("async_training.trigger_parameter_sync_step", "0"),
        ("async_training.partial_rollout", "maybe"),
        ("rollout.total_rollout_steps", "-5"),
        ("async_training.staleness", "1"),
    ],
)
def test_asynchronous_settings_that_cannot_be_used_are_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError) as caught:
        composed("fully_async_policy.fully_async_main", f"{name}={value}")
    assert name in str(caught.value)


def test_what_fully_asynchronous_settings_replace_is_told() -> None:
    words = ["data.train_batch_size=96", f"{POLICY}.actor.ppo_mini_batch_size=16", "async_training.require_batches=2"]
    (notice,) = (
        text for text in composed("fully_async_policy.fully_async_main", *words).notices if "fully_async" in text
    )
    assert "data.train_batch_size=128" in notice and "replaces data.train_batch_size=96" in notice


def test_asynchronous_settings_in_a_file(tmp_path) -> None:
    (tmp_path / "own.yaml").write_text("async_training: {staleness_threshold: 0.5, require_batches: 2}\n")
    config = compose_config("ppo_trainer", [f"{POLICY}.actor.ppo_mini_batch_size=4"], tmp_path, "own").config
    assert config.data.train_batch_size == 4 * 2 * 4 and config.trainer.v1.staleness == 0.5
