"""Generation that runs ahead of training: what is trained on, how old it is, and how such a run resumes."""

import hashlib
import json
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import ray
from raising import raises_with
from safetensors.torch import load_file
from trainer_tools import trained

from hybridrl.config import ConfigError, load_config, validate
from hybridrl.errors import DataError, RewardError, UserError
from hybridrl.trainer.ppo.batching import repeat_for_sampling
from hybridrl.trainer.ppo.run_requirements import RunRequirements
from hybridrl.trainer.ppo.sampler import Sampler, ScoredBatch
from hybridrl.trainer.ppo.trainer import RayPPOTrainer

MODE = "trainer.v1.trainer_mode"
STEPS, PROMPTS, SAMPLES = 5, 4, 3
REWARD = '''
import json
from pathlib import Path


def compute_score(data_source, solution_str, ground_truth, extra_info):
    """The share of early letters; an error from a certain call on, while the file is there."""
    if Path("FAULT").exists():
        raise RuntimeError("the grader is away")
    return sum(char < "m" for char in solution_str) / max(len(solution_str), 1)
'''


@pytest.fixture(scope="module", autouse=True)
def _ray(ray_session: None) -> None:
    """All runs of this file share one Ray."""


@pytest.fixture
def base(micro_model: Path, sort_data: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "letters.py").write_text(REWARD.replace("FAULT", str(tmp_path / "fault")))
    return [
        f"actor_rollout_ref.model.path={micro_model}",
        f"data.train_files={sort_data / 'train.parquet'}",
        f"reward.custom_reward_function.path={tmp_path / 'letters.py'}",
        "algorithm.adv_estimator=grpo",
        f"data.train_batch_size={PROMPTS}",
        "data.max_prompt_length=24",
        "data.max_response_length=6",
        f"actor_rollout_ref.rollout.n={SAMPLES}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={PROMPTS}",
        "actor_rollout_ref.actor.optim.lr=1e-2",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,extra,hf_model]",
        "trainer.dump_freq=1",
        "trainer.logger=[file]",
        f"trainer.total_training_steps={STEPS}",
    ]


def ahead(steps: float = 1, mode: str = "colocate_async") -> list[str]:
    return [f"{MODE}={mode}", f"trainer.v1.{mode}.num_warmup_batches={steps}"]


#: two replicas of two devices each
OWN_DEVICES = [
    *ahead(mode="separate_async"),
    "actor_rollout_ref.rollout.name=vllm",
    "actor_rollout_ref.rollout.nnodes=2",
    "actor_rollout_ref.rollout.n_gpus_per_node=2",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
]


def steps_of(folder: Path) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "timing_s/step" in line]


def trained_uids(folder: Path) -> list[list[str]]:
    """The prompts of each step."""
    dumps = sorted((folder / "rollouts").glob("*.jsonl"), key=lambda path: int(path.stem))
    rows = [[json.loads(line) for line in path.read_text().splitlines()] for path in dumps]
    return [list(dict.fromkeys(str(row["uid"]) for row in step)) for step in rows]


def weights(folder: Path, step: int = STEPS) -> str:
    """The digest of a step's weights: pytest shows the difference of two digests at once, that of two files never."""
    (path,) = (folder / f"global_step_{step}" / "actor" / "hf_model").glob("*.safetensors")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_once_each(folder: Path) -> None:
    uids = trained_uids(folder)
    flat = [uid for step in uids for uid in step]
    assert [len(step) for step in uids] == [PROMPTS] * STEPS and len(set(flat)) == len(flat)


