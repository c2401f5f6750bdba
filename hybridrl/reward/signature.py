"""The call of a reward function, by the names of its parameters.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

from hybridrl.errors import RewardError

Form = Literal["sample", "batch"]

SAMPLE_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_NAMES = ("data_sources", "solution_strs", "ground_truths", "extra_infos")
_BATCH_KNOWN = (*BATCH_NAMES, "responses")
#: how verl's own scorers (geo3k, math_verify) call the response
_VERL_TEXTS = ("predict_str", "model_output")
#: other names that users write for an argument, by form; a column of the data of such a name comes first, if there is
#: one, and makes the name of a response ambiguous
_TEXTS: dict[Form, tuple[str, ...]] = {
    "sample": (
        "response",
        "solution",
        "prediction",
        "output",
        "response_str",
        "solution_text",
        "response_text",
        *_VERL_TEXTS,
    ),
    "batch": ("solutions", "predictions", "outputs", "response_strs"),
}
_TRUTHS: dict[Form, tuple[str, ...]] = {
    "sample": (
        *("gt", "label", "target", "answer", "reference", "truth", "gold", "groundtruth", "ground_truth_str"),
        *("gold_answer", "golden_answer", "reference_answer", "expected_answer", "correct_answer", "true_answer"),
    ),
    "batch": (
        *("gts", "labels", "targets", "answers", "references", "truths", "groundtruths", "gold_answers"),
        *("golden_answers", "reference_answers", "expected_answers", "correct_answers", "true_answers"),
    ),
}
#: arguments of other libraries that nothing here provides -> what the form is, and what to write instead
_FOREIGN = {
    "queries": "OpenRLHF's reward_func(queries, prompts, labels), whose queries are prompts with their responses: take "
    "the responses alone, as compute_reward(responses, ground_truths)",
    "sample": "slime's custom_rm(args, sample): take solution_str for sample.response, ground_truth for sample.label",
    "args": "slime's custom_rm(args, sample): take solution_str and ground_truth, and settings from reward_kwargs",
    "state": "verifiers' f(completion, answer, state): score sessions in an environment, or take solution_str and "
    "ground_truth",
    "info": "verifiers' f(completion, answer, info): take extra_info, or a column of the data",
    "parser": "verifiers' f(parser, completion, answer): take solution_str, and create the parser in the file",
    "completion": "verifiers' f(completion, answer), in which it is messages or text: take solution_str for the text, "
    "or completions for TRL's lists of messages",
    "trainer_state": "TRL's, which its own trainer provides; leave it out",
    "log_extra": "TRL's, which its own trainer provides; return a dict with 'score' and what is to be logged",
    "log_metric": "TRL's, which its own trainer provides; return a dict with 'score' and what is to be logged",
    "environments": "TRL's, which its own trainer provides; see docs/environments.md",
}
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
class RewardCall:
    """The way in which a function is called.

    Attributes:
        form: once per sample or once per batch.
        arguments: the values that it gets, in this order.
        renamed: (argument, the function's name of it), where that is another.
        positional: parameters of the function that are passed by position, the first ones.
        guessed: parameters that are arguments by a usual name only: a column of that name makes them ambiguous.
        truths: names of columns that mean the ground truth where the data have no such column.
        columns: columns of the data that it has to get, besides `arguments`.
        optional: columns that it gets if the data have them.
        with_default: those of `optional` whose default is a value, and neither None nor an empty text.
        all_columns: it gets every column, as TRL passes them.
        may_abstain: None, for a sample that it does not apply to, is a result.
    """

    form: Form
    arguments: tuple[str, ...]
    renamed: tuple[tuple[str, str], ...] = ()
    positional: tuple[str, ...] = ()
    guessed: tuple[str, ...] = ()
    truths: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    with_default: tuple[str, ...] = ()
    all_columns: bool = False
    may_abstain: bool = False

    @property
    def wanted(self) -> tuple[str, ...] | None:
        """The parts that a sample has to hold besides verl's four arguments: names of columns, and `prompt`, `prompts`
        or `completion_ids`; None: everything.
        """
        if self.all_columns:
            return None
        return (*self.columns, *self.optional, *(name for name in (PROMPT, *_TRL_NAMES) if name in self.arguments))

    @property
    def takes_ground_truth(self) -> bool:
        """Whether the function gets the ground truth, under any name."""
        own = {"ground_truth", "ground_truths"} & {*self.arguments, *self.columns, *self.optional}
        return bool(own or self.truths)

    def reduced(self, value: Any) -> Any:
        """Return a sample, or a list of samples, with only what the function gets.

        Raises:
            RewardError: the data lack a column.
        """
        samples = [value] if isinstance(value, Sample) else value
        self._columns_of(samples)
        names = self.wanted
        if names is None:
            return value
        reduced = [
            replace(
                sample,
                prompt=sample.prompt if {PROMPT, "prompts", "completions"} & set(names) else None,
                token_ids=sample.token_ids if "completion_ids" in names else None,
                columns={name: sample.columns[name] for name in names if name in sample.columns},
            )
            for sample in samples
        ]
        return reduced[0] if isinstance(value, Sample) else reduced

    def values(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Return the function's arguments by its names of them; those of a batch are lists.

        Raises:
            RewardError: the data lack a column.
        """
        provided = _of_sample(samples[0]) if self.form == "sample" else _of_batch(samples)
        names = dict(self.renamed)
        arguments = {names.get(name, name): provided[name] for name in self.arguments}
        for name in self._columns_of(samples):
            column = [self._column(sample, name) for sample in samples]
            arguments[name] = column[0] if self.form == "sample" else column
        return arguments

    def _columns_of(self, samples: Sequence[Sample]) -> list[str]:
        present = dict.fromkeys(name for sample in samples for name in sample.columns)
        has_truth = any(sample.ground_truth is not None for sample in samples)
        fault = self.fault_in_columns(list(present), has_ground_truth=True)  # single rows may have none
        if fault is not None:
            raise RewardError(fault)
        optional = [name for name in self.optional if name in present or (has_truth and name in self._truths)]
        more = [name for name in present if name not in self.arguments] if self.all_columns else []
        if self.all_columns and has_truth:
            more.append("ground_truth")
        return list(dict.fromkeys([*self.columns, *optional, *more]))

    @property
    def _truths(self) -> tuple[str, ...]:
        return ("ground_truth", *self.truths)

    def _column(self, sample: Sample, name: str) -> Any:
        if name in sample.columns:
            return sample.columns[name]
        return sample.ground_truth if name in self._truths else None

    def unfilled(self, columns: Sequence[str], has_ground_truth: bool) -> list[str]:
        """Return parameters with an empty default that the data have nothing for."""
        return [
            name
            for name in self.optional
            if name not in self.with_default and name not in columns
            if not (has_ground_truth and name in self._truths)
        ]

    def fault_in_columns(self, columns: Sequence[str], has_ground_truth: bool) -> str | None:
        """Return what is wrong with a function for data with these columns; None if nothing is."""
        for name in self.guessed:
            if name in columns:
                return (
                    f"it has the parameter {name!r}, which may be the response or the column {name!r} of the data. "
                    f"Call the parameter {'solution_str' if self.form == 'sample' else 'solution_strs'} for the "
                    "response, or rename the column and take the response by that name besides"
                )
        for name in self.columns:
            if name not in columns and not (has_ground_truth and name in self._truths):
                return missing_column(name, columns)
        return None


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """Return a row's ground truth: that of its `reward_model`, or its column `ground_truth`; None if it has neither.

    A number that is missing, as columns of numbers and Python's JSON have it (NaN), is None, too.
    """
    reference = row.get("reward_model")
    truth = reference.get("ground_truth") if isinstance(reference, Mapping) else row.get("ground_truth")
    return None if isinstance(truth, float) and truth != truth else truth


def missing_column(name: str, columns: Sequence[str]) -> str:
    """Return the message for a parameter that nothing provides."""
    if name in _FOREIGN:
        return f"it has the parameter {name!r}, and the data have no such column. It is {_FOREIGN[name]}. {EXPECTED}"
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


def understand(
    call: Callable[..., Any], name: str, kwargs: Mapping[str, Any], form: Form, source: str, kwargs_key: str
) -> RewardCall:
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
    named = {p.name: p for p in parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    by_position = tuple(p.name for p in parameters.values() if p.kind is p.POSITIONAL_ONLY)
    unknown = [key for key in kwargs if (key not in named and not takes_any) or key in by_position]
    if unknown:
        raise RewardError(f"{kwargs_key}: {name} has no parameter {unknown[0]!r}. Its parameters: {', '.join(named)}.")
    bound = {*kwargs, *_bound(call)}  # they have values, which no column of the data replaces
    required = [key for key, p in named.items() if p.default is p.empty and key not in bound]
    others = [key for key, p in named.items() if p.default is not p.empty and key not in bound]
    if (
        form == "batch"
        and "completions" not in named
        and (single := [key for key in _TEXTS["sample"] if key in required])
    ):
        raise RewardError(
            f"{source}: {name} has the parameter {single[0]!r}, and reward.reward_manager.name=batch calls functions "
            f"once with lists: call it solution_strs for a list, or solution_str for one response. {EXPECTED}."
        )
    empty = [key for key in others if named[key].default is None or named[key].default == ""]
    by_name = all(named[key].kind is inspect.Parameter.KEYWORD_ONLY for key in required)
    free = Free(required, others, empty, takes_any, by_name)
    how = _as_in_trl(free) or _as_batch(free) or _as_sample(free) or _as_in_verl(free, by_position, form)
    if how is None:
        raise RewardError(f"{source}: {_not_understood(name, parameters, required)}")
    how = replace(how, positional=tuple(key for key in by_position if key in required))
    _check_call(call, name, how, kwargs, source, kwargs_key)
    return how


@dataclass(frozen=True)
class Free:
    """Parameters of a function that have to get something.

    Attributes:
        required: those without a default.
        others: those with one.
        empty: those of `others` whose default is None or an empty text, so that they wait for a value.
        takes_any: the function takes any further name.
        by_name: those without a default are passed by name only.
    """

    required: Sequence[str]
    others: Sequence[str]
    empty: Sequence[str]
    takes_any: bool
    by_name: bool

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.required, *self.others)

    def texts(self, form: Form) -> list[str]:
        """Those that are the response by a usual name; one with a default may be anything."""
        return [name for name in _TEXTS[form] if name in self.required]

    def truths(self, form: Form) -> tuple[str, ...]:
        """The one that is the ground truth by a usual name, unless the data have such a column.

        A default with a value says that it is something else, such as the length that is aimed at.
        """
        candidates = tuple(name for name in _TRUTHS[form] if name in self.required)
        candidates = candidates or tuple(name for name in _TRUTHS[form] if name in self.empty)
        proper = "ground_truth" if form == "sample" else "ground_truths"
        return () if len(candidates) != 1 or {proper, "ground_truth"} & set(self.names) else candidates

    def besides(self, names: Sequence[str]) -> dict[str, Any]:
        """The fields of a `RewardCall` for parameters that are columns of the data: all but these."""
        return {
            "columns": tuple(name for name in self.required if name not in names),
            "optional": tuple(name for name in self.others if name not in names),
            "with_default": tuple(name for name in self.others if name not in names and name not in self.empty),
        }


def _bound(call: Callable[..., Any]) -> set[str]:
    """Names of parameters that `functools.partial` has given a value."""
    names: set[str] = set()
    while isinstance(call, partial):
        names |= set(call.keywords)
        call = call.func
    return names


def _as_in_trl(free: Free) -> RewardCall | None:
    """A function with a parameter `completions`."""
    if "completions" not in free.names:
        return None
    return RewardCall(
        "batch",
        tuple(name for name in _TRL_NAMES if name in free.names or free.takes_any),
        all_columns=free.takes_any,
        may_abstain=True,
        truths=free.truths("batch"),
        **free.besides(_TRL_NAMES),
    )


def _as_batch(free: Free) -> RewardCall | None:
    """A function whose response is a list by its name."""
    fill = free.takes_any and "solution_strs" in free.names
    if "responses" in free.names or "solution_strs" in free.names:
        arguments = tuple(n for n in _BATCH_KNOWN if n in free.names or (fill and n in BATCH_NAMES))
        return RewardCall("batch", arguments, truths=free.truths("batch"), **free.besides(_BATCH_KNOWN))
    text = free.texts("batch")
    if len(text) != 1:
        return None
    arguments = ("solution_strs", *(name for name in BATCH_NAMES if name in free.names))
    renamed, taken_names = (("solution_strs", text[0]),), (*BATCH_NAMES, text[0])
    return RewardCall(
        "batch",
        arguments,
        renamed=renamed,
        guessed=(text[0],),
        truths=free.truths("batch"),
        **free.besides(taken_names),
    )


def _as_sample(free: Free) -> RewardCall | None:
    """A function whose response is one text by its name, or that takes every name."""
    text = free.texts("sample")
    usual_names = (*SAMPLE_NAMES, *((PROMPT,) if PROMPT in free.names else ()))
    if "solution_str" in free.names or (free.takes_any and free.by_name):
        arguments = tuple(name for name in usual_names if name in free.names or free.takes_any)
        return RewardCall("sample", arguments, truths=free.truths("sample"), **free.besides(usual_names))
    if len(text) != 1 or set(_BATCH_KNOWN) & set(free.names):
        return None
    arguments = ("solution_str", *(name for name in usual_names if name in free.names))
    return RewardCall(
        "sample",
        arguments,
        renamed=(("solution_str", text[0]),),
        guessed=(text[0],),
        truths=free.truths("sample"),
        **free.besides((*usual_names, text[0])),
    )


def _as_in_verl(free: Free, by_position: Sequence[str], form: Form) -> RewardCall | None:
    """A function of three or four parameters that are positional only, and that no name tells: they are verl's."""
    names = {*SAMPLE_NAMES, *BATCH_NAMES, *_TRL_NAMES, PROMPT, *_FOREIGN}
    names |= {name for form_ in _TEXTS for name in (*_TEXTS[form_], *_TRUTHS[form_])}
    if len(free.required) not in (3, 4) or list(by_position) != list(free.names) or names & set(by_position):
        return None
    arguments = (BATCH_NAMES if form == "batch" else SAMPLE_NAMES)[: len(by_position)]
    return RewardCall(
        form, arguments, renamed=tuple(zip(arguments, by_position, strict=True)), guessed=tuple(by_position)
    )


def _not_understood(name: str, parameters: Mapping[str, Any], required: Sequence[str]) -> str:
    listed = ", ".join(parameters) or "nothing"
    foreign = next((f"{key} is {_FOREIGN[key]}. " for key in required if key in _FOREIGN), "")
    text = [key for key in _TEXTS["sample"] if key in required]
    if len(text) > 1:
        return (
            f"{name} takes ({listed}), and {' and '.join(text)} may each be the response; call the response "
            f"solution_str. {EXPECTED}."
        )
    return (
        f"{name} takes ({listed}), and no name tells which parameter is the response. {foreign}Call the response "
        f"solution_str and the ground truth ground_truth; other parameters are columns of the data. {EXPECTED}."
    )


def _check_call(
    call: Callable[..., Any], name: str, how: RewardCall, kwargs: Mapping[str, Any], source: str, kwargs_key: str
) -> None:
    names = dict(how.renamed)
    values = dict.fromkeys((*(names.get(argument, argument) for argument in how.arguments), *how.columns))
    try:
        first = [values.pop(argument) for argument in how.positional]
        inspect.signature(call).bind(*first, **values, **kwargs)
    except TypeError as error:
        raise RewardError(
            f"{source}: {name} cannot be called with ({', '.join((*how.arguments, *how.columns, *kwargs))}): "
            f"{error}. {EXPECTED}; pass further arguments with {kwargs_key}."
        ) from error
