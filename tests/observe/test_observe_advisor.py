"""The timeline of a run, and what the advisor says about runs whose limit is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hybridrl.config.roles import ROLES, MicroBatches, Pass, RoleSpec, Scoring, Update
from hybridrl.errors import UserError
from hybridrl.observe.advisor import Advice, advise
from hybridrl.observe.jsonl import JsonLines
from hybridrl.observe.report import summarize, write_report
from hybridrl.observe.run_history import load_history
from hybridrl.observe.timeline import TIMELINE, Timeline, picture, read_timeline
from hybridrl.registry import INFERENCE_ENGINES
from hybridrl.rollout.inference_engine import register_inference_engine
from hybridrl.utils.spans import CONTROLLER, TimedSpan

BALANCED = {
    "data": 0.1, "gen": 2.0, "reward": 1.0, "old_log_prob": 1.0, "ref": 1.0, "adv": 0.1, "update_actor": 2.5,
    "update_weights": 0.5,
}  # fmt: skip
METHODS = {"gen": "generate_sequences", "old_log_prob": "compute_log_prob", "ref": "compute_ref_log_prob",
           "update_actor": "update_actor"}  # fmt: skip
SELECTIVE = {"enable_gradient_checkpointing": True, "recompute_granularity": "selective"}
CONFIG: dict[str, Any] = {
    "actor_rollout_ref": {
        "actor": {"ppo_micro_batch_size_per_gpu": 32, "use_dynamic_bsz": False, "checkpoint": {"async_save": False}},
        "rollout": {"name": "vllm", "max_num_seqs": 256, "checkpoint_engine": {"method": "streamed"}},
        "model": {"enable_gradient_checkpointing": True},
    },
    "reward": {"num_workers": 4},
    "data": {"dataloader_num_workers": 0, "max_response_length": 4096},
    "trainer": {"balance_batch": True, "save_freq": 1},
}


def judged(judge: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The settings of a run whose judge is set so."""
    model = {"enable": True, "n_gpus_per_node": 2, "judge": judge, **more}
    return {**CONFIG, "reward": {**CONFIG["reward"], "reward_model": model}}