def test_a_run_in_place_is_a_function_of_its_seed_and_resumes_bit_for_bit(base, tmp_path) -> None:
    """A checkpoint in the middle holds what was in flight: the resumed run ends with the same weights."""
    first, again = tmp_path / "first", tmp_path / "again"
    for folder in (first, again):
        with trained(*base, *ahead(), "trainer.save_freq=2", f"trainer.default_local_dir={folder}"):
            pass
    assert weights(first) == weights(again)
    check_once_each(first)
    ages = [step["rollout/staleness/max"] for step in steps_of(first)]
    assert ages == [0, 1, 1, 1, 1], "the first step finds nothing that was answered ahead"
    assert all(step["rollout/staleness/mean"] == step["rollout/staleness/max"] for step in steps_of(first))
    assert [step["ledger/occupancy"] for step in steps_of(first)] == [1, 1, 1, 1, 0.5], "nothing is left at the end"
    for step in (3, 4, 5):
        shutil.rmtree(again / f"global_step_{step}", ignore_errors=True)
    shutil.rmtree(again / "rollouts")
    with trained(*base, *ahead(), "trainer.save_freq=2", f"trainer.default_local_dir={again}"):
        pass
    assert weights(first) == weights(again)
    assert trained_uids(again) == trained_uids(first)[2:]
    kept = ("critic/", "actor/", "response_length", "missing/", "rollout/staleness", "ledger/occupancy", "ledger/void")
    resumed, whole = steps_of(again)[-3:], steps_of(first)[-3:]
    for one_step, same_step in zip(resumed, whole, strict=True):
        names = [name for name in same_step if name.startswith(kept) and "mfu" not in name]
        assert names and {name: one_step[name] for name in names} == {name: same_step[name] for name in names}


def test_two_steps_ahead_with_dynamic_sampling_holds_the_bound(base, tmp_path) -> None:
    words = ["algorithm.filter_groups.enable=True", "data.gen_batch_size=3", "trainer.v1.window=2"]
    with trained(*base, *ahead(2), *words, f"trainer.default_local_dir={tmp_path / 'run'}"):
        pass
    check_once_each(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert all(step["rollout/staleness/max"] <= 2 for step in steps) and steps[-1]["rollout/staleness/max"] >= 1
    assert steps[-1]["filter_groups/generated"] >= 1
    assert any(name.startswith("rollout_corr/k3_kl/age_") for name in steps[-1]), "divergence by age"


def test_prompts_that_would_be_too_old_are_dropped_and_others_drawn(base, tmp_path) -> None:
    words = ["trainer.v1.sampler.max_off_policy_threshold=1"]
    with trained(*base, *ahead(), *words, f"trainer.default_local_dir={tmp_path / 'run'}"):
        pass
    check_once_each(tmp_path / "run")
    steps = steps_of(tmp_path / "run")
    assert [step["rollout/staleness/max"] for step in steps] == [0] * STEPS
    assert steps[-1]["ledger/void"] >= PROMPTS * (STEPS - 2)


def test_a_scorer_that_fails_while_others_train_loses_no_step(base, tmp_path) -> None:
    """The last complete step is saved, with the prompts in flight; the same command goes on to the same weights."""
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    with trained(*base, *ahead(), f"trainer.default_local_dir={whole}"):
        pass

    class Interrupted(RayPPOTrainer):
        def report(self, *arguments, **settings):  # type: ignore[no-untyped-def]
            if self.run.step == 2:
                (tmp_path / "fault").touch()
            return super().report(*arguments, **settings)

        def make_room(self) -> None:
            if (tmp_path / "fault").exists():
                time.sleep(3)  # the lot has failed by then: also an error that is there before the wait stops the step
            super().make_room()

    from hybridrl.trainer.ppo import prepare_ppo

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_ppo, "RayPPOTrainer", Interrupted)
        with pytest.raises(RewardError), trained(*base, *ahead(), f"trainer.default_local_dir={cut}"):
            pass
    (tmp_path / "fault").unlink()
    with trained(*base, *ahead(), f"trainer.default_local_dir={cut}"):
        pass
    assert weights(cut) == weights(whole)
    check_once_each(cut)


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (ahead(mode="separate_async"), [f"{MODE}=separate_async", "rollout.nnodes=1"]),
        (
            [*ahead(mode="separate_async"), "actor_rollout_ref.rollout.name=hf", "rollout.nnodes=1"],
            ["rollout.nnodes=1 with name=hf"],
        ),
        (
            [
                *ahead(),
                "algorithm.use_kl_in_reward=True",
                "algorithm.kl_ctrl.type=adaptive",
                "algorithm.kl_ctrl.horizon=4",  # above a fifth of a step of 12 samples, below that of two steps
            ],
            ["algorithm.kl_ctrl.horizon=4", "a step of 12 samples", "2 steps later", "above 4"],
        ),
        (
            [*ahead(), "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.nnodes=1"],
            [f"{MODE}=colocate_async", "trainer_mode=separate_async"],
        ),
        (
            [*ahead(), "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.replicas.max=3"],
            ["rollout.replicas.max=3", f"{MODE}=colocate_async", f"{MODE}=separate_async"],
        ),
        (
            [*OWN_DEVICES, "actor_rollout_ref.rollout.replicas.min=3"],
            ["rollout.replicas.min=3", "starts with 2 replicas", "min to at most 2"],
        ),
        (
            [*OWN_DEVICES, "actor_rollout_ref.rollout.replicas.min=1", "actor_rollout_ref.rollout.replicas.max=1"],
            ["rollout.replicas.min=1", "rollout.replicas.max=1", "max to at least 2"],
        ),
        ([*ahead(), "trainer.v1.window=99"], ["trainer.v1.window=99", "at most 5"]),
        (ahead(0.5), ["num_warmup_batches=0.5", "data.gen_batch_size=3"]),
        (
            [*ahead(), "trainer.v1.sampler.max_off_policy_strategy=wait"],
            ["max_off_policy_strategy", "old ones are dropped"],
        ),
        (ahead(0), ["num_warmup_batches=0"]),
        (["trainer.v1.drain=True"], ["trainer.v1.drain=True"]),
        (
            [*ahead(), "reward.reward_model.enable=True", "reward.reward_model.model.path=MODEL"],
            [MODE, "reward_model", "pool of its own"],
        ),
    ],
)
def test_settings_that_cannot_run_ahead_are_refused_by_name(
    base, tmp_path, micro_reward_model, capfd, words: Sequence[str], parts: Sequence[str]
) -> None:
    words = [word.replace("MODEL", str(micro_reward_model)) for word in words]
    try:
        validate(load_config("ppo_trainer", [*base, *words, f"trainer.default_local_dir={tmp_path / 'run'}"]))
        text = capfd.readouterr().err  # a setting without effect is a notice
    except ConfigError as error:
        text = str(error)
    assert all(part in text for part in parts), text


