"""A batch of unequal rows, a policy loss, and the same training step written as a plain PyTorch loop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

from hybridrl.config.schema.engine import FSDPConfig, OptimConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import Engine, create_train_engine
from hybridrl.protocol import DataProto
from hybridrl.utils import distributed
from hybridrl.utils.metrics import Metric

PROMPT, RESPONSE, ROWS = 10, 14, 12
TEMPERATURE = 0.7
#: of a transformer's configuration, for rows of `make_fields`
SIZES: dict[str, Any] = {
    "vocab_size": 210,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
#: two ranks split the heads of keys and values of most families, four ranks repeat them
HEADS: dict[str, Any] = {**SIZES, "num_key_value_heads": 2, "tie_word_embeddings": False}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "decoder_sparse_step": 1}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
#: of the configurations of the families that every way to compute has to agree on
FAMILIES: dict[str, dict[str, Any]] = {
    # A window that is shorter than the rows, in the second of two layers.
    "Qwen2": {**HEADS, "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    "Qwen3": {**HEADS, "head_dim": 16},
    "Llama": {**HEADS, "num_key_value_heads": 4},
    "Gemma": {**HEADS, "head_dim": 8, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "Qwen3Moe": {**HEADS, **EXPERTS, "head_dim": 8},
    "DeepseekV3": {**HEADS, **LATENT, **ROUTED, "num_key_value_heads": 4, "first_k_dense_replace": 1},
}


def save_model(name: str, folder: Path, settings: dict[str, Any]) -> Path:
    """A model of transformers' `<name>Config` whose weights are large enough for its tokens to differ."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**settings))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    model.save_pretrained(folder / name)
    return folder / name


def make_fields(rows: int = ROWS, seed: int = 0) -> dict[str, torch.Tensor]:
    """Left-padded prompts, right-padded responses of random lengths; row 5 has no response token (padding)."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(10, 200, (rows, PROMPT + RESPONSE), generator=generator)
    prompts = torch.randint(1, PROMPT + 1, (rows,), generator=generator)
    responses = torch.randint(1, RESPONSE + 1, (rows,), generator=generator)
    attention = torch.zeros_like(ids)
    for row in range(rows):
        attention[row, PROMPT - prompts[row] : PROMPT + responses[row]] = 1
    mask = attention[:, PROMPT:].clone()
    mask[5 % rows] = 0
    mask[0, 0] = 0  # as a tool's tokens are: attended to, not trained on
    advantages = torch.randn(rows, RESPONSE, generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": (attention.cumsum(1) - 1).clamp(min=0),
        "prompts": ids[:, :PROMPT].clone(),
        "responses": ids[:, PROMPT:].clone(),
        "response_mask": mask,
        "advantages": advantages,
        "returns": advantages.clone(),
    }


def related(fields: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The rows as samples of three prompts, with responses that share their first tokens, and one row twice."""
    fields = {name: tensor.clone() for name, tensor in fields.items()}
    ids, attention = fields["input_ids"], fields["attention_mask"]
    for row in range(len(ids)):
        first = row // 4 * 4
        for tensor in (ids, attention):
            tensor[row, :PROMPT] = tensor[first, :PROMPT]
        if row % 4 == 1:  # branches off within the response
            ids[row, PROMPT : PROMPT + 3] = ids[first, PROMPT : PROMPT + 3]
        if row % 4 == 2:  # one of the two rows is a prefix of the other
            ids[row, PROMPT:] = ids[first, PROMPT:]
    for name in ("input_ids", "attention_mask", "response_mask"):
        fields[name][11] = fields[name][8]
    fields["position_ids"] = (attention.cumsum(1) - 1).clamp(min=0)
    fields["prompts"], fields["responses"] = ids[:, :PROMPT].clone(), ids[:, PROMPT:].clone()
    return fields


def make_batch(fields: dict[str, torch.Tensor], rows: slice = slice(None)) -> DataProto:
    """The rows as a batch that knows the token count of all of them."""
    count = int(fields["response_mask"].sum())
    return DataProto.from_dict({name: t[rows] for name, t in fields.items()}, meta_info={"batch_num_tokens": count})


