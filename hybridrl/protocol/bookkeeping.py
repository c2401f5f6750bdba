"""The names that batches use themselves: one declaration of who writes which column.

A batch has columns of three owners under one roof: those of the data, those that a reward function returned, and the
bookkeeping of the run. This module declares the bookkeeping; `fields.py` does it for tensors with columns. No data
column, key of a reward function or extra field of a session may have such a name:

* data columns of these names do not travel in batches (`left_out`), so a run is the same as without them;
* keys of reward functions and extra fields of sessions are refused (`reserved`).

Code that writes a further column of its own declares it here, or calls `register_column`.
"""

from collections.abc import Iterable
from enum import StrEnum

from hybridrl.protocol import fields
from hybridrl.protocol.names import (
    IMAGE_DIGEST,
    IMAGE_FILES,
    MULTI_MODAL_INPUTS,
    PROMPT_IMAGES,
    SESSION_LOG,
    TRAJECTORY_REWARD,
)


class Writer(StrEnum):
    """Writer of a column."""

    DATA = "data"  # rows of the data, with a meaning for the run
    LOADER = "loader"  # the data set and its loader
    ROLLOUT = "rollout"  # the rollout, for each trajectory
    ENGINE = "engine"  # an engine, for each response
    SESSION = "session"  # the loop of an agent
    CALL = "call"  # no column: an argument of an agent's loop
    ROLE = "role"  # a model that scores
    CONTROLLER = "controller"  # the trainer, and what spreads batches over workers


_COLUMNS: dict[str, Writer] = {
    **dict.fromkeys(("data_source", "reward_model", "extra_info", "agent_name"), Writer.DATA),
    **dict.fromkeys(("tools_kwargs", "env_kwargs", "interaction_kwargs"), Writer.DATA),
    **dict.fromkeys(("uid", "index", "raw_prompt", MULTI_MODAL_INPUTS, IMAGE_FILES), Writer.LOADER),
    **dict.fromkeys(("sample", "session_id", "trajectory_index", TRAJECTORY_REWARD, "turn_rewards"), Writer.ROLLOUT),
    **dict.fromkeys(("finish_reason", IMAGE_DIGEST), Writer.ENGINE),
    PROMPT_IMAGES: Writer.ROLLOUT,
    **dict.fromkeys((SESSION_LOG, "__num_turns__", "reward_scores", "tool_call_counts"), Writer.SESSION),
    **dict.fromkeys(("tool_rewards", "tool_faults", "turn_scores", "interaction_extra"), Writer.SESSION),
    **dict.fromkeys(("env_done", "env_turns", "env_extra", "agent_requests_too_long"), Writer.SESSION),
    **dict.fromkeys(("self", "sampling_params", "prompt_ids", "validate"), Writer.CALL),
    **dict.fromkeys(("rm_scores", "rm_step_scores"), Writer.ROLE),
    **dict.fromkeys(("slot", "is_padding"), Writer.CONTROLLER),
}
#: tensors with a value per row, which `fields` needs no entry for
_ROW_TENSORS = (
    *("reward_baselines", "row_ids", "group_ids", "sequence_ids", "sequence_tokens", "teacher_index", "margins"),
    *("ref_answer_log_probs", "answer_log_probs", "kl_baseline", "prompt_values"),
)
#: columns of sessions that no reward function gets: it has them in `extra_info`, or they say nothing about an answer
_NOT_FOR_REWARDS = (SESSION_LOG, "__num_turns__", "reward_scores")
#: what an item of a data set may hold of these
_OF_ITEMS = {"input_ids", "position_ids", "index", "raw_prompt", MULTI_MODAL_INPUTS, IMAGE_FILES}


def register_column(name: str, writer: Writer | str) -> None:
    """Declare a non-tensor column that code of the run writes, so that no data column can be mistaken for it.

    Args:
        name: its key in `DataProto.non_tensor_batch`.
        writer: who writes it.

    Raises:
        ValueError: somebody else writes a column of that name.
    """
    registered = _COLUMNS.setdefault(name, Writer(writer))
    if registered is not Writer(writer):
        raise ValueError(f"register_column({name!r}, {str(writer)!r}): the {registered} writes a column of that name")


def columns(*writers: Writer) -> frozenset[str]:
    """Names of the declared columns, of these writers or of all."""
    return frozenset(name for name, writer in _COLUMNS.items() if not writers or writer in writers)


def bookkeeping() -> frozenset[str]:
    """Every name that belongs to the run: columns that it writes, arguments of loops, and tensors."""
    return (columns() - columns(Writer.DATA)) | fields.declared() | set(_ROW_TENSORS)


def left_out(names: Iterable[str]) -> list[str]:
    """Select the data columns that do not travel in batches."""
    own = bookkeeping()
    return [name for name in names if name in own]


def foreign_items(names: Iterable[str]) -> list[str]:
    """Select the names of a data item that do not belong to the data set."""
    return [name for name in left_out(names) if name not in _OF_ITEMS]


def reserved(names: Iterable[str], *writers: Writer) -> list[str]:
    """Select the names that a reward function or a session must not use, because they have another owner.

    Args:
        names: keys of a reward function's dict, or extra fields of a session.
        writers: those whose names are allowed.
    """
    allowed = columns(*writers) if writers else frozenset()
    own = (columns(Writer.DATA) | bookkeeping()) - allowed
    return [name for name in names if name in own]


def for_rewards(names: Iterable[str]) -> list[str]:
    """Select the columns of a generated batch that a reward function gets by name: data and results of sessions."""
    own = (bookkeeping() - columns(Writer.SESSION)) | set(_NOT_FOR_REWARDS)
    return [name for name in names if name not in own]
