"""One interface for generation, by the training weights in place or by separate engines.

Shapes: B rows, P prompt width (left-padded), T response width (right-padded).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from hybridrl.config import RolloutConfig
from hybridrl.errors import RolloutError
from hybridrl.models.model_config import config_of
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import IMAGE_DIGEST, IMAGE_MASK, MULTI_MODAL_INPUTS
from hybridrl.protocol.sample_names import request_names
from hybridrl.rollout.batch import batch_of, images_of, requests_of
from hybridrl.rollout.client import GenerationClient, PoolClient, TurnClient
from hybridrl.rollout.replicas.replica_supervisor import Supervisor
from hybridrl.rollout.request import MEMORY_TAGS, CompletionArrays, request_number
from hybridrl.rollout.trajectory import Trajectory
from hybridrl.utils.clock import OverlappingSeconds

OnFinished = Callable[[Sequence[Trajectory]], None]
_MODEL_INPUTS = ("input_ids", "attention_mask", "position_ids")
_OBJECTS = ("uid", "sample", MULTI_MODAL_INPUTS)
_COUNTERS = ("generated_tokens", "prompt_tokens", "prefix_cache_queries", "prefix_cache_hits")


class Rollout(ABC):
    """Generates responses with the policy's weights, as they were when `update_weights` was last called.

    Attributes:
        version: number of training steps of those weights; -1 before the first update.
        in_place: the training weights themselves generate, so there is nothing to send or release.
        gives_memory_back: `release` frees device memory.
        server: the `hybridrl.serve.RunServer` that serves it over HTTP; None where it is not served.
    """

    version: int = -1
    in_place: bool = False
    gives_memory_back: bool = False
    server: Any = None

    @abstractmethod
    def generate(self, prompts: DataProto, on_finished: OnFinished | None = None) -> DataProto:
        """One response per row, in the rows' order.

        Args:
            prompts: tensors `input_ids`, `attention_mask`, `position_ids` [B, P], left-padded; non-tensors `uid` (one
                per prompt) and, where a prompt has several rows, `sample` (which of them), and other columns of the
                prompts (`raw_prompt`, `extra_info`, ...); meta `global_steps`, `validate`, `attempt` (how often these
                samples were asked for before, 0 where it is missing; another attempt draws other tokens), `seeded`
                (every request draws with its own seed, so that other requests do not matter), `routed_experts` (return
                this field, if the engine's metadata have `records_routing`), and any field of `SamplingParams`.
                `multi_modal_inputs` are the images of prompts; `position_ids` are [B, 4, P] then.
            on_finished: is called, in any thread, with the trajectories of each sample as soon as it is complete, while
                others are generated. A rollout that returns all responses at once does not call it.

        Returns:
            A batch of tensors in the prompts' order: `prompts` [B, P], `responses` [B, T], `input_ids`,
            `attention_mask`, `position_ids` [B, P + T], `response_mask` [B, T], `rollout_log_probs` [B, T] and
            `weight_versions` [B, T] (the `version` that each token was generated with); T is `rollout.response_length`.
            Its non-tensors are those of `batch_of`: `uid`, `sample`, and what a trajectory has besides. The meta
            `missing_samples` lists an `UnscoredSample` for each sample without an answer.
        """

    @abstractmethod
    def update_weights(self, version: int) -> dict[str, float]:
        """Generate with the policy's present weights from here on.

        Responses in flight wait, keep their tokens, and continue under the new weights.

        Returns:
            Metrics of the transfer.
        """

    def weights_will_change(self) -> None:  # noqa: B027
        """Take no weights from the policy until the next `update_weights`, because training is about to change them.

        Returns when a transfer or a turn that has begun is complete. `Learner` calls it before each change.
        """

    def release(self, tags: Sequence[str] = MEMORY_TAGS, training: bool = False) -> None:
        """Training begins: return the device memory of generation to it (with "weights" the weights are lost).

        Args:
            training: requests, in flight or new ones, wait for the next `update_weights`. Otherwise the next
                `generate` takes the memory back.
        """
        self.weights_will_change()

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:  # noqa: B027
        """Take that memory back."""

    def resume_for_requests(self) -> None:
        """Take that memory back because there is something to generate, unless training has it (see `release`)."""
        self.resume()

    def lend_cache(self) -> None:  # noqa: B027
        """Return the memory of the KV cache, with unchanged weights, until there is something to generate."""

    def pause(self) -> None:
        """Stop generating; requests in flight keep their tokens.

        The trainers do not call it, nor `unpause` and `abort`: they are for dataflows in which others generate as well.

        Raises:
            RolloutError: requests cannot be held.
        """
        raise self._undefined("pause")

    def unpause(self) -> None:
        """Continue generating."""
        raise self._undefined("unpause")

    def abort(self) -> None:
        """End requests in flight: `generate` returns the tokens generated so far."""
        raise self._undefined("abort")

    def _undefined(self, method: str) -> RolloutError:
        return RolloutError(f"{type(self).__name__} cannot hold or end requests: it defines no {method}()")

    @abstractmethod
    def client(self) -> GenerationClient:
        """Single requests, with token ids in and out; many sessions may ask at the same time.

        Requests wait while training changes the weights, and go on after the next `update_weights`.
        """

    def health(self) -> list[str]:
        """The state of each replica or worker in one word, such as `ready`; empty if it has none."""
        return []

    def check_running(self) -> None:  # noqa: B027
        """Raise the error that has ended generation for good, if there is one."""

    def metrics(self) -> dict[str, float]:
        """Metrics accumulated since the previous call."""
        return {}

    def close(self) -> None:  # noqa: B027
        """End what was started for generation."""


class InPlaceRollout(Rollout):
    """The training workers also generate, with the present weights, so that they are never out of date.

    Args:
        policy: a worker group with `generate_sequences`.
        config: `actor_rollout_ref.rollout`.
    """

    in_place = True

    def __init__(self, policy: Any, config: RolloutConfig) -> None:
        self._policy = policy
        self._config = config
        self._client: TurnClient | None = None
        self._trains = self._paused = False
        #: called before the client is closed
        self.on_close: list[Callable[[], None]] = []

    def generate(self, prompts: DataProto, on_finished: OnFinished | None = None) -> DataProto:
        tensors = [name for name in (*_MODEL_INPUTS, IMAGE_MASK) if name in prompts.batch.keys()]
        objects = [name for name in _OBJECTS if name in prompts.non_tensor_batch]
        inputs = prompts.select(tensors, objects)  # all that travels to the workers
        inputs.meta_info["weights_version"] = self.version
        batch: DataProto = self._policy.generate_sequences(inputs)
        return batch

    def update_weights(self, version: int) -> dict[str, float]:
        self.version = version
        self._trains = False
        self._open_or_hold()
        return {}

    def weights_will_change(self) -> None:
        """Serve no turn of the client until `update_weights`."""
        self._trains = True
        self._open_or_hold()

    def pause(self) -> None:
        """Begin no further turn of the client. A call to the workers cannot be interrupted: they finish it."""
        self._paused = True
        self._open_or_hold()

    def unpause(self) -> None:
        self._paused = False
        self._open_or_hold()

    def abort(self) -> None:
        """End the requests that wait for a turn."""
        if self._client is not None:
            self._client.abort_waiting()

    def client(self) -> TurnClient:
        """Requests are served turn by turn: those that wait become one batch."""
        if self._client is None:
            self._client = TurnClient(self.generate, self._config, int(self._policy.world_size), lambda: self.version)
            self._open_or_hold()
        return self._client

    def _open_or_hold(self) -> None:
        if self._client is None:
            return
        if self.version < 0 or self._trains or self._paused:
            self._client.hold()
        else:
            self._client.open()

    def close(self) -> None:
        for call in self.on_close:
            call()
        if self._client is not None:
            self._client.close()

    def health(self) -> list[str]:
        return ["ready"] * int(self._policy.world_size)


class ReplicatedRollout(Rollout):
    """Generates with replicas of an engine.

    Args:
        supervisor: of the replicas; started before anything is generated.
    """

    def __init__(self, supervisor: Supervisor) -> None:
        self.supervisor, self.scheduler = supervisor, supervisor.scheduler
        self._config = supervisor.settings.spec.config
        self._model = config_of(supervisor.settings.spec.model)
        self.gives_memory_back = self._config.free_cache_engine and bool(supervisor.replicas[0].placement.devices)
        self._seconds = OverlappingSeconds()
        self._trains = False
        self._before: dict[str, dict[str, float]] = {}
        self._restarts = self._rerun = self._joined = self._left = 0
        #: called before the replicas are closed
        self.on_close: list[Callable[[], None]] = []

    def generate(self, prompts: DataProto, on_finished: OnFinished | None = None) -> DataProto:
        self.resume_for_requests()
        images = images_of(prompts, self._model, self._config.limit_images)
        requests = requests_of(prompts, self._config, request_number, images)
        names, seeing = request_names(prompts), MULTI_MODAL_INPUTS in prompts.non_tensor_batch

        def trajectory(number: int, completion: CompletionArrays) -> Trajectory:
            extra = {IMAGE_DIGEST: completion.image_digest} if seeing else {}
            return Trajectory.single_turn(requests[number].prompt_ids, completion, *names[number], extra=extra)

        def done(number: int, completion: CompletionArrays) -> None:
            assert on_finished is not None
            on_finished([trajectory(number, completion)])

        with self._seconds.measured():
            completions = self.scheduler.generate(requests, None if on_finished is None else done)
        trajectories = [trajectory(number, completion) for number, completion in enumerate(completions)]
        positions = prompts.batch["position_ids"]
        return batch_of(
            trajectories,
            self.supervisor.settings.spec.pad_token_id,
            prompt_width=prompts.batch["input_ids"].shape[1],
            response_width=self._config.response_length,
            prompt_positions=positions if positions.ndim > 2 else None,
        )

    def resume_for_requests(self) -> None:
        if not self._trains:
            self.supervisor.resume()  # the KV cache is released until there is something to generate

    def update_weights(self, version: int) -> dict[str, float]:
        self.supervisor.resume(["weights"])
        report = self.supervisor.update_weights(version)
        self.version = version
        if self._trains:
            self._trains = False
            if self.scheduler.in_flight:
                self.supervisor.resume()
        if not report:
            return {}
        sent = max(part.bytes for part in report)
        seconds = max(part.seconds for part in report)
        metrics = {
            "rollout/update_weights_s": seconds,
            "rollout/update_weights_gb_per_s": sent / 1e9 / max(seconds, 1e-9),
            "rollout/update_weights_buckets": float(max(part.buckets for part in report)),
        }
        received = max(part.received for part in report)
        if received >= 0:
            metrics["rollout/update_weights_received_gb"] = received / 1e9
        if report[0].saved is not None:
            metrics["rollout/update_weights_saved_gb"] = sum(part.saved for part in report) / 1e9
        return metrics

    def weights_will_change(self) -> None:
        self.supervisor.weights_will_change()

    def release(self, tags: Sequence[str] = MEMORY_TAGS, training: bool = False) -> None:
        self._trains = training
        self.supervisor.weights_will_change()
        if self._config.free_cache_engine:
            self.supervisor.release(tags)

    def resume(self, tags: Sequence[str] = MEMORY_TAGS) -> None:
        self.supervisor.resume(tags)

    def lend_cache(self) -> None:
        if self._config.free_cache_engine:
            self.supervisor.release(["kv_cache"])

    def pause(self) -> None:
        self.supervisor.pause()

    def unpause(self) -> None:
        self.supervisor.unpause()

    def abort(self) -> None:
        self.scheduler.abort()

    def client(self) -> PoolClient:
        return PoolClient(self.supervisor)

    def health(self) -> list[str]:
        return self.supervisor.health()

    def check_running(self) -> None:
        if self.scheduler.error is not None:
            raise self.scheduler.error

    def metrics(self) -> dict[str, float]:
        now = {index: part for index, part in self.supervisor.statistics().items() if "generated_tokens" in part}
        since = dict.fromkeys(_COUNTERS, 0.0)
        for index, part in now.items():
            before = self._before.get(index, {})
            for name in _COUNTERS:  # a restarted replica counts from zero
                count, previous = part.get(name, 0.0), before.get(name, 0.0)
                since[name] += count - previous if count >= previous else count
        metrics = {
            "rollout/replicas": float(len(now)),
            "rollout/restarts": float(self.supervisor.restarts - self._restarts),
            "rollout/requests_rerun": float(self.scheduler.rerun - self._rerun),
            "rollout/in_flight/max": float(self.scheduler.take_peak()),
            "rollout/prompt_tokens": since["prompt_tokens"],
            "rollout/prefix_cache_hit_rate": since["prefix_cache_hits"] / max(since["prefix_cache_queries"], 1.0),
        }
        if self.supervisor.settings.bounds is not None:
            metrics["rollout/replicas_joined"] = float(self.supervisor.replicas_joined - self._joined)
            metrics["rollout/replicas_left"] = float(self.supervisor.replicas_left - self._left)
            self._joined, self._left = self.supervisor.replicas_joined, self.supervisor.replicas_left
        if seconds := self._seconds.take():
            metrics["rollout/tokens_per_s"] = since["generated_tokens"] / seconds
        self._before, self._restarts, self._rerun = now, self.supervisor.restarts, self.scheduler.rerun
        return metrics

    def close(self) -> None:
        for call in self.on_close:
            call()
        self.supervisor.close()
