"""Generation with the training weights in place: no second copy, no engine to install, any causal LM of transformers.

Prompts that occur several times are processed once. Rows that have ended are dropped from the batch and its cache, so
that they cost nothing. Every rank holds whole weights while it generates, so ranks may end at different lengths without
waiting for each other.

Shapes: B rows, U distinct prompts, P prompt width, T response width, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn

from hybridrl.config import RolloutConfig
from hybridrl.engine.capabilities import GeneratesInPlace, ReplaysRouting
from hybridrl.errors import RolloutError, UserError
from hybridrl.models.vision import (
    GRID,
    PIXELS,
    ImageTensors,
    RotaryPositions,
    digest,
    is_vision_model,
    placed_at,
    placeholders_in,
    tokens_per_image,
)
from hybridrl.protocol import DataProto
from hybridrl.protocol.names import IMAGE_DIGEST, IMAGE_MASK, MULTI_MODAL_INPUTS, ROUTED_EXPERTS
from hybridrl.protocol.sample_names import request_names
from hybridrl.rollout.batch import batch_of, prompt_ids_of
from hybridrl.rollout.hf.cache import make_cache, select_rows
from hybridrl.rollout.inference_engine import register_inference_engine
from hybridrl.rollout.noise import purpose_of, stream_keys, uniforms
from hybridrl.rollout.request_images import join_images
from hybridrl.rollout.sampling import SamplingParams, draw
from hybridrl.rollout.stop_strings import StopStrings
from hybridrl.rollout.trajectory import NO_VERSION, Trajectory
from hybridrl.utils.device import current_device

_COMPACT_BELOW = 7 / 8  # drop ended rows once they are an eighth of the batch, because dropping copies the cache


@register_inference_engine("hf", in_place=True, records_routing=True, sees_images=True)
class HFRollout:
    """Generates with the training engine's own module, inside each worker.

    Args:
        config: `rollout.max_num_seqs` bounds the rows generated at once, `rollout.seed` keys the noise.
        engine: whose weights generate.
        eos_token_ids: a response ends with the first of these.
        pad_token_id: fills responses after their end; may be one of the EOS ids.
        tokenizer: finds stop strings; needed where there are any.
    """

    def __init__(
        self,
        config: RolloutConfig,
        engine: GeneratesInPlace,
        eos_token_ids: Sequence[int],
        pad_token_id: int,
        tokenizer: Any = None,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.engine = engine
        self.eos_token_ids = tuple(eos_token_ids)
        self.pad_token_id = pad_token_id

    def generate(self, prompts: DataProto) -> DataProto:
        """One response per row, as `Rollout.generate` says; `weights_version` of the meta is its weights' version.

        With `finish_reasons` in the meta the batch has a column `finish_reason`: "stop" or "length". With
        `routed_experts` it has this field [B, P + T, L, K]: the experts that tokens used here. The last token of a row
        is sampled and not computed; it has those of the token before it. Where prompts have `multi_modal_inputs`, the
        batch has the column `image_digest`: the images that each row was generated from.
        """
        meta = prompts.meta_info
        params = SamplingParams.from_meta(self.config, meta)
        eos = self._eos(meta, params)
        pad = int(meta.get("pad_token_id", self.pad_token_id))
        noise = self._noise(prompts, params)
        device = current_device()
        ids = prompts.batch["input_ids"].to(device)
        mask = prompts.batch["attention_mask"].to(device)
        positions = prompts.batch["position_ids"].to(device)
        rows = ids.shape[0]
        responses = torch.full((rows, params.max_new_tokens), pad, dtype=torch.int64, device=device)
        log_probs = torch.zeros((rows, params.max_new_tokens), dtype=torch.float32, device=device)
        lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        images = _Images.of(prompts)
        experts: list[torch.Tensor | None] = []
        with self.engine.whole_weights() as module, self._recorded(meta) as expert_ids, torch.no_grad():
            images.place(prompts, module.config)
            if images.has_column and positions.ndim == 2:  # requests come without the positions of their images
                positions = images.positions(ids, mask, module.config).to(device)
            for start in range(0, rows, self.config.max_num_seqs):
                part = slice(start, min(start + self.config.max_num_seqs, rows))
                distinct = _Prompts.distinct(ids[part], mask[part], positions[part], images[part])
                record = None if expert_ids is None else _Record(expert_ids, distinct, params.max_new_tokens)
                _decode(
                    module,
                    distinct,
                    params,
                    torch.tensor(eos, dtype=torch.int64, device=device),
                    noise[part].to(device),
                    _Output(responses[part], log_probs[part], lengths[part], ended[part]),
                    StopStrings(self.tokenizer, params.stop),
                    record,
                )
                experts += [None] * len(ids[part]) if record is None else record.of_rows(lengths[part].tolist())
        version = int(meta.get("weights_version", NO_VERSION))
        reasons = ["stop" if done else "length" for done in ended.tolist()]
        extras = [{"finish_reason": reason} if meta.get("finish_reasons", False) else {} for reason in reasons]
        extras = [extra | image_extra for extra, image_extra in zip(extras, images.extras(), strict=True)]
        rows_of = zip(
            prompt_ids_of(prompts),
            responses.tolist(),
            log_probs.tolist(),
            lengths.tolist(),
            request_names(prompts),
            extras,
            experts,
            strict=True,
        )
        trajectories = [
            Trajectory(
                name.uid,
                name.sample,
                prompt,
                tokens[:count],
                [1] * count,
                scores[:count],
                [(version, count)],
                extra=extra,
                routed_experts=used,
            )
            for prompt, tokens, scores, count, name, extra, used in rows_of
        ]
        return batch_of(
            trajectories,
            pad,
            prompt_width=ids.shape[1],
            response_width=params.max_new_tokens,
            prompt_positions=prompts.batch["position_ids"],
        )

    def _eos(self, meta: Mapping[str, Any], params: SamplingParams) -> Sequence[int]:
        """The tokens that end a response."""
        eos = _as_ids(meta.get("eos_token_id", self.eos_token_ids))
        if not eos and not params.ignore_eos:
            raise UserError(
                "the tokenizer and the model's generation config name no EOS token, so no response could end early: "
                "add eos_token_id to the model, or set actor_rollout_ref.rollout.ignore_eos=True"
            )
        return eos

    def _recorded(self, meta: Mapping[str, Any]) -> AbstractContextManager[list[torch.Tensor] | None]:
        """Record the experts of all computed tokens within the context, if the meta asks for them; yields the list."""
        if not meta.get(ROUTED_EXPERTS, False):
            return nullcontext()
        assert isinstance(self.engine, ReplaysRouting)  # checked at start-up, by check_router_replay
        return self.engine.recorded_routing()

    def _noise(self, prompts: DataProto, params: SamplingParams) -> torch.Tensor:
        """Uniforms [B, T] keyed by the sample; none are needed for greedy decoding."""
        rows = len(prompts)
        if not params.do_sample:
            return torch.zeros((rows, params.max_new_tokens), dtype=torch.float64)
        meta, tensors = prompts.meta_info, prompts.non_tensor_batch
        keys = stream_keys(
            seed=self.config.seed,
            step=int(meta.get("global_steps", 0)),
            purpose=purpose_of(meta),
            uids=tensors["uid"].tolist(),
            samples=tensors["sample"].tolist() if "sample" in tensors else [0] * rows,
        )
        return torch.from_numpy(uniforms(np.asarray(keys), params.max_new_tokens))


class _Images:
    """The images of each row, with their digests; a group's rows share theirs, which are read once.

    Attributes:
        has_column: the batch has the column of images.
        places: [B, P], true for tokens of images, once `place` has found them; None: the model reads text alone.
    """

    def __init__(
        self,
        rows: Sequence[ImageTensors],
        digests: Sequence[str],
        has_column: bool,
        places: torch.Tensor | None = None,
    ) -> None:
        self._rows, self._digests, self.has_column, self.places = rows, digests, has_column, places

    @classmethod
    def of(cls, prompts: DataProto) -> "_Images":
        column = prompts.non_tensor_batch.get(MULTI_MODAL_INPUTS)
        rows = [{}] * len(prompts) if column is None else [row_images or {} for row_images in column.tolist()]
        unique_rows = {id(row_images): row_images for row_images in rows}
        digest_by_id = {key: digest(row_images) for key, row_images in unique_rows.items()}
        return cls(rows, [digest_by_id[id(row_images)] for row_images in rows], column is not None)

    def __getitem__(self, part: slice) -> "_Images":
        places = None if self.places is None else self.places[part]
        return _Images(self._rows[part], self._digests[part], self.has_column, places)

    def place(self, prompts: DataProto, config: Any) -> None:
        """Find the tokens of images, and refuse rows whose number of placeholders is not that of their images' tokens.

        Raises:
            RolloutError: a prompt came without its images, or with others.
        """
        if not is_vision_model(config):
            return
        fields = prompts.batch
        image_tokens = fields.get(IMAGE_MASK, placeholders_in(config, fields["input_ids"]))
        places = image_tokens & fields["attention_mask"].bool()
        self.places = places.to(current_device())
        for row, (count, own) in enumerate(zip(places.sum(dim=1).tolist(), self._rows, strict=True)):
            expected = int(tokens_per_image(config, own["image_grid_thw"]).sum()) if own else 0
            if count != expected:
                raise RolloutError(
                    f"prompt {row} of the batch has {count} image placeholders, and its images have {expected} tokens: "
                    "its images are not in multi_modal_inputs"
                )

    def positions(self, ids: torch.Tensor, mask: torch.Tensor, config: Any) -> torch.Tensor:
        """[B, 4, P], as a data set's prompts have them."""
        assert self.places is not None  # the model reads images
        rotary, positions = RotaryPositions(config), torch.zeros(ids.shape[0], 4, ids.shape[1], dtype=torch.int64)
        for row, (own, places, images) in enumerate(zip(ids.cpu(), self.places.cpu(), self._rows, strict=True)):
            real = mask[row].bool().cpu()
            positions[row][:, real] = rotary.of(own[real].tolist(), images, places[real])
        return positions

    def extras(self) -> list[dict[str, Any]]:
        """Return each row's extra column: the digest of the images from which it was generated."""
        return [{IMAGE_DIGEST: image_digest} if self.has_column else {} for image_digest in self._digests]

    def numbers(self, device: torch.device) -> torch.Tensor:
        """[B]: equal for rows with the same images."""
        number_of = {image_digest: number for number, image_digest in enumerate(dict.fromkeys(self._digests))}
        return torch.tensor([number_of[image_digest] for image_digest in self._digests], device=device)

    def joined(self, rows: Sequence[int], device: torch.device) -> ImageTensors:
        """Return the vision tower's inputs for the images of these rows, concatenated; `{}` if there are none."""
        joined = join_images([self._rows[row] for row in rows if self._rows[row]])
        return {name: tensor.to(device) for name, tensor in joined.items() if name in (PIXELS, GRID)}


