"""A language model as judge: it is asked about each response, and its answer is read for a score.

A judge that cannot be reached, or whose answer has no score, gives no score, never a 0.

Imported by the pool's processes, so it must stay light: no torch, no numpy.
"""

import asyncio
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybridrl.errors import RewardError
from hybridrl.reward.remote_scores import plain
from hybridrl.reward.results import BadScore, check_score
from hybridrl.scored import Reason, Unscored, UnscoredError
from hybridrl.utils import clock
from hybridrl.utils.chat_client import ChatClient
from hybridrl.utils.json_client import ServiceError
from hybridrl.utils.user_code import load_object

_KEY = "reward.reward_model.judge"
#: what `ask_or_read` returns, and the columns in which it gets the answer
QUESTION, ANSWER, ANSWER_IS_CUT = "question", "judge_answer", "judge_answer_is_cut"
_LABEL = re.compile(r"score[\s*_`]{0,5}[:=][\s*_`]{0,5}", re.IGNORECASE)
# Not the beginning of another number (1,000), nor of a range (7-8).
_NUMBER = re.compile(r"[-+\u2212]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?(?![\d.,]*\d|[-\u2013]\d)")
TEMPLATE = """You judge an answer to a request.

Request:
{{ prompt }}
{% if ground_truth %}
What a right answer says:
{{ ground_truth }}
{% endif %}
Answer:
{{ response }}

Explain briefly how good the answer is. Then end with a line of the form
Score: N
where N is a number from 0 (useless) to 10 (could not be better)."""


@dataclass(frozen=True)
class JudgeAnswer:
    """The answer of a judge that the run serves.

    Attributes:
        text: what it wrote.
        seconds: how long it took.
        is_cut: it ended at `judge.max_tokens`, and not by itself.
    """

    text: str
    seconds: float
    is_cut: bool = False


@dataclass(frozen=True)
class Questions:
    """The questions to a judge, and the reading of its answers.

    Attributes:
        render: makes the question, from `prompt`, `messages`, `response`, `ground_truth`, `data_source`, `extra_info`.
        parse: reads the answer; see `compute_score`.
        system_prompt: comes before the question; None: nothing.
    """

    render: Callable[..., str]
    parse: Callable[[str, Mapping[str, Any]], Any]
    system_prompt: str | None

    @classmethod
    def of(
        cls, template: str | None, system_prompt: str | None, parse_path: str | None, parse_name: str | None
    ) -> "Questions":
        """Those of the settings.

        Raises:
            RewardError: the template or the function cannot be read.
        """
        return cls(_template(template), _parser(parse_path, parse_name), system_prompt)

    def messages(self, sample: Mapping[str, Any]) -> list[dict[str, str]] | Unscored:
        """The conversation that ends with the question about a sample."""
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt else []
        try:
            question = self.render(**sample)
        except Exception as error:  # the template is a user's
            return Unscored(Reason.GRADING, f"the template failed: {type(error).__name__}: {error}")
        return [*system, {"role": "user", "content": question}]

    def score(self, text: str, is_cut: bool, sample: Mapping[str, Any]) -> Any:
        """Read an answer: a dict with `score` and `judgement`, or an `Unscored`."""
        if not text:
            return Unscored(Reason.GRADING, "the judge answered nothing")
        return _read(self.parse, text, {**sample, "is_cut": is_cut})


@dataclass(frozen=True)
class Judge:
    """Asks a model behind an endpoint with the OpenAI chat API.

    Attributes:
        client: sends the requests.
        questions: what it is asked.
        sampling: further fields of the request.
        timeout_s: seconds that an answer may take.
        threads: ask; a thread for each request at once.
        slots: as many as threads. Samples wait for one, which does not count as their time.
    """

    client: ChatClient
    questions: Questions
    sampling: Mapping[str, Any]
    timeout_s: float
    threads: ThreadPoolExecutor
    slots: asyncio.Semaphore

    async def score(self, sample: Mapping[str, Any]) -> Any:
        """Ask the judge about a sample: a dict with `score` and `judgement`, or an `Unscored`."""
        loop = asyncio.get_running_loop()
        with clock.stopped():
            await self.slots.acquire()
        answer = self.threads.submit(self._score, sample)
        # The thread of a sample that takes too long stays busy: its slot is free when the thread is.
        answer.add_done_callback(lambda _: loop.call_soon_threadsafe(self.slots.release))
        return await asyncio.wrap_future(answer)

    def _score(self, sample: Mapping[str, Any]) -> Any:
        messages = self.questions.messages(sample)
        if isinstance(messages, Unscored):
            return messages
        try:
            answer = self.client.ask(messages, self.timeout_s, **self.sampling)
        except ServiceError as error:
            return Unscored(error.reason, f"the judge gave no answer: {error}")
        return self.questions.score(answer.text, answer.is_cut, sample)


def _read(parse: Callable[[str, Mapping[str, Any]], Any], text: str, sample: Mapping[str, Any]) -> Any:
    """The score in a judge's answer."""
    try:
        parsed = parse(text, sample)
    except UnscoredError as error:
        return error.unscored
    except Exception as error:  # the function is a user's
        return Unscored(Reason.GRADING, f"{type(error).__name__}: {error}; the judge wrote {text[-200:]!r}")
    if parsed is None:
        why = f", which ended at {_KEY}.max_tokens" if sample["is_cut"] else ""
        return Unscored(Reason.GRADING, f"the judge's answer{why} has no score: {text[-200:]!r}")
    try:
        result = check_score(parsed)
    except BadScore as error:
        return Unscored(Reason.GRADING, f"the function that reads answers {error}; the judge wrote {text[-200:]!r}")
    if isinstance(result, Unscored):
        return result
    score, extra = result
    return {"judgement": text, **(extra or {}), "score": score}


