"""The memory of a run's phases before it starts, and what is refused."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raising import raises_with
from transformers import Qwen2Config, Qwen3MoeConfig

from hybridrl.config import PPOTrainerConfig, SFTTrainerConfig, load_config
from hybridrl.config.dotted import set_key
from hybridrl.config.entry_settings import engine_settings
from hybridrl.config.roles import ROLES
from hybridrl.engine import create_train_engine
from hybridrl.errors import PlacementError
from hybridrl.forecast import role_models
from hybridrl.forecast import supervised_run as tuning
from hybridrl.forecast.meta_tensors import peak_of
from hybridrl.forecast.ppo_run import changes_that_fit, check_before_loading, forecast_run, refuse_if_too_large
from hybridrl.forecast.role_models import NotComputed, attempted, forecast_model, forecast_roles
from hybridrl.forecast.run_forecast import on_first_worker, print_expected
from hybridrl.programs import main
from hybridrl.protocol import DataProto
from hybridrl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from hybridrl.trainer.ppo.memory import phase_peaks
from hybridrl.trainer.supervised.objective_rows import as_responses
from hybridrl.utils import device
from hybridrl.workers.model_worker import micro_batching
from hybridrl.workers.supervised_worker import SupervisedWorker

GIB = 1024**3
ONE_DEVICE = {"algorithm.adv_estimator": "grpo", "trainer.n_gpus_per_node": 1}


def words(model: Path, **more: Any) -> list[str]:
    given = {
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "data.train_files": "x.parquet",
        "data.max_prompt_length": 100,
        "data.max_response_length": 200,
        "data.train_batch_size": 4,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "trainer.n_gpus_per_node": 2,
        "algorithm.adv_estimator": "gae",
    }
    return [f"{key}={value}" for key, value in {**given, **more}.items()]


def settings(model: Path, **more: Any) -> PPOTrainerConfig:
    config: Any = load_config("ppo_trainer", words(model, **more))
    return config


def test_models_in_one_pool_share_a_device(micro_model: Path) -> None:
    loss = {"actor_rollout_ref.actor.use_kl_loss": True}
    shared = forecast_run(settings(micro_model, **loss))
    apart = forecast_run(settings(micro_model, **loss, placement="split"))
    policy, ref, critic = (shared.roles[name] for name in ("actor_rollout", "ref", "critic"))
    assert policy is not None and ref is not None and critic is not None
    phases = shared.phases()
    assert phases["update_actor"] == policy.update + ref.resident + critic.resident
    assert phases["update_critic"] == critic.update + policy.resident + ref.resident
    assert phases["ref"] == ref.without_gradients + policy.resident + critic.resident
    assert ref.states == ref.gradients == ref.activations == 0 < ref.pass_activations
    alone = apart.roles["critic"]
    assert alone is not None and apart.phases()["update_critic"] == alone.update


def test_a_role_of_ones_own_has_a_forecast(micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = replace(ROLES["ref"], name="own", needed=lambda config: True)
    without = forecast_run(settings(micro_model))
    policy = without.roles["actor_rollout"]
    assert policy is not None
    monkeypatch.setitem(ROLES, "own", own)
    assert forecast_run(settings(micro_model)).roles["own"] is None
    monkeypatch.setattr(role_models, "ROLE_FORECASTS", dict(role_models.ROLE_FORECASTS))
    role_models.forecasts_role("own")(lambda part, config, ranks: replace(policy, weights=policy.weights * ranks))
    found = forecast_run(settings(micro_model))
    assert found.roles["own"] == replace(policy, weights=2 * policy.weights)
    assert found.phases()["update_actor"] == without.phases()["update_actor"] + found.roles["own"].resident


def test_roles_of_external_lib_are_forecast_before_a_worker_has_imported_it(micro_model: Path, tmp_path: Path) -> None:
    module = tmp_path / "role_of_forecast.py"
    module.write_text(
        "from dataclasses import replace\n"
        "from hybridrl.forecast.role_models import forecasts_role\n"
        "from hybridrl.trainer.ppo.role_groups import ROLES\n"
        "ROLES['late'] = replace(ROLES['ref'], name='late')\n"
        "forecasts_role('late')(lambda part, config, ranks: ranks)\n"
    )
    config = settings(micro_model, **{"actor_rollout_ref.model.external_lib": module})
    try:
        assert forecast_roles(config, {"late": 3}) == {"late": 3}
    finally:
        ROLES.pop("late", None)


def test_an_engine_takes_its_share_of_a_gpu(micro_model: Path) -> None:
    config = settings(micro_model, **{"actor_rollout_ref.rollout.gpu_memory_utilization": 0.6})
    without, with_engine = forecast_run(config), forecast_run(config, 10 * GIB)
    assert with_engine.phases()["gen"] == pytest.approx(without.phases()["gen"] + 6 * GIB, rel=0.01)
    assert with_engine.phases()["update_actor"] == without.phases()["update_actor"]
    kept = settings(micro_model, **{"actor_rollout_ref.rollout.free_cache_engine": False})
    assert forecast_run(kept, 10 * GIB).phases()["update_actor"] == without.phases()["update_actor"] + 5 * GIB


def test_a_run_that_cannot_fit_is_told_the_keys_that_would_fit(
    micro_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(micro_model, **ONE_DEVICE)
    found = forecast_run(config)
    refuse_if_too_large(config, found, found.peak)
    assert capsys.readouterr().err == ""
    short = 0.9 * found.peak
    refuse_if_too_large(config, found, short)  # shorter sequences would fit
    told = capsys.readouterr().err
    assert "full length" in told and "update_actor needs" in told
    changes, fits = changes_that_fit(config, short)
    assert fits and all(f"{key}={value}" in told for key, value in changes)
    fitting = settings(micro_model, **ONE_DEVICE, **dict(changes))
    refuse_if_too_large(fitting, forecast_run(fitting), short)
    assert capsys.readouterr().err == ""


def test_weights_and_state_that_cannot_fit_are_refused(micro_model: Path) -> None:
    config = settings(micro_model, **ONE_DEVICE)
    found = forecast_run(config)
    for total in (0.9, 1.1):
        short = total * found.without_tokens().peak
        if total < 1:
            with raises_with(PlacementError, "update_actor", "trainer.n_gpus_per_node"):
                refuse_if_too_large(config, found, short, compute=lambda *_: dict(found.roles))  # nothing changes it
        else:
            refuse_if_too_large(config, found, short)


def test_a_run_on_gpus_is_checked_before_models_load(micro_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the figures of a device in place of a worker group; the forecast is that of its first rank."""
    config = settings(micro_model)

    def group(total: float, on_gpu: bool = True, call: Any = None) -> Any:
        return SimpleNamespace(
            resource_pool=SimpleNamespace(use_gpu=on_gpu),
            device_memory=lambda: [{"total_gb": total}],
            execute_rank_zero_sync=call or (lambda method, function, *arguments: function(*arguments)),
        )

    check_before_loading(config, group(1.0, on_gpu=False))
    assert capsys.readouterr().err == ""
    found = check_before_loading(config, group(4.0))
    assert found == forecast_run(config, 4.0 * GIB)
    told = capsys.readouterr().err
    assert "of 4.0" in told and "update_actor" in told and "actor_rollout: weights" in told and "critic:" in told

    def broken(*_: Any) -> Any:
        raise RuntimeError("no such operator on the meta device")

    capsys.readouterr()
    check_before_loading(config, group(4.0, call=broken))
    assert "no such operator" in capsys.readouterr().err