def _write(
    folder: Path,
    times: dict[str, float],
    metrics: dict[str, float] | None = None,
    slow: tuple[int, float] = (0, 1.0),
    config: dict[str, Any] = CONFIG,
) -> Path:
    """A run of six steps on four ranks, the first of them slow to start, as its files tell it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    file = JsonLines(folder / "metrics.jsonl")
    lengths = {"response_length/mean": 900.0, "response_length/max": 1500.0, "prompt_length/mean": 100.0}
    with Timeline(folder) as timeline:
        for step in range(1, 7):
            seconds = {name: value * (3 if step == 1 else 1) for name, value in times.items()}
            inside = {name: value for name, value in seconds.items() if name not in ("save_checkpoint", "testing")}
            timing = {f"timing_s/{name}": value for name, value in seconds.items()}
            total = sum(inside.values())
            file.write({"step": step, "timing_s/step": total, **timing, **lengths, **(metrics or {})})
            at, spans = 1000.0 * step, []
            spans.append(TimedSpan("step", CONTROLLER, at, total))
            for name, value in inside.items():
                spans.append(TimedSpan(name, CONTROLLER, at, value))
                if name in METHODS:
                    rank, factor = slow
                    share = {one: value if one == rank else value / factor for one in range(4)}
                    spans += [TimedSpan(f"actor_rollout_ref/{METHODS[name]}", one, at, share[one]) for one in range(4)]
                at += value
            timeline.write(step, spans)
    file.close()
    return folder


PLANTED: dict[str, tuple[dict[str, Any], str, str | None, str]] = {
    "slow reward": ({"times": {**BALANCED, "reward": 20.0}}, "reward", None, "reward.num_workers=8"),
    "long validations beside the steps": (
        {"times": {**BALANCED, "reward": 20.0, "testing": 60.0, "testing_wait": 0.1}},
        "reward",
        None,
        "reward.num_workers=8",
    ),
    "steps that wait for the validation beside them": (
        {"times": {**BALANCED, "testing": 60.0, "testing_wait": 20.0}},
        "testing_wait",
        None,
        "trainer.test_freq=2",
    ),
    "slow judge": (
        {"times": {**BALANCED, "reward": 20.0}, "config": judged({"enable": True})},
        "reward",
        None,
        "reward.reward_model.enable_resource_pool=True, or a lower reward.reward_model.judge.max_tokens",
    ),
    "slow judge with devices of its own": (
        {"times": {**BALANCED, "reward": 20.0}, "config": judged({"enable": True}, enable_resource_pool=True)},
        "reward",
        None,
        "reward.reward_model.n_gpus_per_node=4",
    ),
    "slow endpoint of a judge": (
        {"times": {**BALANCED, "reward": 20.0}, "config": judged({"url": "http://host/v1", "max_concurrent": 8})},
        "reward",
        None,
        "reward.reward_model.judge.max_concurrent=16",
    ),
    "one slow rank": (
        {"times": {**BALANCED, "old_log_prob": 20.0}, "slow": (2, 2.5)},
        "old_log_prob",
        "2 of actor_rollout_ref/compute_log_prob",
        "global_profiler.tool=torch global_profiler.steps=[3] actor_rollout_ref.actor.profiler.enable=True "
        "actor_rollout_ref.actor.profiler.ranks=[2], to see",
    ),
    "a rank that is slow in another phase": (
        {"times": {**BALANCED, "old_log_prob": 12.0, "reward": 20.0}, "slow": (2, 2.5)},
        "reward",
        None,
        "reward.num_workers=8",
    ),
    "long tail": (
        {"times": {**BALANCED, "gen": 20.0}, "metrics": {"response_length/mean": 200.0, "response_length/max": 4096.0}},
        "gen",
        None,
        "data.max_response_length=2048",
    ),
    "weight sync": (
        {"times": {**BALANCED, "update_weights": 20.0}},
        "update_weights",
        None,
        "actor_rollout_ref.rollout.checkpoint_engine.method=auto",
    ),
    "small micro-batches": (
        {
            "times": {**BALANCED, "update_actor": 20.0},
            "config": {
                **CONFIG,
                "actor_rollout_ref": {**CONFIG["actor_rollout_ref"], "actor": {"ppo_micro_batch_size_per_gpu": 1}},
            },
        },
        "update_actor",
        None,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    ),
    "data": ({"times": {**BALANCED, "data": 20.0}}, "data", None, "data.dataloader_num_workers=4"),
    "checkpoint": (
        {"times": {**BALANCED, "save_checkpoint": 20.0}},
        "save_checkpoint",
        None,
        "actor_rollout_ref.actor.checkpoint.async_save=True",
    ),
    "large micro-batches": (
        {"times": {**BALANCED, "update_actor": 20.0}},
        "update_actor",
        None,
        "actor_rollout_ref.model.enable_gradient_checkpointing=False, if",
    ),
    "selective checkpointing": (
        {
            "times": {**BALANCED, "update_actor": 20.0},
            "config": {**CONFIG, "actor_rollout_ref": {**CONFIG["actor_rollout_ref"], "model": SELECTIVE}},
        },
        "update_actor",
        None,
        "actor_rollout_ref.model.enable_gradient_checkpointing=False actor_rollout_ref.model.recompute_granularity=",
    ),
}


@pytest.mark.parametrize("case", PLANTED)
def test_the_planted_limit_is_named_with_its_rank_and_a_setting_to_try(tmp_path: Path, case: str) -> None:
    run, phase, rank, override = PLANTED[case]
    history = load_history(_write(tmp_path, **run))
    advice = advise(history.steps(), read_timeline(tmp_path), history.config)
    assert advice is not None
    assert (advice.phase, advice.rank) == (phase, rank)
    assert advice.override.startswith(override)
    # A validation that runs beside steps takes no time of its own.
    beside = run["times"]["testing"] if "testing_wait" in run["times"] else 0.0
    expected = 20.0 / (sum(run["times"].values()) - beside)
    assert advice.share == pytest.approx(expected, rel=1e-3)


def limited_by(tmp_path: Path, phase: str, config: dict[str, Any]) -> Advice:
    """The advice of a run that this phase limits."""
    history = load_history(_write(tmp_path, {**BALANCED, phase: 20.0}, config={**CONFIG, **config}))
    advice = advise(history.steps(), {}, history.config)
    assert advice is not None and advice.phase == phase
    return advice


PRIME = {"roles": {"prime": {"model": {"path": "x"}}}}  # a run's file has only what was set of such a role
LEARNING = {"ppo_micro_batch_size_per_gpu": 2, "use_dynamic_bsz": False}


@pytest.mark.parametrize(
    ("phase", "config", "override"),
    [
        ("update_prime", PRIME, "roles.prime.model.enable_gradient_checkpointing=False"),
        (
            "update_prime",
            {"roles": {"prime": {"model": {"enable_gradient_checkpointing": False}}}},
            "roles.prime.use_dynamic_bsz=True",
        ),
        ("update_prime", {"roles": {"prime": LEARNING}}, "roles.prime.ppo_micro_batch_size_per_gpu=8"),
        ("update_critic", {"critic": LEARNING}, "critic.ppo_micro_batch_size_per_gpu=8"),
        (
            "update_critic",
            {"critic": {"use_dynamic_bsz": True, "profiler": {"enable": False}}},
            "global_profiler.tool=torch global_profiler.steps=[3] critic.profiler.enable=True "
            "critic.profiler.ranks=[0]",
        ),
        ("process_rewards", PRIME, "roles.prime.use_dynamic_bsz=True"),
        (
            "process_rewards",
            {"roles": {"prime": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 512}}},
            "roles.prime.ppo_max_token_len_per_gpu=8192",
        ),
        ("values", {}, "critic.use_dynamic_bsz=True"),
        ("values", {"critic": {"use_dynamic_bsz": True}}, "placement.roles.critic="),
        ("ref", {}, "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=True"),
        ("old_log_prob", {}, "actor_rollout_ref.rollout.log_prob_use_dynamic_bsz=True"),
        ("teacher", {}, "placement.roles.teacher="),
        ("reward_model", {}, "reward.reward_model.use_dynamic_bsz=True"),
        (
            "reward_model",
            {"reward": {"reward_model": {"rollout": {"name": "vllm"}}}},
            "placement.roles.reward_model=",
        ),
        ("own_scores", {}, "placement.roles.own="),
        ("own_update", {}, "global_profiler.tool=torch"),
        ("own_pass", {}, "roles.own.my_dynamic=True"),
    ],
)
def test_phases_of_every_role_have_a_rule(tmp_path: Path, monkeypatch, phase, config, override) -> None:
    own = RoleSpec(
        name="own",
        worker=None,
        needed=lambda config: True,
        placement=("own",),
        mesh="own",
        passes=(Pass("own_pass", "compute", batching=MicroBatches("roles.own", "my_size", "my_tokens", "my_dynamic")),),
        scoring=Scoring("own_scores", "score", "own", reader=lambda: None, weight=lambda config: 1.0),
        update=Update("own_update", "update", fields=()),
    )
    monkeypatch.setitem(ROLES, "own", own)
    advice = limited_by(tmp_path, phase, config)
    assert advice.override.startswith(override) and "no rule here" not in advice.reason


def test_an_engine_that_generates_in_the_training_workers_is_named(tmp_path: Path) -> None:
    @register_inference_engine("in_place_of_advisor", in_place=True)
    class InPlace:
        pass

    try:
        for name in ("hf", "in_place_of_advisor"):
            rollout = {**CONFIG["actor_rollout_ref"]["rollout"], "name": name}
            config = {"actor_rollout_ref": {**CONFIG["actor_rollout_ref"], "rollout": rollout}}
            advice = limited_by(tmp_path / name, "gen", config)
            assert f"rollout.name={name} " in advice.reason
            assert advice.override == "actor_rollout_ref.rollout.name=vllm"
    finally:
        del INFERENCE_ENGINES.objects["in_place_of_advisor"]


def test_the_report_shows_the_timeline_of_every_rank_and_the_advice(tmp_path: Path) -> None:
    run = PLANTED["one slow rank"][0]
    page = write_report(_write(tmp_path, **run)).read_text()
    for text in (
        "actor_rollout_ref 2",
        "old_log_prob takes",
        "rank 2 of actor_rollout_ref/compute_log_prob",
        "step 6:",
    ):
        assert text in page
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page
    assert "speed: old_log_prob takes" in summarize(tmp_path, width=400)


def test_bars_lie_where_their_spans_were() -> None:
    spans = [
        TimedSpan("gen", CONTROLLER, 10.0, 4.0),
        TimedSpan("actor/update", 0, 12.0, 1.0),
        TimedSpan("actor/update", 1, 12.0, 8.0),
    ]
    found = picture(3, spans)
    assert found.seconds == 10 and found.rows == ["gen", "actor 0", "actor 1"]
    assert [(bar.start, bar.width, bar.row) for bar in found.bars] == [(0, 40, 0), (20, 10, 1), (20, 80, 2)]
    many = picture(3, [TimedSpan("actor/update", rank, 10.0, 1.0 + rank) for rank in range(100)])
    assert many.left_out == 66 and "actor 99" in many.rows and "actor 0" not in many.rows


def test_a_resumed_run_replaces_the_timeline_of_the_steps_that_it_repeats(tmp_path: Path) -> None:
    def spans(step: int) -> list[TimedSpan]:
        return [TimedSpan("gen", CONTROLLER, 100.0 * step, 1.0), TimedSpan("actor/update", 0, 100.0 * step + 1, 0.25)]

    with Timeline(tmp_path) as timeline:
        for step in (1, 2, 3):
            timeline.write(step, spans(step))
        timeline.cut_after(1)
        timeline.write(2, spans(7))
    assert read_timeline(tmp_path) == {1: spans(1), 2: spans(7)}
    (tmp_path / TIMELINE).write_text('{"step": 1, "spans": [["gen"]]}\n')
    with pytest.raises(UserError, match=TIMELINE):
        read_timeline(tmp_path)


def test_without_steps_there_is_no_advice() -> None:
    assert advise([], {}, {}) is None
    assert advise([{"val-core/x": 1.0}], {}, {}) is None
