"""Sessions on a real model: what is trained on is what was sampled, and a fault spoils its own session only."""

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from rollout_stage import ROLLOUT, config_for, prompts_of
from template_families import FAMILIES

from hybridrl.agents import AgentLoopBase, AgentLoopOutput, AgentRollout, create_agents, register
from hybridrl.agents.agent_rollout import run_coroutine
from hybridrl.config import load_config
from hybridrl.config.checks.idle import check_idle
from hybridrl.engine.microbatch import MicroBatching
from hybridrl.errors import RolloutError, TooFewReplicasError
from hybridrl.models.info import tokenizer_of
from hybridrl.protocol import DataProto, object_array
from hybridrl.reward import create_reward_manager
from hybridrl.rollout import Rollout
from hybridrl.scored import Reason, Scored, Unscored, UnscoredError
from hybridrl.trainer.ppo.early_scores import scored_early


@pytest.mark.parametrize("name", FAMILIES)
def test_what_is_trained_on_is_what_was_sampled(started, engine, model, name) -> None:
    rollout, recorded = started(config_for(model, FAMILIES[name].template))
    batch = rollout.generate(prompts_of(rollout, 6))
    tokenizer = rollout.agents.tokenizer
    calls = {tuple(prompt): completion for prompt, completion in recorded.calls}
    assert len(calls) == len(recorded.calls) > 12  # several turns
    fields = batch.batch
    for row in range(6):
        prompt = fields["prompts"][row][fields["attention_mask"][row, : fields["prompts"].shape[1]].bool()].tolist()
        length = int(fields["attention_mask"][row, fields["prompts"].shape[1] :].sum())
        response, mask = fields["responses"][row, :length].tolist(), fields["response_mask"][row].tolist()
        place, turns = 0, 0
        while place < length:
            made = calls.pop(tuple(prompt + response[:place]))  # each request continues exactly the tokens before
            count = len(made.token_ids)
            assert response[place : place + count] == made.token_ids and mask[place : place + count] == [1] * count
            assert fields["rollout_log_probs"][row, place : place + count].tolist() == pytest.approx(made.log_probs)
            place, turns = place + count, turns + 1
            if place < length:
                read = tokenizer.decode(made.token_ids, skip_special_tokens=True)  # tools get no special tokens
                answer = f"{len(read)} characters"
                behind = FAMILIES[name].behind.replace("ANSWER", answer)
                ended = tokenizer.decode(made.token_ids[-1:]) == FAMILIES[name].end
                text = behind if ended else FAMILIES[name].end + behind
                tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
                assert response[place : place + len(tokens)] == tokens
                assert not any(mask[place : place + len(tokens)])
                place += len(tokens)
        assert not any(mask[length:])
        assert batch.non_tensor_batch["__num_turns__"][row] in (2 * turns, 2 * turns + 1)
        rewards = batch.non_tensor_batch["tool_rewards"][row]
        assert len(rewards) >= turns - 1 and set(rewards) <= {0.25}
    assert not calls
    generated = fields["response_mask"].bool()
    assert torch.equal(fields["weight_versions"] == 0, generated)
    trained = engine.infer(batch, MicroBatching(size=3), 1.0, {"log_probs"})["log_probs"]
    difference = (trained - fields["rollout_log_probs"])[generated].abs().max()
    assert difference < 1e-5, difference


def test_sessions_are_the_same_again_and_differ_from_each_other(started, model) -> None:
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template))
    prompts = prompts_of(rollout, 2)
    prompts = DataProto.concat([prompts, prompts])
    prompts.non_tensor_batch["sample"] = object_array([0, 0, 1, 1])
    first, second = rollout.generate(prompts), rollout.generate(prompts)
    assert torch.equal(first.batch["responses"], second.batch["responses"])
    assert not torch.equal(first.batch["responses"][:2], first.batch["responses"][2:])


def test_limits_end_a_session(started, model) -> None:
    turns = [f"{ROLLOUT}.multi_turn.max_assistant_turns=2", f"{ROLLOUT}.multi_turn.max_user_turns=9"]
    rollout, recorded = started(config_for(model, FAMILIES["qwen"].template, *turns))
    batch = rollout.generate(prompts_of(rollout, 3))
    assert len(recorded.calls) <= 6 and max(batch.non_tensor_batch["__num_turns__"]) == 4
    rounds = [f"{ROLLOUT}.multi_turn.max_user_turns=1"]
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, *rounds))
    assert max(rollout.generate(prompts_of(rollout, 3)).non_tensor_batch["__num_turns__"]) == 4


