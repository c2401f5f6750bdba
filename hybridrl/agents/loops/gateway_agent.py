"""The loop `gateway_agent`: an agent of the user's own, which talks to the run's server."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from hybridrl.agents.gateway import AgentFailed
from hybridrl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput, register
from hybridrl.chat.session_images import tensors_of, with_data_urls
from hybridrl.errors import RolloutError
from hybridrl.models.vision import ImageTensors
from hybridrl.notify import notify
from hybridrl.protocol.names import IMAGE_FILES, MULTI_MODAL_INPUTS
from hybridrl.rollout.request_images import PromptImages, split_images
from hybridrl.rollout.trace import training_trace, write_trace
from hybridrl.scored import Unscored, UnscoredError


@register("gateway_agent", reads=("gateway",))
class GatewayAgentLoop(AgentLoopBase):
    """Runs `agent.function` or `agent.command` in a session on the run's server, and takes the turns of that session.

    The agent returns the session's score; if it returns None, the reward function scores. Each branch of the session
    is an output. Every generated token has a mask of 1 in exactly one of them.

    An agent that raises, or ends with an exit code, when its last request did not fit into `data.max_response_length`
    counts as truncated: its turns are kept, and the reward function scores them. A session whose agent was killed has
    no score.
    """

    uses_gateway: ClassVar[bool] = True

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        assert self.gateway is not None  # `uses_gateway`
        session, started = self.server_manager, time.perf_counter()
        row = _row_of_agent(kwargs)
        result, closed = await self.gateway.run(session.complete, session.sampling, row)
        session.raise_failure()
        session.log.messages = closed.messages
        await self._write_trace(closed.trace, f"{row.get('uid', '')}-{row.get('sample', 0)}")
        if closed.messages is None:  # the agent's result may follow from unanswered requests
            raise RolloutError("the run's server restarted while the agent's session was open")
        if isinstance(result, AgentFailed):
            if not (closed.cut and result.by_itself and session.generated):
                raise result
            result = None
        if isinstance(result, Unscored):
            raise UnscoredError(result.reason, result.detail)
        branches = session.tree().branches()
        if not branches:
            raise RolloutError("the agent ended without an answer of the model; it must call the base URL that it gets")
        seconds = time.perf_counter() - started
        outputs = [
            AgentLoopOutput(
                branch.prompt_ids,
                branch.token_ids,
                branch.mask,
                num_turns=2 * len(branch.turns),
                multi_modal_data={"images": _images_of(session.images_of_calls[branch.turns[-1].index])},
                extra_fields={"agent_requests_too_long": closed.too_long},
            )
            for branch in branches
        ]
        # the session's score stands at the end of its last branch
        outputs[-1].reward_score = result
        generating = min(session.seconds, seconds)
        outputs[-1].metrics = AgentLoopMetrics(generate_sequences=generating, tool_calls=seconds - generating)
        return outputs

    async def _write_trace(self, trace: Mapping[str, Any] | None, name: str) -> None:
        """Write the session's trace into `agent.trace_dir`. Without one, make it from the generated turns."""
        folder = self.rollout_config.agent.trace_dir
        if folder is None:
            return
        if trace is None:  # the server has restarted meanwhile
            trace = training_trace(self.server_manager.tree())
        try:
            await asyncio.to_thread(write_trace, Path(folder), name, trace)
        except OSError as error:
            notify(f"the traces of sessions cannot be written into {folder}: {error}", "warning", once=True)


def _row_of_agent(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns of a row that an agent gets. Images are in the prompt, as in OpenAI's chat API."""
    own = {name: value for name, value in row.items() if name not in ("prompt_ids", IMAGE_FILES, MULTI_MODAL_INPUTS)}
    files = row.get(IMAGE_FILES)
    if files:
        own["raw_prompt"] = with_data_urls(row["raw_prompt"], files)
    return own


def _images_of(images: PromptImages | None) -> list[ImageTensors]:
    """Return the images of a call, one entry per image."""
    return [] if images is None else split_images(tensors_of(images))
