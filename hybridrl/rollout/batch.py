"""Between batches and requests: what an engine is asked for a batch of prompts, and the batch made of its answers.

Shapes: B rows, P prompt width (left-padded), T response width (right-padded).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from hybridrl.config import RolloutConfig
from hybridrl.protocol import DataProto
from hybridrl.rollout.noise import stream_keys
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import SamplingParams

#: version of the weights where there is no token
NO_VERSION = -1


def requests_of(prompts: DataProto, config: RolloutConfig, next_id: Callable[[], int]) -> list[Request]:
    """A request for each row of a batch as `Rollout.generate` takes it.

    Args:
        next_id: gives a number that no request had.
    """
    meta, objects = prompts.meta_info, prompts.non_tensor_batch
    params = SamplingParams.from_meta(config, meta)
    rows = len(prompts)
    uids = objects["uid"].tolist() if "uid" in objects else [""] * rows
    samples = objects["sample"].tolist() if "sample" in objects else [0] * rows
    step = int(meta.get("global_steps", 0))
    purpose = "validate" if meta.get("validate", False) else "train"
    seeds: list[int | None] = [None] * rows
    if (config.full_determinism or meta.get("seeded", False)) and params.do_sample:
        seeds = [int(key) % 2**63 for key in stream_keys(config.seed, step, purpose, uids, samples)]
    ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
    return [
        Request(
            id=f"{purpose}-{step}-{next_id()}",
            prompt_ids=ids[row][mask[row]].tolist(),
            sampling=params if seed is None else replace(params, seed=seed),
            session=str(uid),
        )
        for row, (uid, seed) in enumerate(zip(uids, seeds, strict=True))
    ]


def batch_of(prompts: DataProto, completions: Sequence[Completion], width: int, pad_token_id: int) -> DataProto:
    """The batch that `Rollout.generate` returns, of completions in the rows' order.

    Args:
        width: T.
    """
    rows = len(completions)
    responses = torch.full((rows, width), pad_token_id, dtype=torch.int64)
    log_probs = torch.zeros((rows, width), dtype=torch.float32)
    versions = torch.full((rows, width), NO_VERSION, dtype=torch.int32)
    lengths = torch.zeros(rows, dtype=torch.int64)
    for row, completion in enumerate(completions):
        count = len(completion.token_ids)
        lengths[row] = count
        responses[row, :count] = torch.tensor(completion.token_ids, dtype=torch.int64)
        log_probs[row, :count] = torch.tensor(completion.log_probs, dtype=torch.float32)
        start = 0
        for version, tokens in completion.versions:
            versions[row, start : start + tokens] = version
            start += tokens
    batch = assemble(prompts, responses, lengths, log_probs, pad_token_id)
    batch.batch["weight_versions"] = versions
    return batch


def assemble(
    prompts: DataProto, responses: torch.Tensor, lengths: torch.Tensor, log_probs: torch.Tensor, pad_token_id: int
) -> DataProto:
    """Prompts and what was generated for them as one batch; `weight_versions` is left to the caller.

    Args:
        prompts: the batch that was asked for, [B, P].
        responses: [B, T] token ids; whatever stands beyond a row's length is overwritten with padding.
        lengths: [B] number of generated tokens, the EOS included.
        log_probs: [B, T] log-probability of each generated token.
        pad_token_id: fills the rest of each row.
    """
    width = responses.shape[1]
    steps = torch.arange(width, device=responses.device)
    mask = steps[None, :] < lengths[:, None]
    responses = torch.where(mask, responses, pad_token_id)
    prompt_ids, prompt_mask = prompts.batch["input_ids"], prompts.batch["attention_mask"]
    last_position = prompts.batch["position_ids"][:, -1:]
    response_mask = mask.to(prompt_mask.dtype)
    tensors = {
        "prompts": prompt_ids,
        "responses": responses,
        "input_ids": torch.cat([prompt_ids, responses], dim=1),
        "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
        "position_ids": torch.cat([prompts.batch["position_ids"], last_position + 1 + steps[None, :]], dim=1),
        "response_mask": response_mask,
        "rollout_log_probs": torch.where(mask, log_probs.float(), 0.0),
    }
    return DataProto.from_dict(tensors=tensors)