def test_what_learns_from_each_batch_cannot_run_ahead(base, tmp_path) -> None:
    (tmp_path / "curriculum.py").write_text(
        "from torch.utils.data import SequentialSampler\n\n\nclass Curriculum(SequentialSampler):\n"
        "    def __init__(self, data_source, data_config):\n        super().__init__(data_source)\n\n"
        "    def update(self, batch): ...\n"
    )
    words = [f"data.sampler.class_path={tmp_path / 'curriculum.py'}", "data.sampler.class_name=Curriculum"]
    with (
        raises_with(DataError, f"{MODE}=colocate_async", "Curriculum.update"),
        trained(*base, *ahead(), *words, f"trainer.default_local_dir={tmp_path / 'run'}"),
    ):
        pass


def test_a_sampler_whose_batches_are_its_own_cannot_run_ahead(base, tmp_path, monkeypatch) -> None:
    class OneByOne(Sampler):
        def next(self) -> ScoredBatch:
            return super().next()

    monkeypatch.setattr(RayPPOTrainer, "sampler_class", OneByOne)
    with (
        raises_with(UserError, f"{MODE}=colocate_async", "OneByOne.next"),
        trained(*base, *ahead(), f"trainer.default_local_dir={tmp_path / 'run'}"),
    ):
        pass


