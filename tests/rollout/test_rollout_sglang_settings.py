"""What the SGLang engine says before SGLang is started: versions, refusals, the arguments it would get."""

import asyncio
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from raising import raises_with

from hybridrl.config import ModelConfig, RolloutConfig
from hybridrl.models.tokenizer import load_tokenizer
from hybridrl.rollout import RolloutError
from hybridrl.rollout.inference_engine import EngineSpec, inference_engine_class
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.sglang import compat
from hybridrl.rollout.sglang.weights import joined
from hybridrl.rollout.stop_strings import StopStrings


@pytest.fixture
def sglang_version(monkeypatch, tmp_path):
    """Pretend that a version is installed: its metadata are, which is all that is read before the start."""

    def install(version: str) -> None:
        folder = tmp_path / f"sglang-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        monkeypatch.syspath_prepend(tmp_path)

    return install


def spec_of(path: Path, devices: tuple[int, ...] = (), **rollout) -> EngineSpec:
    config = RolloutConfig(prompt_length=64, response_length=64, **rollout)
    return EngineSpec(config, ModelConfig(path=str(path)), (2,), pad_token_id=0, devices=devices)


@pytest.mark.parametrize("version", ["0.5.21", "0.4.10.post2", "0.6.0"])
def test_versions_that_do_not_work_are_refused_with_the_range(sglang_version, version) -> None:
    sglang_version(version)
    with raises_with(RolloutError, f"{version} does", "sglang>=0.5.22,<0.6"):
        compat.check_version()


@pytest.mark.parametrize("version", ["0.5.22", "0.5.99"])
def test_untested_versions_are_named(sglang_version, version) -> None:
    sglang_version(version)
    assert f"sglang {version} was never tested" in compat.check_version()


def test_the_tested_version_is_silent(sglang_version) -> None:
    sglang_version("0.5.23")
    assert compat.check_version() is None


def test_a_missing_sglang_is_named(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with raises_with(RolloutError, "scripts/install.sh"):
        compat.check_version()


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ({"tensor_model_parallel_size": 3}, "tensor_model_parallel_size=3 .* use one of 1, 2, 4"),
        ({"data_parallel_size": 2}, "data_parallel_size=2: .* Leave it at 1"),
        ({"full_determinism": True}, "full_determinism=True: .* on a GPU only"),
    ],
)
def test_settings_that_cannot_work_are_refused(sglang_version, tiny_model, rollout, message) -> None:
    sglang_version("0.5.23")
    spec = spec_of(tiny_model, **rollout)
    with pytest.raises(RolloutError, match=message):
        inference_engine_class("sglang").check(spec.config, spec.model, on_gpu=False)


def test_what_would_make_other_images_of_them_is_refused(sglang_version, vision_models, tmp_path) -> None:
    sglang_version("0.5.23")
    check = inference_engine_class("sglang").check

    def refused(path: Path, said: str, **rollout: int) -> None:
        spec = spec_of(path, **rollout)
        with pytest.raises(RolloutError, match=said):
            check(spec.config, spec.model, on_gpu=False)

    refused(vision_models["qwen2_5_vl"], "patches have 96 numbers .*SGLang reads patches of 1176 alone")
    refused(vision_models["qwen3_vl"], "pipeline_model_parallel_size=2: not built", pipeline_model_parallel_size=2)
    spec = spec_of(vision_models["qwen3_vl"])
    check(spec.config, spec.model, on_gpu=False)
    assert compat.arguments(spec)["mem_fraction_static"] > 0  # SGLang's own share may be below 0
    folder = shutil.copytree(vision_models["qwen3_vl"], tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    del settings["text_config"]["rope_parameters"]["mrope_interleaved"]
    (folder / "config.json").write_text(json.dumps(settings))
    refused(folder, "mrope_interleaved=true, without which SGLang computes other positions")


def test_classifiers_that_it_has_no_class_for_are_refused(tiny_model, tmp_path) -> None:
    check = inference_engine_class("sglang").check_scoring
    check(
        ModelConfig(path=str(tiny_model))
    )  # a critic's folder names the language model, and is served as its classifier
    folder = shutil.copytree(tiny_model, tmp_path / "model")
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "architectures": ["MistralForSequenceClassification"]}))
    with pytest.raises(RolloutError, match="a classifier of Mistral, and SGLang serves those of Qwen2, Qwen3, Llama"):
        check(ModelConfig(path=str(folder)))


