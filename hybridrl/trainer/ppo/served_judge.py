"""A judge in replicas of an inference engine: it answers the questions that the reward manager asks."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from hybridrl.config import PPOTrainerConfig
from hybridrl.config.schema.reward import JudgeConfig
from hybridrl.errors import ModelError, RewardError
from hybridrl.models.chat import encode
from hybridrl.models.info import check_files, tokenizer_of
from hybridrl.models.model_config import checked_source, config_of
from hybridrl.models.rendering import rendered
from hybridrl.models.tokenizer import check_vocabulary
from hybridrl.models.vision import is_vision_model
from hybridrl.reward.judge import JudgeAnswer
from hybridrl.reward.scorers import JudgeScorer, judges_in
from hybridrl.rollout.client import PoolClient
from hybridrl.rollout.request import Request, request_number
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.scored import Reason, UnscoredError
from hybridrl.trainer.ppo.served_role import ServedRole

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "reward.reward_model"


class ServedJudge(ServedRole):
    """The judge of a run. On devices of other roles it answers within `turn` alone; what is asked before waits."""

    def init_model(self, steps: int | None = None, updates_per_step: int = 1) -> None:
        """Start the replicas; see `ServedRole.init_model`."""
        super().init_model(steps, updates_per_step)
        self._tokenizer = tokenizer_of(self.models[0].model)
        self._client = PoolClient(self.supervisors[0])
        self._began = 0.0  # the present turn
        self._lock = threading.Lock()
        self._answering, self._since = 0, 0.0

    def answer_for(self, judges: Iterable[JudgeScorer], config: PPOTrainerConfig) -> None:
        """Answer what these ask from now on."""
        for judge in judges:
            judge.connect(functools.partial(self.answer, config.reward.reward_model.judge))

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Have the device memory within the block, where other roles have the devices too."""
        if not self.blocking:
            yield
            return
        (supervisor,) = self.supervisors
        supervisor.resume()
        self._began = time.monotonic()
        try:
            yield
        finally:
            self._give_back(supervisor)

    async def answer(self, judge: JudgeConfig, messages: list[dict[str, str]]) -> JudgeAnswer:
        """Answer a conversation.

        Args:
            judge: its settings.
            messages: the last one is the question.

        Returns:
            The text, and the seconds that it took, without the wait for the memory.

        Raises:
            UnscoredError: the engine refused the question.
            RolloutError: its replicas cannot be kept alive.
        """
        started = time.monotonic()
        text = question_text(self._tokenizer, messages, judge)
        (ids,) = encode(self._tokenizer, [text], self._longest)
        request = Request(f"judge-{request_number()}", ids, _sampling(judge, text))
        with self._counted():
            try:
                completion = await self._client.generate(request)
            except asyncio.CancelledError:  # its sample was given up
                self.supervisors[0].scheduler.abort([request.id])
                raise
        if completion.finish_reason not in ("stop", "length"):
            why = completion.error or f"it ended with {completion.finish_reason}"
            where = f"{self.models[0].where}.max_model_len"
            detail = f"the judge gave no answer: {why}. Questions and answers may have {self._longest} tokens ({where})"
            raise UnscoredError(Reason.INFRA, detail)
        text = str(self._tokenizer.decode(completion.token_ids, skip_special_tokens=True))
        return JudgeAnswer(text, self._seconds_since(started), completion.finish_reason == "length")

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        """Count the time in which any question is being answered."""
        with self._lock:
            self._since = time.monotonic() if not self._answering else self._since
            self._answering += 1
        try:
            yield
        finally:
            with self._lock:
                self._answering -= 1
                if not self._answering:
                    before = self.method_seconds.get("answer", 0.0)
                    self.method_seconds["answer"] = before + self._seconds_since(self._since)

    def _seconds_since(self, moment: float) -> float:
        """Seconds since a moment, without the wait for the present turn."""
        return time.monotonic() - max(moment, self._began)

    @property
    def _longest(self) -> int:
        return self.supervisors[0].settings.spec.max_model_len


def _sampling(judge: JudgeConfig, question: str) -> SamplingParams:
    """Return the settings of an answer, which is the same for the same question, in whatever order questions come."""
    sampled, more = judge.temperature > 0, judge.extra_body
    seed = (zlib.crc32(question.encode()) + int(more.get("seed", 0))) % 2**31
    return SamplingParams(
        do_sample=sampled,
        temperature=judge.temperature if sampled else 1.0,
        top_p=float(more.get("top_p", 1.0)),
        top_k=int(more.get("top_k", -1)),
        max_new_tokens=judge.max_tokens,
        seed=seed if sampled else None,
    )


def question_text(tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, str]], judge: JudgeConfig) -> str:
    """A conversation in the judge's chat template, to be answered."""
    more = dict(judge.extra_body.get("chat_template_kwargs", {}))
    return rendered(tokenizer, messages, is_generated=True, add_generation_prompt=True, **more)


def check_judge_model(config: PPOTrainerConfig) -> None:
    """Refuse a model that cannot answer questions, before any model is loaded.

    Raises:
        ModelError: names the setting and what to change.
    """
    part = config.reward.reward_model
    if not part.serves_judge:
        return
    where, hf_config = f"{_KEY}.model.path={part.model.path}", config_of(part.model)
    writes = [name for name in hf_config.architectures or () if name.endswith(("LMHeadModel", "ForCausalLM"))]
    if is_vision_model(hf_config):
        raise ModelError(f"{where}: a judge that the run serves reads text; use a language model without images")
    if not writes:
        classes = ", ".join(hf_config.architectures or ()) or "a class that is not recorded"
        raise ModelError(
            f"{where}: {classes} writes no text, and a judge has to; name a language model, or set "
            f"{_KEY}.judge.enable=False for a classifier"
        )
    checked_source(part.model.path)
    check_files(part.model)
    try:
        tokenizer = tokenizer_of(part.model)
        source = part.model.tokenizer_path or part.model.path
        check_vocabulary(tokenizer, hf_config.get_text_config().vocab_size, source)
    except ModelError as error:
        raise ModelError(f"{_KEY}.model: {error} (here {_KEY}.model.tokenizer_path)") from error
    if tokenizer.chat_template is None:
        raise ModelError(f"{where}: its tokenizer has no chat template; set {_KEY}.model.custom_chat_template")
    system = [{"role": "system", "content": part.judge.system_prompt}] if part.judge.system_prompt else []
    try:
        question_text(tokenizer, [*system, {"role": "user", "content": "?"}], part.judge)
    except Exception as error:  # a template raises anything
        named = f"{_KEY}.judge.system_prompt or extra_body.chat_template_kwargs"
        raise ModelError(f"{where}: its chat template refuses a question: {error}; check {named}") from error


def judges_of(manager: Any) -> list[JudgeScorer]:
    """Return what asks the judge for a reward manager, to be connected once the model is loaded.

    Raises:
        RewardError: the manager does not ask it.
    """
    judges = list(judges_in(getattr(manager, "pool", None)))
    if not judges:
        raise RewardError(
            f"{_KEY}.judge.enable=True: the reward manager {type(manager).__name__} scores without the functions that "
            "the configuration names (its pool is its own), so nobody would ask the judge; use another manager, or "
            "remove the judge"
        )
    return judges
