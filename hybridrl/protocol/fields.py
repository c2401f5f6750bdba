"""The fields of a batch: which axis each tensor has, and what fills the columns that a wider batch adds.

Shapes: B rows, P prompt width, T response width, S = P + T. Prompts are padded at the left, responses at the right, so
a sequence has padding at both ends.

| axis       | shape         | examples                                     |
|------------|---------------|----------------------------------------------|
| `row`      | `[B, ...]`    | `row_ids`, `reward_baselines`                |
| `prompt`   | `[B, P, ...]` | `prompts`                                    |
| `response` | `[B, T, ...]` | `response_mask`, `advantages`                |
| `sequence` | `[B, S, ...]` | `input_ids`, `attention_mask`, `position_ids` |

A tensor's width never decides its axis. Otherwise a feature of 8 numbers per row would be cut like a response as soon
as the longest response of a batch has 8 tokens. Therefore:

* a tensor `[B]` has the axis `row` and needs no entry here;
* a tensor with more dimensions needs an entry. `register_field` adds it, in every process that cuts or joins batches;
* the width of a registered field must be that of its axis.

A jagged tensor holds no padding, so `narrow` and `widen` leave it as it is. `padded` converts it to a padded tensor.

The length of a response comes from `attention_mask`. `response_mask` may have holes, because the policy reads
the tokens of a tool's answer but is not trained on them. Its sum is the number of trained tokens and not a length.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from hybridrl.errors import MissingFieldError

Axis = Literal["row", "prompt", "response", "sequence"]
PAD_TOKEN: Literal["pad_token"] = "pad_token"  # the tokenizer's padding token, as a fill value


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a batch.

    Attributes:
        axis: what its columns represent.
        fill: value of the columns that are added when batches of different widths are joined.
        dim: which dimension of the tensor the axis is.
    """

    axis: Axis
    fill: float | Literal["pad_token"] = 0
    dim: int = 1


@dataclass(frozen=True, slots=True)
class Widths:
    """The widths of a batch's columns."""

    prompt: int
    response: int

    def of(self, axis: Axis) -> int:
        """Return the number of columns of a `prompt`, `response` or `sequence` field."""
        return {"prompt": self.prompt, "response": self.response, "sequence": self.prompt + self.response}[axis]


_RESPONSE_FIELDS = (
    "advantages",
    "datum_inputs",  # [B, T, K, I], what a loss of datums reads of its targets
    "datum_log_probs",  # [B, T, K]
    "datum_targets",  # [B, T, K]
    "entropys",
    "loss_weights",
    "old_log_probs",
    "prepared",
    "prime_ref_log_prob",
    "process_rewards",
    "ref_kl",
    "ref_log_prob",
    "response_mask",
    "returns",
    "rm_scores",
    "rollout_is_weights",
    "rollout_log_probs",
    "sum_pi_squared",
    "teacher_log_probs",
    "teacher_topk_ids",  # [B, T, K], as the log-probabilities of these tokens
    "teacher_topk_log_probs",
    "token_level_rewards",
    "token_level_scores",
    "trained_mask",
    "turn_level_rewards",
    "turn_states",
    "values",
    "weight_versions",
)
FIELDS: dict[str, Field] = {
    "prompts": Field("prompt", PAD_TOKEN),
    "responses": Field("response", PAD_TOKEN),
    "input_ids": Field("sequence", PAD_TOKEN),
    "attention_mask": Field("sequence"),
    "image_mask": Field("sequence"),
    "loss_mask": Field("sequence"),
    "loss_weight": Field("sequence"),
    "routed_experts": Field("sequence"),  # [B, S, L, K]: the K experts of each token in L layers
    "sequence_sums": Field("row"),
    "position_ids": Field("sequence", dim=-1),  # [B, S], or [B, k, S] with k positions per token
    **{name: Field("response") for name in _RESPONSE_FIELDS},
}