def test_settings_become_arguments(tiny_model) -> None:
    given = {
        "tensor_model_parallel_size": 2,
        "max_num_seqs": 7,
        "max_num_batched_tokens": 512,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.4,
        "enforce_eager": True,
        "cudagraph_capture_sizes": [1, 8],
        "seed": 5,
    }
    cpu = compat.arguments(spec_of(tiny_model, **given))
    gpu = compat.arguments(replace(spec_of(tiny_model, (0, 1), **given), index=3, load_weights=True))
    common = {"tp_size": 2, "max_running_requests": 7, "chunked_prefill_size": 512, "disable_radix_cache": True}
    assert common.items() <= cpu.items() and common.items() <= gpu.items()
    assert (cpu["dtype"], gpu["dtype"]) == ("float32", "bfloat16")
    assert (cpu["load_format"], gpu["load_format"]) == ("dummy", "auto")
    assert (cpu["random_seed"], gpu["random_seed"]) == (5, 8)
    assert (gpu["mem_fraction_static"], gpu["enable_memory_saver"], gpu["cuda_graph_bs_decode"]) == (0.4, True, [1, 8])
    assert cpu["device"] == "cpu" and "device" not in gpu
    # 7 sequences of 64 + 64 tokens and what SGLang keeps free
    assert cpu["max_total_tokens"] == 7 * (128 + 6) and "max_total_tokens" not in gpu


def test_the_level_of_sleep_decides_whether_weights_are_backed_up(tiny_model) -> None:
    at = {level: compat.arguments(spec_of(tiny_model, devices=(0,), sleep_level=level)) for level in (1, 2)}
    assert at[1]["enable_weights_cpu_backup"] is True
    assert at[2]["enable_weights_cpu_backup"] is False
    fixed = replace(spec_of(tiny_model, devices=(0,), sleep_level=2), load_weights=True)
    assert compat.arguments(fixed)["enable_weights_cpu_backup"] is True  # nobody sends a teacher's weights again
    kept = compat.arguments(spec_of(tiny_model, devices=(0,), sleep_level=1, free_cache_engine=False))
    assert kept["enable_weights_cpu_backup"] is False  # nothing is released


def test_lower_priorities_come_first_if_the_engine_orders_by_priority(tiny_model) -> None:
    switches = ("enable_priority_scheduling", "schedule_low_priority_values_first")
    for policy, on in (("fcfs", False), ("priority", True)):
        found = compat.arguments(spec_of(tiny_model, scheduling_policy=policy))
        assert [found[name] for name in switches] == [on, on]


def test_arguments_of_the_user_win(tiny_model) -> None:
    spec = spec_of(tiny_model)
    spec.config.engine_kwargs.sglang.update(schedule_policy="lpm", max_total_tokens=1000)
    assert {"schedule_policy": "lpm", "max_total_tokens": 1000}.items() <= compat.arguments(spec).items()


def test_a_long_context_is_not_given_more_cache_than_a_cpu_should(tiny_model) -> None:
    spec = spec_of(tiny_model, max_model_len=4096, max_num_seqs=100_000)
    # 2 layers x 2 (keys, values) x 2 heads x 32 x 4 bytes a token
    assert compat.arguments(spec)["max_total_tokens"] == 2**30 // (2 * 2 * 2 * 32 * 4)


def test_sampling_settings() -> None:
    params = SamplingParams(do_sample=True, temperature=0.7, top_p=0.9, top_k=-1, max_new_tokens=50, seed=2**40 + 1)
    found = compat.sampling(params, (2, 3), max_tokens=20, seeded=False)
    assert found == {
        "max_new_tokens": 20,
        "temperature": 0.7,
        "ignore_eos": False,
        "stop_token_ids": [2, 3],
        "top_p": 0.9,
        "top_k": -1,
    }
    assert compat.sampling(params, (2, 3), 20, seeded=True)["sampling_seed"] == 2**40 % 2**31 + 1
    greedy = compat.sampling(replace(params, do_sample=False, ignore_eos=True), (2, 3), 20, seeded=True)
    assert greedy == {"max_new_tokens": 20, "temperature": 0.0, "ignore_eos": True, "stop_token_ids": []}


def test_processes_of_replicas_are_told_cores_of_their_own(tiny_model, monkeypatch) -> None:
    monkeypatch.delenv("SGLANG_CPU_OMP_THREADS_BIND", raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    spec = replace(spec_of(tiny_model, tensor_model_parallel_size=2), threads=2)
    bound = [compat.environment(replace(spec, index=index))["SGLANG_CPU_OMP_THREADS_BIND"] for index in range(3)]
    assert bound == ["0,1|2,3", "4,5|6,7", "0,1|2,3"]
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "3|5")
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in compat.environment(spec)
    assert "SGLANG_USE_CPU_ENGINE" not in compat.environment(replace(spec, devices=(0, 1)))


