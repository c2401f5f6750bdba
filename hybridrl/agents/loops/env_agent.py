"""The model acts on an environment until the episode is done."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from hybridrl.agents.environments.environment import Action, Step, messages_of
from hybridrl.agents.environments.environment_session import EnvironmentSession
from hybridrl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, TokenOutput, register
from hybridrl.chat.log import without_pixels
from hybridrl.chat.session_images import images_in, with_row_images
from hybridrl.models.vision import ImageTensors, digest
from hybridrl.notify import notify
from hybridrl.rollout.noise import stream_keys


@dataclass
class _Episode:
    """The state of a session; the fields are those of `AgentLoopOutput`."""

    prompt_ids: list[int]
    tools: Sequence[Mapping[str, Any]]
    state: Any
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    turn_states: list[tuple[int, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    images: list[ImageTensors] = field(default_factory=list)
    turns: int = 0
    observations: int = 0
    done: bool = False
    seconds: float = 0.0


@register("env_agent", reads=("environments",))
class EnvironmentAgentLoop(AgentLoopBase):
    """Resets the environment of the row, and gives it each turn of the model, until the episode is done.

    It also ends, with `env_done` false, at `response_length` tokens after the prompt, at `max_assistant_turns` turns of
    the model, at `max_user_turns` observations, and where an observation does not fit. A turn that `response_length`
    cuts is not given to the environment. One that `agent.environment_turn_tokens` cuts is.

    The reward of a step belongs to the last token of its turn.
    """

    uses_environments: ClassVar[bool] = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        assert self.environments is not None  # the class says that it uses them
        env_kwargs = kwargs.get("env_kwargs") or {}
        session = EnvironmentSession(
            self.environments.entry(env_kwargs), self.rollout_config.agent.environment_timeout_s
        )
        try:
            if "seed" in kwargs:
                notify(
                    "the data have a column 'seed', and row['seed'] of an environment is the seed of the session; put "
                    "the one of the data into env_kwargs",
                    "warning",
                    once=True,
                )
            first = await session.reset({**kwargs, "env_kwargs": env_kwargs, "seed": self.seed_of(kwargs)})
            first = await self._prepared(first)
            messages = with_row_images(kwargs["raw_prompt"], self.row_images(kwargs))
            episode = self._begin(messages, first, session.tools)
            while (step := await self._turn(episode, session, sampling_params)) is not None:
                if not self._observe(episode, *step):
                    break
        finally:
            await session.close()
        return AgentLoopOutput(
            episode.prompt_ids,
            episode.response_ids,
            episode.response_mask,
            reward_score=0.0 if session.gives_rewards else None,
            num_turns=1 + episode.turns + episode.observations,
            metrics=AgentLoopMetrics(generate_sequences=episode.seconds, tool_calls=session.seconds),
            extra_fields={"env_done": episode.done, "env_turns": episode.turns, "env_extra": episode.extra},
            turn_rewards=episode.turn_rewards,
            turn_states=episode.turn_states,
        )

    def _begin(self, messages: list[Any], first: Step, tools: Sequence[Mapping[str, Any]]) -> _Episode:
        """The prompt: the row's messages and the first observation."""
        if isinstance(first.observation, str) and messages and messages[-1].get("role") == "user":
            before, text = messages[-1]["content"], str(first.observation)
            joined: Any = f"{before}\n\n{text}" if before else text
            if before and not isinstance(before, str):
                joined = [*before, {"type": "text", "text": f"\n\n{text}"}]
            messages = [*messages[:-1], {**messages[-1], "content": joined}]
        else:
            messages = [*messages, *messages_of(first.observation)]
        episode = _Episode(self.turns.prompt(messages, tools or None), tools, _state(first))
        episode.extra |= first.extra
        episode.images = images_in(messages)
        episode.messages = self.server_manager.log.messages = list(messages)
        return episode

    async def _turn(
        self, episode: _Episode, session: EnvironmentSession, sampling_params: Mapping[str, Any]
    ) -> tuple[Action, Step] | None:
        """A turn of the model and the environment's answer; None where the turn is cut."""
        limit = self.rollout_config.response_length - len(episode.response_ids)
        longest = min(limit, self.rollout_config.agent.environment_turn_tokens or limit)
        started = time.perf_counter()
        output = await self.server_manager.generate(
            prompt_ids=[*episode.prompt_ids, *episode.response_ids],
            sampling_params={**sampling_params, "max_new_tokens": longest},
            image_data=episode.images,
        )
        episode.seconds += time.perf_counter() - started
        episode.response_ids += output.token_ids
        episode.response_mask += [1] * len(output.token_ids)
        episode.turns += 1
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        episode.messages.append({"role": "assistant", "content": text})
        last = len(episode.response_ids) - 1
        if not output.token_ids:
            return None
        episode.turn_states.append((last, episode.state))
        if output.stop_reason != "stop" and (output.stop_reason != "length" or len(output.token_ids) < longest):
            return None  # it was aborted, or the model's context is full
        if output.stop_reason != "stop" and longest == limit:
            return None
        action, log = self._action(output, episode.tools), self.server_manager.log
        began = log.clock()
        step = await self._prepared(await session.step(action))
        observation = without_pixels(messages_of(step.observation))
        log.add("step", began, turn=episode.turns - 1, observation=observation, reward=step.points, done=step.done)
        episode.extra |= step.extra
        episode.turn_rewards.append((last, step.points))
        return action, step

    def _action(self, output: TokenOutput, tools: Sequence[Mapping[str, Any]]) -> Action:
        text = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        if not tools:
            return Action(text, (), output.token_ids)
        assert self.tool_parser is not None
        whole = self.tokenizer.decode(output.token_ids, skip_special_tokens=False)
        return Action(text, self.tool_parser.parse(whole, tools).calls, output.token_ids)

    def _observe(self, episode: _Episode, action: Action, step: Step) -> bool:
        """Append an observation; whether the session goes on."""
        settings = self.rollout_config.multi_turn
        episode.done, episode.state = step.done, _state(step)
        if step.done or episode.turns >= (settings.max_assistant_turns or episode.turns + 1):
            return False
        if episode.observations >= (settings.max_user_turns or episode.observations + 1):
            return False
        messages = messages_of(step.observation) or [{"role": "user", "content": ""}]
        episode.messages += messages
        calls = action.template_calls if any(message["role"] == "tool" for message in messages) else ()
        tokens = self.turns.following(episode.response_ids[-1], messages, episode.tools or None, calls)
        longer = len(episode.response_ids) + len(tokens)
        limit = self.rollout_config.max_model_len
        if longer >= self.rollout_config.response_length or (limit and len(episode.prompt_ids) + longer >= limit):
            return False
        episode.images += images_in(messages)
        episode.response_ids += tokens
        episode.response_mask += [0] * len(tokens)
        episode.observations += 1
        return True

    async def _prepared(self, step: Step) -> Step:
        """A step whose images are patches."""
        if isinstance(step.observation, str) or step.observation is None:
            return step
        return replace(step, observation=await self.prepared(messages_of(step.observation)))

    def seed_of(self, row: Mapping[str, Any]) -> int:
        """The seed of an episode: the same for all samples of a prompt and in a resumed run, another in each epoch."""
        purpose = "validate" if row.get("validate") else "train"
        name = f"environment {row.get('uid', '')}"
        return int(stream_keys(self.rollout_config.seed, 0, purpose, [name], [0])[0]) % 2**31


def _state(step: Step) -> Any:
    if step.state is not None or isinstance(step.observation, str) or step.observation is None:
        return step.observation if step.state is None else step.state
    named = without_pixels(step.observation)
    images = [digest(image) for image in images_in(step.observation)]
    return [*((message["role"], message["content"]) for message in named), *images]