def test_a_session_ends_where_an_answer_would_not_fit(started, model) -> None:
    """With little room for prompt and response together, and with an answer longer than all of it."""
    family = FAMILIES["qwen"]
    rollout, _ = started(config_for(model, family.template, f"{ROLLOUT}.agent.on_error=raise"))
    prompts = prompts_of(rollout, 4)
    longest = int(prompts.batch["attention_mask"].sum(1).max())
    rollout, recorded = started(
        config_for(model, family.template, f"{ROLLOUT}.max_model_len={longest + 90}", f"{ROLLOUT}.agent.on_error=raise")
    )
    batch = rollout.generate(prompts)
    assert int(batch.batch["attention_mask"].sum(1).max()) <= longest + 90
    assert 4 <= len(recorded.calls) <= 12


@register("forges")
class Forges(AgentLoopBase):
    """Says of tokens of its own that the policy generated them."""

    async def run(self, sampling_params, **kwargs):
        out = await self.server_manager.generate(prompt_ids=kwargs["prompt_ids"], sampling_params=sampling_params)
        return AgentLoopOutput(kwargs["prompt_ids"], [*out.token_ids[:-1], 3, 3], [1] * (len(out.token_ids) + 1))


@register("cuts_context")
class CutsContext(AgentLoopBase):
    """Two parts of one session: the second has a context of its own."""

    async def run(self, sampling_params, **kwargs):
        parts = []
        for question in ("What is first?", "And now?"):
            prompt = await self.apply_chat_template([{"role": "user", "content": question}])
            out = await self.server_manager.generate(
                "verl gives an id",
                prompt_ids=prompt,
                sampling_params={**sampling_params, "max_tokens": 5, "logprobs": True},
            )
            mask = [0] + [1] * (len(out.token_ids) - 1)  # a part of what was generated may be left out
            parts.append(AgentLoopOutput(prompt, out.token_ids, mask, reward_score=0.5, num_turns=2))
        return parts


@register("cuts_context_unscored")
class CutsContextUnscored(CutsContext):
    """The same, without rewards of its own."""

    async def run(self, sampling_params, **kwargs):
        return [replace(part, reward_score=None) for part in await super().run(sampling_params, **kwargs)]


class Flaky(AgentLoopBase):
    """Fails at rows whose `fails` says so: always, the first time, or by asking for too much."""

    seen: ClassVar[set] = set()

    def __init__(self, *, greeting: str, **kwargs) -> None:
        super().__init__(**kwargs)
        assert greeting == "hello"

    async def run(self, sampling_params, **kwargs):
        key = (kwargs["uid"], kwargs["sample"])
        if kwargs["fails"] == "always" or (kwargs["fails"] == "once" and key not in self.seen):
            self.seen.add(key)
            raise ConnectionError("the environment is gone")
        if kwargs["fails"] == "long":
            await self.server_manager.generate(prompt_ids=[3] * 5000)
        out = await self.server_manager.generate(prompt_ids=kwargs["prompt_ids"], sampling_params={"max_tokens": 4})
        return AgentLoopOutput(kwargs["prompt_ids"], out.token_ids, [1] * len(out.token_ids))


class Judged(AgentLoopBase):
    """Ends as the row's `ends` says."""

    async def run(self, sampling_params, **kwargs):
        prompt, ends = kwargs["prompt_ids"], kwargs["ends"]
        out = await self.server_manager.generate(prompt_ids=prompt, sampling_params={"max_tokens": 4})
        if isinstance(ends, Exception):
            raise ends
        mask = [1] * len(out.token_ids)
        return [AgentLoopOutput(prompt, out.token_ids, mask, reward_score=score) for score in ends]