@pytest.mark.parametrize(
    ("words", "bypass", "weights_of", "old_log_probs"),
    [
        ([], False, None, False),
        (ahead(1), True, None, False),
        (ahead(2), False, "token", True),
        ([*ahead(1), "actor_rollout_ref.actor.policy_loss.loss_mode=gspo"], False, "token", True),
        ([*ahead(1), "algorithm.rollout_correction.bypass_mode=False"], False, None, True),
    ],
)
def test_old_responses_never_pass_as_new_ones(base, words, bypass, weights_of, old_log_probs) -> None:
    """Without a correction and without old log-probabilities, the ratio of stale tokens would be 1."""
    config = load_config("ppo_trainer", [*base, *words])
    correction = config.algorithm.rollout_correction
    assert (correction.bypass_mode, correction.rollout_is) == (bypass, weights_of)
    assert RunRequirements.of(config).old_log_probs is old_log_probs


@pytest.mark.parametrize(
    ("value", "mode"),
    [("true", "colocate_async"), ("separate", "separate_async"), ("false", "sync"), ("colocate", "colocate_async")],
)
def test_the_short_name_of_the_modes(base, value, mode) -> None:
    assert load_config("ppo_trainer", [*base, f"asynchronous={value}"]).trainer.v1.trainer_mode == mode


@pytest.mark.parametrize("steps", [1, 2])
def test_old_responses_do_not_trip_the_check_of_the_mismatch(base, tmp_path, steps) -> None:
    """They differ from the trainer's weights by right; a threshold of rounding would stop the run at step 2."""
    words = ["trainer.health.logprob_mismatch.threshold=1e-6", "trainer.health.logprob_mismatch.patience=1"]
    words.append("trainer.health.logprob_mismatch.action=stop")
    with trained(*base, *ahead(steps), *words, f"trainer.default_local_dir={tmp_path / 'run'}"):
        pass
    divergence = [
        value
        for step in steps_of(tmp_path / "run")
        for name, value in step.items()
        if name.startswith("rollout_corr/k3_kl")
    ]
    assert max(divergence) > 1e-5, "there was something to trip it"


def test_requests_during_an_update_wait_for_its_weights(base, tiny_model, tmp_path) -> None:
    """They would take the memory back that training uses."""
    pytest.importorskip("vllm")
    seen: dict[str, Any] = {}

    class Requesting(RayPPOTrainer):
        def reshard(self) -> dict[str, float]:
            if self.run.step == 2:
                prompts = repeat_for_sampling(next(iter(self.train_loader)), 1)
                prompts.meta_info = {"global_steps": 99, "validate": True}
                answer: Future[Any] = Future()
                thread = threading.Thread(target=lambda: answer.set_result(self.rollout.generate(prompts)))
                thread.start()
                waits = self.rollout.scheduler
                while not waits.in_flight:
                    time.sleep(0.01)
                seen["memory"], seen["done"] = set(self.rollout.supervisor.memory), answer.done()
                metrics = super().reshard()
                versions = answer.result(60).batch
                seen["versions"] = versions["weight_versions"][versions["response_mask"].bool()].unique().tolist()
                return metrics
            return super().reshard()

    from hybridrl.trainer.ppo import prepare_ppo

    words = [f"actor_rollout_ref.model.path={tiny_model}", "actor_rollout_ref.rollout.name=vllm"]
    words += ["trainer.total_training_steps=2", "trainer.threads_per_worker=1"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_ppo, "RayPPOTrainer", Requesting)
        with trained(*base, *words, *ahead(), f"trainer.default_local_dir={tmp_path / 'run'}"):
            pass
    assert seen == {"memory": set(), "done": False, "versions": [2]}


