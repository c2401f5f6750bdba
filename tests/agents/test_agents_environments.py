"""Sessions on environments: what they see, what is trained on, and faults that spoil one session only."""

import pytest
import torch
from guess_env import Length
from raising import raises_with
from rollout_stage import ROLLOUT, config_for, prompts_of
from template_families import FAMILIES

from hybridrl.agents import create_agents
from hybridrl.agents.environments.load_environments import load_environments
from hybridrl.errors import RolloutError
from hybridrl.models.info import tokenizer_of
from hybridrl.scored import Reason

QWEN = FAMILIES["qwen"]


def env_config(model, environment: str | None, *more: str):
    words = [f"{ROLLOUT}.agent.default_agent_loop=env_agent", f"{ROLLOUT}.multi_turn.function_tool_path=null"]
    if environment is not None:
        words.append(f"{ROLLOUT}.agent.default_environment={environment}")
    return config_for(model, QWEN.template, *words, *more)


def test_an_episode_is_what_was_sampled_and_rewards_stand_on_their_turns(started, model) -> None:
    Length.log.clear()
    rollout, recorded = started(env_config(model, "length", f"{ROLLOUT}.agent.environment_turn_tokens=25"))
    prompts = prompts_of(rollout, 4, sample=[0, 1, 0, 1])
    prompts.non_tensor_batch["uid"][:] = ["a", "a", "b", "b"]
    batch = rollout.generate(prompts)
    episodes = {entry[0]: entry[1:] for entry in Length.log if len(entry) == 3}
    assert episodes["a", 0][0] == episodes["a", 1][0] != episodes["b", 0][0]  # seeds are those of prompts
    fields, tokenizer = batch.batch, rollout.agents.tokenizer
    calls = {tuple(prompt): completion for prompt, completion in recorded.calls}
    for row, (uid, sample) in enumerate([("a", 0), ("a", 1), ("b", 0), ("b", 1)]):
        width = fields["prompts"].shape[1]
        prompt = fields["prompts"][row][fields["attention_mask"][row, :width].bool()].tolist()
        assert "2 turns are left." in tokenizer.decode(prompt)
        length = int(fields["attention_mask"][row, width:].sum())
        response, place = fields["responses"][row, :length].tolist(), 0
        expected = torch.zeros(fields["responses"].shape[1])
        seen = episodes[uid, sample][1]
        objects = batch.non_tensor_batch
        assert len(seen) == 2 and objects["env_done"][row] and objects["env_turns"][row] == 2
        for number, (text, token_ids) in enumerate(seen):
            made = calls.pop(tuple(prompt + response[:place])).token_ids
            assert list(token_ids) == made and len(made) <= 25
            assert text == tokenizer.decode(made, skip_special_tokens=True)
            place += len(made)
            expected[place - 1] = len(text) / 10
            if number == 0:
                ended = tokenizer.decode(made[-1:]) == QWEN.end
                behind = "\n<|im_start|>user\n1 turns are left.<|im_end|>\n<|im_start|>assistant\n"
                tokens = tokenizer(behind if ended else QWEN.end + behind, add_special_tokens=False)["input_ids"]
                assert response[place : place + len(tokens)] == tokens
                place += len(tokens)
        assert place == length
        assert torch.equal(fields["turn_level_rewards"][row], expected)
        assert fields["turn_states"][row].nonzero().flatten().tolist() == expected.nonzero().flatten().tolist()
        assert batch.non_tensor_batch["env_extra"][row] == {"length": len(seen[-1][0])}
        log = batch.non_tensor_batch["session_log"][row]
        spoken = [message["content"] for message in log["messages"]]
        assert spoken[-3:] == [seen[0][0], "1 turns are left.", seen[1][0]] and "2 turns are left." in spoken[-4]
        assert [event["kind"] for event in log["events"]] == ["generate", "step"] * 2
        rewards = [event["reward"] for event in log["events"] if event["kind"] == "step"]
        assert rewards == pytest.approx([len(text) / 10 for text, _ in seen])
    assert not calls
    states = fields["turn_states"]
    firsts = {int(row[row > 0][0]) for row in states}
    assert len(firsts) == 1 and firsts != {int(row[row > 0][1]) for row in states}  # one situation, one number
    assert batch.non_tensor_batch["trajectory_reward"].tolist() == [0.0] * 4
    rollout.close()
    assert sorted(map(str, Length.log)).count("stop") == 1
    assert sum(entry[1:] == ("closed",) for entry in Length.log if isinstance(entry, tuple)) == 4