def test_a_session_gives_a_score_or_the_reason_why_not(started, model, tmp_path) -> None:
    file = tmp_path / "loops.yaml"
    file.write_text(f"- {{name: judged, _target_: {__name__}.Judged}}\n")
    rollout, _ = started(
        config_for(
            model,
            FAMILIES["qwen"].template,
            f"{ROLLOUT}.agent.agent_loop_config_path={file}",
            f"{ROLLOUT}.agent.retries=0",
        )
    )
    ends = [
        [Scored(0.5, {"acc": 1})],
        [0.25, Unscored("grading", "no judge")],  # no part of the session remains
        UnscoredError("dropped"),
        TimeoutError("too slow"),
        [float("nan")],
        [Scored(1.0, {"reward_model": {"ground_truth": "mine"}})],
    ]
    truths = [{"ground_truth": "1 2 3"}] * 6
    batch = rollout.generate(prompts_of(rollout, 6, agent_name=["judged"] * 6, ends=ends, reward_model=truths))
    assert batch.non_tensor_batch["trajectory_reward"].tolist() == [0.5]
    assert batch.non_tensor_batch["acc"].tolist() == [1] and batch.non_tensor_batch["uid"].tolist() == ["0-0"]
    lost = batch.meta_info["missing_samples"]
    assert [one.unscored.reason for one in lost] == ["grading", "dropped", "timeout", "infra", "infra"]
    assert 2 <= lost[0].tokens <= 8 and {one.tokens for one in lost[1:]} == {None}  # an error cuts a session off
    assert not any(one.again for one in lost)
    assert lost[0].unscored.detail == "no judge" and "reward_score nan" in lost[3].unscored.detail
    assert "'reward_model'" in lost[4].unscored.detail and "column of the data" in lost[4].unscored.detail


def test_a_session_that_ran_out_of_time_is_not_run_again_at_once(started, model, tmp_path) -> None:
    """It would take the whole time limit again; `algorithm.missing` decides what becomes of it."""
    file = tmp_path / "loops.yaml"
    file.write_text(f"- {{name: judged, _target_: {__name__}.Judged}}\n")
    words = (f"{ROLLOUT}.agent.agent_loop_config_path={file}", f"{ROLLOUT}.agent.retries=2")
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, *words))
    ends = [TimeoutError("too slow"), UnscoredError("timeout"), ConnectionError("gone")]
    batch = rollout.generate(prompts_of(rollout, 3, agent_name=["judged"] * 3, ends=ends))
    lost = [(one.uid, one.again) for one in batch.meta_info["missing_samples"]]
    assert lost == [("0-0", False), ("0-1", False), ("0-2", True), ("0-2", True), ("0-2", False)]


def test_sessions_that_fail_because_no_replica_is_left_end_the_batch(started, model, monkeypatch) -> None:
    """They are neither tried again nor left out: no session can have an answer any more."""

    def ended() -> None:
        raise TooFewReplicasError("0 replicas are left")

    loop = f"{ROLLOUT}.agent.default_agent_loop=forges"
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, loop, f"{ROLLOUT}.agent.on_error=drop"))
    assert rollout.generate(prompts_of(rollout, 2)).meta_info["missing_samples"]
    monkeypatch.setattr(rollout.inner, "check_running", ended)
    with pytest.raises(TooFewReplicasError):
        rollout.generate(prompts_of(rollout, 2))


def own_loops(tmp_path: Path) -> str:
    file = tmp_path / "loops.yaml"
    file.write_text(f"- {{name: flaky, _target_: {__name__}.Flaky, greeting: hello}}\n")
    return f"{ROLLOUT}.agent.agent_loop_config_path={file}"


def test_tokens_that_the_policy_did_not_generate_are_refused(started, model) -> None:
    loop = f"{ROLLOUT}.agent.default_agent_loop=forges"
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, loop, f"{ROLLOUT}.agent.on_error=raise"))
    with pytest.raises(RolloutError, match="which the policy did not generate"):
        rollout.generate(prompts_of(rollout, 1))


def test_a_session_of_several_parts_is_several_rows(started, model, engine) -> None:
    loop = f"{ROLLOUT}.agent.default_agent_loop=cuts_context"
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, loop))
    batch = rollout.generate(prompts_of(rollout, 2))
    objects = batch.non_tensor_batch
    assert objects["uid"].tolist() == ["0-0", "0-0", "0-1", "0-1"]
    assert objects["session_id"].tolist() == ["sample 0"] * 4 and objects["trajectory_index"].tolist() == [0, 1, 0, 1]
    assert objects["trajectory_reward"].tolist() == [0.5] * 4
    generated = batch.batch["response_mask"].bool()
    assert not generated[:, 0].any() and generated.sum() > 4
    trained = engine.infer(batch, MicroBatching(size=4), 1.0, {"log_probs"})["log_probs"]
    assert (trained - batch.batch["rollout_log_probs"])[generated].abs().max() < 1e-5


