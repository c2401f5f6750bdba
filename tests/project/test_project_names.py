"""What the library registers, a user can register too: no code chooses by the name of an entry or of a role."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from hybridrl import registry
from hybridrl.config.roles import ROLES

PACKAGE = Path(registry.__file__).parent
#: names that are keys of requests, files and batches in many places
WORDS = {"batch", "model", "python", "session", "steps"}
COLUMN = ("reward_model",)
KL = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
#: by file, the names in it that mean something else, that stand for what the user did not choose, or that its own row
#: in the table of roles leads to
ALLOWED: dict[str, tuple[str, ...]] = {
    # the entry of an unset key
    "agents/agents.py": ("single_turn_agent", "tool_agent"),
    "algorithms/rollout_correction/apply.py": ("bypass_mode", "vanilla", "reinforce"),
    "serve/openai_api.py": ("hermes",),
    # which of the built-in losses read a clip range; a user's own counts as one that reads every setting
    "config/schema/actor.py": (
        *("vanilla", "gspo", "geo_mean", "cispo", "clip_cov", "dppo_tv", "dppo_kl"),
        "flowrl_vargrad",
    ),
    # verl's settings, values and strings of the same name
    "algorithms/policy_losses/bypass.py": ("reinforce",),
    "algorithms/rollout_correction/presets.py": ("bypass_mode",),
    "config/schema/choices.py": ("hf", "mlflow", "reinforce", *KL),
    "config/schema/root.py": ("megatron",),
    "config/schema/trainer.py": ("critic",),
    "observe/figures.py": ("critic",),
    "workers/actor_rollout_ref.py": ("actor_rollout", "ref"),
    # verl's column of training data
    **{f"data/preprocess/{name}.py": COLUMN for name in ("calculator", "colours", "geo3k", "gsm8k", "math")},
    **{f"data/preprocess/{name}.py": COLUMN for name in ("search_r1", "sort", "verifiers")},
    **{f"{name}.py": COLUMN for name in ("protocol/bookkeeping", "reward/signature")},
    **{f"data/suites/{name}.py": COLUMN for name in ("math_suites", "suite_rows")},
    # the scorers of suites, by data source
    "reward/score/__init__.py": ("gpqa", "gsm8k", "humaneval", "ifeval", "livecodebench", "math500"),
    "trainer/ppo/samples.py": COLUMN,
    # forms of the KL divergence, of which losses for distillation are made
    "algorithms/kl.py": KL,
    "algorithms/rollout_correction/mismatch.py": ("kl",),
    "algorithms/rollout_correction/rejection.py": ("k1", "k2", "k3"),
    # kinds of models
    "config/checks/supervised.py": ("reward_model",),
    "engine/fsdp/engine.py": ("reward_model",),
    "models/kinds.py": ("reward_model",),
    # architectures of transformers whose FLOPs are counted
    "models/work.py": (
        *("gemma", "gemma3_text", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe"),
        *("deepseek_v2", "deepseek_v3"),
    ),
    # the table itself; a role's own checks and worker
    "config/checks/check_run.py": ("reward_model",),
    "config/roles.py": ("actor_rollout", "prime", "ref", "reward_model", "teacher"),
    # the engines and roles whose layouts a plan computes by formulas of their own
    "plan/run_plan.py": ("critic", "fsdp2", "megatron", "ref", "reward_model"),
    # packages, programs, a function of Python, a service for metrics, a reward of that name, Megatron's softmax
    "__init__.py": ("grpo", "kto", "ppo"),
    "agents/environments/gymnasium.py": ("gymnasium",),
    "agents/tools/builtin.py": ("abs",),
    # names of other projects
    "compat/openrlhf/openrlhf_policy.py": (
        "gae",
        "gspo",
        "ppo",
        "reinforce",
        "rloo",
        "vanilla",
    ),
    "compat/openrlhf/openrlhf_supervised.py": ("sigmoid",),
    "compat/prime_rl/prime_rl_policy.py": ("grpo",),
    "compat/prime_rl/prime_rl_script.py": ("vllm",),
    "compat/slime/slime_policy.py": (
        "cispo",
        "dapo",
        "grpo",
        "gspo",
        "ppo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
    ),
    "compat/slime/slime_sizes.py": ("ppo",),
    "compat/trl/script.py": ("grpo", "kto"),
    "config/entry_settings.py": ("kto",),
    "config/short_table.py": ("cispo", "dapo", "grpo", "sapo"),  # TRL's names of losses
    "engine/megatron/build.py": ("vanilla",),
    "models/liger.py": ("cross_entropy",),  # a kernel
    "observe/tracking.py": ("mlflow",),
    "plan/plan_command.py": ("grpo", "ppo"),
    "plan/published.py": ("prime-rl",),
    "programs.py": ("grpo", "kto", "ppo"),
    "reward/column_checks.py": ("reward_model",),
    "reward/pools.py": ("judge",),
    "rollout/vllm/compat.py": ("vllm",),
    "trainer/api.py": ("grpo", "kto", "ppo"),
    "trainer/call_arguments.py": ("dapo", "grpo", "sapo"),  # likewise
    "trainer/settings_change.py": ("kto",),
    "utils/agent_host.py": ("openai",),
}


def registered() -> set[str]:
    registries = [value for value in vars(registry).values() if isinstance(value, registry.Registry)]
    return {name for one in registries for name in one._declared} | ROLES.keys()


def chosen_by(source: str, names: set[str]) -> set[str]:
    """The names that code compares with, matches, looks up, or lists."""
    return {name for node in ast.walk(ast.parse(source)) for name in _named(node) if name in names}


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Compare):
        for side in (node.left, *node.comparators):
            yield from _texts(side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
    elif isinstance(node, ast.MatchValue):
        yield from _texts([node.value])
    elif isinstance(node, ast.Subscript):
        yield from _texts([node.slice])
    elif isinstance(node, ast.Dict):
        yield from _texts(node.keys)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("get", "pop"):
        yield from _texts(node.args[:1])
    elif isinstance(node, ast.Tuple | ast.List | ast.Set):
        found = list(_texts(node.elts))
        yield from found if len(found) > 1 else ()


def _texts(nodes: list[ast.expr] | list[ast.expr | None]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_nothing_is_chosen_by_a_registered_name() -> None:
    names = registered() - WORDS
    assert {"vllm", "fsdp2", "grpo", "vanilla", "dapo", "critic", "prime", "tool_agent", "llama"} <= names
    files = {file.relative_to(PACKAGE).as_posix(): file.read_text(encoding="utf-8") for file in PACKAGE.rglob("*.py")}
    found = {path: chosen for path, text in files.items() if (chosen := chosen_by(text, names))}
    assert found == {path: set(allowed) for path, allowed in ALLOWED.items()}


@pytest.mark.parametrize(
    "code",
    [
        "if config.rollout.name == 'vllm': pass",
        "if name not in ('auto', 'vllm'): pass",
        "match name:\n    case 'vllm' | 'sglang': pass",
        "makers = {'vllm': make}",
        "found = makers['vllm']",
        "group = groups.get('vllm')",
        "NAMES = ('vllm', 'sglang')",
    ],
)
def test_a_choice_by_name_is_found(code: str) -> None:
    assert "vllm" in chosen_by(textwrap.dedent(code), {"vllm", "sglang"})
    assert not chosen_by("use('vllm')  # the one entry\nINSTALL = ('vllm', 'bash')", {"bash_", "none"})