class _Prompts:
    """The distinct prompts of a batch, [U, P], their images with places, and which of them each row has, [B]."""

    def __init__(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        row_of: torch.Tensor,
        images: ImageTensors,
        places: torch.Tensor | None,
    ) -> None:
        self.ids, self.mask, self.row_of, self.images, self.places = ids, mask, row_of, images, places
        # [U, P], or [k, U, P] with k positions per token, as models take them
        self.positions = positions if positions.ndim == 2 else positions.transpose(0, 1)

    @classmethod
    def distinct(cls, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, images: _Images) -> "_Prompts":
        first = int(mask.any(dim=0).int().argmax()) if mask.any() else 0
        ids, mask, positions = ids[:, first:], mask[:, first:], positions[..., first:]
        # Padding and prompt may hold the same id, and different images have the same placeholders, so prompts are
        # compared by ids, mask and images together.
        image_numbers = images.numbers(ids.device)[:, None].to(ids.dtype)
        places = None if images.places is None else images.places[:, first:]
        where = [] if places is None else [places.to(ids.dtype)]
        key = torch.cat([ids, mask.to(ids.dtype), image_numbers, *where], dim=1)
        _, row_of = torch.unique(key, dim=0, return_inverse=True)
        count = int(row_of.max()) + 1
        example = torch.empty(count, dtype=torch.int64, device=ids.device)
        example.scatter_(0, row_of, torch.arange(ids.shape[0], device=ids.device))
        joined = images.joined(example.tolist(), ids.device)
        places = None if places is None else places[example]
        return cls(ids[example], mask[example], positions[example], row_of, joined, places)