def test_the_reward_function_scores_a_session_of_several_parts_once(started, model) -> None:
    loop = f"{ROLLOUT}.agent.default_agent_loop=cuts_context_unscored"
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, loop))
    batch = rollout.generate(prompts_of(rollout, 2))
    assert batch.non_tensor_batch["trajectory_reward"].tolist() == [0.0, None] * 2


def test_failed_sessions_run_again_or_are_left_out(started, model, tmp_path, capsys) -> None:
    config = config_for(model, FAMILIES["qwen"].template, own_loops(tmp_path))
    rollout, _ = started(config)
    Flaky.seen.clear()
    names, fails = ["flaky", "flaky", "flaky", None], ["always", "once", "no", "no"]
    batch = rollout.generate(prompts_of(rollout, 4, agent_name=names, fails=fails))
    assert batch.non_tensor_batch["uid"].tolist() == ["0-1", "0-2", "0-3"]
    lost = batch.meta_info["missing_samples"]
    assert [(one.uid, one.sample, one.again) for one in lost] == [("0-0", 0, True), ("0-0", 0, False), ("0-1", 0, True)]
    assert {one.unscored.reason for one in lost} == {Reason.INFRA} and {one.tokens for one in lost} == {None}
    metrics = rollout.metrics()
    assert (metrics["agent_loop/sessions_retried"], metrics["agent_loop/sessions_failed"]) == (2.0, 1.0)
    assert "the environment is gone" in capsys.readouterr().err
    nothing = rollout.generate(prompts_of(rollout, 2, agent_name=["flaky"] * 2, fails=["always", "long"]))
    assert len(nothing) == 0 and len(nothing.meta_info["missing_samples"]) == 4
    assert "prompt has 5000 tokens" in capsys.readouterr().err
    config.actor_rollout_ref.rollout.agent.on_error = "raise"
    with pytest.raises(RolloutError, match="environment is gone"):
        rollout.generate(prompts_of(rollout, 2, agent_name=["flaky"] * 2, fails=["always", "no"]))


def test_a_rollout_of_agents_passes_on_all_but_generation(started, model) -> None:
    """What a method of `Rollout` does by default is nothing, so one that is not passed on is lost without an error."""
    methods = {name for name, value in vars(Rollout).items() if callable(value) and not name.startswith("_")}
    assert methods - {"generate"} <= vars(AgentRollout).keys()
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template))
    asked: list[str] = []
    rollout.inner.lend_cache = lambda: asked.append("lend_cache")
    rollout.lend_cache()
    assert asked == ["lend_cache"]


def test_an_error_of_the_sessions_is_never_that_of_their_closed_loop(monkeypatch) -> None:
    """The loop is closed just after the error is known: nothing may be sent to it then."""

    class Closing(asyncio.SelectorEventLoop):
        def close(self) -> None:
            time.sleep(0.2)  # the caller gets the error meanwhile
            super().close()

        def call_soon_threadsafe(self, *arguments, **named):
            raise RuntimeError("Event loop is closed")

    monkeypatch.setattr(asyncio, "new_event_loop", Closing)

    async def fails() -> None:
        raise RolloutError("the environment is gone")

    with pytest.raises(RolloutError, match="the environment is gone"):
        run_coroutine(fails())


def test_a_loop_that_samples_otherwise_than_the_run_is_told(started, model, capsys) -> None:
    rollout, _ = started(config_for(model, FAMILIES["qwen"].template, f"{ROLLOUT}.agent.default_agent_loop=hotter"))
    rollout.generate(prompts_of(rollout, 2))
    assert "samples with temperature=1.5, top_k=3, and training computes" in capsys.readouterr().err


@register("hotter")
class Hotter(AgentLoopBase):
    """Samples with a temperature of its own."""

    async def run(self, sampling_params, **kwargs):
        prompt = kwargs["prompt_ids"]
        out = await self.server_manager.generate(
            prompt_ids=prompt, sampling_params={**sampling_params, "temperature": 1.5, "top_k": 3, "max_tokens": 2}
        )
        return AgentLoopOutput(prompt, out.token_ids, [1] * len(out.token_ids))