def last_score(text: str, sample: Mapping[str, Any]) -> float | None:
    """The number after the last `Score:` of a text; None where something else stands there.

    Of an answer that was cut (`is_cut`), it counts only if its line is complete and says nothing else before: the last
    number may be cut, and a number before it may be that of another answer.
    """
    labels = list(_LABEL.finditer(text))
    number = _NUMBER.match(text, labels[-1].end()) if labels else None
    if number is None:
        return None
    line_start = text.rfind("\n", 0, labels[-1].start()) + 1
    words_before = re.findall(r"\w+", text[line_start : labels[-1].start()])
    if sample.get("is_cut") and (len(words_before) > 1 or "\n" not in text[number.end() :]):
        return None
    return float(number.group().replace("\u2212", "-"))


def make_judge(
    url: str,
    model: str | None,
    template: str | None,
    system_prompt: str | None,
    parse_path: str | None,
    parse_name: str | None,
    sampling: Mapping[str, Any],
    max_concurrent: int,
    attempts: int,
    timeout_s: float,
    token_env: str | None,
) -> Judge:
    """The judge of these settings, `reward.reward_model.judge`.

    Raises:
        RewardError: the template or the function cannot be read, or the endpoint does not have the model.
    """
    client = ChatClient.of(url, model, token_env, attempts, timeout_s, _KEY, RewardError)
    questions = Questions.of(template, system_prompt, parse_path, parse_name)
    threads = ThreadPoolExecutor(max_concurrent, thread_name_prefix="judge")
    return Judge(client, questions, sampling, timeout_s, threads, asyncio.Semaphore(max_concurrent))


def _template(path: str | None) -> Callable[..., str]:
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, autoescape=False)
    if path is None:
        return environment.from_string(TEMPLATE).render
    try:
        return environment.from_string(Path(path).expanduser().read_text(encoding="utf-8")).render
    except OSError as error:
        raise RewardError(f"{_KEY}.template={path}: {error.strerror}") from None
    except jinja2.TemplateError as error:
        raise RewardError(f"{_KEY}.template={path}: {error}") from None


def _parser(path: str | None, name: str | None) -> Callable[[str, Mapping[str, Any]], Any]:
    if path is None:
        return last_score
    function = load_object(path, name or "parse", f"{_KEY}.parse.path", f"{_KEY}.parse.name", RewardError)
    try:
        count = len(inspect.signature(function).parameters)
    except (TypeError, ValueError) as error:
        raise RewardError(f"{_KEY}.parse.path={path}: {name or 'parse'} is no function: {error}") from None
    if count not in (1, 2):
        problem = f"{name or 'parse'} takes {count} arguments; it gets (text) or (text, sample)"
        raise RewardError(f"{_KEY}.parse.path={path}: {problem}")
    return function if count == 2 else lambda text, sample: function(text)


_judges: dict[str, Judge] = {}
_questions = functools.cache(Questions.of)


def check_reward_kwargs(**settings: Any) -> None:
    """Make the judge when its process starts, so that what is wrong is told before a run begins."""
    if "url" not in settings:
        _questions(**settings)
        return
    name = json.dumps(settings, sort_keys=True, default=str)
    if name not in _judges:
        _judges[name] = make_judge(**settings)


async def compute_score(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    prompt: Any,
    **settings: Any,
) -> Any:
    """Ask the judge about a response; `settings` are those of `make_judge`."""
    name = json.dumps(settings, sort_keys=True, default=str)
    return await _judges[name].score(_asked_about(data_source, solution_str, ground_truth, extra_info, prompt))


def ask_or_read(
    data_source: Any,
    solution_str: str,
    ground_truth: Any,
    extra_info: Any,
    prompt: Any,
    judge_answer: str | None = None,
    judge_answer_is_cut: bool = False,
    **settings: Any,
) -> Any:
    """One of the two steps around an answer that is generated elsewhere; `settings` are those of `Questions.of`.

    Returns:
        Without an answer a dict with the `question`, messages; with one what it says, as `compute_score` returns it. Or
        an `Unscored`.
    """
    questions = _questions(**settings)
    sample = _asked_about(data_source, solution_str, ground_truth, extra_info, prompt)
    if judge_answer is not None:
        return questions.score(judge_answer, judge_answer_is_cut, sample)
    messages = questions.messages(sample)
    return messages if isinstance(messages, Unscored) else {"score": 0.0, QUESTION: messages}


def _asked_about(
    data_source: Any, solution_str: str, ground_truth: Any, extra_info: Any, prompt: Any
) -> dict[str, Any]:
    """The variables of a template."""
    messages = plain(prompt) if not isinstance(prompt, str) else [{"role": "user", "content": prompt}]
    return {
        "prompt": messages[-1].get("content") if messages else "",
        "messages": messages or [],
        "response": solution_str,
        "ground_truth": plain(ground_truth),
        "data_source": data_source,
        "extra_info": plain(extra_info),
    }