def test_expandable_segments_are_off_in_its_process_only(monkeypatch, tiny_model) -> None:
    """They help training, and torch_memory_saver, which releases SGLang's memory, refuses them."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,max_split_size_mb:256")
    variables = compat.environment(spec_of(tiny_model, devices=(0,)))
    assert variables["PYTORCH_CUDA_ALLOC_CONF"] == "max_split_size_mb:256,expandable_segments:False"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True,max_split_size_mb:256"


def test_stand_in_kernel_writes_cache_locations() -> None:
    import importlib.util

    from hybridrl_testing import GPU_PACKAGES

    file = GPU_PACKAGES / "sgl_kernel" / "__init__.py"
    module_spec = importlib.util.spec_from_file_location("stand_in_sgl_kernel", file)
    kernel = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(kernel)
    table = torch.zeros((4, 6), dtype=torch.int32)
    requests, starts, ends = torch.tensor([2, 0, 3]), torch.tensor([1, 0, 4]), torch.tensor([3, 4, 4])
    kernel.assign_req_to_token_pool_cpu(requests, table, starts, ends, torch.arange(10, 20), 6)
    expected = torch.zeros((4, 6), dtype=torch.int32)
    expected[2, 1:3] = torch.tensor([10, 11])
    expected[0, 0:4] = torch.tensor([12, 13, 14, 15])
    assert torch.equal(table, expected)
    with raises_with(NotImplementedError, "sgl_kernel.fused_experts"):
        kernel.fused_experts()


def test_projections_that_sglang_joins_are_loaded_in_one_call() -> None:
    """However the buckets are cut: SGLang forgets the first of the pair when its call ends."""
    waiting: dict[str, torch.Tensor] = {}
    bucket = {"l.0.q_a_proj.weight": torch.ones(2), "l.0.mlp.weight": torch.ones(3)}
    assert [name for name, _ in joined(bucket.items(), waiting)] == ["l.0.mlp.weight"]
    bucket["l.0.q_a_proj.weight"].zero_()  # the sender writes the next bucket
    second = {"l.1.kv_a_proj_with_mqa.weight": torch.ones(4), "l.0.kv_a_proj_with_mqa.weight": torch.ones(5)}
    found = dict(joined(second.items(), waiting))
    assert list(found) == ["l.0.q_a_proj.weight", "l.0.kv_a_proj_with_mqa.weight"]
    assert found["l.0.q_a_proj.weight"].tolist() == [1, 1]
    assert list(waiting) == ["l.1.kv_a_proj_with_mqa.weight"]  # a model without its partner: loaded at the end


@pytest.mark.parametrize("strings", [("ä",), ("####",), (" b", "12"), ("\n\n", "zz"), ("absent",)], ids=str)
@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_stop_strings_in_chunks_end_where_the_whole_text_first_holds_one(tiny_model, strings, chunk) -> None:
    tokenizer = load_tokenizer(tiny_model)
    ids = tokenizer.encode("a bä\n#### 12\n\nzz", add_special_tokens=False)
    wholes = [tokenizer.decode(ids[:count]) for count in range(1, len(ids) + 1)]
    expected = next((n for n, text in enumerate(wholes, 1) if any(string in text for string in strings)), None)
    stop, found, seen = StopStrings(tokenizer, strings), None, 0
    for count in [*range(chunk, len(ids), chunk), len(ids)]:
        found = found or stop.first_end(ids[:count], seen)
        seen = count
    assert found == expected


def test_sglang_is_idle_before_its_memory_is_released() -> None:
    """Its scheduler ends if it is asked while the last batch is still in its books."""
    from hybridrl.rollout.sglang.sglang_child import HostedEngine

    calls = []

    class Server:
        async def drop_prefixes(self) -> None:
            calls.append("idle")

        async def release(self, tags) -> None:
            calls.append(tuple(tags))

    host = object.__new__(HostedEngine)
    host.server, host._names, host._released = Server(), {}, set()
    asyncio.run(host.release(["kv_cache"]))
    asyncio.run(host.release(["weights", "kv_cache"]))
    assert calls == ["idle", ("kv_cache",), "idle", ("weights",)]


def test_processes_of_sglang_import_nothing_of_a_trainer() -> None:
    """The host imports SGLang and what a request needs, and nothing of the process that has started it."""
    heavy = "{'torch', 'ray', 'transformers', 'tensordict'}"
    code = f"import sys, hybridrl.rollout.sglang.sglang_child; print({heavy} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "set()"