def test_generation_that_fails_ends_all_sessions(started, model) -> None:
    rollout, recorded = started(config_for(model, FAMILIES["qwen"].template))
    recorded.client.close()
    with pytest.raises(RolloutError, match="the rollout was closed"):
        rollout.generate(prompts_of(rollout, 3))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (f"{ROLLOUT}.multi_turn.function_tool_path=null", "which has no tools"),
        (f"{ROLLOUT}.multi_turn.function_tool_path=no_such.py", "no such file"),
        (f"{ROLLOUT}.agent.default_agent_loop=unheard_of", "tool_agent"),
        (f"{ROLLOUT}.agent.agent_loop_config_path=no_such.yaml", "no such file"),
    ],
)
def test_what_cannot_work_is_refused_at_start_up(model, setting, message) -> None:
    config = config_for(model, FAMILIES["qwen"].template, setting)
    with pytest.raises(RolloutError, match=message):
        create_agents(config, tokenizer_of(config.actor_rollout_ref.model), [])


def test_everything_that_a_rollout_does_is_passed_on() -> None:
    """Methods with a body in `Rollout` would do nothing without an error, such as `lend_cache`."""
    methods = {name for name, found in vars(Rollout).items() if callable(found) and not name.startswith("_")}
    assert methods > {"generate", "release", "lend_cache"} and methods <= vars(AgentRollout).keys()


def test_settings_that_nothing_reads_are_told(model) -> None:
    words = [f"{ROLLOUT}.multi_turn.enable=False", f"{ROLLOUT}.multi_turn.function_tool_path=null"]
    config = config_for(model, FAMILIES["qwen"].template, *words, f"{ROLLOUT}.agent.retries=3")
    assert create_agents(config, tokenizer_of(config.actor_rollout_ref.model), []) is None
    told = " ".join(check_idle(config)[1])
    assert f"{ROLLOUT}.agent.retries=3" in told and f"{ROLLOUT}.multi_turn.format=every_turn" in told
    plain = load_config("ppo_trainer", [f"actor_rollout_ref.model.path={model}"])
    assert create_agents(plain, tokenizer_of(plain.actor_rollout_ref.model), []) is None
    assert check_idle(plain) == ([], [])


@register("waits_for_a_score")
class WaitsForAScore(AgentLoopBase):
    """Answers at once, but for sample 1, which first waits until some sample has been scored."""

    async def run(self, sampling_params, **row):
        prompt = list(row["prompt_ids"])
        made = await self.server_manager.generate(
            prompt_ids=prompt, sampling_params={**sampling_params, "max_tokens": 4}
        )
        while row["uid"] == "0-1" and not Path(row["scored"]).exists():
            await asyncio.sleep(0.01)
        return AgentLoopOutput(prompt, made.token_ids, [1] * len(made.token_ids))


def test_a_session_is_scored_while_others_still_run(started, model, tmp_path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "def compute_score(solution_str, ground_truth):\n    return float(len(solution_str))\n"
    )
    config = config_for(
        model,
        next(iter(FAMILIES.values())).template,
        f"reward.custom_reward_function.path={tmp_path / 'mine.py'}",
        f"{ROLLOUT}.agent.default_agent_loop=waits_for_a_score",
    )
    rollout, _ = started(config)
    manager = create_reward_manager(config, rollout.agents.tokenizer)
    asked = prompts_of(rollout, 3, scored=[str(tmp_path / "scored")] * 3)
    submit = manager.submit_responses

    def submit_and_tell(responses):
        futures = submit(responses)
        for future in futures:
            future.add_done_callback(lambda _: (tmp_path / "scored").touch())  # called where the score is there
        return futures

    monkeypatch.setattr(manager, "submit_responses", submit_and_tell)
    try:
        with scored_early(manager, asked) as scores:
            batch = rollout.generate(asked, scores.on_finished)  # would wait for ever if sessions were scored after it
        batch.non_tensor_batch |= {name: asked.non_tensor_batch[name] for name in ("raw_prompt", "scored")}
        early, later = scores(batch), manager(batch, return_dict=True)
        assert early["metrics"]["perf/reward_scored_early"] > 0
        assert torch.equal(early["reward_tensor"], later["reward_tensor"])
    finally:
        manager.close()
