"""Turns rows into responses, with processes of the cluster or with an endpoint."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa
import torch

from hybridrl.config import GenerationConfig
from hybridrl.data import DataError, RLHFDataset, create_rl_dataset
from hybridrl.data.data_files import read_table
from hybridrl.data.last_turn import CONTINUE, prompt_hint, split_last_turn, table_with_answers
from hybridrl.data.loader import PromptCollator
from hybridrl.data.row_selection import choose_rows, pad_token_id, seed_of
from hybridrl.errors import UserError
from hybridrl.models.chat import as_messages, check_prompt
from hybridrl.models.vision import processor_of
from hybridrl.protocol import DataProto, object_array
from hybridrl.protocol.names import MULTI_MODAL_INPUTS
from hybridrl.reward.positions import response_lengths
from hybridrl.trainer.generation.output_file import Response
from hybridrl.trainer.generation.processes import Endings, Endpoint, EndpointResponse, sampling_of
from hybridrl.trainer.ppo.batching import repeat_for_sampling


class Responder(Protocol):
    """Generates responses to the rows of the data.

    Attributes:
        rows: the rows that get responses, in order.
        in_flight: number of parts that it works on at once, each in its own thread.
    """

    rows: pa.Table
    in_flight: int

    def respond(self, items: Sequence[int]) -> list[list[Response]]:
        """Return `n_samples` responses to each of these rows."""
        ...


class ClusterResponder:
    """Tokenises the prompts here. `generate` returns the responses as tokens.

    Args:
        config: the whole configuration.
        dataset: the prompts.
        tokenizer: turns responses into text.
        endings: determines how a response ended.
    """

    def __init__(self, config: GenerationConfig, dataset: RLHFDataset, tokenizer: Any, endings: Endings) -> None:
        self.config = config
        self.dataset = dataset
        self.tokenizer = tokenizer
        self.endings = endings
        self.in_flight = 1
        self.generate: Callable[[DataProto], DataProto]
        self._collate = PromptCollator(pad_token_id(tokenizer))
        self.rows = dataset.table.arrow().take(pa.array(dataset.indices))

    @classmethod
    def of(cls, config: GenerationConfig, tokenizer: Any, endings: Endings) -> "ClusterResponder":
        """Create one with the prompts that `data` names.

        Raises:
            DataError: the files or rows cannot be used.
        """
        data = config.data
        processor = processor_of(config.actor_rollout_ref.model, data.mm_processor_kwargs)
        dataset = create_rl_dataset(data.path, data, tokenizer, data.max_samples, "data.path", processor)
        if not isinstance(dataset, RLHFDataset):
            raise DataError(
                f"data.custom_cls: {type(dataset).__name__} is not derived from hybridrl.data.RLHFDataset, so which "
                "columns of the input to keep is not known; derive it from that"
            )
        return cls(config, dataset, tokenizer, endings)

    def respond(self, items: Sequence[int]) -> list[list[Response]]:
        rows = [self.dataset[item] for item in items]
        tensors, objects = self._collate(rows)
        uids = object_array([f"0-{index}" for index in objects["index"]])  # noise depends on the row, as in training
        n = self.config.data.n_samples
        columns = {"uid": uids}
        if MULTI_MODAL_INPUTS in objects:
            columns[MULTI_MODAL_INPUTS] = object_array(objects[MULTI_MODAL_INPUTS])
        prompts = repeat_for_sampling(DataProto.from_dict(tensors=tensors, non_tensors=columns), n)
        prompts = prompts.select(non_tensor_batch_keys=[*columns, "sample"])
        prompts.meta_info = {"global_steps": 0, "validate": False, "seeded": True}
        return self._read(self.generate(prompts), [len(row["input_ids"]) for row in rows])

    def _read(self, batch: DataProto, prompt_tokens: Sequence[int]) -> list[list[Response]]:
        """Return the responses of a batch with `n_samples` rows per prompt."""
        tensors = batch.batch
        lengths: list[int] = response_lengths(batch).tolist()  # the mask may have holes
        tokens = [ids[:length] for ids, length in zip(tensors["responses"].tolist(), lengths, strict=True)]
        texts = self.tokenizer.batch_decode(tokens, skip_special_tokens=True)
        keep = self.config.data.log_probs
        log_probs: torch.Tensor | None = tensors["rollout_log_probs"] if keep else None
        n = self.config.data.n_samples
        responses: list[list[Response]] = [[] for _ in prompt_tokens]
        for row, (ids, text) in enumerate(zip(tokens, texts, strict=True)):
            responses[row // n].append(
                Response(
                    text=text,
                    finish_reason=self.endings.reason(ids),
                    prompt_tokens=prompt_tokens[row // n],
                    tokens=len(ids),
                    token_ids=ids if keep else None,
                    log_probs=log_probs[row, : len(ids)].tolist() if log_probs is not None else None,
                )
            )
        return responses


class EndpointResponder:
    """Sends messages to an endpoint, which renders and tokenises them itself. Each response is a separate request.

    Args:
        config: the whole configuration.

    Raises:
        DataError: the files or rows cannot be used.
        UserError: see `Endpoint`.
    """

    def __init__(self, config: GenerationConfig) -> None:
        self.config = config
        data, rollout = config.data, config.actor_rollout_ref.rollout
        table = read_table(data.path, "data.path")
        table.require(data.prompt_key, "data.prompt_key", prompt_hint(table))
        if data.last_assistant_turn == CONTINUE:
            raise DataError(
                f"data.last_assistant_turn={CONTINUE} is not supported with an endpoint, which renders messages "
                "itself; generate with processes of the cluster, or end prompts with the user's message."
            )
        table = table_with_answers(table, data)
        if data.ground_truth_key is not None:
            table = table.with_ground_truth(data.ground_truth_key)
        self._index = choose_rows(len(table), data.max_samples, data.shuffle, seed_of(data))
        column = table.column(data.prompt_key)
        for index in self._index:
            try:
                check_prompt(column[index])
            except ValueError as error:
                raise DataError(
                    f"{table.locate(int(index))}: column {data.prompt_key!r} cannot be used as a prompt: {error}."
                ) from None
        self._table = table
        self._messages = [
            split_last_turn(
                as_messages(column[index], data.system_prompt, has_padding=table.has_padding(int(index))),
                data.last_assistant_turn,
                table.locate(int(index)),
            )[0]
            for index in self._index
        ]
        self.rows = table.arrow().take(pa.array(self._index))
        self.endpoint = Endpoint(rollout.openai)
        waiting = data.batch_size * data.n_samples
        self.in_flight = 1 + -(-rollout.openai.max_concurrency // waiting)  # keeps slots busy at a part's end

    def respond(self, items: Sequence[int]) -> list[list[Response]]:
        n, requests = self.config.data.n_samples, []
        for item in items:
            for sample in range(n):
                requests.append((item, self._ask(item, sample)))
        responses: list[list[Response]] = [[] for _ in items]
        for number, (item, future) in enumerate(requests):
            try:
                reply: EndpointResponse = future.result()
            except UserError as error:
                for _, other in requests:
                    other.cancel()
                raise UserError(f"{self._table.locate(int(self._index[item]))}: {error}") from error
            responses[number // n].append(
                Response(
                    text=reply.text,
                    finish_reason=reply.finish_reason,
                    prompt_tokens=reply.prompt_tokens,
                    tokens=reply.tokens,
                    token_ids=reply.token_ids,
                    log_probs=reply.log_probs,
                )
            )
        return responses

    def _ask(self, item: int, sample: int) -> Any:
        sampling = sampling_of(self.config.actor_rollout_ref.rollout, int(self._index[item]), sample)
        return self.endpoint.chat(self._messages[item], sampling, self.config.data.log_probs)