class _Output:
    """The output buffers of a part of the batch: views [B, T], [B, T], [B], [B]."""

    def __init__(
        self, responses: torch.Tensor, log_probs: torch.Tensor, lengths: torch.Tensor, ended: torch.Tensor
    ) -> None:
        self.responses, self.log_probs, self.lengths, self.ended = responses, log_probs, lengths, ended


class _Record:
    """The experts of the tokens that one `_decode` feeds to the module, in main memory: L layers, K per token.

    Args:
        expert_ids: the list to which each forward pass appends the experts of its tokens, [tokens, K] per layer.
        prompts: what is decoded.
        width: T.
    """

    def __init__(self, expert_ids: list[torch.Tensor], prompts: _Prompts, width: int) -> None:
        self._expert_ids = expert_ids
        self._row_of, self._mask = prompts.row_of.tolist(), prompts.mask.bool().cpu()
        self._width = width
        self._prompts: torch.Tensor
        self._responses: torch.Tensor

    def prompts_fed(self) -> None:
        """The module has computed the distinct prompts."""
        experts = self._pop_experts()
        self._prompts = experts.view(*self._mask.shape, *experts.shape[1:])
        self._responses = experts.new_empty(len(self._row_of), self._width, *experts.shape[1:])

    def tokens_fed(self, rows: torch.Tensor, step: int) -> None:
        """The module has computed the tokens of these rows in column `step`."""
        self._responses[rows.cpu(), step] = self._pop_experts()

    def of_rows(self, lengths: Sequence[int]) -> list[torch.Tensor]:
        """Return the experts of each row, [prompt and response tokens, L, K], given the lengths of the responses.

        The last token was never fed, and no log-probability depends on its experts. It gets those of the token before
        it, which differ from each other as a token's experts do.
        """
        row_experts = []
        for row, (prompt, length) in enumerate(zip(self._row_of, lengths, strict=True)):
            fed = torch.cat([self._prompts[prompt][self._mask[prompt]], self._responses[row, : length - 1]])
            row_experts.append(torch.cat([fed, fed[-1:]]))
        return row_experts

    def _pop_experts(self) -> torch.Tensor:
        experts = torch.stack(self._expert_ids, dim=1).cpu()
        self._expert_ids.clear()
        return experts


