"""How a reward function is called, by the names of its parameters.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hybridrl.errors import RewardError

Form = Literal["sample", "batch"]

SAMPLE_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_SHORT_BATCH_NAMES = ("responses", "ground_truths")
_BATCH_KNOWN = (*BATCH_NAMES, "responses")
PROMPT = "prompt"  # what a function of one sample gets besides, where it has the parameter
_TRL_NAMES = ("prompts", "completions", "completion_ids")
EXPECTED = (
    "Write it as compute_score(data_source, solution_str, ground_truth, extra_info) for one sample, as "
    "compute_reward(responses, ground_truths) for a whole batch, or as TRL's f(completions, **columns)"
)


@dataclass(frozen=True)
class Sample:
    """One response to score.

    Attributes:
        data_source, solution_str, ground_truth, extra_info: verl's four arguments.
        prompt: the messages, or the text, that it answers.
        token_ids: the response's tokens.
        columns: the columns of the data, by name.
    """

    data_source: Any
    solution_str: str
    ground_truth: Any
    extra_info: dict[str, Any]
    prompt: Any = None
    token_ids: Sequence[int] | None = None
    columns: Mapping[str, Any] = field(default_factory=dict)

    @property
    def completion(self) -> Any:
        """The response as TRL passes it: a list of one message where the prompt is a list of messages."""
        if self.prompt is None or isinstance(self.prompt, str):
            return self.solution_str
        return [{"role": "assistant", "content": self.solution_str}]


@dataclass(frozen=True)
class Call:
    """How a function is called.

    Attributes:
        form: once per sample or once per batch.
        arguments: the values that it gets, in this order.
        by_name: they are passed by name.
        columns: columns of the data that it has to get, besides `arguments`.
        optional: columns that it gets if the data have them.
        all_columns: it gets every column, as TRL passes them.
        may_abstain: None, for a sample that it does not apply to, is a result.
    """

    form: Form
    arguments: tuple[str, ...]
    by_name: bool = True
    columns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    all_columns: bool = False
    may_abstain: bool = False

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """What a sample has to hold besides verl's four arguments: names of columns, and `prompt`, `prompts` or
        `completion_ids`; None: everything.
        """
        if self.all_columns:
            return None
        return (*self.columns, *self.optional, *(name for name in (PROMPT, *_TRL_NAMES) if name in self.arguments))

    def reduced(self, value: Any) -> Any:
        """Return a sample, or a list of samples, with only what the function gets.

        Raises:
            RewardError: the data lack a column.
        """
        samples = [value] if isinstance(value, Sample) else value
        self._columns_of(samples)
        wanted = self.wanted
        if wanted is None:
            return value
        reduced = [
            replace(
                sample,
                prompt=sample.prompt if {PROMPT, "prompts", "completions"} & set(wanted) else None,
                token_ids=sample.token_ids if "completion_ids" in wanted else None,
                columns={name: sample.columns[name] for name in wanted if name in sample.columns},
            )
            for sample in samples
        ]
        return reduced[0] if isinstance(value, Sample) else reduced

    def values(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the arguments by name; those of a batch are lists.

        Raises:
            RewardError: the data lack a column.
        """
        known = _of_sample(samples[0]) if self.form == "sample" else _of_batch(samples)
        found = {name: known[name] for name in self.arguments}
        for name in self._columns_of(samples):
            column = [_column(sample, name) for sample in samples]
            found[name] = column[0] if self.form == "sample" else column
        return found

    def _columns_of(self, samples: Sequence[Sample]) -> list[str]:
        present = dict.fromkeys(name for sample in samples for name in sample.columns)
        missing = [name for name in self.columns if name not in (*present, "ground_truth")]
        if missing:
            raise RewardError(missing_column(missing[0], list(present)))
        optional = [name for name in self.optional if name in present or _has_truth(name, samples)]
        more = [name for name in present if name not in self.arguments] if self.all_columns else []
        if self.all_columns and _has_truth("ground_truth", samples):
            more.append("ground_truth")
        return list(dict.fromkeys([*self.columns, *optional, *more]))


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """Return a row's ground truth: that of its `reward_model`, or its column `ground_truth`; None if it has neither."""
    reference = row.get("reward_model")
    return reference.get("ground_truth") if isinstance(reference, Mapping) else row.get("ground_truth")


def missing_column(name: str, columns: Sequence[str]) -> str:
    """Return the message for a parameter that nothing provides."""
    return (
        f"it has the parameter {name!r}, and the data have no such column (columns: {', '.join(columns) or 'none'}). "
        "Add the column, rename the parameter, or set it in reward_kwargs"
    )


def _of_sample(sample: Sample) -> dict[str, Any]:
    values = (sample.data_source, sample.solution_str, sample.ground_truth, sample.extra_info)
    return {**dict(zip(SAMPLE_NAMES, values, strict=True)), PROMPT: sample.prompt}