def register_field(name: str, axis: Axis, fill: float | Literal["pad_token"] = 0, dim: int = 1) -> None:
    """Declare a tensor that batches carry.

    Args:
        name: its key in `DataProto.batch`.
        axis: `row`, `prompt`, `response` or `sequence`; see the table of this module.
        fill: value of added columns; `"pad_token"` is the tokenizer's padding token.
        dim: which dimension of the tensor the axis is.

    Raises:
        ValueError: the axis is unknown, or the field is registered with other properties.
    """
    if axis not in get_args(Axis):
        raise ValueError(f"register_field({name!r}, axis={axis!r}): axis is one of {', '.join(get_args(Axis))}")
    field = Field(axis, fill, dim)
    registered = FIELDS.setdefault(name, field)
    if registered != field:
        raise ValueError(f"register_field({name!r}): {field} contradicts {registered}, which is registered already")


#: the stages of a dataflow that write a field, by the field
_STAGES: dict[str, list[str]] = {}


def declare_stage(stage: str, writes: Iterable[str]) -> None:
    """Declare the fields that a stage of a dataflow writes, so that an error can name the stage where one is missing.

    Args:
        stage: its name, such as that of a worker method.
        writes: all fields that it may write.
    """
    for name in writes:
        stages = _STAGES.setdefault(name, [])
        if stage not in stages:
            stages.append(stage)


declare_stage(
    "generation (Rollout.generate)",
    ("prompts", "responses", "input_ids", "attention_mask", "position_ids", "response_mask", "rollout_log_probs"),
)
declare_stage("the policy's compute_log_prob", ("old_log_probs", "entropys", "ref_kl", "sum_pi_squared"))
declare_stage("the policy's or the reference's compute_ref_log_prob", ("ref_log_prob",))
declare_stage("the critic's compute_values", ("values",))
declare_stage("the reward manager (Sampler.score)", ("token_level_scores",))
declare_stage("the reward model's compute_rm_score", ("rm_scores",))
declare_stage("advantage estimation (compute_advantage)", ("token_level_rewards", "advantages", "returns"))
declare_stage("compute_teacher", ("teacher_log_probs", "teacher_topk_ids", "teacher_topk_log_probs"))
declare_stage("compute_process_rewards", ("process_rewards", "prime_ref_log_prob"))


def stages_by_field() -> Mapping[str, Sequence[str]]:
    """Return the stages that write each field."""
    return _STAGES


def check_fields(stage: str, reads: Iterable[str], fields: Collection[str]) -> None:
    """Refuse a batch without a field that a stage reads.

    Args:
        stage: what is about to read it.
        reads: the fields that it needs.
        fields: those of the batch.

    Raises:
        MissingFieldError: names the fields, and the stages that should have written them.
    """
    missing = [name for name in reads if name not in fields]
    if not missing:
        return
    sources = [f"{name}, which {' or '.join(_STAGES[name])} gives" for name in missing if name in _STAGES]
    sources += [f"{name}, which no known stage gives" for name in missing if name not in _STAGES]
    raise MissingFieldError(
        f"{stage} reads {'; '.join(sources)}; the batch has {', '.join(sorted(map(str, fields))) or 'no fields'}. Call "
        "that stage before, and join its result to the batch with batch.union(result)"
    )


def declared() -> frozenset[str]:
    """Names of the declared tensors."""
    return frozenset(FIELDS)


def field_of(name: str, tensor: torch.Tensor) -> Field:
    """Return the properties of a field; a tensor `[B]` without an entry has the axis `row`.

    Raises:
        ValueError: an unregistered tensor has more dimensions, so its axis is unknown.
    """
    field = FIELDS.get(name)
    if field is not None:
        return field
    if tensor.dim() == 1:
        return Field("row")
    raise ValueError(
        f"the batch holds {name!r} with {tensor.dim()} dimensions, and it is not known whether its columns belong to "
        f"the prompt, the response or the sequence, or whether it is a property of the row. Call "
        f'hybridrl.protocol.fields.register_field({name!r}, axis="row") with the axis that it has '
        f"({', '.join(get_args(Axis))})"
    )