def _decode(
    module: nn.Module,
    prompts: _Prompts,
    params: SamplingParams,
    eos: torch.Tensor,
    noise: torch.Tensor,
    out: _Output,
    stop: StopStrings,
    record: _Record | None = None,
) -> None:
    """Generate until every row has ended or reached the limit."""
    cache = make_cache(module.config)
    padded = not bool(prompts.mask.all())  # without padding no mask is needed, and attention is faster for it
    with placed_at(prompts.places):
        result = module(
            input_ids=prompts.ids,
            attention_mask=prompts.mask if padded else None,
            position_ids=prompts.positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **prompts.images,
        )
    if record is not None:
        record.prompts_fed()
    rows = torch.arange(prompts.row_of.shape[0], device=prompts.ids.device)  # output row of each row in the batch
    logits = result.logits[:, -1].index_select(0, prompts.row_of)
    mask = prompts.mask.index_select(0, prompts.row_of)
    position = prompts.positions[..., -1:].index_select(-2, prompts.row_of)
    select_rows(cache, prompts.row_of)
    ended = torch.zeros_like(rows, dtype=torch.bool)
    for step in range(params.max_new_tokens):
        tokens, log_probs = draw(logits, params, noise[rows, step])
        out.responses[rows, step] = tokens
        out.log_probs[rows, step] = log_probs
        out.lengths[rows] += (~ended).to(out.lengths.dtype)
        if not params.ignore_eos:
            ended = ended | torch.isin(tokens, eos)
        if params.stop:
            texts = [out.responses[row, : step + 1].tolist() for row in rows.tolist()]
            ended = ended | torch.tensor([stop.ends(text) for text in texts], device=ended.device)
        out.ended[rows] = ended
        going = (~ended).nonzero().squeeze(-1)
        if going.numel() == 0 or step + 1 == params.max_new_tokens:
            return
        if going.numel() <= _COMPACT_BELOW * rows.numel():
            rows, tokens, mask, position = rows[going], tokens[going], mask[going], position[..., going, :]
            ended = torch.zeros_like(rows, dtype=torch.bool)
            select_rows(cache, going)
        position = position + 1
        mask = torch.cat([mask, mask.new_ones((mask.shape[0], 1))], dim=1)
        result = module(
            input_ids=tokens[:, None],
            attention_mask=mask if padded else None,
            position_ids=position,
            past_key_values=cache,
            use_cache=True,
        )
        if record is not None:
            record.tokens_fed(rows, step)
        logits = result.logits[:, -1]


def _as_ids(value: int | Sequence[int]) -> list[int]:
    return [value] if isinstance(value, int) else [int(item) for item in value]
