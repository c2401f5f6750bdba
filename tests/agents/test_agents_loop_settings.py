"""Settings of sessions are refused by name when the data show that no row is answered by a loop that reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from raising import raises_with
from rollout_stage import ROLLOUT

from hybridrl.agents.loop_settings import check_loop_settings
from hybridrl.config import load_config
from hybridrl.errors import ConfigError

TOOLS = ["tool_timeout_s=9", "max_parallel_calls=2", "turn_rewards=True", "max_tool_response_length=99"]
TOOLS = [f"{ROLLOUT}.multi_turn.{word}" for word in [*TOOLS, "tool_response_truncate_side=left"]]
TURNS = [f"{ROLLOUT}.multi_turn.{word}" for word in ("format=llama3_json", "max_user_turns=3", "max_assistant_turns=3")]
TURNS += [f"{ROLLOUT}.agent.{word}" for word in ("retries=3", "on_error=drop", "max_running=9")]
ENVIRONMENT = [f"{ROLLOUT}.agent.{word}" for word in ("environment_timeout_s=9", "environment_turn_tokens=9")]
ENVIRONMENT += [f"{ROLLOUT}.agent.{word}" for word in ("default_environment=gymnasium",)]
GATEWAY = ["function=a.py:f", "command=run", "timeout_s=9", "sampling=agent", "match=loose", "trace_dir=t"]
GATEWAY = [f"{ROLLOUT}.agent.{word}" for word in GATEWAY]


class Rows:
    """A dataset whose rows choose these loops."""

    def __init__(self, *names: str | None) -> None:
        self.columns = ["agent_name", "answer"] if names else ["answer"]
        self._names = names

    def column(self, name: str) -> list[str | None]:
        assert name == "agent_name"
        return list(self._names)


def faults(words: list[str], *datasets: object, default: str = "single_turn_agent", **classes: type) -> str:
    config = load_config("ppo_trainer", words)
    try:
        check_loop_settings(config, datasets, default, classes)
    except ConfigError as error:
        return "\n".join(error.faults)
    return ""


def test_what_no_row_reads_is_refused_by_name() -> None:
    words = [*TOOLS, *TURNS, *ENVIRONMENT, *GATEWAY]
    for datasets in ([Rows()], [Rows("single_turn_agent", None), Rows()]):
        fault = faults(words, *datasets)
        assert all(word in fault for word in words) and "single_turn_agent" in fault and "agent_name" in fault


@pytest.mark.parametrize(
    ("loop", "words", "others"),
    [
        ("tool_agent", [*TOOLS, *TURNS], [*ENVIRONMENT, *GATEWAY]),
        ("env_agent", [*ENVIRONMENT, *TURNS], [*TOOLS, *GATEWAY]),
        ("gateway_agent", [*GATEWAY, *TURNS], [*TOOLS, *ENVIRONMENT]),
    ],
)
def test_one_row_that_chooses_the_loop_is_enough(loop: str, words: list[str], others: list[str]) -> None:
    assert not faults(words, Rows(), Rows(None, loop))
    assert not faults(words, Rows(), default=loop)
    fault = faults([*words, *others], Rows(None, loop))
    assert all(word in fault for word in others) and not any(word in fault for word in words)


def test_loops_of_ones_own_may_read_everything() -> None:
    words = [*TOOLS, *TURNS, *ENVIRONMENT, *GATEWAY]
    assert not faults(words, Rows("mine", None), mine=object)
    assert not faults(words, Rows("my_module:Loop"))
    assert not faults(words, object())  # which columns its rows have, only they can tell
    from hybridrl.registry import AGENT_LOOPS

    fault = faults(words, Rows("mine"), mine=AGENT_LOOPS.get("tool_agent"))  # another name of the library's
    assert all(word in fault for word in [*ENVIRONMENT, *GATEWAY]) and not any(word in fault for word in TOOLS)


def test_a_default_that_no_row_uses_is_refused() -> None:
    word = f"{ROLLOUT}.agent.default_agent_loop=env_agent"
    assert word in faults([word], Rows("tool_agent", "tool_agent"), default="env_agent")
    assert not faults([word], Rows("tool_agent", None), default="env_agent")
    assert not faults([word], Rows("tool_agent"), Rows(), default="env_agent")


def test_what_verls_scripts_set_stays_a_notice() -> None:
    assert not faults([f"{ROLLOUT}.agent.num_workers=8"], Rows())


def test_a_run_says_so_before_it_starts(micro_model: Path, sort_data: Path) -> None:
    from hybridrl.trainer.ppo.prepare_ppo import prepare

    words = [f"actor_rollout_ref.model.path={micro_model}", f"data.train_files={sort_data}/train.parquet"]
    words += [
        f"data.val_files={sort_data}/test.parquet",
        "trainer.logger=[console]",
        TOOLS[0],
        "data.train_batch_size=8",
    ]
    with raises_with(ConfigError, "tool_timeout_s=9"):
        prepare(load_config("ppo_trainer", words))
