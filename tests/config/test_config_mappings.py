"""The keys of mappings that users fill are checked by what reads them, before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.config.schema.distillation import TeacherModelConfig
from hybridrl.config.schema.mappings import Unchecked
from hybridrl.config.schema.node import declared, is_free
from hybridrl.config.schema.prime import PrimeConfig
from hybridrl.config.schema.reward import RewardPartConfig
from hybridrl.config.schema.root import ROOTS
from hybridrl.models.tiny_vision import build_tiny_vision_model
from hybridrl.registry import MAPPING_READERS

POLICY = "actor_rollout_ref"
MODEL, ACTOR, ROLLOUT = f"{POLICY}.model", f"{POLICY}.actor", f"{POLICY}.rollout"
KWARGS = f"{ROLLOUT}.engine_kwargs"
SCORED = "reward.reward_model"
FUNCTION = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, scale=1):\n    return 1.0\n"
ANYTHING = "def compute_score(data_source, solution_str, ground_truth, extra_info=None, **more):\n    return 1.0\n"


@pytest.fixture
def files(tmp_path: Path, micro_model: Path) -> dict[str, str]:
    (tmp_path / "reward.py").write_text(FUNCTION)
    (tmp_path / "any.py").write_text(ANYTHING)
    return {"MODEL": str(micro_model), "REWARD": str(tmp_path / "reward.py"), "ANY": str(tmp_path / "any.py")}


def faults_of(root: str, words: Sequence[str], files: dict[str, str]) -> list[str]:
    base = [f"data.train_files=[{files['REWARD']}]", "trainer.device=cpu"]
    if root == "ppo_trainer":
        base += [f"{MODEL}.path=MODEL", "algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4"]
    else:
        base += ["model.path=MODEL"]
    given = list({word.split("=")[0]: word for word in (*base, *words)}.values())
    for name, path in files.items():
        given = [word.replace(name, path) for word in given]
    try:
        validate(load_config(root, given))  # type: ignore[call-overload]
    except ConfigError as error:
        return error.faults
    return []


OPTIM = f"{ACTOR}.optim.override_optimizer_config"
MEGATRON = f"{ACTOR}.megatron"
#: (tree, settings, the entry that nothing reads, a part of the sentence about it)
UNREAD = [
    ("ppo_trainer", [], f"{MODEL}.override_config.nonsense=1", "a Qwen2Config has no such field"),
    ("ppo_trainer", [], f"{MODEL}.override_config.hidden_sise=1", "nearest: hidden_size"),
    ("ppo_trainer", [], f"{MODEL}.override_config.save_pretrained=1", "has no such field"),
    ("ppo_trainer", ["critic.enable=True"], "critic.model.override_config.nonsense=1", "has no such field"),
    (
        "ppo_trainer",
        [f"{SCORED}.enable=True", f"{SCORED}.model.path=MODEL"],
        f"{SCORED}.model.override_config.nonsense=1",
        "no such field",
    ),
    (
        "ppo_trainer",
        ["algorithm.adv_estimator=prime", "roles.prime.model.path=MODEL"],
        "roles.prime.model.override_config.nonsense=1",
        "no such field",
    ),
    ("sft_trainer", [], "model.override_config.nonsense=1", "has no such field"),
    ("ppo_trainer", [], "data.apply_chat_template_kwargs.nonsense=1", "the chat template of"),
    ("ppo_trainer", [], "data.apply_chat_template_kwargs.add_generation_prompt=False", "has no such entry"),
    ("dpo_trainer", [], "data.apply_chat_template_kwargs.enable_thinking=False", "the chat template of"),
    ("ppo_trainer", [], "data.mm_processor_kwargs.max_pixels=9", "reads text alone"),
    ("ppo_trainer", [], f"{OPTIM}.nonsense=1", "does not accept nonsense"),
    (
        "ppo_trainer",
        ["critic.enable=True"],
        "critic.optim.override_optimizer_config.nonsense=1",
        "does not accept nonsense",
    ),
    ("ppo_trainer", [f"{ACTOR}.optim.optimizer=Muon"], f"{OPTIM}.adamw_nonsense=1", "does not accept nonsense"),
    ("rm_trainer", [], "optim.override_optimizer_config.nonsense=1", "does not accept nonsense"),
    ("ppo_trainer", [f"{ACTOR}.strategy=megatron"], f"{OPTIM}.nonsense=1", "does not accept nonsense"),
    ("ppo_trainer", [f"{ACTOR}.strategy=megatron"], f"{MEGATRON}.override_ddp_config.nonsense=1", "is not supported"),
    (
        "ppo_trainer",
        [f"{ACTOR}.strategy=megatron"],
        f"{MEGATRON}.override_transformer_config.recompute_granularty=full",
        "nearest: recompute_granularity",
    ),
    ("ppo_trainer", [f"{ROLLOUT}.name=vllm"], f"{KWARGS}.vllm.nonsense=1", "vLLM's AsyncEngineArgs has no such entry"),
    ("ppo_trainer", [f"{ROLLOUT}.name=vllm"], f"{KWARGS}.vllm.max_num_seq=1", "nearest: max_num_seqs"),
    *[
        ("ppo_trainer", [f"{ROLLOUT}.name=vllm"], f"{KWARGS}.vllm.{entry}", "Remove it")
        for entry in ("logprobs_mode=raw_logprobs", "model=x", "worker_extension_cls=x", "generation_config=auto")
    ],
    *[
        ("ppo_trainer", [f"{ROLLOUT}.name=sglang"], f"{KWARGS}.sglang.{entry}", "Remove it")
        for entry in ("model_path=x", "custom_weight_loader=[x]", "skip_tokenizer_init=false")
    ],
    *[
        ("ppo_trainer", [f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.{own}"], f"{KWARGS}.vllm.{entry}", own)
        for own, entry in [
            ("gpu_memory_utilization=0.3", "gpu_memory_utilization=0.9"),
            ("tensor_model_parallel_size=1", "tensor_parallel_size=2"),
            ("seed=3", "seed=4"),
        ]
    ],
    (
        "ppo_trainer",
        [f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.max_num_seqs=4"],
        f"{KWARGS}.sglang.max_running_requests=5",
        "max_num_seqs=4",
    ),
    ("ppo_trainer", [f"{ACTOR}.optim.lr=0.1"], f"{OPTIM}.lr=0.2", "optim.lr=0.1"),
    ("ppo_trainer", [f"{ACTOR}.optim.betas=[0.1,0.2]"], f"{OPTIM}.betas=[0.8,0.9]", "optim.betas=[0.1, 0.2]"),
    ("sft_trainer", ["optim.weight_decay=0.1"], "optim.override_optimizer_config.weight_decay=0", "weight_decay=0.1"),
    ("ppo_trainer", [f"{ROLLOUT}.name=vllm"], f"{KWARGS}.sglang.tp_size=1", "has no effect, because"),
    (
        "ppo_trainer",
        [f"{SCORED}.enable=True", f"{SCORED}.model.path=MODEL", f"{SCORED}.rollout.name=vllm"],
        f"{SCORED}.rollout.engine_kwargs.vllm.nonsense=1",
        "has no such entry",
    ),
    (
        "ppo_trainer",
        [f"{SCORED}.enable=True", f"{SCORED}.model.path=MODEL", f"{SCORED}.rollout.name=vllm"],
        f"{SCORED}.rollout.engine_kwargs.sglang.tp_size=1",
        "vllm serves the model",
    ),
    (
        "ppo_trainer",
        ["reward.custom_reward_function.path=REWARD"],
        "reward.custom_reward_function.reward_kwargs.scael=2",
        "nearest: scale",
    ),
    ("ppo_trainer", ["reward.functions.a.path=REWARD"], "reward.functions.a.reward_kwargs.scael=2", "nearest: scale"),
    ("ppo_trainer", ["reward.reward_manager.name=dapo"], "reward.reward_kwargs.nonsense=1", "unknown key"),
    (
        "ppo_trainer",
        ["algorithm.adv_estimator=prime", "roles.prime.model.path=MODEL"],
        "roles.prime.nonsense=1",
        "unknown key",
    ),
    ("ppo_trainer", [], "roles.nonsense.a=1", "no such role"),
    ("ppo_trainer", [], "placement.roles.nonsense=global", "unknown role"),
    ("ppo_trainer", [], "ray_kwargs.ray_init.nonsense=1", "ray.init has no such entry"),
    ("sft_trainer", [], "ray_kwargs.ray_init.nonsense=1", "ray.init has no such entry"),
]
#: entries that something reads
READ = [
    ("ppo_trainer", [f"{MODEL}.override_config={{attn_implementation: sdpa, num_hidden_layers: 1, use_cache: False}}"]),
    (
        "ppo_trainer",
        [
            f"{MODEL}.override_config.rope_parameters={{rope_type: yarn, factor: 2.0, "
            "original_max_position_embeddings: 64}",
        ],
    ),
    ("ppo_trainer", ["data.apply_chat_template_kwargs.chat_template='{{ messages }}'"]),
    ("ppo_trainer", [f"{OPTIM}={{eps: 1e-6, fused: False}}"]),
    ("ppo_trainer", [f"{OPTIM}={{lr: 0.2}}"]),
    ("ppo_trainer", [f"{ACTOR}.optim.lr=0.2", f"{OPTIM}={{lr: 0.2}}"]),
    ("ppo_trainer", [f"{ROLLOUT}.name=vllm", f"{KWARGS}.vllm={{max_num_seqs: 9, seed: 1}}"]),
    (
        "ppo_trainer",
        [f"{ROLLOUT}.name=vllm", f"{KWARGS}.vllm={{max_num_seqs: 9, disable_mm_preprocessor_cache: True}}"],
    ),
    (
        "ppo_trainer",
        ["reward.custom_reward_function.path=REWARD", "reward.custom_reward_function.reward_kwargs.scale=2"],
    ),
    ("ppo_trainer", ["reward.custom_reward_function.path=ANY", "reward.custom_reward_function.reward_kwargs.scael=2"]),
    ("ppo_trainer", ["ray_kwargs.ray_init={num_gpus: 1, _temp_dir: /tmp/x, object_store_memory: 100000000}"]),
]


@pytest.mark.parametrize(("root", "given", "word", "named"), UNREAD, ids=[case[2] for case in UNREAD])
def test_an_entry_that_nothing_reads_is_named(
    root: str, given: Sequence[str], word: str, named: str, files: dict[str, str]
) -> None:
    key = word.split("=")[0]
    faults = faults_of(root, [*given, f"+{word}"], files)
    assert any(key.rpartition(".")[0] in fault and named in fault for fault in faults), faults


@pytest.mark.parametrize(("root", "words"), READ, ids=[case[1][-1] for case in READ])
def test_entries_that_are_read_pass(root: str, words: Sequence[str], files: dict[str, str]) -> None:
    assert faults_of(root, words, files) == []


def test_fields_of_nested_configurations_and_of_processors(tmp_path: Path, files: dict[str, str]) -> None:
    files["MODEL"] = str(build_tiny_vision_model(tmp_path / "vision"))
    (config,) = faults_of("ppo_trainer", [f"+{MODEL}.override_config.text_config.nonsense=1"], files)
    assert config.startswith(f"{MODEL}.override_config.text_config.nonsense=1: a ") and "no such field" in config
    (processor,) = faults_of("ppo_trainer", ["+data.mm_processor_kwargs.nonsense=1"], files)
    assert processor.startswith("data.mm_processor_kwargs: ") and "has no nonsense" in processor
    good = [f"{MODEL}.override_config.text_config.num_hidden_layers=1", "data.mm_processor_kwargs.max_pixels=262144"]
    assert faults_of("ppo_trainer", good, files) == []


@pytest.mark.parametrize("settings", [*ROOTS.values(), PrimeConfig, RewardPartConfig, TeacherModelConfig])
def test_every_mapping_has_a_reader_or_says_why_it_has_none(settings: type) -> None:
    for name, field in declared(settings).items():
        reader = field.metadata.get("read_by")
        if is_free(field) or "Any" in str(field.type):
            assert (isinstance(reader, Unchecked) and reader.why) or MAPPING_READERS.is_builtin(reader), name
        else:
            of_file = field.metadata.get("place") == "file" and MAPPING_READERS.is_builtin(reader)
            assert reader is None or of_file, name
