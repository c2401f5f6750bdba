"""A session's calls as OpenEnv's `TrainingTrace`, version 1, and back as trajectories.

A turn of the trace is one call: `prompt_token_ids` are all tokens before the completion, `loss_mask` covers the prompt
(0) and the completion (1), `per_token_logps` the completion alone. `metadata` has what OpenEnv has no field for: the
call that this one continues, the reason why it ended, which weights generated which of its tokens, and the images of
its prompt: where their tokens are, and the digest of their patches.
"""

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hybridrl.errors import RolloutError
from hybridrl.rollout.request import Completion
from hybridrl.rollout.token_tree import TokenTree
from hybridrl.rollout.trajectory import NO_VERSION, Trajectory
from hybridrl.utils.files import write_text

SCHEMA_VERSION = 1
_LOWEST = -9999.0  # JSON has no infinity


def training_trace(tree: TokenTree, exchanges: Mapping[int, Mapping[str, Any]] | None = None) -> dict[str, Any]:
    """Build the trace of a session.

    Args:
        tree: its calls.
        exchanges: `request` and `response` of calls as the client saw them, by the call's number.
    """
    return {
        "schema_version": SCHEMA_VERSION,
        "turns": [_entry(tree, index, exchanges or {}) for index in range(len(tree.turns))],
    }


def _entry(tree: TokenTree, index: int, exchanges: Mapping[int, Mapping[str, Any]]) -> dict[str, Any]:
    turn = tree.turns[index]
    prompt_ids, completion = turn.prompt_ids, turn.completion
    return {
        "node_id": _name(index),
        "prompt_token_ids": prompt_ids,
        "completion_token_ids": list(completion.token_ids),
        # a sum of rounded exponentials may be above 1 by a rounding error, and then its logarithm is above 0
        "per_token_logps": [min(value, 0.0) if math.isfinite(value) else _LOWEST for value in completion.log_probs],
        "loss_mask": [0] * len(prompt_ids) + [1] * len(completion.token_ids),
        "request": dict(exchanges.get(index, {}).get("request", {})),
        "response": dict(exchanges.get(index, {}).get("response", {})),
        "metadata": {
            "parent": None if turn.parent is None else _name(turn.parent.index),
            "finish_reason": completion.finish_reason,
            "weight_versions": spans(completion.versions),
            **({"images": [asdict(image) for image in turn.images]} if turn.images else {}),
        },
    }


def write_trace(folder: Path, name: str, trace: Mapping[str, Any]) -> Path:
    """Write a trace into a folder, under a name that no other file there has."""
    plain = re.sub(r"[^\w.-]", "_", name)
    path = folder / f"{plain}-{secrets.token_hex(4)}.json"
    write_text(path, json.dumps(trace))
    return path


def read_trace(path: Path) -> dict[str, Any]:
    """The trace of a file, for `trajectories_of`.

    Raises:
        RolloutError: it cannot be read as one.
    """
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RolloutError(f"{path} cannot be read as a training trace: {error}") from error
    if not isinstance(trace, dict):
        raise RolloutError(f"{path} cannot be read as a training trace: it is no JSON object")
    return trace


def _name(index: int) -> str:
    return f"turn-{index}"


def trajectories_of(trace: Mapping[str, Any], uid: str = "", sample: int = 0) -> list[Trajectory]:
    """The trajectories of a trace: one per conversation, each trained token in exactly one of them.

    Args:
        trace: as `training_trace` makes it, or OpenEnv's `TrainingTrace.model_dump()`.
        uid, sample: whose session it was.

    Raises:
        RolloutError: it is no trace of version 1, or has images, of which it keeps no pixels.
    """
    if trace.get("schema_version") != SCHEMA_VERSION:
        raise RolloutError(
            f"a training trace has schema_version={trace.get('schema_version')!r}; only {SCHEMA_VERSION} can be read"
        )
    tree, masks = TokenTree(), list[list[int]]()
    for number, turn in enumerate(trace["turns"]):
        try:
            prompt_ids, token_ids = list(turn["prompt_token_ids"]), list(turn["completion_token_ids"])
            metadata = turn.get("metadata") or {}
            if metadata.get("images"):
                raise RolloutError(
                    f"turn {number} of a training trace has images, of which a trace keeps the digests alone; a "
                    "trajectory needs their patches"
                )
            versions = [
                (int(span["version"]), span["end"] - span["start"]) for span in metadata.get("weight_versions") or ()
            ]
            mask, log_probs = list(turn["loss_mask"]), list(turn["per_token_logps"])
        except (KeyError, TypeError, ValueError) as error:
            raise RolloutError(f"turn {number} of a training trace cannot be read: {error!r}") from error
        if (
            len(mask) != len(prompt_ids) + len(token_ids)
            or any(mask[: len(prompt_ids)])
            or len(log_probs) != len(token_ids)
        ):
            raise RolloutError(
                f"turn {number} of a training trace: loss_mask must cover prompt (with 0) and completion, and "
                "per_token_logps the completion"
            )
        masks.append(mask[len(prompt_ids) :])
        reason = metadata.get("finish_reason", "stop")
        tree.add(prompt_ids, Completion(_name(number), token_ids, log_probs, reason, versions))
    return trajectories_in(tree, uid, sample, masks)


def trajectories_in(
    tree: TokenTree, uid: str, sample: int, masks: Sequence[Sequence[int]] | None = None
) -> list[Trajectory]:
    """The trajectories of a session's calls; see `TokenTree.branches`.

    Args:
        masks: of each call's completion; None trains on all of its tokens.
    """
    branches = tree.branches()
    trajectories: list[Trajectory] = []
    for branch in branches:
        log_probs: list[float] = []
        versions: list[tuple[int, int]] = []
        mask: list[int] = []
        for number, turn in enumerate(branch.turns):
            completion, between = turn.completion, len(turn.between) if number else 0
            count = len(completion.token_ids)
            log_probs += [0.0] * between + list(completion.log_probs)
            turn_mask = [1] * count if masks is None else list(masks[turn.index])
            mask += [0] * between + turn_mask
            versioned = sum(tokens for _, tokens in completion.versions)
            versions += [(NO_VERSION, between), *completion.versions, (NO_VERSION, count - versioned)]
        trained = [in_branch & trainable for in_branch, trainable in zip(branch.mask, mask, strict=True)]
        session = f"sample {sample}" if len(branches) > 1 else ""
        trajectories.append(
            Trajectory(
                uid,
                sample,
                branch.prompt_ids,
                branch.token_ids,
                trained,
                log_probs,
                [pair for pair in versions if pair[1]],
                session=session,
                turn=len(trajectories),
            )
        )
    return trajectories


def spans(versions: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return {version, start, end} of each run of tokens from the same weights; versions are text, as in vLLM."""
    version_spans: list[dict[str, Any]] = []
    end = 0
    for version, count in versions:
        start, end = end, end + count
        if version_spans and version_spans[-1]["version"] == str(version):
            version_spans[-1]["end"] = end
        else:
            version_spans.append({"version": str(version), "start": start, "end": end})
    return version_spans