def narrow(name: str, tensor: torch.Tensor, widths: Widths, skip: int, columns: int) -> torch.Tensor:
    """Return a field without its first `skip` prompt columns and with only its first `columns` response columns.

    Args:
        widths: of the batch that the tensor is from.

    Raises:
        ValueError: the field's axis is not known, or the tensor does not have the width of its axis.
    """
    field = field_of(name, tensor)
    if field.axis == "row" or tensor.is_nested:
        return tensor
    _check_width(name, tensor, field, widths)
    start = 0 if field.axis == "response" else skip
    stop = widths.prompt if field.axis == "prompt" else columns + (widths.prompt if field.axis == "sequence" else 0)
    return tensor.narrow(field.dim, start, stop - start)


def widen(
    name: str, tensor: torch.Tensor, widths: Widths, prompt: int, response: int, pad_token_id: int
) -> torch.Tensor:
    """Return a field padded to the given prompt and response widths.

    Args:
        widths: of the batch that the tensor is from.

    Raises:
        ValueError: the field's axis is not known, or the tensor does not have the width of its axis.
    """
    field = field_of(name, tensor)
    if field.axis == "row" or tensor.is_nested:
        return tensor
    _check_width(name, tensor, field, widths)
    pad_left = 0 if field.axis == "response" else prompt - widths.prompt
    pad_right = 0 if field.axis == "prompt" else response - widths.response
    fill = pad_token_id if field.fill == PAD_TOKEN else field.fill
    after = tensor.dim() - 1 - field.dim % tensor.dim()  # dimensions after the axis, which `pad` lists first
    return torch.nn.functional.pad(tensor, (0, 0) * after + (pad_left, pad_right), value=float(fill))


def padded(tensors: Mapping[str, torch.Tensor], pad_token_id: int = 0) -> dict[str, torch.Tensor]:
    """Return the fields of a batch with its jagged tensors padded: prompts at the left, responses at the right.

    A batch without jagged tensors is returned as it is. Rows of a jagged batch have no padding between prompt and
    response, so `response_mask` (or `responses`) gives the length of the response.

    Raises:
        ValueError: some fields of the batch are jagged and others with columns are padded, or the axis of a field is
            not known.
    """
    if not any(tensor.is_nested for tensor in tensors.values()):
        return dict(tensors)
    ragged = {name: field_of(name, t).axis for name, t in tensors.items() if field_of(name, t).axis != "row"}
    plain = sorted(name for name in ragged if not tensors[name].is_nested)
    if plain:
        raise ValueError(f"{', '.join(plain)} are padded and other fields of the batch are jagged; hold all alike")
    responses = tensors.get("response_mask", tensors.get("responses"))
    if responses is None or "input_ids" not in tensors:
        raise ValueError("a jagged batch needs input_ids, and response_mask or responses for the response lengths")
    of_response = [len(row) for row in responses.unbind()]
    of_prompt = [len(row) - count for row, count in zip(tensors["input_ids"].unbind(), of_response, strict=True)]
    whole = Widths(max(of_prompt), max(of_response))
    result = dict(tensors)
    for name in ragged:
        rows = [
            widen(name, row[None], Widths(prompt, response), whole.prompt, whole.response, pad_token_id)
            for row, prompt, response in zip(tensors[name].unbind(), of_prompt, of_response, strict=True)
        ]
        result[name] = torch.cat(rows)
    return result


def _check_width(name: str, tensor: torch.Tensor, field: Field, widths: Widths) -> None:
    width = tensor.shape[field.dim] if -tensor.dim() <= field.dim < tensor.dim() else None
    if width != widths.of(field.axis):
        raise ValueError(
            f"{name!r} has shape {list(tensor.shape)}, but it is registered with axis {field.axis!r} in dimension "
            f"{field.dim}, which has {widths.of(field.axis)} columns in this batch"
        )
