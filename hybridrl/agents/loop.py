"""The interface of agent loops: the conversation of one session, with token ids in and out."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

from hybridrl.agents.environments.load_environments import Environments
from hybridrl.agents.gateway import AgentHost, AgentRunner, Gateway, program_of
from hybridrl.agents.interactions.load_interactions import Interactions
from hybridrl.agents.tools.tool import BaseTool
from hybridrl.chat.log import SessionLog
from hybridrl.chat.parsers.tool_parser import ToolParser
from hybridrl.chat.session_images import SeenImages
from hybridrl.chat.turns import Turns
from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.chat import Message
from hybridrl.models.vision import ImageTensors
from hybridrl.notify import notify
from hybridrl.registry import AGENT_LOOPS
from hybridrl.rollout.client import GenerationClient
from hybridrl.rollout.request import TRAINING_PRIORITY, Completion, Request, request_number
from hybridrl.rollout.request_images import PromptImages, split_images
from hybridrl.rollout.sampling import SamplingParams
from hybridrl.rollout.token_tree import TokenTree
from hybridrl.scored import Scored, Unscored
from hybridrl.utils.entry_metadata import AgentLoopMetadata

T = TypeVar("T", bound="type[AgentLoopBase]")

#: verl's names of sampling settings -> those of `SamplingParams`
_NAMES = {"max_tokens": "max_new_tokens"}
_SETTINGS = ("do_sample", "temperature", "top_p", "top_k", "max_new_tokens", "ignore_eos", "stop", "seed")
_WITHOUT_EFFECT = ("logprobs",)  # log-probabilities are always returned


@dataclass
class AgentLoopMetrics:
    """Seconds that a session spent."""

    generate_sequences: float = 0.0
    tool_calls: float = 0.0
    compute_score: float = 0.0
    num_preempted: int = -1


@dataclass
class AgentLoopOutput:
    """The output of a session, or of a part of one, for training; the fields are verl's.

    Attributes:
        prompt_ids: tokens before the first generated one.
        response_ids: every token after them: those that the policy generated, and those of tools and users.
        response_mask: 1 for each token to train on, which the policy must have generated at this place in this
            session; 0 for the others.
        response_logprobs: not read, because the sampler's own are known; verl's loops give them.
        reward_score: the score, or a `Scored` whose `extra` becomes columns; None leaves it to the reward function.
            With an `Unscored` in any output, the whole session is missing: its sample is generated again or leaves its
            group, as `algorithm.missing` says.
        num_turns: of user, model and tools together.
        metrics: seconds per activity.
        extra_fields: further columns of the batch.
        routed_experts: not read, because the sampler's own are known; verl's loops give them.
        multi_modal_data: `{"images": [...]}`: all images of the trajectory in order, as the last request had them as
            `image_data`. None takes those of that request.
        turn_rewards: (place in `response_ids`, reward) of turns: the last token of each, which the policy generated.
            They are added to the score, at that token.
        turn_states: (place, state) of turns: what identifies the situation before the turn that ends there, by its
            `repr`; see `gigpo`.
    """

    prompt_ids: Sequence[int]
    response_ids: Sequence[int]
    response_mask: Sequence[int]
    response_logprobs: Sequence[float] | None = None
    reward_score: float | Scored | Unscored | None = None
    num_turns: int = 0
    metrics: AgentLoopMetrics | Mapping[str, float] = field(default_factory=AgentLoopMetrics)
    extra_fields: dict[str, Any] = field(default_factory=dict)
    routed_experts: Any = None
    multi_modal_data: Mapping[str, Any] | None = None
    turn_rewards: Sequence[tuple[int, float]] = ()
    turn_states: Sequence[tuple[int, Any]] = ()

    def __post_init__(self) -> None:
        if len(self.response_mask) != len(self.response_ids):
            raise RolloutError(
                f"an agent loop returned {len(self.response_ids)} response_ids and a response_mask of "
                f"{len(self.response_mask)}; give one entry per token"
            )
        if others := [name for name, media in (self.multi_modal_data or {}).items() if media and name != "images"]:
            raise RolloutError(f"an agent loop returned {others[0]} in multi_modal_data; images are supported")


@dataclass
class TokenOutput:
    """Tokens that the policy generated; the fields are verl's.

    Attributes:
        token_ids: generated tokens, the one that ends the turn included.
        log_probs: of each, see `Completion`.
        stop_reason: "stop", "length" or "abort".
        versions: (version of the weights, tokens that they generated), in order.
        routed_experts: where they are recorded, see `Completion`.
    """

    token_ids: list[int]
    log_probs: list[float]
    stop_reason: str
    versions: list[tuple[int, int]] = field(default_factory=list)
    num_preempted: int | None = None
    routed_experts: Any = None
    extra_fields: dict[str, Any] = field(default_factory=dict)


class GenerationFailedError(Exception):
    """Generation as a whole failed, which is no fault of a session; the cause has the reason."""


class SessionClient:
    """Generates for one session, and remembers what was generated. Loops have it as `server_manager`.

    Args:
        client: of the rollout.
        sampling: the settings of the step.
        max_tokens: most tokens of a prompt and what follows it.
        session: its name, for requests that share a replica.
        seed_of: the seed of the turn with a number; None: the engine's own stream.
        trains: what is generated is trained on.
        images: those of the session; None: the model reads text alone.
        routing: the experts of the tokens are wanted.

    Attributes:
        log: what happens in the session. `generate` is noted by itself; `log.add` notes more.
    """

    def __init__(
        self,
        client: GenerationClient,
        sampling: SamplingParams,
        max_tokens: int,
        session: str,
        seed_of: Callable[[int], int | None],
        trains: bool = True,
        images: SeenImages | None = None,
        routing: bool = False,
    ) -> None:
        self.images = images
        self._routing = routing
        self.client = client
        self._sampling = sampling
        self._max_tokens = max_tokens
        self._session = session
        self._seed_of = seed_of
        self._trains = trains
        #: (prompt, completion) of each call
        self.generated: list[tuple[list[int], Completion]] = []
        self.log = SessionLog()
        self._turns = 0
        self._failure: Exception | None = None
        self._seconds = 0.0

    @property
    def sampling(self) -> SamplingParams:
        """The settings of the step."""
        return self._sampling

    @property
    def seconds(self) -> float:
        """Spent on requests of `complete`, summed over them."""
        return self._seconds

    async def complete(self, request: Request) -> Completion:
        """Generate the completion of a gateway agent's request. May be called in another thread.

        A request that was aborted, because the agent has gone, is no part of the session. The request's own seed is not
        used: with it, all samples of a prompt would be alike.
        """
        turn = self._turns
        self._turns += 1
        sampling = request.sampling
        self._warn_of_difference(sampling, "an agent behind the gateway")
        if sampling.seed is not None:
            notify(
                "an agent behind the gateway sets a seed, which is not used: with it, all samples of a prompt would be "
                "alike. Turns have seeds of the run",
                "warning",
                once=True,
            )
        room = self._max_tokens - len(request.prompt_ids)
        if room < 1:
            error = f"the prompt has {len(request.prompt_ids)} tokens; prompt and response may have {self._max_tokens}"
            return Completion(request.id, [], [], "error", error=error)
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room), seed=self._seed_of(turn))
        began = self.log.clock()
        try:
            completion = await self.client.generate(
                replace(request, sampling=sampling, priority=TRAINING_PRIORITY, routing=self._routing)
            )
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._seconds += self.log.clock() - began
        if completion.finish_reason in ("stop", "length"):
            self._note(list(request.prompt_ids), completion, began, request.images)
        return completion

    def _note(self, prompt: list[int], completion: Completion, began: float, images: PromptImages | None) -> None:
        """Add what was generated to the session's record.

        Raises:
            RolloutError: the engine generated from other images than it was given.
        """
        digest = "" if images is None else images.digest()
        if self.images is not None and completion.token_ids and completion.image_digest != digest:
            raise RolloutError("a session's response was generated from other images than those of its request")
        self.generated.append((prompt, completion))
        if self.images is not None:
            self.images.requests.append(images)
        self.log.add(
            "generate",
            began,
            prompt_tokens=len(prompt),
            tokens=len(completion.token_ids),
            finish_reason=completion.finish_reason,
        )

    def tree(self) -> TokenTree:
        """The calls so far, linked by their tokens and images."""
        tree = TokenTree()
        for (prompt, completion), images in zip(self.generated, self.images_of_calls, strict=True):
            tree.add(prompt, completion, () if images is None else images.in_tokens())
        return tree

    @property
    def images_of_calls(self) -> list[PromptImages | None]:
        """The images of each call."""
        return [None] * len(self.generated) if self.images is None else self.images.requests

    def raise_failure(self) -> None:
        """Pass on that `complete` could not generate any more.

        Raises:
            GenerationFailedError: see `generate`.
        """
        if self._failure is not None:
            raise GenerationFailedError from self._failure

    async def generate(
        self,
        request_id: str | None = None,
        *,
        prompt_ids: Sequence[int],
        sampling_params: Mapping[str, Any] | None = None,
        image_data: Sequence[Any] | None = None,
        **media: Any,
    ) -> TokenOutput:
        """Generate the tokens that follow a prompt.

        Args:
            request_id: verl's argument; requests of a session share a replica without it.
            prompt_ids: all tokens before.
            sampling_params: settings that differ from those of the step: `temperature`, `top_p`, `top_k`,
                `max_tokens` (or `max_new_tokens`), `do_sample`, `ignore_eos`, `stop`, `seed`.
            image_data: all images of the prompt in the order of their placeholders: PIL images, or their patches.
            media: must be empty.

        Raises:
            RolloutError: the request is refused; the session has failed.
            GenerationFailedError: nothing can be generated any more.
        """
        if any(media.values()):
            raise RolloutError(f"an agent loop asked for {', '.join(media)}, not supported; use text and images")
        if image_data and self.images is None:
            raise RolloutError("an agent loop gave image_data, and the model reads text alone")
        prompt, turn = list(prompt_ids), self._turns
        self._turns += 1
        sampling = self._settings(sampling_params or {}, turn)
        room = self._max_tokens - len(prompt)
        if room < 1:
            raise RolloutError(
                f"a session's prompt has {len(prompt)} tokens, and prompt and response may have {self._max_tokens}; "
                "raise actor_rollout_ref.rollout.max_model_len or response_length, or end the session before"
            )
        sampling = replace(sampling, max_new_tokens=min(sampling.max_new_tokens, room))
        images = None
        if self.images is not None:
            read = await self.images.read(image_data or ())
            images = self.images.reader.in_request(prompt, read, self.generated)
        name = f"{self._session}-{request_number()}"
        request = Request(name, prompt, sampling, session=self._session, images=images, routing=self._routing)
        began = self.log.clock()
        try:
            completion = await self.client.generate(request)
        except Exception as error:
            raise GenerationFailedError from error
        if completion.finish_reason == "error":
            raise RolloutError(f"the rollout refused a session's request: {completion.error}")
        self._note(prompt, completion, began, images)
        return TokenOutput(
            list(completion.token_ids),
            list(completion.log_probs),
            completion.finish_reason,
            list(completion.versions),
            routed_experts=completion.routed_experts,
        )

    def _settings(self, sampling_params: Mapping[str, Any], turn: int) -> SamplingParams:
        changes = {
            _NAMES.get(name, name): value for name, value in sampling_params.items() if name not in _WITHOUT_EFFECT
        }
        if changes.get("repetition_penalty") == 1.0:
            changes.pop("repetition_penalty")
        if unknown := changes.keys() - set(_SETTINGS):
            raise RolloutError(
                f"an agent loop set {', '.join(sorted(unknown))} in sampling_params; choose from {', '.join(_SETTINGS)}"
            )
        if "stop" in changes:
            stop = changes["stop"] or ()
            changes["stop"] = (stop,) if isinstance(stop, str) else tuple(stop)
        sampling = replace(self._sampling, **{"seed": self._seed_of(turn), **changes})
        self._warn_of_difference(sampling, "an agent loop")
        return sampling

    def _warn_of_difference(self, sampling: SamplingParams, who: str) -> None:
        """Warn where tokens to train on come from another distribution than that which training computes."""
        of_run = self._sampling
        if self._trains and sampling.json_schema is not None:
            notify(
                f"{who} keeps its answers to a JSON schema: their tokens are sampled from what the schema leaves of "
                "the policy's distribution, and training computes log-probabilities without it. Ask for the format in "
                "the prompt",
                "warning",
                once=True,
            )
        if not self._trains or not (sampling.do_sample or of_run.do_sample):
            return
        names = ("temperature", "top_p", "top_k") if sampling.do_sample and of_run.do_sample else ("do_sample",)
        differing = [name for name in names if getattr(sampling, name) != getattr(of_run, name)]
        if differing:
            notify(
                f"{who} samples with {_listed(sampling, differing)}, and training computes log-probabilities with "
                f"actor_rollout_ref.rollout.{_listed(of_run, differing)}: on tokens with response_mask 1 they are "
                "those of another distribution. Set both alike, or give such tokens response_mask 0",
                "warning",
                once=True,
            )


def _listed(sampling: SamplingParams, names: Sequence[str]) -> str:
    return ", ".join(f"{name}={getattr(sampling, name)}" for name in names)


class AgentLoopBase(ABC):
    """The conversation of one session. Derive from it, and register the class with `register(name)`.

    There is one object per session, and all sessions of a process share one event loop: `run` must not block. What it
    does besides `await self.server_manager.generate(...)` takes time from the others. Sessions run in worker processes
    (`rollout.agent.num_workers`), each with its own copy of the class.

    Args:
        trainer_config: `actor_rollout_ref` is read from it.
        server_manager: generates.
        tokenizer: the policy's.
        tools: by name.
        parser: finds the calls in a turn; None where there are no tools.
        turns: makes the tokens between turns.
        kwargs: verl's further arguments, and those of the loop's entry in `rollout.agent.agent_loop_config_path`.

    Attributes:
        rollout_config: `actor_rollout_ref.rollout`.
        tool_schemas: descriptions of the tools, for the chat template.
        loop: the event loop; `loop.run_in_executor` runs what would block it.
        processor, data_config: verl's attributes: None, and `data`.
        environments: those of the run; None where no loop of the run uses them.
        interactions: simulated users of the run; None where it has none.
        uses_environments: of the class: its sessions act on environments, which the run starts.
        gateway: runs the agents of this loop against the run's server; None where the class has none.
        uses_gateway: of the class: its sessions are agents behind the run's server, which `start_agents` starts.
        agent_settings: of the class: the settings of `rollout.agent` that its agents read.
        only_generates: of the class: its sessions only ask the model, which needs no worker process.
        needs_columns: of the class: columns besides the prompt that the data of its rows must have.
    """

    uses_environments: ClassVar[bool] = False
    uses_gateway: ClassVar[bool] = False
    agent_settings: ClassVar[Sequence[str]] = (
        "function",
        "command",
        "timeout_s",
        "max_running",
        "sampling",
        "match",
        "trace_dir",
    )
    only_generates: ClassVar[bool] = False
    needs_columns: ClassVar[Sequence[str]] = ()

    @classmethod
    def runs_on_controller(cls) -> bool:
        """Whether its sessions run in the controller's process, whatever `rollout.agent.num_workers` is."""
        return cls.only_generates or cls.uses_gateway

    def __init__(
        self,
        *,
        trainer_config: Any,
        server_manager: SessionClient,
        tokenizer: Any,
        tools: Mapping[str, BaseTool],
        parser: ToolParser | None,
        turns: Turns,
        **kwargs: Any,
    ) -> None:
        self.config = trainer_config
        self.rollout_config = trainer_config.actor_rollout_ref.rollout
        self.server_manager = server_manager
        self.tokenizer = tokenizer
        self.tools = tools
        self.tool_schemas = [tool.tool_schema for tool in tools.values()]
        self.tool_parser = parser
        self.turns = turns
        self.loop = asyncio.get_running_loop()
        self.processor, self.data_config = kwargs.get("processor"), kwargs.get("data_config")
        self.environments: Environments | None = kwargs.get("environments")
        self.gateway: Gateway | None = kwargs.get("gateway")
        self.interactions: Interactions | None = kwargs.get("interactions")

    @abstractmethod
    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """The session from its prompt to its end.

        Args:
            sampling_params: the settings of the step, which `server_manager.generate` also takes.
            kwargs: the row: `raw_prompt` (messages), `prompt_ids` (their tokens), and every other column.

        Returns:
            One output, or several whose order is that of the session, for example where the context was cut.
        """

    @classmethod
    def start_agents(cls, rollout: RolloutConfig, arguments: Mapping[str, Any]) -> AgentRunner:
        """Start the runner of the agents, once per run; called if the class has `uses_gateway`.

        Args:
            rollout: `actor_rollout_ref.rollout`.
            arguments: of the loop's entry in `agent_loop_config_path`.

        Returns:
            Here: processes with `agent.function` or `agent.command`.

        Raises:
            RolloutError: it cannot start.
        """
        return AgentHost(program_of(rollout))

    async def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """The tokens of a conversation, and the opening of the model's turn."""
        return self.turns.prompt(await self.prepared(messages), tools)

    async def prepared(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Messages as `turns` takes them: their images, `{"type": "image", "image": ...}`, become patches.

        Raises:
            RolloutError: an image cannot be read, or the model reads text alone.
        """
        if self.server_manager.images is not None:
            return await self.server_manager.images.reader.prepared(messages)
        parts = [part for entry in messages if isinstance(entry.get("content"), list) for part in entry["content"]]
        if any(part.get("type") != "text" for part in parts):
            raise RolloutError("a message of a session has an image, and the model reads text alone; use text")
        return [dict(message) for message in messages]

    def row_images(self, row: Mapping[str, Any]) -> list[ImageTensors]:
        """The images of the data's row, each as patches."""
        tensors = row.get("multi_modal_inputs")
        return split_images(tensors) if tensors else []


def register(agent_name: str, *, only_answers: bool = False, reads: Sequence[str] = ()) -> Callable[[T], T]:
    """Class decorator: rows with this `agent_name`, or `rollout.agent.default_agent_loop`, use this loop.

    Args:
        only_answers: it answers each prompt once, so tools and simulated users next to it are refused as unread.
        reads: see `hybridrl.utils.entry_metadata.AgentLoopMetadata`; a loop of a user's own may read every setting.
    """

    def add(loop: T) -> T:
        AGENT_LOOPS.add(agent_name, loop, AgentLoopMetadata(only_answers=only_answers, reads=tuple(reads)))
        return loop

    return add