def test_a_drain_does_not_wait_for_replicas_that_wait_for_weights(base, tiny_model, tmp_path) -> None:
    """The only replica is lost while training changes the weights; it gets none before the next ones are sent."""
    pytest.importorskip("vllm")

    class Losing(RayPPOTrainer):
        def reshard(self) -> dict[str, float]:
            metrics = super().reshard()
            if self.run.step == 1:
                self.rollout.pause()  # the prompts that are drawn now stay in flight
            return metrics

        def make_room(self) -> None:
            super().make_room()
            if self.run.step == 2:
                ray.kill(self.rollout.supervisor.replicas[0].actor)
                self.rollout.unpause()

    from hybridrl.trainer.ppo import prepare_ppo

    words = [f"actor_rollout_ref.model.path={tiny_model}", "actor_rollout_ref.rollout.name=vllm"]
    words += ["rollout.nnodes=1", "rollout.n_gpus_per_node=1", "trainer.threads_per_worker=1", "trainer.v1.drain=True"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepare_ppo, "RayPPOTrainer", Losing)
        with trained(*base, *words, *ahead(mode="separate_async"), f"trainer.default_local_dir={tmp_path / 'run'}"):
            pass
    check_once_each(tmp_path / "run")
    assert sum(step["rollout/restarts"] for step in steps_of(tmp_path / "run")) == 1


def test_weights_change_while_others_are_generated(base, tiny_model, tmp_path) -> None:
    """Engines on devices of their own, and on those of training: requests in flight go on under the next weights."""
    pytest.importorskip("vllm")
    engine = [f"actor_rollout_ref.model.path={tiny_model}", "actor_rollout_ref.rollout.name=vllm"]
    auto = ["actor_rollout_ref.rollout.name=auto", "rollout.nnodes=1", "rollout.n_gpus_per_node=1"]
    drain = ["trainer.v1.drain=True"]
    for number, (mode, more) in enumerate(
        (
            ("separate_async", auto),
            ("colocate_async", []),
            ("separate_async", [*auto, *drain]),
            ("colocate_async", drain),
        )
    ):
        folder = tmp_path / str(number)
        words = [*base, *engine, *more, *ahead(mode=mode), "trainer.threads_per_worker=1"]
        with trained(*words, f"trainer.default_local_dir={folder}"):
            pass
        check_once_each(folder)
        ages = [step["rollout/staleness/max"] for step in steps_of(folder)]
        assert ages[0] == 0 and all(0 <= age <= 1 for age in ages), ages
        trained_weights = load_file(
            next((folder / f"global_step_{STEPS}" / "actor" / "hf_model").glob("*.safetensors"))
        )
        before = load_file(next(tiny_model.glob("*.safetensors")))
        assert any(
            (trained_weights[name] - before[name]).abs().max() > 1e-3 for name in before if name in trained_weights
        )


AGENT = """
import openai


def doubts(base_url, api_key, row):
    client = openai.OpenAI(base_url=base_url, api_key=api_key)
    messages = list(row["raw_prompt"])
    answer = client.chat.completions.create(model="any", messages=messages, max_tokens=4)
    messages += [answer.choices[0].message, {"role": "user", "content": "2 1"}]
    client.chat.completions.create(model="any", messages=messages, max_tokens=4)
"""


def test_agents_are_trained_ahead_through_the_runs_server(base, tmp_path) -> None:
    """Each session is trained on once, within the bound."""
    (tmp_path / "agent.py").write_text(AGENT)
    rollout, folder = "actor_rollout_ref.rollout", tmp_path / "run"
    words = [
        f"{rollout}.server.enable=True",
        f"{rollout}.server.host=127.0.0.1",
        f"{rollout}.agent.default_agent_loop=gateway_agent",
        f"{rollout}.agent.function={tmp_path / 'agent.py'}:doubts",
        "data.max_response_length=40",
        "data.gen_batch_size=2",
    ]
    with trained(*base, *ahead(), *words, f"trainer.default_local_dir={folder}"):
        pass
    check_once_each(folder)
    steps = steps_of(folder)
    assert all(step["rollout/staleness/max"] <= 1 for step in steps) and steps[-1]["rollout/staleness/max"] == 1
    assert all(step["num_turns/mean"] >= 3 for step in steps)