def test_seeds_are_the_same_again_and_others_in_validation(started, model) -> None:
    rollout, _ = started(env_config(model, "length"))
    seeds = []
    for validate in (False, False, True):
        Length.log.clear()
        prompts = prompts_of(rollout, 2)
        prompts.meta_info["validate"] = validate
        rollout.generate(prompts)
        seeds.append([entry[1] for entry in Length.log if len(entry) == 3])
    assert sorted(seeds[0]) == sorted(seeds[1]) and not set(seeds[0]) & set(seeds[2])


@pytest.mark.parametrize("how", ["raises", "hangs", "exits", "nan", "nothing", "gives_up"])
def test_a_faulty_environment_spoils_its_own_session_only(started, model, capsys, how) -> None:
    words = [f"{ROLLOUT}.agent.environment_timeout_s=2", f"{ROLLOUT}.agent.retries=0"]
    rollout, _ = started(env_config(model, "faulty", *words, f"{ROLLOUT}.agent.environment_turn_tokens=5"))
    batch = rollout.generate(prompts_of(rollout, 3, env_kwargs=[{"how": how}, None, {}]))
    assert batch.non_tensor_batch["uid"].tolist() == ["0-1", "0-2"]
    assert batch.batch["turn_level_rewards"].sum(-1).tolist() == [1.0, 1.0]
    told = capsys.readouterr().err
    (missing,) = batch.meta_info["missing_samples"]
    reasons = {"hangs": Reason.TIMEOUT, "gives_up": Reason.GRADING}
    assert (missing.uid, missing.unscored.reason) == ("0-0", reasons.get(how, Reason.INFRA))
    assert {
        "raises": "the game server is gone",
        "hangs": "the environment did not answer within 2 s",
        "exits": "SystemExit: 3",
        "nan": "it must be finite",
        "nothing": "step returned None",
        "gives_up": "the move is ambiguous",
    }[how] in told


def test_an_environment_may_declare_tools(started, model) -> None:
    rollout, recorded = started(env_config(model, "caller", f"{ROLLOUT}.multi_turn.max_assistant_turns=3"))
    batch = rollout.generate(prompts_of(rollout, 2))
    text = rollout.agents.tokenizer.decode(batch.batch["input_ids"][0])
    assert '"name": "echo"' in text and text.count("<tool_response>") >= 2
    assert batch.non_tensor_batch["env_done"].tolist() == [False, False]
    turns = batch.non_tensor_batch["env_turns"].tolist()
    assert len(recorded.calls) == sum(turns) and max(turns) == 3


def test_a_turn_that_the_length_cuts_is_no_action(started, model) -> None:
    Length.log.clear()
    config = env_config(model, "length")
    config.actor_rollout_ref.rollout.response_length = 3
    rollout, _ = started(config)
    batch = rollout.generate(prompts_of(rollout, 3))
    finished = [len(entry[2]) for entry in Length.log if len(entry) == 3]
    cut = (batch.batch["response_mask"].sum(-1) == 3).sum()
    assert cut > 0 and finished.count(0) >= 1 and not any(batch.non_tensor_batch["env_done"])


def test_environments_of_a_file_and_what_is_refused(model, tmp_path) -> None:
    file = tmp_path / "environments.yaml"
    file.write_text(f"environments:\n- {{name: short, class_name: {Length.__module__}.Length, config: {{steps: 1}}}}\n")
    found = load_environments(str(file), None, [])
    assert found.default == "short" and found.entry({}).config == {"steps": 1}
    assert list(load_environments(str(file), "length", ["faulty"]).entries) == ["short", "length", "faulty"]
    with raises_with(RolloutError, "env_kwargs.name", "'no'"):
        found.entry({"name": "no"})
    for text, reason in {
        "environments: []": "must be {environments",
        "environments: [{name: a}]": "class_name",
        "environments: [{class_name: a}]": "'a'; choose from gymnasium",
        "environments: [{class_name: length, color: red}]": "color",
        f"environments: [{{class_name: {Length.__module__}.PIECE}}]": "not a class",
        "environments: [{class_name: builtins.dict}]": "has no reset and no step",
        "environments: [{class_name: gymnasium}]": "config.id is missing",
        "a: [": "not readable YAML",
    }.items():
        file.write_text(text)
        with pytest.raises(RolloutError, match=reason):
            load_environments(str(file), None, [])
    with pytest.raises(RolloutError, match="no such file"):
        load_environments("nowhere.yaml", None, [])
    config = env_config(model, None)
    tokenizer = tokenizer_of(config.actor_rollout_ref.model)
    with raises_with(RolloutError, "env_agent"):
        create_agents(config, tokenizer, [])
    config = config_for(model, QWEN.template, f"{ROLLOUT}.agent.default_environment=length")
    with pytest.raises(RolloutError, match="without a loop that acts on environments"):
        create_agents(config, tokenizer, [])
    config = env_config(model, None)
    config.data.last_assistant_turn = "continue"
    with raises_with(RolloutError, "env_agent"):
        create_agents(config, tokenizer, [])