def _of_batch(samples: Sequence[Sample]) -> dict[str, Any]:
    solutions = [sample.solution_str for sample in samples]
    return {
        "data_sources": [sample.data_source for sample in samples],
        "solution_strs": solutions,
        "responses": solutions,
        "ground_truths": [sample.ground_truth for sample in samples],
        "extra_infos": [sample.extra_info for sample in samples],
        "prompts": [sample.prompt for sample in samples],
        "completions": [sample.completion for sample in samples],
        "completion_ids": [list(sample.token_ids or ()) for sample in samples],
    }


def _has_truth(name: str, samples: Sequence[Sample]) -> bool:
    return name == "ground_truth" and any(sample.ground_truth is not None for sample in samples)


def _column(sample: Sample, name: str) -> Any:
    if name in sample.columns:
        return sample.columns[name]
    return sample.ground_truth if name == "ground_truth" else None


def understand(
    call: Callable[..., Any], name: str, kwargs: Mapping[str, Any], form: Form, source: str, kwargs_key: str
) -> Call:
    """Find out how to call a function.

    Args:
        call: the function.
        name: its name.
        kwargs: further arguments that the configuration sets.
        form: how to call a function whose parameter names do not show it.
        source: the setting that names the function, with its value, for messages.
        kwargs_key: the setting of the further arguments.

    Raises:
        RewardError: its parameters do not fit.
    """
    try:
        parameters = inspect.signature(call).parameters
    except (TypeError, ValueError) as error:
        raise RewardError(f"{source}: the parameters of {name} cannot be read ({error}). {EXPECTED}.") from error
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {p.name: p for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    positional = [
        p
        for p in parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    unknown = [key for key in kwargs if key not in named and not takes_any]
    if unknown:
        raise RewardError(f"{kwargs_key}: {name} has no parameter {unknown[0]!r}. Its parameters: {', '.join(named)}.")
    required = [key for key, p in named.items() if p.default is p.empty and key not in kwargs]
    others = [key for key, p in named.items() if p.default is not p.empty and key not in kwargs]
    short = name == "compute_reward" and len([p for p in positional if p.name not in kwargs]) == 2
    if "completions" in named and not (short and not takes_any):
        found = _as_in_trl(named, required, kwargs, takes_any)
    elif "responses" in named or "solution_strs" in named:
        fill = takes_any and "solution_strs" in named
        chosen = tuple(n for n in _BATCH_KNOWN if n in named or (fill and n in BATCH_NAMES))
        needed, optional = _without(required, _BATCH_KNOWN), _without(others, _BATCH_KNOWN)
        found = Call("batch", chosen, columns=needed, optional=optional)
    elif "solution_str" in named or (takes_any and not positional):
        known = (*SAMPLE_NAMES, *((PROMPT,) if PROMPT in named else ()))
        chosen = tuple(n for n in known if n in named or takes_any)
        needed, optional = _without(required, known), _without(others, known)
        found = Call("sample", chosen, columns=needed, optional=optional)
    else:
        found = _by_position(parameters, name, [p for p in positional if p.name not in kwargs], form, source)
    _check_call(call, name, found, kwargs, source, kwargs_key)
    return found


def _without(names: Sequence[str], known: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if name not in known)


def _as_in_trl(
    named: Mapping[str, inspect.Parameter], required: Sequence[str], kwargs: Mapping[str, Any], takes_any: bool
) -> Call:
    rest = [key for key in named if key not in _TRL_NAMES and key not in kwargs]
    return Call(
        "batch",
        tuple(name for name in _TRL_NAMES if name in named or takes_any),
        columns=tuple(key for key in rest if key in required),
        optional=tuple(key for key in rest if key not in required),
        all_columns=takes_any,
        may_abstain=True,
    )


def _by_position(
    parameters: Mapping[str, inspect.Parameter],
    name: str,
    positional: Sequence[inspect.Parameter],
    form: Form,
    source: str,
) -> Call:
    """A function with other parameter names: their number and the manager decide how to call it."""
    count = len(positional)
    if name == "compute_reward" and count == 2:
        return Call("batch", _SHORT_BATCH_NAMES, by_name=False)
    if count in (3, 4):
        return Call(form, (BATCH_NAMES if form == "batch" else SAMPLE_NAMES)[:count], by_name=False)
    given = ", ".join(parameters) or "nothing"
    raise RewardError(f"{source}: {name} takes ({given}), which is not a known form. {EXPECTED}.")


def _check_call(
    call: Callable[..., Any], name: str, found: Call, kwargs: Mapping[str, Any], source: str, kwargs_key: str
) -> None:
    try:
        if found.by_name:
            inspect.signature(call).bind(**dict.fromkeys((*found.arguments, *found.columns)), **kwargs)
        else:
            inspect.signature(call).bind(*found.arguments, **kwargs)
    except TypeError as error:
        raise RewardError(
            f"{source}: {name} cannot be called with ({', '.join((*found.arguments, *found.columns, *kwargs))}): "
            f"{error}. {EXPECTED}; pass further arguments with {kwargs_key}."
        ) from error
