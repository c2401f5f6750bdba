"""Says why a name of verl's is missing, and what there is instead."""

from __future__ import annotations

import difflib
import pkgutil
from types import ModuleType

_PAGE = 'docs/compat.md, "Code written for verl", lists what there is'
_MEGATRON = "Megatron is not supported yet; use strategy=fsdp2"

#: module of verl, with everything below it -> why it is missing. The longest match counts.
ABSENT = {
    "verl.checkpoint_engine": "hybridrl.hybrid_engine brings weights to the rollout and has no engines to choose",
    "verl.experimental": "verl's experiments are not part of hybridrl",
    "verl.experimental.agent_loop": "loops derive from hybridrl.agents.AgentLoopBase (docs/agents.md)",
    "verl.experimental.reward_loop": "there is one reward loop; derive a manager from hybridrl.reward.RewardManager",
    "verl.interactions": "simulated users derive from hybridrl.agents.BaseInteraction (docs/agents.md)",
    "verl.model_merger": "a checkpoint holds the model in Hugging Face format already (actor/hf_model)",
    "verl.models": "models are those of transformers, loaded by hybridrl.models.loading",
    "verl.plugin": "platforms are CPUs and CUDA GPUs (hybridrl.utils.device)",
    "verl.single_controller.base.megatron": "Megatron is not supported yet; derive workers from Worker",
    "verl.single_controller.ray.megatron": "Megatron is not supported yet; use RayWorkerGroup",
    "verl.third_party": "hybridrl patches no other package",
    "verl.tools": "tools derive from hybridrl.agents.BaseTool (docs/agents.md)",
    "verl.trainer.distillation": "its losses are those of hybridrl.algorithms.distillation (docs/distillation.md)",
    "verl.trainer.constants_ppo": "hybridrl.single_controller.ray.init_ray starts Ray",
    "verl.trainer.main_ppo.TaskRunner": "the controller is the program itself, hybridrl.trainer.ppo.run_ppo",
    "verl.trainer.ppo.reward": "rewards are computed by managers; derive one from hybridrl.reward.RewardManager",
    "verl.trainer.ppo.v1": "the transfer queue's trainer is not supported; use verl.trainer.ppo.ray_trainer",
    "verl.utils.checkpoint": "checkpoints are written by hybridrl.checkpoint, whose files are hybridrl's own",
    "verl.utils.kernel": "kernels are those of torch and transformers",
    "verl.utils.megatron": _MEGATRON,
    "verl.utils.megatron_utils": _MEGATRON,
    "verl.utils.fsdp_utils": "models are sharded by hybridrl.engine.fsdp, with FSDP2 alone",
    "verl.utils.ulysses": "sequences are split by hybridrl.models.ulysses (docs/long_context.md)",
    "verl.utils.profiler": "profiling of workers is not supported yet",
    "verl.utils.attention_utils": "packing is done by the engine (model.use_remove_padding)",
    "verl.utils.flops_counter": "hybridrl measures tokens per second (perf/throughput)",
    "verl.utils.reward_score": "hybridrl.reward.score has no such scorer; write it as a custom reward function",
    "verl.utils.rollout_trace": "rollout.trace sends traces of every loop; yours adds to server_manager.log",
    "verl.utils.rollout_skip": "rollouts are not skipped; trainer.rollout_data_dir writes every sample",
    "verl.workers.actor": "workers are hybridrl.workers, on an engine of hybridrl.engine",
    "verl.workers.critic": "workers are hybridrl.workers, on an engine of hybridrl.engine",
    "verl.workers.engine": "engines are hybridrl.engine (docs/extending.md)",
    "verl.workers.megatron_workers": "Megatron is not supported yet; use verl.workers.fsdp_workers",
    "verl.workers.fsdp_workers.RewardModelWorker": "reward.reward_model starts hybridrl.workers.reward_model",
    "verl.workers.reward_manager.AbstractRewardManager": "managers derive from hybridrl.reward.RewardManager",
    "verl.workers.reward_manager.PrimeRewardManager": "scores are computed in parallel by every manager",
    "verl.workers.reward_model": "reward.reward_model starts hybridrl.workers.reward_model",
    "verl.workers.rollout": "generation engines are hybridrl.rollout (docs/extending.md)",
    "verl.workers.sharding_manager": "weights go to the rollout through hybridrl.hybrid_engine",
}


def reason(name: str, parent: ModuleType) -> str:
    """Return the message about a name that hybridrl lacks.

    Args:
        name: the full name in verl of a module, class or function.
        parent: the module of hybridrl that would have it.
    """
    matches = [prefix for prefix in ABSENT if f"{name}.".startswith(f"{prefix}.")]
    if matches:
        return f"hybridrl has no {name}: {ABSENT[max(matches, key=len)]}. {_PAGE}."
    parent_name, _, short = name.rpartition(".")
    if short.startswith(("Mcore", "Megatron", "NVMegatron")):
        return f"hybridrl has no {name}: {_MEGATRON}. {_PAGE}."
    names = [*getattr(parent, "__all__", ()), *(module.name for module in pkgutil.iter_modules(parent.__path__))]
    near = difflib.get_close_matches(short, names, n=3)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{parent_name} has {', '.join(names) or 'nothing'}."
    return f"hybridrl has no {name}; {hint} {_PAGE}."
