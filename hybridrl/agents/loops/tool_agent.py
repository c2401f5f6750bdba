"""The model calls tools until it answers."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hybridrl.agents.interactions.interaction_session import InteractionSession
from hybridrl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from hybridrl.agents.tools.load_tools import selected_tools
from hybridrl.agents.tools.tool_session import ToolResult, ToolSession
from hybridrl.chat.parsers.tool_parser import Call, FunctionCall, Parsed
from hybridrl.chat.session_images import images_in
from hybridrl.chat.turns import answers_of
from hybridrl.errors import RolloutError
from hybridrl.models.vision import ImageTensors
from hybridrl.protocol.bookkeeping import reserved
from hybridrl.scored import Unscored

_UNREADABLE = "invalid_call"  # the name of a call that has none


@dataclass
class AgentData:
    """The state of a session, as tools get it (`agent_data`).

    Attributes:
        messages: the conversation so far; turns of the model as text.
        prompt_ids: tokens before the first generated one.
        response_ids, response_mask: every token after them, and which of them were generated.
        images: patches of the images so far, in the order of their tokens.
        tools_kwargs: the row's column of this name.
        extra_fields: columns of the batch that a tool adds.
        turn_rewards: (place of the last token of a turn, reward), of tool calls and of a simulated user.
        turn_scores: scores that a simulated user gave.
    """

    messages: list[dict[str, Any]]
    prompt_ids: list[int]
    tools_kwargs: Mapping[str, Any]
    response_ids: list[int] = field(default_factory=list)
    response_mask: list[int] = field(default_factory=list)
    images: list[ImageTensors] = field(default_factory=list)
    user_turns: int = 0
    assistant_turns: int = 0
    tool_rewards: list[float] = field(default_factory=list)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    metrics: AgentLoopMetrics = field(default_factory=AgentLoopMetrics)
    faults: dict[str, int] = field(default_factory=dict)
    tool_calls: int = 0
    turn_rewards: list[tuple[int, float]] = field(default_factory=list)
    turn_scores: list[float] = field(default_factory=list)
    interaction_extra: dict[str, Any] = field(default_factory=dict)


@register("tool_agent", reads=("tools",))
class ToolAgentLoop(AgentLoopBase):
    """Generates, runs the calls of the turn, appends their answers, and goes on, until a turn has no call.

    In rows with `interaction_kwargs`, a simulated user answers such a turn, and the session goes on until the user ends
    it.

    It also ends at `response_length` tokens after the prompt, at `max_assistant_turns` turns of the model and at
    `max_user_turns` rounds of answers. An answer that does not fit is left out. Calls that cannot be read, unknown
    tools, wrong arguments, errors and time-outs are answered with the reason.

    `extra_info.tool_selection` of a row names the tools that it has. Reward functions get the rewards of calls, the
    scores of the user's answers, and what `calc_reward` of each tool and `calculate_score` of the user returned as
    `extra_info["rollout_reward_scores"]`. With `multi_turn.turn_rewards`, rewards of calls and answers are added to the
    score, at the last token of their turn.
    """

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        settings = self.rollout_config.multi_turn
        tools_kwargs = kwargs.get("tools_kwargs") or {}
        data = AgentData(list(kwargs["raw_prompt"]), list(kwargs["prompt_ids"]), tools_kwargs)
        data.images = self.row_images(kwargs)
        names = selected_tools(kwargs.get("extra_info"), list(self.tools))
        tools = {name: self.tools[name] for name in names}
        schemas = [tool.tool_schema for tool in tools.values()]
        images = self.server_manager.images
        session = ToolSession(tools, settings, tools_kwargs, None if images is None else images.reader)
        user = self._user(kwargs)
        user_scores: dict[str, float] = {}
        self.server_manager.log.messages = data.messages
        try:
            while (calls := await self._generate(data, sampling_params, schemas)) is not None:
                answered = self._answer(data, calls, session, schemas) if calls else self._reply(data, user, schemas)
                if not await answered:
                    break
            if user is not None and (score := await user.score()) is not None:
                user_scores[user.name] = score
        finally:
            scores = await session.close()
            if user is not None:
                await user.close()
        data.metrics.tool_calls = session.seconds
        if own := reserved(data.extra_fields):
            raise RolloutError(
                f"a tool set the extra field {own[0]!r}, which is the name of a column that the run itself uses; give "
                "the field another name"
            )
        unscored = [score for score in scores.values() if isinstance(score, Unscored)]
        return AgentLoopOutput(
            data.prompt_ids,
            data.response_ids,
            data.response_mask,
            reward_score=unscored[0] if unscored else None,
            num_turns=1 + data.user_turns + data.assistant_turns,
            metrics=data.metrics,
            extra_fields={
                **data.extra_fields,
                "tool_call_counts": data.tool_calls,
                "tool_rewards": data.tool_rewards,
                "reward_scores": {
                    **scores,
                    **user_scores,
                    "tool_rewards": data.tool_rewards,
                    **({"user_turn_rewards": data.turn_scores} if user is not None else {}),
                },
                "tool_faults": data.faults,
                **({"turn_scores": data.turn_scores} if self.interactions is not None else {}),
                **({"interaction_extra": data.interaction_extra} if self.interactions is not None else {}),
            },
            turn_rewards=data.turn_rewards if settings.turn_rewards else (),
        )

    def _user(self, row: Mapping[str, Any]) -> InteractionSession | None:
        """The simulated user of a row."""
        kwargs = row.get("interaction_kwargs") or {}
        user = None if self.interactions is None else self.interactions.of(kwargs)
        if user is None:
            return None
        return InteractionSession(user, kwargs, self.rollout_config.multi_turn.tool_timeout_s)

    async def _generate(
        self, data: AgentData, sampling_params: Mapping[str, Any], schemas: Sequence[Mapping[str, Any]]
    ) -> list[Call] | None:
        """Add a turn of the model, and return the calls in it; None where the session ends with it."""
        settings, limit = self.rollout_config.multi_turn, self.rollout_config.response_length
        started = time.perf_counter()
        output = await self.server_manager.generate(
            prompt_ids=[*data.prompt_ids, *data.response_ids],
            sampling_params={**sampling_params, "max_new_tokens": limit - len(data.response_ids)},
            image_data=data.images,
        )
        data.metrics.generate_sequences += time.perf_counter() - started
        data.response_ids += output.token_ids
        data.response_mask += [1] * len(output.token_ids)
        data.assistant_turns += 1
        assert self.tool_parser is not None  # there are tools, or this loop is refused at start-up
        parsed = self.tool_parser.parse(self.tokenizer.decode(output.token_ids, skip_special_tokens=False), schemas)
        if parsed.calls and not schemas:  # there are users alone, to whom this is text like any other
            parsed = Parsed(self.tokenizer.decode(output.token_ids, skip_special_tokens=True))
        data.messages.append({"role": "assistant", "content": parsed.content})
        ended = output.stop_reason != "stop" or not output.token_ids or len(data.response_ids) >= limit
        if ended or data.assistant_turns >= (settings.max_assistant_turns or data.assistant_turns + 1):
            return None
        if data.user_turns >= (settings.max_user_turns or data.user_turns + 1):
            return None
        return parsed.calls

    async def _reply(
        self, data: AgentData, user: InteractionSession | None, schemas: Sequence[Mapping[str, Any]]
    ) -> bool:
        """Append the user's answer to a turn; whether the session goes on."""
        if user is None:
            return False
        log = self.server_manager.log
        began = log.clock()
        reply = await user.reply(data.messages)
        log.add("user", began, turn=data.assistant_turns - 1, answer=reply.text, score=reply.score, ended=reply.ended)
        data.interaction_extra |= reply.extra
        if reply.score is not None:
            data.turn_scores.append(reply.score)
            data.turn_rewards.append((len(data.response_ids) - 1, reply.score))
        if reply.ended:
            return False
        return self._append(data, await self.prepared([{"role": "user", "content": reply.content}]), schemas, ())

    async def _answer(
        self,
        data: AgentData,
        calls: Sequence[Call],
        session: ToolSession,
        schemas: Sequence[Mapping[str, Any]],
    ) -> bool:
        """Run the calls of a turn and append their answers; whether they fit."""
        readable, log = [call for call in calls if isinstance(call, FunctionCall)], self.server_manager.log
        began = log.clock()
        results = iter(self._within_limit(data, await session.call(readable, data)))
        answered: list[tuple[FunctionCall, str | list[dict[str, Any]]]] = []
        arguments: Mapping[str, Any] | str
        for call in calls:
            if isinstance(call, FunctionCall):
                result = next(results)
                name, arguments = call.name, call.arguments
            else:
                name, arguments = _UNREADABLE, call.text
                reason = f"Error: this call could not be read: {call.reason}"
                call, result = FunctionCall(_UNREADABLE, {}), ToolResult(reason, fault="malformed")
            log.add(
                "tool",
                began,
                result.seconds,
                turn=data.assistant_turns - 1,
                name=name,
                arguments=arguments,
                response=result.text,
                reward=result.reward,
                fault=result.fault,
                **({"images": len(result.images)} if result.images else {}),
            )
            if call.name not in session.tools:  # text of the model must not become text of the template
                call = FunctionCall(_UNREADABLE, {}, call.tool_call_id)
            if result.fault:
                data.faults[result.fault] = data.faults.get(result.fault, 0) + 1
            if result.reward is not None:
                data.tool_rewards.append(result.reward)
                data.turn_rewards.append((len(data.response_ids) - 1, result.reward))
            answered.append((call, result.content))
        data.tool_calls += len(readable)
        return self._append(data, answers_of(answered), schemas, [call for call, _ in answered])

    def _within_limit(self, data: AgentData, results: list[ToolResult]) -> list[ToolResult]:
        """Results without images that are more than a session can have, with the reason instead."""
        most, count = self.rollout_config.limit_images, len(data.images)
        for number, result in enumerate(results):
            if most is not None and result.images and count + len(result.images) > most:
                reason = f"Error: not shown, because at most {most} images can be seen"
                results[number] = replace(result, text=reason, images=[], fault="limit")
            count += len(results[number].images)
        return results

    def _append(
        self,
        data: AgentData,
        messages: Sequence[dict[str, Any]],
        schemas: Sequence[Mapping[str, Any]],
        calls: Sequence[FunctionCall],
    ) -> bool:
        """Append answers to a turn; whether they fit."""
        tokens = self.turns.following(data.response_ids[-1], messages, schemas or None, calls)
        longer = len(data.response_ids) + len(tokens)
        limit = self.rollout_config.max_model_len
        if longer >= self.rollout_config.response_length or (limit and len(data.prompt_ids) + longer >= limit):
            return False
        data.messages += messages
        data.images += images_in(messages)
        data.response_ids += tokens
        data.response_mask += [0] * len(tokens)
        data.user_turns += 1
        return True