def test_a_phase_that_takes_more_than_its_forecast_is_told_once(
    micro_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = forecast_run(settings(micro_model))
    expected = {phase: size / GIB for phase, size in found.phases().items()}
    peaks = phase_peaks({}, found)
    assert {"gen", "update_actor", "update_critic"} <= set(expected)
    peaks.compare({phase: 1.09 * size for phase, size in expected.items()})
    peaks.compare({"gen": 2 * expected["gen"]})  # its cache is not part of the forecast
    assert capsys.readouterr().err == ""
    above = {phase: 1.2 * size for phase, size in expected.items()} | {"update_actor": 1.5 * expected["update_actor"]}
    peaks.compare(above)
    told = capsys.readouterr().err
    assert f"update_actor took {above['update_actor']:.3g} GiB, 1.50 times the forecast" in told
    peaks.compare(above)
    unknown = phase_peaks({}, replace(found, roles={**found.roles, "own": None}))
    unknown.compare(above)  # what a model takes that nobody forecast
    assert capsys.readouterr().err == ""


def test_the_command_prints_every_part(micro_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.parquet").touch()
    given = {"data.train_files": tmp_path / "x.parquet", "data.val_files": tmp_path / "x.parquet"}
    main(["forecast", *words(micro_model, **given)])
    told = capsys.readouterr().out
    for part in ("memory forecast per device, GiB", "update_actor", "values", "actor_rollout: weights", "optimizer"):
        assert part in told


def test_the_forecast_says_that_it_does_not_count_liger(micro_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(micro_model, **{**ONE_DEVICE, "actor_rollout_ref.model.use_liger": True})
    assert "use_liger" not in forecast_run(config).lines(None)[-1]  # it has no effect on a CPU
    monkeypatch.setattr(device, "runs_triton", lambda: True)
    assert "without model.use_liger" in forecast_run(config).lines(None)[-1]


def tuning_words(model: Path, **more: Any) -> list[str]:
    given = {
        "model.path": model,
        "model.enable_gradient_checkpointing": False,
        "data.train_files": "x.parquet",
        "data.max_length": 200,
        "data.train_batch_size": 6,
        "data.micro_batch_size_per_gpu": 4,
    }
    return [f"{key}={value}" for key, value in {**given, **more}.items()]


def tuning_settings(model: Path, **more: Any) -> SFTTrainerConfig:
    config: Any = load_config("sft_trainer", tuning_words(model, **more))
    return config


def test_a_step_of_fine_tuning_takes_what_was_forecast(micro_model: Path) -> None:
    """On conversations of full length, whose tokens all have a loss."""
    config = tuning_settings(micro_model)
    engine: Any = create_train_engine(
        "language_model",
        "fsdp2",
        model=config.model,
        engine=engine_settings(config.engine, None),
        optim=config.optim,
    )
    engine.initialize()
    ids = torch.randint(10, 200, (6, 200))
    ones = torch.ones_like(ids)
    positions = torch.arange(200).expand(6, -1).contiguous()
    fields = {"input_ids": ids, "attention_mask": ones, "position_ids": positions, "loss_mask": ones}
    batch = as_responses(DataProto.from_dict(fields))
    micro = micro_batching(config.data.micro_batch_size_per_gpu, False, config.data.max_token_len_per_gpu)

    def step() -> None:
        engine.train_batch(batch, micro, lambda outputs, _: (-outputs["log_probs"].mean(), {}), 1.0)

    step()  # makes the optimizer's state
    states = [value for state in engine.model_state.optimizer.state.values() for value in state.values()]
    existing = [*engine.module.parameters(), *states]
    measured = sum(tensor.nbytes for tensor in existing) + peak_of(step, *existing)
    found = tuning.forecast_tuning(config)
    assert found.phases() == {"update_model": pytest.approx(measured, rel=0.1)}
    assert "testing" in tuning.forecast_tuning(tuning_settings(micro_model, **{"data.val_files": "x"})).phases()


def test_a_second_model_as_reference_is_counted(micro_model: Path) -> None:
    """`dpo.reference=cache` takes as much as the model alone, and is what a run that does not fit is told first."""
    settings: Any = [
        load_config(
            "dpo_trainer", tuning_words(micro_model, **{"dpo.loss_type": "ipo", "model.use_fused_kernels": True})
        )
        for _ in range(2)
    ]
    settings[1].dpo.reference = "cache"
    two, one = (tuning.forecast_tuning(config) for config in settings)
    reference = two.roles["reference"]
    assert set(one.roles) == {"model"} and reference is not None and reference.states == reference.gradients == 0
    assert two.phases()["update_model"] == one.phases()["update_model"] + reference.resident > one.peak
    changes, fits = tuning.changes_that_fit(settings[0], 0.5 * (one.peak + two.peak))
    assert fits and ("dpo.reference", "cache") in changes


def test_fine_tuning_that_cannot_fit_is_told_the_keys_that_would_fit(
    micro_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tuning_settings(micro_model, **{"model.use_fused_kernels": True, "trainer.n_gpus_per_node": 2})
    found = tuning.forecast_tuning(config)
    group = SimpleNamespace(
        resource_pool=SimpleNamespace(use_gpu=True),
        device_memory=lambda: [{"total_gb": 0.9 * found.peak / GIB}],
        execute_rank_zero_sync=lambda method, function, *arguments: function(*arguments),
    )
    tuning.check_before_loading(config, group)  # type: ignore[arg-type]
    told = capsys.readouterr().err
    changes, fits = tuning.changes_that_fit(config, 0.9 * found.peak)
    assert fits and changes == [("data.max_token_len_per_gpu", 200)]
    assert "full length" in told and "data.max_token_len_per_gpu=200" in told and "update_model" in told
    states = found.without_tokens().peak
    changes, _ = tuning.changes_that_fit(config, 0.9 * states)
    assert ("engine.offload_policy", True) in changes
    group.device_memory = lambda: [{"total_gb": 0.9 * states / GIB}]
    with raises_with(PlacementError, "update_model", "engine.offload_policy=True"):
        tuning.check_before_loading(config, group)  # type: ignore[arg-type]


def test_the_command_prints_fine_tuning_and_names_an_engine_without_a_forecast(
    micro_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.parquet").touch()
    given = tuning_words(micro_model, **{"data.train_files": tmp_path / "x.parquet"})
    main(["forecast", "sft", *given])
    told = capsys.readouterr().out
    assert all(part in told for part in ("update_model", "model: weights", "optimizer", "activations"))
    unknown = tuning.TuningForecast({"model": None}, {"model": "engine.strategy=own:Engine"})
    with raises_with(PlacementError, "engine.strategy=own:Engine"):
        print_expected(lambda _: unknown, lambda *_: None, [[1]])


TIGHT = {
    "data.train_batch_size": 1,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
    "actor_rollout_ref.model.use_fused_kernels": True,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": 300,
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": 300,
    "algorithm.adv_estimator": "grpo",
}
EIGHT_BIT = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
has_torchao = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="8-bit optimizers are torchao's")


@has_torchao
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_makes_weights_and_state_of_a_policy_fit(tiny_model: Path, ranks: int) -> None:
    """FSDP2's own offloading needs several ranks; 8-bit Adam, which changes results, comes after what does not."""
    actor, offload = "actor_rollout_ref.actor", "actor_rollout_ref.actor.fsdp_config.offload_policy"
    config = settings(tiny_model, **TIGHT, **{"trainer.n_gpus_per_node": ranks})
    policy = forecast_run(config).roles["actor_rollout"]
    assert policy is not None
    eight_bit = [(f"{actor}.optim.{name}", value) for name, value in EIGHT_BIT.items()]
    enough = policy.update - 0.9 * (policy.weights + policy.states + policy.gradients)
    if ranks == 1:
        smaller = forecast_run(settings(tiny_model, **TIGHT, **dict(eight_bit))).roles["actor_rollout"]
        assert smaller is not None and smaller.states < 0.7 * policy.states
        enough = smaller.update
    changes, fits = changes_that_fit(config, enough)
    assert fits and changes == ([(offload, True)] if ranks == 2 else eight_bit)


@has_torchao
@pytest.mark.parametrize("ranks", [1, 2])
def test_what_makes_weights_and_state_of_fine_tuning_fit(tiny_model: Path, ranks: int) -> None:
    given = {"model.use_fused_kernels": True, "model.enable_gradient_checkpointing": True}
    config = tuning_settings(
        tiny_model, **given, **{"data.max_token_len_per_gpu": 200, "trainer.n_gpus_per_node": ranks}
    )
    one = tuning.forecast_tuning(config).roles["model"]
    assert one is not None
    changes, fits = tuning.changes_that_fit(config, one.update - (0.7 if ranks == 2 else 0.3) * one.states)
    expected = [("engine.offload_policy", True)] if ranks == 2 else [(f"optim.{k}", v) for k, v in EIGHT_BIT.items()]
    assert fits and changes == expected


@pytest.mark.parametrize(
    ("key", "sizes"),
    [
        ("model.enable_activation_offload", {"num_hidden_layers": 12}),
        ("model.tiled_mlp.enabled", {"intermediate_size": 4096}),
    ],
)
def test_what_makes_activations_of_fine_tuning_fit(tmp_path: Path, key: str, sizes: dict[str, int]) -> None:
    usual = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2Config(**{**usual, "intermediate_size": 48, "vocab_size": 263, **sizes}).save_pretrained(tmp_path)
    given = {
        "model.use_fused_kernels": True,
        "model.enable_gradient_checkpointing": True,
        "data.max_length": 2000,
        "data.micro_batch_size_per_gpu": 1,
    }
    config, peaks = tuning_settings(tmp_path, **given), []
    for value in (True, False):
        set_key(config, key, value)
        peaks.append(tuning.forecast_tuning(config).peak)
    assert peaks[0] < 0.8 * peaks[1]
    assert tuning.changes_that_fit(config, 1.01 * peaks[0]) == ([(key, True)], True)


def test_a_setting_that_another_one_refuses_is_not_named(tmp_path: Path) -> None:
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    Qwen2Config(**sizes, intermediate_size=4096, vocab_size=263).save_pretrained(tmp_path)
    config = tuning_settings(tmp_path, **{"model.enable_gradient_checkpointing": True, "data.max_length": 2000})
    for compiled in (False, True):
        config.engine.use_torch_compile = compiled
        changes, fits = tuning.changes_that_fit(config, 1.0)
        assert not fits and (("model.tiled_mlp.enabled", True) in changes) is not compiled


def test_a_worker_returns_why_there_is_no_forecast(tmp_path: Path) -> None:
    found = attempted(forecast_roles, settings(tmp_path / "gone"), {"actor_rollout": 1})
    assert isinstance(found, NotComputed) and found.reason.startswith("ModelError: ")


@pytest.mark.slow(20)
def test_workers_stay_where_a_forecast_cannot_be_computed(
    ray_session: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a setting that the model refuses ends them nor a model that cannot be computed without weights."""
    Qwen3MoeConfig(
        num_hidden_layers=1, hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=16, vocab_size=263,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48,
    ).save_pretrained(tmp_path)  # fmt: skip
    config = tuning_settings(tmp_path, **{"model.enable_gradient_checkpointing": True, "data.max_length": 2000})
    pool = RayResourcePool([1], use_gpu=False)
    try:
        group = RayWorkerGroup(pool, RayClassWithInitArgs(SupervisedWorker, config=config), timeout_s=200)
        states = tuning.forecast_tuning(config).without_tokens().peak
        on_gpu = SimpleNamespace(
            resource_pool=SimpleNamespace(use_gpu=True),
            device_memory=lambda: [{"total_gb": 1.1 * states / GIB}],
            execute_rank_zero_sync=group.execute_rank_zero_sync,
        )
        found = tuning.check_before_loading(config, on_gpu)  # type: ignore[arg-type]
        assert found is not None and "update_model needs" in capsys.readouterr().err
        gone: Any = tuning_settings(tmp_path / "gone")
        assert tuning.check_before_loading(gone, on_gpu) is None
        told = capsys.readouterr().err
        assert "there is no forecast of memory: ModelError: " in told and str(tmp_path / "gone") in told
        assert on_first_worker(group, forecast_model, config, 1) == found.roles["model"]
    finally:
        pool.release()


@pytest.mark.slow(20)
def test_keys_of_megatron_make_a_run_fit(micro_model: Path) -> None:
    """They are tried only where `strategy=megatron` reads them, and those of `fsdp2` only where that does."""
    given: dict[str, Any] = {
        **ONE_DEVICE,
        "data.train_batch_size": 1,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 1,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.rollout.n": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.1,
        "actor_rollout_ref.model.use_fused_kernels": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": True,
        "actor_rollout_ref.model.tiled_mlp.enabled": True,
    }
    for strategy, group in (("megatron", "megatron"), ("fsdp2", "fsdp_config")):
        config = settings(micro_model, **given, **{"actor_rollout_ref.actor.strategy": strategy})
        policy, ref = (forecast_run(config).roles[name] for name in ("actor_rollout", "ref"))
        assert policy is not None and ref is not None
        changes, fits = changes_that_fit(config, policy.update + 0.5 * ref.resident)
        assert fits and changes == [(f"actor_rollout_ref.ref.{group}.param_offload", True)]


def test_a_run_with_prime_is_told_keys_of_its_model(micro_model: Path, tiny_model: Path) -> None:
    """Settings of `roles.prime` that were not given have their defaults."""
    given = {
        **TIGHT,
        "data.train_batch_size": 8,
        "algorithm.adv_estimator": "prime",
        "trainer.n_gpus_per_node": 2,
        "roles.prime.model.path": tiny_model,
        "roles.prime.ppo_mini_batch_size": 8,
        "roles.prime.use_dynamic_bsz": True,
    }
    config = settings(micro_model, **given)
    peak = forecast_run(config).peak
    assert peak == forecast_run(config).phases()["update_prime"]
    limit, offload = ("roles.prime.ppo_max_token_len_per_gpu", 300), ("roles.prime.fsdp_config.offload_policy", True)
    assert changes_that_fit(config, 0.5 * peak) == ([limit], True)
    changes, fits = changes_that_fit(config, 0.4 * peak)
    assert fits and changes == [limit, offload] and "fsdp_config" not in config.roles["prime"]
    assert forecast_run(settings(micro_model, **given, **dict(changes))).peak <= 0.4 * peak
