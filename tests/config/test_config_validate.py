"""Cross-checks at start-up: each fault is found, named with its keys, and all of them come at once."""

from pathlib import Path

import numpy as np
import pytest
import torch

from hybridrl.algorithms import get_adv_estimator_fn
from hybridrl.algorithms.rollout_correction.presets import PRESETS
from hybridrl.config import ConfigError, load_config, validate
from hybridrl.config.checks.check_run import check, check_gpus, visible_gpus
from hybridrl.config.schema.trainer import RunConfig
from hybridrl.errors import AlgorithmError
from hybridrl.registry import ADV_ESTIMATORS

POLICY = "actor_rollout_ref"


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working directory with data, a model folder and a reward function; no GPU."""
    (tmp_path / "model").mkdir()
    for name in ("train.parquet", "val.parquet", "reward.py", "cls.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return tmp_path


PPO = [f"{POLICY}.model.path=model", "data.train_files=train.parquet", "data.val_files=[val.parquet]"]
GRPO = [*PPO, "algorithm.adv_estimator=grpo", f"{POLICY}.rollout.n=8"]
GDPO = ["algorithm.adv_estimator=gdpo", "algorithm.gdpo_reward_keys=[accuracy,format]"]
ADAPTIVE = ["algorithm.use_kl_in_reward=true", "algorithm.kl_ctrl.type=adaptive"]
CORRECTION = "algorithm.rollout_correction"
SFT = ["model.path=./model", "data.train_files=[train.parquet]"]


def faults_of(words: list[str], root: str = "ppo_trainer") -> list[str]:
    config = load_config(root, words)  # type: ignore[call-overload]
    with pytest.raises(ConfigError) as caught:
        validate(config)
    return caught.value.faults


@pytest.mark.parametrize(
    "words",
    [
        PPO,
        GRPO,
        [*GRPO, "data.train_batch_size=96", f"{POLICY}.actor.ppo_mini_batch_size=32", "trainer.n_gpus_per_node=5"],
        [*GRPO, "data.train_batch_size=4", f"{POLICY}.actor.ppo_mini_batch_size=2"],  # micro-batch default is larger
        [*GRPO, "+placement.pools.second=[1]", "+placement.roles.ref=second"],
        [*GRPO, f"{POLICY}.model.path=org/name", "critic.model.path=nowhere"],  # no critic in GRPO
        [*GRPO, "reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 64}"],
        [*GRPO, "data.train_files=hdfs://host/file.parquet"],
        [*GRPO, "data.train_files=[tr*.parquet,openai/gsm8k@main:train]", "data.val_files='openai/gsm8k:test[:10%]'"],
        [*GRPO, f"{POLICY}.actor.checkpoint.save_contents=[hf_model]", "trainer.resume_mode=disable"],
        [*GRPO, "trainer.max_actor_ckpt_to_keep=2", "trainer.max_critic_ckpt_to_keep=2"],
        [*GRPO, *ADAPTIVE, "algorithm.kl_ctrl.horizon=1639"],  # 1024 prompts x 8 samples < 5 x 1639
        [*GRPO, *GDPO, "algorithm.gdpo_reward_weights=[1,2]", f"{POLICY}.actor.use_kl_loss=true"],
        [*GRPO, f"{POLICY}.actor.policy_loss.loss_mode=cispo", f"{POLICY}.actor.clip_ratio_low=5"],
        *([*GRPO, *(f"{CORRECTION}.{key}={value}" for key, value in preset.items())] for preset in PRESETS.values()),
    ],
)
def test_what_works_passes(here, words):
    validate(load_config("ppo_trainer", words))


def test_sft_that_works_passes(here):
    validate(load_config("sft_trainer", SFT))
    validate(load_config("sft_trainer", [*SFT, "data.prompt_key=question", "data.response_key=answer"]))


@pytest.mark.parametrize(
    ("change", "key", "expected"),
    [
        # models and files
        ([f"{POLICY}.model.path=''"], f"{POLICY}.model.path", "is not set"),
        ([f"{POLICY}.model.path=./missing"], f"{POLICY}.model.path", "no such directory"),
        ([f"{POLICY}.model.path=/a/b/c"], f"{POLICY}.model.path", "no such directory"),
        ([f"{POLICY}.model.path=train.parquet"], f"{POLICY}.model.path", "is a file"),
        ([f"{POLICY}.model.tokenizer_path=./tok"], f"{POLICY}.model.tokenizer_path", "no such directory"),
        ([f"{POLICY}.model.external_lib=no_such_module_x"], f"{POLICY}.model.external_lib", "neither a Python file"),
        (
            [f"+{POLICY}.model.override_config.attn_implementation=flash_attention_2", "trainer.device=cpu"],
            "attn_implementation",
            "needs a GPU",
        ),
        (["data.train_files=[]"], "data.train_files", "is not set"),
        (["data.train_files=[train.parquet,gone.parquet]"], "data.train_files=gone.parquet", "no such file"),
        (["data.train_files=model"], "data.train_files", "is a folder"),
        (["data.train_files=*.csv"], "data.train_files=*.csv", "no file has such a name"),
        (["data.val_files=gone.parquet"], "data.val_files", "no such file"),
        (["data.val_files=[]", "trainer.test_freq=5"], "trainer.test_freq=5", "data.val_files"),
        (["data.val_files=[]", "trainer.val_only=true"], "trainer.val_only", "data.val_files"),
        (["data.train_max_samples=10"], "data.train_max_samples=10", "no batch"),
        (["data.custom_cls.path=cls.py"], "data.custom_cls.path", "custom_cls.name"),
        (["data.custom_cls.path=gone.py", "data.custom_cls.name=A"], "data.custom_cls.path", "no such file"),
        (["data.sampler.class_name=A"], "data.sampler.class_name", "class_path"),
        (["reward.custom_reward_function.path=gone.py"], "reward.custom_reward_function.path", "no such file"),
        (["reward.custom_reward_function.name=f"], "reward.custom_reward_function.name", "path"),
        (["reward.reward_manager.source=importlib"], "reward.reward_manager", "module.path"),
        (["reward.reward_manager.name=naiv"], "reward.reward_manager.name", "nearest: naive"),
        (
            ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg.lenght=4"],
            "overlong_buffer_cfg.lenght",
            "unknown key",
        ),
        (
            ["reward.reward_manager.name=dapo", "reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 9999}"],
            "overlong_buffer_cfg.len",
            "from 1 to",
        ),
        (["reward.reward_kwargs.per_tokn=1"], "reward.reward_kwargs has per_tokn", "naive has no settings"),
        (["reward.reward_manager.name=prime", "reward.reward_kwargs.x=1"], "reward_kwargs has x", "prime"),
        # algorithm
        (["algorithm.adv_estimator=grpoo"], "algorithm.adv_estimator", "nearest: grpo"),
        ([f"{POLICY}.actor.policy_loss.loss_mode=vanila"], "loss_mode", "nearest: vanilla"),
        (
            [f"{POLICY}.rollout.n=1", f"{POLICY}.actor.policy_loss.loss_mode=gvpo"],
            "loss_mode=gvpo compares",
            f"{POLICY}.rollout.n=1",
        ),
        (
            ["algorithm.adv_estimator=spo", "algorithm.use_kl_in_reward=true"],
            "adv_estimator=spo tracks",
            "algorithm.use_kl_in_reward",
        ),
        (
            ["algorithm.adv_estimator=spo", "algorithm.normalize_rewards=batch"],
            "adv_estimator=spo tracks",
            "algorithm.normalize_rewards=batch",
        ),
        (
            ["algorithm.use_pf_ppo=True", f"{POLICY}.actor.policy_loss.loss_mode=gvpo_ref"],
            "loss_mode=gvpo_ref compares",
            "algorithm.use_pf_ppo=True",
        ),
        (
            [f"{POLICY}.rollout.n=1", "algorithm.adv_estimator=grpo_passk"],
            "algorithm.adv_estimator=grpo_passk",
            f"{POLICY}.rollout.n=1",
        ),
        (["algorithm.adv_estimator=gae", "critic.enable=false"], "algorithm.adv_estimator=gae", "critic.enable"),
        (["trainer.critic_warmup=3"], "trainer.critic_warmup=3", "without a critic"),
        ([f"{POLICY}.actor.loss_scale_factor=100"], "loss_scale_factor", "seq-mean-token-sum-norm"),
        ([f"{POLICY}.actor.policy_loss.loss_mode=dro"], "loss_mode=dro", "dro_beta"),
        (["algorithm.filter_groups.metric=seq_final_reward"], "metric=seq_final_reward", "use score"),
        ([*ADAPTIVE, "algorithm.kl_ctrl.horizon=1638"], "kl_ctrl.horizon=1638", "8192 samples"),
        ([*GDPO, "algorithm.gdpo_reward_weights=[1]"], "gdpo_reward_weights=[1.0]", "one weight for each key"),
        ([*GDPO, "algorithm.use_kl_in_reward=true"], "algorithm.use_kl_in_reward=True", "actor.use_kl_loss=True"),
        ([*GDPO, "algorithm.normalize_rewards=batch"], "algorithm.normalize_rewards=batch", "set it to none"),
        ([*GDPO, "algorithm.clip_rewards=5"], "algorithm.clip_rewards=5", "set it to null"),
        (
            [
                *GDPO,
                "reward.reward_manager.name=dapo",
                "reward.reward_kwargs.overlong_buffer_cfg={enable: true, len: 64}",
            ],
            "overlong_buffer_cfg",
            "adv_estimator=gdpo",
        ),
        (["algorithm.gdpo_reward_keys=[a]"], "gdpo_reward_keys", "adv_estimator=grpo"),
        # rollout correction
        ([f"{CORRECTION}.loss_type=reinforce"], f"{CORRECTION}.loss_type=reinforce", "bypass_mode=True"),
        ([f"{CORRECTION}.rollout_is_batch_normalize=true"], "rollout_is_batch_normalize=True", "rollout_is is not set"),
        ([f"{CORRECTION}.rollout_rs_threshold=0.01"], "rollout_rs_threshold=0.01", "rollout_rs is not set"),
        # batches
        (
            ["data.train_batch_size=100", "ppo_mini_batch_size=256"],
            "ppo_mini_batch_size=256",
            "data.train_batch_size=100",
        ),
        (["data.train_batch_size=1000"], "data.train_batch_size=1000", "nearest divisors: 250, 500"),
        ([f"{POLICY}.actor.ppo_micro_batch_size_per_gpu=4096"], "ppo_micro_batch_size_per_gpu=4096", "2048 sequences"),
        # lengths
        (
            [f"{POLICY}.rollout.response_length=64", "data.max_response_length=65"],
            "response_length=64",
            "same thing",
        ),
        ([f"{POLICY}.actor.rollout_n=4"], "actor.rollout_n=4", "same thing"),
        ([f"{POLICY}.rollout.max_model_len=1000"], "max_model_len=1000", "1024 tokens"),
        (
            [f"{POLICY}.actor.use_dynamic_bsz=true", f"{POLICY}.actor.ppo_max_token_len_per_gpu=1023"],
            "actor.ppo_max_token_len_per_gpu=1023",
            "1024 tokens",
        ),
        # the KL over the vocabulary
        (
            [
                f"{POLICY}.actor.use_kl_loss=true",
                f"{POLICY}.actor.kl_loss_type=full",
                "+placement.pools.second=[1]",
                "+placement.roles.ref=second",
            ],
            "actor.kl_loss_type=full",
            "remove placement.roles.ref",
        ),
        (
            [
                f"{POLICY}.actor.use_kl_loss=true",
                f"{POLICY}.actor.kl_loss_type=full",
                f"{POLICY}.ref.fsdp_config.dtype=bfloat16",
            ],
            "ref.fsdp_config.dtype=bfloat16",
            "set them alike",
        ),
        (
            [
                f"{POLICY}.actor.use_kl_loss=true",
                f"{POLICY}.actor.kl_loss_type=full",
                f"{POLICY}.ref.strategy=megatron",
            ],
            "ref.strategy=megatron",
            "must be actor_rollout_ref.actor.strategy=fsdp2",
        ),
        (
            [
                f"{POLICY}.actor.use_kl_loss=true",
                f"{POLICY}.actor.kl_loss_type=full",
                f"{POLICY}.actor.strategy=megatron",
                f"{POLICY}.actor.megatron.tensor_model_parallel_size=2",
                f"{POLICY}.ref.megatron.tensor_model_parallel_size=1",
            ],
            "ref.megatron.tensor_model_parallel_size=1",
            "set them alike",
        ),
        (
            [
                "algorithm.use_kl_in_reward=true",
                "algorithm.kl_penalty=full",
                "algorithm.rollout_correction.bypass_mode=true",
            ],
            "algorithm.kl_penalty=full",
            "bypass_mode=False",
        ),
        # sampling
        ([f"{POLICY}.rollout.do_sample=false"], "do_sample=False", "alike"),
        ([f"{POLICY}.rollout.val_kwargs.do_sample=true"], "val_kwargs.do_sample=True", "temperature"),
        ([f"{POLICY}.rollout.temperature=0"], f"{POLICY}.rollout.temperature=0", "do_sample=False"),
        # engines and run
        ([f"{POLICY}.rollout.nnodes=1", f"{POLICY}.rollout.name=hf"], "rollout.nnodes=1 with name=hf", "sglang, vllm"),
        (
            [
                f"{POLICY}.rollout.checkpoint_engine.method=streamed",
                f"{POLICY}.rollout.checkpoint_engine.check_weights=true",
            ],
            "check_weights=True with method=streamed",
            "check_weights=false",
        ),
        (
            [
                f"{POLICY}.rollout.name=vllm",
                f"{POLICY}.rollout.nnodes=1",
                f"{POLICY}.rollout.checkpoint_engine.method=streamed",
                f"{POLICY}.rollout.checkpoint_engine.delta=true",
            ],
            "delta=True with method=streamed",
            "delta=false",
        ),
        (
            [f"{POLICY}.rollout.name=vllm", f"{POLICY}.rollout.checkpoint_engine.delta=true"],
            "rollout.nnodes=0: replicas on the devices of training",
            "delta=false",
        ),
        (
            [f"{POLICY}.rollout.name=hf", f"{POLICY}.rollout.checkpoint_engine.check_weights=true"],
            "check_weights=True with name=hf",
            "sglang, vllm",
        ),
        (
            [f"{POLICY}.rollout.name=hf", f"{POLICY}.rollout.checkpoint_engine.method=planned"],
            "method=planned",
            "name=hf",
        ),
        ([f"{POLICY}.actor.fsdp_config.forward_only=true"], "forward_only=True", "trained"),
        (
            [
                f"{POLICY}.actor.checkpoint.save_contents=[model]",
                f"{POLICY}.actor.checkpoint.load_contents=[model,optimizer]",
            ],
            "load_contents",
            "optimizer",
        ),
        ([f"{POLICY}.actor.checkpoint.save_contents=[hf_model]"], "save_contents=['hf_model']", "lacks model"),
        ([f"{POLICY}.actor.checkpoint.load_contents=[optimizer]"], "load_contents=['optimizer']", "lacks model"),
        (
            [
                f"{POLICY}.actor.checkpoint.save_contents=[hf_model]",
                "trainer.resume_mode=disable",
                "trainer.save_freq=1",
                "trainer.health.kl_blowup.action=rollback",
            ],
            "save_contents=['hf_model']",
            "no health check could roll back",
        ),
        (
            [f"{POLICY}.actor.optim.optimizer_impl=nowhere.optim"],
            "optimizer_impl=nowhere.optim",
            "nowhere is not installed",
        ),
        ([f"{POLICY}.actor.optim.optimizer_impl=./gone.py"], "optimizer_impl=./gone.py", "no such file"),
        ([f"{POLICY}.actor.optim.min_lr=1"], f"{POLICY}.actor.optim.min_lr=1.0", "lr=1e-06"),
        ([f"{POLICY}.actor.optim.optimizer_impl=bitsandbytes.optim"], "bitsandbytes.optim", "torchao.optim"),
        (["trainer.max_critic_ckpt_to_keep=2"], "max_critic_ckpt_to_keep=2 has no effect", "without a critic"),
        (["trainer.resume_mode=resume_path"], "trainer.resume_mode", "resume_from_path"),
        (
            ["trainer.resume_mode=resume_path", "trainer.resume_from_path=gone"],
            "resume_from_path=gone",
            "no such folder",
        ),
        (["trainer.resume_mode=resume_path", "trainer.resume_from_path=model"], "resume_from_path", "global_step_N"),
        (["trainer.default_local_dir=train.parquet"], "trainer.default_local_dir", "is a file"),
        (["trainer.device=cuda"], "trainer.device=cuda", "no GPU"),
        # placement
        (["placement.roles.ref=other"], "placement.roles.ref=other", "no such pool"),
        (
            ["placement.roles.actor=global"],
            "placement.roles.actor",
            "actor_rollout_ref, ref, teacher, critic",
        ),
        (["placement.pools.second=[1]"], "placement.pools.second", "holds no role"),
        (["placement.pools.second=[]", "placement.roles.ref=second"], "placement.pools.second", "is empty"),
        (["placement.pools.global=[2]"], "placement.pools.global=[2]", "same thing"),
        (["placement=split"], "placement.pools.value", "is empty"),
    ],
)
def test_a_fault_names_its_keys_and_the_way_out(here, change, key, expected):
    faults = faults_of([*GRPO, *change])
    assert len(faults) == 1, faults
    assert key in faults[0]
    assert expected in faults[0]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["critic.ppo_mini_batch_size=300"], "critic.ppo_mini_batch_size=300"),
        (["trainer.max_critic_ckpt_to_keep=2"], "max_critic_ckpt_to_keep=2"),
        (["critic.model.path=./gone"], "critic.model.path=./gone"),
        (["critic.fsdp.forward_only=true"], "critic.fsdp.forward_only=True"),
        (["critic.use_dynamic_bsz=true", "critic.ppo_max_token_len_per_gpu=10"], "critic.ppo_max_token_len_per_gpu=10"),
        (["~placement.roles.critic", "placement.roles.critic=nowhere"], "placement.roles.critic=nowhere"),
    ],
)
def test_faults_of_a_critic(here, change, expected):
    assert any(expected in fault for fault in faults_of([*PPO, *change]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (["data.train_files=[]"], "data.train_files is not set"),
        (["data.train_files=gone.parquet"], "no such file"),
        (["data.prompt_key=q"], "data.prompt_key=q alone"),
        (["data.micro_batch_size_per_gpu=300"], "data.micro_batch_size_per_gpu=300"),
        (["data.use_dynamic_bsz=true", "data.max_token_len_per_gpu=100"], "max_token_len_per_gpu=100"),
        (["data.train_max_samples=3"], "no batch"),
        (["model.path=./gone"], "model.path=./gone"),
        (
            ["checkpoint.save_contents=[model]", "checkpoint.load_contents=[optimizer]"],
            "checkpoint.load_contents",
        ),
        (["checkpoint.save_contents=[hf_model]"], "lacks model"),
        (["optim.optimizer_impl=bitsandbytes.optim"], "torchao.optim"),
        (["trainer.test_freq=2"], "trainer.test_freq=2"),
        (["placement.roles.modl=global"], "placement.roles.modl"),
    ],
)
def test_faults_of_sft(here, change, expected):
    (fault,) = faults_of([*SFT, *change], "sft_trainer")
    assert expected in fault


def test_an_optimizer_may_be_in_a_file(here):
    validate(load_config("sft_trainer", [*SFT, "optim.optimizer_impl=./cls.py", "optim.optimizer=Own"]))
    validate(load_config("sft_trainer", [*SFT, "optim.optimizer_impl=cls.py", "optim.optimizer=Own"]))


@pytest.mark.parametrize(
    ("program", "change", "expected"),
    [
        ("sft", ["sft.loss_type=sigmoid"], "main_dpo"),
        (
            "dpo",
            ["dpo.loss_type=bradley_terry"],
            "main_rm",
        ),
        ("dpo", ["dpo.loss_type=sigmod"], "unknown"),
        ("dpo", ["dpo.loss_type=ipo", "dpo.label_smoothing=0.1"], "Set dpo.loss_type=sigmoid or simpo"),
        ("dpo", ["dpo.loss_type=orpo", "dpo.reference=cache"], "dpo.reference=cache has no effect"),
        (
            "dpo",
            ["dpo.loss_type=hinge", "data.margin_key=m"],
            "data.margin_key=m has no effect, because dpo.loss_type=hinge",
        ),
        ("dpo", ["dpo.reference=adapter"], "set model.lora_rank, or dpo.reference=cache"),
        (
            "dpo",
            ["data.use_dynamic_bsz=True", "data.max_token_len_per_gpu=2000"],
            "less than twice data.max_length=1024: the longest pair",
        ),
        ("dpo", ["data.micro_batch_size_per_gpu=300"], "data.train_batch_size=256, the pairs of one step"),
        ("dpo", ["data.train_files=[]"], "give files with pairs"),
        ("rm", ["engine=megatron"], "engine.strategy=megatron trains language_model, value_model and no reward_model"),
        ("rm", ["rm.loss_type=sigmoid"], "main_dpo"),
        ("kto", ["kto.loss_type=sigmoid"], "main_dpo"),
        ("dpo", ["dpo.loss_type=kto"], "main_kto"),
        ("kto", ["kto.reference=cache"], "set kto.reference=model, or adapter"),
        ("kto", ["data.train_files=[]"], "give files with labelled answers"),
    ],
)
def test_faults_of_objectives(here, program, change, expected):
    (fault,) = faults_of([*SFT, *change], f"{program}_trainer")
    assert expected in fault


def test_pairs_that_work_pass(here):
    validate(load_config("dpo_trainer", [*SFT, "data.margin_key=m", "dpo.label_smoothing=0.1", "dpo.sft_coef=1"]))
    validate(load_config("rm_trainer", [*SFT, "data.margin_key=m", "rm.centering_coef=0.1"]))
    adapted = load_config("dpo_trainer", [*SFT, "model.lora_rank=8"])
    validate(adapted)
    assert (adapted.reference, load_config("dpo_trainer", SFT).reference) == ("adapter", "model")
    assert load_config("dpo_trainer", ["dpo.loss_type=simpo"]).reference is None


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ([f"{POLICY}.rollout.n=1"], ["algorithm.adv_estimator=grpo", f"{POLICY}.rollout.n=1"]),
        ([f"{POLICY}.rollout.val_kwargs.n=4"], [f"{POLICY}.rollout.val_kwargs.n=4", "do_sample=False"]),
        (["trainer.resume_from_path=model"], ["trainer.resume_from_path=model", "trainer.resume_mode=auto"]),
        (
            [f"{CORRECTION}.bypass_mode=true", f"{CORRECTION}.rollout_is=token"],
            [f"{CORRECTION}.rollout_is=token", "loss_type=ppo_clip"],
        ),
        (
            ["placement=split", "trainer.n_gpus_per_node=4"],
            ["placement.pools.value=[2]", "critic", "placement=colocated"],
        ),
    ],
)
def test_what_runs_with_an_unexpected_consequence_is_told(here, capsys, change, told):
    assert check(load_config("ppo_trainer", GRPO)) == []
    config = load_config("ppo_trainer", [*GRPO, *change])
    (notice,) = check(config)
    assert all(key in notice for key in told)
    capsys.readouterr()
    validate(config)
    assert notice in capsys.readouterr().err


@pytest.mark.parametrize(("program", "words"), [("ppo", GRPO), ("sft", SFT), ("dpo", SFT), ("kto", SFT), ("rm", SFT)])
def test_files_for_validation_that_nothing_reads_are_told(here, program, words):
    off = ["trainer.val_before_train=False"] if program == "ppo" else []
    files = next(word for word in words if word.startswith("data.train_files=")).replace("train_files", "val_files")
    (notice,) = check(load_config(f"{program}_trainer", [*words, files, *off]))
    assert all(key in notice for key in ["data.val_files", "trainer.test_freq=-1"])
    assert ("trainer.val_before_train" in notice) == (program == "ppo")
    assert check(load_config(f"{program}_trainer", [*words, files, "trainer.test_freq=5", *off])) == []
    assert check(load_config(f"{program}_trainer", words)) == []
    if program == "ppo":
        assert check(load_config("ppo_trainer", [*words, files])) == []


@pytest.mark.parametrize("name", ADV_ESTIMATORS.names())
def test_one_sample_per_prompt_is_refused_exactly_where_it_has_no_advantage(name):
    """The notice says that a response is reinforced by its own score: true of every estimator that it is given for."""
    facts = ADV_ESTIMATORS.metadata(name)
    if not facts.compares_samples or facts.reads_components:
        return
    rewards, mask = torch.tensor([[0.0, 2.0], [0.0, 1.0]]), torch.ones(2, 2)
    more = {name: torch.zeros(2, 2) for name in ("old_log_probs", "process_rewards")}
    more["sum_pi_squared"] = torch.ones(2, 2)
    more["turn_states"] = torch.tensor([[0, 1], [0, 1]])
    given = {key: value for key, value in more.items() if key in facts.needs}
    try:
        advantages, _ = get_adv_estimator_fn(name)(rewards, mask, np.array(["a", "b"], dtype=object), **given)
    except AlgorithmError:
        assert not facts.alone
        return
    ordered = advantages[0, -1] > advantages[1, -1]  # some estimators whiten or scale the scores
    assert bool(ordered) == facts.alone


def test_all_faults_come_at_once(here):
    faults = faults_of(
        [
            "algorithm.adv_estimator=grpo",
            "data.train_files=gone.parquet",
            "data.train_batch_size=100",
            "ppo_mini_batch_size=64",
            "reward.custom_reward_function.path=gone.py",
            "trainer.resume_mode=resume_path",
        ]
    )
    named = " ".join(faults)
    assert len(faults) == 5
    for key in ("model.path", "data.train_files", "ppo_mini_batch_size", "reward.custom", "resume_from"):
        assert key in named


def test_gpus_are_counted_from_the_driver_without_torch(tmp_path, monkeypatch):
    for index in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:0{index}:00.0").mkdir(parents=True)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus(tmp_path) == 4
    for chosen, count in (("0,1", 2), ("", 0), ("-1", 0), ("GPU-a,GPU-b,GPU-c", 3)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert visible_gpus(tmp_path) == count
    assert visible_gpus(tmp_path / "nothing") == 0


@pytest.mark.parametrize(
    ("device", "processes", "count", "fits"),
    [
        ("auto", 4, 0, True),  # processes on a CPU
        ("auto", 4, 4, True),
        ("auto", 5, 4, False),
        ("cuda", 1, 0, False),
        ("cuda", 2, 1, False),
        ("cuda", 8, None, True),  # unknown: Ray will tell
    ],
)
def test_more_processes_than_devices(device, processes, count, fits):
    faults = list(check_gpus(RunConfig(device=device, n_gpus_per_node=processes), count))
    assert (faults == []) is fits
    assert fits or "trainer." in faults[0]


@pytest.mark.parametrize("named", ["run", "run/global_step_12", "run/global_step_12/actor"])
def test_a_checkpoint_given_as_a_model_is_told_where_its_model_is(here, named):
    for model in (
        "run/global_step_9/actor/hf_model",
        "run/global_step_12/actor/hf_model",
        "run/global_step_12/critic/hf_model",
    ):
        (here / model).mkdir(parents=True)
    (fault,) = faults_of([*GRPO, f"{POLICY}.model.path={named}"])
    assert fault.startswith(f"{POLICY}.model.path={named}: ")
    assert fault.endswith("run/global_step_12/actor/hf_model")


def test_a_checkpoint_without_a_model_says_how_to_make_one(here):
    (here / "run/global_step_9/actor/model").mkdir(parents=True)
    (fault,) = faults_of([*GRPO, f"{POLICY}.model.path=run"])
    assert fault.startswith(f"{POLICY}.model.path=run: ")
    assert "python -m hybridrl.checkpoint.merge run/global_step_9 --out DIR" in fault
