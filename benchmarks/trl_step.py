"""Seconds per GRPO step of `main_ppo` through Ray, compared with TRL's GRPOTrainer, in one run on the same work.

    python benchmarks/trl_step.py                 # the quickstart's model: 0.33 M parameters, prompts of 19, 8 new
    python benchmarks/trl_step.py --case long     # 10 M parameters, prompts of 64, responses of mean 64, limit 256
    python benchmarks/trl_step.py --rounds 1      # each side once: the speed of a shared machine changes by the minute
    python benchmarks/trl_step.py actor_rollout_ref.model.share_prefixes=True     # further settings of our side

Both sides have the same model, prompts, samples per prompt, learning rate and number of threads, one update per
batch, no reference model and no pass for old log-probabilities. A step is the wall-clock time from one optimizer
step to the next, with everything in it: data, generation, reward, update, metrics, Ray. In the long case the
vocabulary has 64 tokens and the weights are random, so every token ends a response with a probability of about 1/64;
the number of tokens that each side generated is printed.

Both sides run in turn, each in a process of its own per round. The last lines are the ratio, ours over TRL's, as the
median over rounds, and the share of the controller and Ray in our step, likewise: (wall - slowest rank inside worker
methods - reward) / wall.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """The work of one comparison."""

    hidden: int
    layers: int
    content_characters: int
    prompt_tokens: int
    response_tokens: int
    prompts: int
    samples: int
    steps: int
    small_vocabulary: bool


CASES = {
    "quickstart": Case(128, 2, 11, 19, 8, prompts=32, samples=8, steps=30, small_vocabulary=False),
    "long": Case(384, 4, 63, 64, 256, prompts=8, samples=8, steps=8, small_vocabulary=True),
}
WARM_UP = 3  # steps that do not count: allocation, lazy imports


def reward_of(text: str) -> float:
    """Something that differs between samples and costs nothing."""
    return float(len(text) % 2)


def small_tokenizer():
    """A character tokenizer of 64 tokens, in the class that transformers rebuilds for a qwen2 directory."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    kept = [token for token in sorted(ByteLevel.alphabet()) if token.isascii() or token in "\u0120\u010a"]
    wanted = "0123456789+-*/=#:.,!?()abcdefghijklmnopqrstuvwxyzSY\u0120\u010aIAB"
    tokens = ["<|pad|>", "<|im_end|>", *[token for token in kept if token in wanted]]
    tokens = [*tokens, *[token for token in kept if token not in tokens]][:64]
    tokenizer = Qwen2Tokenizer(
        vocab={token: number for number, token in enumerate(tokens)},
        merges=[],
        unk_token=None,
        pad_token="<|pad|>",
        eos_token="<|im_end|>",
    )
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
    )
    return tokenizer