def policy_loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = micro.batch["response_mask"]
    count = micro.meta_info["batch_num_tokens"]
    loss = -(outputs["log_probs"] * micro.batch["advantages"] * mask).sum() / count
    if "entropy" in outputs:
        loss = loss - 0.01 * (outputs["entropy"] * mask).sum() / count
    mean = (outputs["log_probs"] * mask).sum() / mask.sum()
    return loss, {"loss": Metric(loss.detach(), kind="sum"), "log_prob": mean.detach()}


def full_kl_loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """The policy loss and half the KL to the reference over the vocabulary."""
    loss, metrics = policy_loss(outputs, micro)
    kl = (outputs["ref_kl"] * micro.batch["response_mask"]).sum() / micro.meta_info["batch_num_tokens"]
    return loss + 0.5 * kl, {**metrics, "ref_kl": Metric(kl.detach(), kind="sum")}


def value_loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    mask = micro.batch["response_mask"]
    loss = ((outputs["values"] - micro.batch["returns"]) ** 2 * mask).sum() / micro.meta_info["batch_num_tokens"]
    return loss, {"loss": Metric(loss.detach(), kind="sum")}


def make_engine(
    path: Path,
    model_type: str = "language_model",
    optim: dict[str, Any] | None = None,
    model: dict[str, Any] | None = None,
    **engine: Any,
) -> Engine:
    """An initialised engine with a learning rate that moves the weights visibly."""
    settings = {
        "lr": 1e-2,
        "clip_grad": 0.5,
        "lr_warmup_steps": 2,
        "lr_scheduler_type": "linear",
        "total_training_steps": 8,
    }
    made = create_train_engine(
        model_type,
        "fsdp2",
        model=ModelConfig(path=str(path), **(model or {})),
        engine=FSDPConfig(**engine),
        optim=OptimConfig(**{**settings, **(optim or {})}),
    )
    made.initialize()
    return made


def weights(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.export_weights()}


def plain_logits(module: torch.nn.Module, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """Logits ``[S', V]`` of one row without its padding, all by itself."""
    return module(input_ids=ids[attention.bool()][None]).logits[0]


def plain_outputs(module: torch.nn.Module, fields: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """log-probabilities and entropies ``[B, T]`` by the textbook, one row at a time."""
    shape = fields["response_mask"].shape
    log_probs, entropies = torch.zeros(shape), torch.zeros(shape)
    grid_l, grid_e = [], []
    for row in range(shape[0]):
        attention = fields["attention_mask"][row]
        logits = plain_logits(module, fields["input_ids"][row], attention).float() / TEMPERATURE
        distribution = logits.log_softmax(-1)
        start = int(attention[:PROMPT].sum())
        line_l, line_e = [], []
        for column in range(shape[1]):
            if fields["response_mask"][row, column]:
                before = distribution[start + column - 1]
                line_l.append(before[fields["input_ids"][row, PROMPT + column]])
                line_e.append(-(before.exp() * before).sum())
            else:
                line_l.append(torch.zeros(()))
                line_e.append(torch.zeros(()))
        grid_l.append(torch.stack(line_l))
        grid_e.append(torch.stack(line_e))
    log_probs, entropies = torch.stack(grid_l), torch.stack(grid_e)
    return log_probs, entropies


def close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(
            got[name], tensor, atol=tolerance, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


def check_shards(engine: Any, whole: dict[str, torch.Tensor]) -> list[int]:
    """The shards of each copy of the model make up every whole tensor, each element once; return the ranks' copies."""
    own = [
        (shard.name, shard.shape, shard.offsets, shard.tensor.clone(), shard.keeps_dtype)
        for shard in engine.export_shards()
    ]
    gathered = distributed.all_gather_object((engine.copy_of_model, own))
    for copy in {index for index, _ in gathered}:
        found = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
        for name, shape, offsets, part, is_buffer in (
            shard for index, shards in gathered if index == copy for shard in shards
        ):
            assert shape == tuple(whole[name].shape)
            there = found[name][tuple(slice(a, a + size) for a, size in zip(offsets, part.shape, strict=True))]
            assert is_buffer or there.isnan().all(), name  # every rank holds a buffer
            there.copy_(part)
        close(found, whole, 0)
    return [index for index, _ in gathered]
