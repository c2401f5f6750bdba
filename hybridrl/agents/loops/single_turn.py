"""One answer to the prompt."""

from typing import Any, ClassVar

from hybridrl.agents.loop import AgentLoopBase, AgentLoopOutput, register


@register("single_turn_agent", only_answers=True)
class SingleTurnAgentLoop(AgentLoopBase):
    """Answers the prompt once: what a rollout without agents does, next to rows with other loops."""

    only_generates: ClassVar[bool] = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput:
        prompt = kwargs["prompt_ids"]
        output = await self.server_manager.generate(
            prompt_ids=prompt, sampling_params=sampling_params, image_data=self.row_images(kwargs)
        )
        return AgentLoopOutput(prompt, output.token_ids, [1] * len(output.token_ids), num_turns=2)