def build(case: Case, folder: Path) -> None:
    """The model with its tokenizer, the prompts as parquet, the reward function."""
    import numpy as np
    import pandas as pd
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from hybridrl.models.tiny import build_tiny_model

    if case.small_vocabulary:
        torch.manual_seed(0)
        tokenizer = small_tokenizer()
        model = Qwen2ForCausalLM(
            Qwen2Config(
                vocab_size=len(tokenizer),
                hidden_size=case.hidden,
                intermediate_size=1792,
                num_hidden_layers=case.layers,
                num_attention_heads=case.hidden // 32,
                num_key_value_heads=case.hidden // 64,
                max_position_embeddings=512,
                pad_token_id=tokenizer.pad_token_id,
                eos_token_id=tokenizer.eos_token_id,
                tie_word_embeddings=False,
            )
        )
        model.save_pretrained(folder / "model")
        tokenizer.save_pretrained(folder / "model")
    else:
        build_tiny_model(folder / "model", hidden=case.hidden, layers=case.layers)
    rng = np.random.default_rng(0)
    contents = [
        "".join(rng.choice(list("0123456789"), case.content_characters))
        for _ in range(case.prompts * (case.steps + WARM_UP + 1))
    ]
    rows = [
        {
            "data_source": "benchmark",
            "prompt": [{"role": "user", "content": content}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index, content in enumerate(contents)
    ]
    pd.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return float(len(solution_str) % 2)\n"
    )


def measure_trl(case: Case, folder: Path, threads: int) -> dict[str, float]:
    """TRL's GRPOTrainer in this process."""
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(threads)
    times: list[float] = []
    tokens: list[int] = []

    class Clock(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            times.append(time.perf_counter())

    def reward(completions, completion_ids, **kwargs):
        tokens.append(sum(len(ids) for ids in completion_ids))
        return [reward_of(completion[0]["content"]) for completion in completions]

    tokenizer = AutoTokenizer.from_pretrained(folder / "model", padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    arguments = GRPOConfig(
        output_dir=str(folder / "trl"),
        per_device_train_batch_size=case.prompts * case.samples,
        num_generations=case.samples,
        max_completion_length=case.response_tokens,
        max_steps=case.steps + WARM_UP,
        learning_rate=1e-7,
        lr_scheduler_type="constant",
        beta=0.0,
        num_iterations=1,
        temperature=1.0,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        logging_strategy="no",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_num_workers=0,
    )
    table = load_dataset("parquet", data_files=str(folder / "train.parquet"), split="train")
    trainer = GRPOTrainer(
        model=model,
        args=arguments,
        reward_funcs=reward,
        train_dataset=table.select_columns(["prompt"]),
        processing_class=tokenizer,
        callbacks=[Clock()],
    )
    trainer.train()
    return summary(times, tokens)


def measure_hybridrl(case: Case, folder: Path, threads: int, overrides: Sequence[str] = ()) -> dict[str, float]:
    """`main_ppo`'s program in this process and a Ray worker, with the micro-batches that fit: the whole batch."""
    from hybridrl.config import load_config
    from hybridrl.trainer.ppo.run_ppo import run_ppo
    from hybridrl.trainer.ppo.trainer import RayPPOTrainer

    rows = case.prompts * case.samples
    config = load_config(
        "ppo_trainer",
        [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={folder / 'model'}",
            "actor_rollout_ref.model.enable_gradient_checkpointing=False",
            f"actor_rollout_ref.rollout.n={case.samples}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={case.prompts}",
            "actor_rollout_ref.actor.use_dynamic_bsz=True",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192",
            "actor_rollout_ref.actor.optim.lr=1e-7",
            f"data.train_files={folder / 'train.parquet'}",
            f"data.train_batch_size={case.prompts}",
            f"data.max_prompt_length={case.prompt_tokens}",
            f"data.max_response_length={case.response_tokens}",
            f"reward.custom_reward_function.path={folder / 'reward.py'}",
            f"trainer.default_local_dir={folder / 'hybridrl'}",
            f"trainer.total_training_steps={case.steps + WARM_UP}",
            f"trainer.threads_per_worker={threads}",
            "trainer.report=False",
            "trainer.logger=[]",
            *overrides,
        ],
    )
    assert rows <= config.actor_rollout_ref.rollout.max_num_seqs
    times: list[float] = []
    tokens: list[int] = []
    spent: list[float] = []  # inside worker methods and the reward function
    whole_init = RayPPOTrainer.__init__

    def init(self, *args, **kwargs):
        whole_init(self, *args, **kwargs)
        report = self.run.report

        def timed(metrics):
            report(metrics)
            times.append(time.perf_counter())
            tokens.append(round(metrics["response_length/mean"] * rows))
            spent.append(metrics["timing_s/workers"] + metrics["timing_s/reward"])

        self.run.report = timed

    RayPPOTrainer.__init__ = init  # type: ignore[method-assign]
    run_ppo(config)
    wall = times[-1] - times[WARM_UP - 1]
    return summary(times, tokens) | {"overhead": 1 - sum(spent[WARM_UP:]) / wall}


def summary(times: list[float], tokens: list[int]) -> dict[str, float]:
    steps = [later - earlier for earlier, later in pairwise(times)][WARM_UP - 1 :]
    return {
        "median_s": statistics.median(steps),
        "mean_s": statistics.mean(steps),
        "steps": len(steps),
        "tokens": sum(tokens[WARM_UP:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, default="quickstart")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of our side")
    parser.add_argument("--side", choices=("trl", "hybridrl"), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    case = CASES[arguments.case]
    if arguments.side:
        if arguments.side == "trl":
            result = measure_trl(case, arguments.folder, arguments.threads)
        else:
            result = measure_hybridrl(case, arguments.folder, arguments.threads, arguments.overrides)
        print("RESULT " + json.dumps(result))
        return
    ratios, shares = [], []
    with tempfile.TemporaryDirectory() as name:
        build(case, Path(name))
        for _ in range(arguments.rounds):
            trl, ours = (one_side(side, Path(name), arguments) for side in ("trl", "hybridrl"))
            ratios.append(ours["median_s"] / trl["median_s"])
            shares.append(ours["overhead"])
            print(f"ratio {ratios[-1]:.2f}, controller and Ray {shares[-1]:.1%}", flush=True)
    what = " ".join([arguments.case, *arguments.overrides])
    print(f"{what}, {arguments.threads} thread(s): hybridrl / TRL = {statistics.median(ratios):.2f}")
    print(f"controller and Ray: {statistics.median(shares):.1%} of hybridrl's step")


def one_side(side: str, folder: Path, arguments: argparse.Namespace) -> dict[str, float]:
    """Measure one side in a process of its own, in a folder of its own, and print what it found."""
    command = [sys.executable, __file__, "--case", arguments.case, "--threads", str(arguments.threads)]
    environment = os.environ | {"OMP_NUM_THREADS": str(arguments.threads), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(
        [*command, "--side", side, "--folder", str(folder), *arguments.overrides],
        capture_output=True,
        text=True,
        env=environment,
    )
    shutil.rmtree(folder / side, ignore_errors=True)  # else the next round would resume it
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        sys.exit(f"{side} failed:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}")
    found: dict[str, float] = json.loads(lines[0].removeprefix("RESULT "))
    print(f"{side:9s} {found}", flush=True)
    return found


if __name__ == "__main__":
    main()
