"""`model.share_prefixes`: tokens that rows share are computed once, and every result is that of separate rows."""

from __future__ import annotations

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from engine_helpers import (
    ROWS,
    SIZES,
    TEMPERATURE,
    full_kl_loss,
    make_batch,
    make_engine,
    make_fields,
    policy_loss,
    related,
    value_loss,
    weights,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from raising import raises_with
from ranks import spawn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, PreTrainedConfig

from hybridrl.config import load_config
from hybridrl.config.schema.engine import FSDPConfig
from hybridrl.config.schema.model import ModelConfig
from hybridrl.engine import MicroBatching, train_engine_class
from hybridrl.engine.fsdp.forward import SelectingHead, response_logits
from hybridrl.engine.micro_batched import prefix_savings
from hybridrl.engine.microbatch import BatchPlan
from hybridrl.engine.prefix_plan import PrefixPlan, TreeLayout
from hybridrl.errors import ModelError
from hybridrl.models import tree_attention
from hybridrl.models.work import Work
from hybridrl.protocol import DataProto
from hybridrl.registry import POLICY_LOSSES
from hybridrl.utils.metrics import merge_metrics
from hybridrl.workers.loss_prepass import ROW_IDS, LossPrepass
from hybridrl.workers.losses import GROUP_IDS, PREPARED, LossCounts, PolicyLoss, policy_loss_fn

GROUPED = {**SIZES, "num_key_value_heads": 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}
ROUTED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen2": GROUPED,
    "Qwen3": {**GROUPED, "head_dim": 16},
    "Llama": {**GROUPED, "tie_word_embeddings": True},
    "Gemma": {**GROUPED, "head_dim": 8},
    # A window shorter than the rows.
    "Mistral": {**GROUPED, "sliding_window": 6},
    "Qwen3Moe": {**GROUPED, **EXPERTS, "head_dim": 8, "decoder_sparse_step": 1},
    # A window that only the mask has.
    "Qwen2Moe": {
        **{**GROUPED, **EXPERTS, "shared_expert_intermediate_size": 24},
        **{"sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1},
    },
    # Values of another size than queries and keys.
    "DeepseekV3": {**SIZES, **LATENT, **ROUTED, "first_k_dense_replace": 1},
}
SHARED = {"share_prefixes": True}
AUTO = {"share_prefixes": None}


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_BLOCK", 4)
        yield


def saved(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(getattr(transformers, f"{name}Config")(**MODELS[name]))
    for parameter in model.parameters():
        parameter.data.mul_(2)
    model.save_pretrained(folder)
    return folder


FIELDS = related(make_fields())


def gradients(engine: Any, loss: Any, micro: MicroBatching, fields: Any = FIELDS, **options: Any) -> Any:
    """Gradients of one mini-batch before they are clipped, and metrics. Weights stay as they are."""
    found = {}
    engine.apply_gradients = lambda norm: found.update(
        {name: p.grad.clone() for name, p in engine.module.named_parameters() if p.grad is not None}
    )
    metrics = merge_metrics([engine.train_batch(make_batch(fields), micro, loss, TEMPERATURE, **options)])
    del engine.apply_gradients
    return found, {name: float(metric.value) for name, metric in metrics.items()}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 2e-6) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, atol=tolerance, rtol=10 * tolerance)


def assert_same_training(
    shared: Any, apart: Any, loss: Any, micro: MicroBatching, fields: Any = FIELDS, **options: Any
) -> None:
    """Both engines compute the same gradients and metrics, the first with fewer tokens."""
    found, metrics = gradients(shared, loss, micro, fields, **options)
    expected, others = gradients(apart, loss, micro, fields, **options)
    assert_close(found, expected)
    assert 0 < metrics.pop("shared_prefix_frac") < 1
    metrics.pop("shared_flops_frac", None)
    assert metrics == pytest.approx(others, rel=1e-5, abs=1e-6)


def engines(path: Path, *arguments: Any, model: dict[str, Any] | None = None, **options: Any) -> tuple[Any, Any]:
    """One that shares prefixes, and one that does not."""
    shared, apart = (
        make_engine(path, *arguments, model={"share_prefixes": share, **(model or {})}, **options)
        for share in (True, False)
    )
    assert shared.shares_prefixes and not apart.shares_prefixes  # type: ignore[attr-defined]
    return shared, apart


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved("Llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def llamas(llama: Path) -> tuple[Any, Any]:
    """Nothing changes their weights."""
    return engines(llama)


@pytest.mark.parametrize("name", MODELS)
def test_results_and_gradients_are_those_of_separate_rows(name: str, tmp_path: Path) -> None:
    shared, apart = engines(saved(name, tmp_path), model={"enable_gradient_checkpointing": name != "Qwen3"})
    outputs = ("log_probs", "entropy", "sum_pi_squared")
    expected = apart.infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE, outputs)
    for micro in (MicroBatching(), MicroBatching(size=5), MicroBatching(max_tokens=40)):
        assert_close(shared.infer(make_batch(FIELDS), micro, TEMPERATURE, outputs), expected)
    assert_same_training(shared, apart, policy_loss, MicroBatching(), entropy=True)


def test_without_logits(llama: Path) -> None:
    shared, apart = engines(llama, model={"use_fused_kernels": True})
    assert_same_training(shared, apart, policy_loss, MicroBatching(size=5), entropy=True)


def test_a_critic(llama: Path) -> None:
    shared, apart = engines(llama, "value_model")
    for engine in (shared, apart):  # a new head is zero, and so would be the gradients of everything below it
        torch.nn.init.normal_(engine.module.score.weight, std=0.05, generator=torch.Generator().manual_seed(0))
    assert_close(*(e.infer(make_batch(FIELDS), MicroBatching(), outputs=("values",)) for e in (shared, apart)))
    assert_same_training(shared, apart, value_loss, MicroBatching(size=7))


def test_the_divergence_from_a_reference(llama: Path) -> None:
    shared, apart = engines(llama)
    references = engines(llama)
    for engine, reference in zip((shared, apart), references, strict=True):
        with torch.no_grad():
            for parameter in reference.module.parameters():
                parameter.mul_(1.1)
        engine.compare_with(reference)
    assert_same_training(shared, apart, full_kl_loss, MicroBatching(size=5), ref_kl=True)
    with pytest.raises(ModelError, match="same micro-batches"):
        shared.compare_with(references[1])


@pytest.mark.parametrize("mode", POLICY_LOSSES.names())
def test_every_policy_loss(mode: str, llamas: tuple[Any, Any]) -> None:
    words = ["clip_ratio=0.02", "entropy_coeff=0.01", "use_kl_loss=True", f"policy_loss.loss_mode={mode}"]
    words += {"dro": ["policy_loss.dro_beta=0.1"], "sppo": ["policy_loss.sppo_eta=0.1"]}.get(mode, [])
    words = [f"actor_rollout_ref.actor.{word}" for word in words]
    actor = load_config("ppo_trainer", [*words, "actor_rollout_ref.model.path=unused"]).actor_rollout_ref.actor
    chosen, generator = PolicyLoss.of(actor, None), torch.Generator().manual_seed(3)
    fields = {**FIELDS, ROW_IDS: torch.arange(ROWS), GROUP_IDS: torch.arange(ROWS) % 3}
    current = llamas[1].infer(make_batch(FIELDS), MicroBatching(), TEMPERATURE)["log_probs"]
    for name in ("old_log_probs", "rollout_log_probs", "ref_log_prob"):
        fields[name] = current + 0.1 * torch.randn(current.shape, generator=generator) * FIELDS["response_mask"]
    fields["rollout_is_weights"] = torch.rand(current.shape, generator=generator) + 0.5
    mask = FIELDS["response_mask"]
    counts = LossCounts(int(mask.sum()), int(mask.any(1).sum()), mask.shape[1])
    if chosen.prepare is not None:
        batch = make_batch(fields)
        LossPrepass(chosen, MicroBatching()).add_to(batch, llamas[1], 0, TEMPERATURE)
        fields[PREPARED] = batch.batch[PREPARED]
    loss = partial(policy_loss_fn(actor), counts=counts)
    assert_same_training(*llamas, loss, MicroBatching(size=5), fields, entropy=True)


def test_positions_of_the_batch_are_kept(llamas: tuple[Any, Any]) -> None:
    """Tokens are shared only where their positions are equal, too."""
    doubled = {**FIELDS, "position_ids": FIELDS["position_ids"] * 2}
    doubled["position_ids"][3] += 1
    assert_close(*(e.infer(make_batch(doubled), MicroBatching(), TEMPERATURE) for e in llamas))
    assert_same_training(*llamas, policy_loss, MicroBatching(), doubled)
    several = torch.stack([FIELDS["position_ids"], doubled["position_ids"], FIELDS["position_ids"]], 1)  # [B, k, S]
    plan = PrefixPlan({**FIELDS, "position_ids": several}, MicroBatching())
    layout = plan.layout([0, 1, 2, 3])
    flat = [tuple(column) for column in torch.cat([layout.input_ids[None], layout.position_ids])[:, 0].T.tolist()]
    assert layout.position_ids.shape == (3, 1, len(flat))
    rows = [
        list(zip(FIELDS["input_ids"][row].tolist(), *several[row].tolist(), strict=True))[column:]
        for row in range(4)
        for column in [int(FIELDS["attention_mask"][row].argmax())]
    ]
    lengths = FIELDS["attention_mask"].sum(1).tolist()
    prefixes = {tuple(row[: n + 1]) for number, row in enumerate(rows) for n in range(lengths[number])}
    assert sorted(flat) == sorted(prefix[-1] for prefix in prefixes)


def test_rows_that_share_nothing_and_a_mini_batch_without_responses(llama: Path) -> None:
    shared, apart = engines(llama)
    fields = make_fields(seed=4)
    fields["input_ids"][range(ROWS), fields["attention_mask"].argmax(1)] = torch.arange(ROWS)  # other first tokens
    found, metrics = gradients(shared, policy_loss, MicroBatching(), fields)
    assert_close(found, gradients(apart, policy_loss, MicroBatching(), fields)[0])
    assert metrics["shared_prefix_frac"] == 0
    batch = make_batch({**fields, "response_mask": torch.zeros_like(fields["response_mask"])})
    assert "shared_prefix_frac" not in shared.train_batch(batch, MicroBatching(), policy_loss)


def test_null_shares_where_it_pays(llama: Path, llamas: tuple[Any, Any], capfd: pytest.CaptureFixture) -> None:
    """Bit for bit as with True, where it saves enough tokens of the batch, and as with False elsewhere."""
    engine: Any = make_engine(llama, model=AUTO)
    unrelated = make_fields(seed=4)
    for fields, equal in ((FIELDS, llamas[0]), (unrelated, llamas[1])):
        for micro in (MicroBatching(), MicroBatching(max_tokens=40)):
            found = engine.infer(make_batch(fields), micro, TEMPERATURE)["log_probs"]
            assert torch.equal(found, equal.infer(make_batch(fields), micro, TEMPERATURE)["log_probs"])
        found, metrics = gradients(engine, policy_loss, MicroBatching(), fields)
        expected, others = gradients(equal, policy_loss, MicroBatching(), fields)
        assert metrics == others and ("shared_prefix_frac" in metrics) == (fields is FIELDS)
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert "share_prefixes" not in capfd.readouterr().err


@pytest.mark.parametrize(
    "settings",
    [{"use_remove_padding": False}, {"override_config": {"attn_implementation": "eager"}}],
)
def test_null_gives_way_to_other_settings(settings: dict[str, Any], llama: Path) -> None:
    engine: Any = make_engine(llama, model={**AUTO, **settings})
    assert engine.shares_prefixes is False
    train_engine_class("language_model", "fsdp2").check(engine.model_config, FSDPConfig(use_torch_compile=True), 1)


def test_null_computes_rows_apart_whose_tokens_have_something_of_their_own(llama: Path) -> None:
    engine: Any = make_engine(llama, model=AUTO)
    mixed = make_engine(llama, model=AUTO), make_engine(llama, model={"share_prefixes": False})
    for reference in mixed:  # one that reads trees, and one that does not
        engine.compare_with(reference)
        _, metrics = gradients(engine, full_kl_loss, MicroBatching(size=5), ref_kl=True)
        assert ("shared_prefix_frac" in metrics) == (reference is mixed[0])
        assert metrics["ref_kl"] == pytest.approx(0, abs=1e-6)
    assert "shared_prefix_frac" in gradients(engine, policy_loss, MicroBatching())[1]


def without_empty_rows() -> dict[str, torch.Tensor]:
    return {name: tensor[[row for row in range(ROWS) if row not in (4, 5)]] for name, tensor in FIELDS.items()}


def pair_loss(outputs: dict[str, torch.Tensor], micro: DataProto) -> tuple[torch.Tensor, dict[str, Any]]:
    """-log sigmoid of the difference between the log-probabilities of the rows of a pair, the first one preferred."""
    chosen, rejected = (outputs["log_probs"] * micro.batch["response_mask"]).sum(1).view(-1, 2).unbind(1)
    losses = -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected))
    return losses.sum() / micro.meta_info["batch_num_tokens"], {}


@pytest.mark.parametrize("limits", [{}, {"size": 4}, {"max_tokens": 40}])
def test_pairs_share_their_prompt(limits: dict[str, int], llama: Path) -> None:
    """Also where pairs of one prompt are mixed in the order of their tokens."""
    fields, micro = without_empty_rows(), MicroBatching(**limits, rows_together=2)
    shared, apart = engines(llama)
    assert_same_training(shared, apart, pair_loss, micro, fields)
    default, _ = gradients(make_engine(llama, model=AUTO), pair_loss, micro, fields)
    assert_close(default, gradients(apart, pair_loss, micro, fields)[0])
    assert (
        "shared_prefix_frac"
        in gradients(make_engine(llama, model=AUTO), pair_loss, MicroBatching(rows_together=2), fields)[1]
    )
    plan = PrefixPlan(fields, micro)
    for count in (len(plan.groups), 5):
        plan.balance(count)
        assert sorted(row for rows in plan.groups for row in rows) == list(range(len(fields["input_ids"])))
        for rows in plan.groups:
            assert rows == [row for first in rows[::2] for row in (first, first + 1)] and all(
                r % 2 == 0 for r in rows[::2]
            )
            assert len(rows) == 2 or (
                len(rows) <= limits.get("size", 99) and plan.tokens(rows) <= limits.get("max_tokens", 999)
            )


def test_limits_count_the_tokens_of_the_tree() -> None:
    """Also that of a retry after an out-of-memory error."""
    plan = PrefixPlan(FIELDS, MicroBatching())
    sizes = [plan.layout(rows).input_ids.shape[1] for rows in plan.groups]
    assert list(map(plan.tokens, plan.groups)) == sizes and plan.halved_budget() == max(sizes) // 2
    assert max(sizes) < sum(plan.lengths[row] for row in plan.groups[sizes.index(max(sizes))])
    halved = PrefixPlan(FIELDS, MicroBatching(max_tokens=plan.halved_budget()))
    assert len(halved.groups) > len(plan.groups)
    assert all(len(rows) == 1 or halved.tokens(rows) <= max(sizes) // 2 for rows in halved.groups)
    found, expected = (sorted(row for rows in one.groups for row in rows) for one in (halved, plan))
    assert found == expected


def full_rows() -> dict[str, torch.Tensor]:
    """Rows of equal length, so that separate rows need no padding; in each group of four one row is another's twin."""
    fields = {**FIELDS, "attention_mask": torch.ones_like(FIELDS["attention_mask"])}
    fields["response_mask"] = torch.ones_like(FIELDS["response_mask"])
    fields["response_mask"][:, :3] = 0
    fields["position_ids"] = fields["attention_mask"].cumsum(1) - 1
    return fields


@pytest.mark.parametrize("model_type", ["language_model", "value_model"])
def test_the_flops_that_sharing_saves_are_those_of_torchs_counter(
    model_type: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each run of a path is one product, which is what the metric counts.
    monkeypatch.setattr(tree_attention, "_BLOCK", 256)
    monkeypatch.setattr(tree_attention, "_CALL", -(1 << 30))
    counted, batch = {}, make_batch(full_rows())
    output = "log_probs" if model_type == "language_model" else "values"
    pair = engines(llama, model_type)
    for engine in pair:
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
            engine.infer(batch, MicroBatching(size=4), outputs=(output,))
        counted[engine] = counter.get_total_flops()
    shared, apart = pair
    found = shared.pop_pass_metrics()
    # The counter also sees the products that make the angles of position embeddings.
    expected = 1 - counted[shared] / counted[apart]
    assert expected > 0.2 and found["shared_flops_frac"].value == pytest.approx(expected, abs=2e-3)
    if model_type == "language_model":  # whose output layer saves nothing
        assert found["shared_prefix_frac"].value > expected + 0.01
    assert not shared.pop_pass_metrics() and not apart.pop_pass_metrics()
    loss = policy_loss if model_type == "language_model" else value_loss
    metrics = shared.train_batch(batch, MicroBatching(size=4), loss)
    assert metrics["shared_flops_frac"].value == pytest.approx(found["shared_flops_frac"].value)


def test_flops_of_passes_add_up_and_those_of_unknown_families_are_left_out(llamas: tuple[Any, Any]) -> None:
    shared, _ = llamas
    shared.pop_pass_metrics()  # of other tests
    parts = []
    for rows in (slice(0, 4), slice(4, 12)):
        shared.infer(make_batch(FIELDS, rows), MicroBatching(), TEMPERATURE)
        parts.append(shared.pop_pass_metrics())
    for rows in (slice(0, 4), slice(4, 12)):
        shared.infer(make_batch(FIELDS, rows), MicroBatching(), TEMPERATURE)
    assert shared.pop_pass_metrics() == merge_metrics(parts)
    plan = PrefixPlan(FIELDS, MicroBatching(), Work(per_token=7))
    assert set(prefix_savings(plan, [plan.layout(rows) for rows in plan.groups])) == {"shared_prefix_frac"}


def test_trees_are_in_the_order_of_their_work_and_balanced_where_it_pays() -> None:
    """A rank with one family beside a rank with two micro-batches cuts it where the prompt is short."""

    def family(prompt: int, response: int) -> PrefixPlan:
        ids = torch.arange(8 * (prompt + response)).view(8, -1)
        ids[:, :prompt] = torch.arange(prompt)
        ones = torch.ones_like(ids)
        fields = {"input_ids": ids, "attention_mask": ones, "response_mask": ones[:, prompt:]}
        return PrefixPlan(fields, MicroBatching(max_tokens=1000), Work(per_token=10, per_pair={0: 1}))

    short, long = family(4, 20), family(100, 5)
    for plan in (short, long):
        assert len(plan.groups) == 1
        plan.balance(2)
    assert [*map(len, short.groups)] == [4, 4] and short.computed_tokens == 2 * 4 + 8 * 20
    assert [*map(len, long.groups)] == [8] and long.computed_tokens == 100 + 8 * 5
    plan = PrefixPlan(FIELDS, MicroBatching(max_tokens=25), Work(per_token=10, per_pair={0: 1}))
    of_nodes = [sum(10 + n for n in plan.layout(rows).position_ids[0].tolist()) for rows in plan.groups]
    assert len(of_nodes) > 2 and of_nodes == sorted(of_nodes, reverse=True)


def test_a_repeated_update_is_the_same_bit_for_bit(llama: Path) -> None:
    after = []
    for _ in range(2):
        engine = make_engine(llama, model=SHARED)
        for _ in range(2):
            engine.train_batch(make_batch(FIELDS), MicroBatching(size=5), policy_loss, TEMPERATURE)
        after.append(weights(engine))
    for name, tensor in after[0].items():
        assert torch.equal(after[1][name], tensor), name


def test_generation_in_place_sees_padded_rows(llamas: tuple[Any, Any]) -> None:
    inputs = {name: FIELDS[name][:4] for name in ("input_ids", "attention_mask", "position_ids")}
    found = []
    for engine in llamas:
        engine.infer(make_batch(FIELDS), MicroBatching())
        with engine.whole_weights() as module, torch.no_grad():
            found.append(module(**inputs).logits[inputs["attention_mask"].bool()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ({"override_config": {"attn_implementation": "eager"}}, {}, "attn_implementation=eager"),
        ({"use_remove_padding": False}, {}, "use_remove_padding=False"),
        ({}, {"use_torch_compile": True}, "use_torch_compile=True"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    model: dict[str, Any], engine: dict[str, Any], message: str, micro_model: Path
) -> None:
    chosen = ModelConfig(path=str(micro_model), share_prefixes=True, **model)
    with raises_with(ModelError, "share_prefixes=True", message):
        train_engine_class("language_model", "fsdp2").check(chosen, FSDPConfig(**engine), 1)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.Gemma2Config(**GROUPED, head_dim=8), "attn_logit_softcapping=50.0"),
        (transformers.MambaConfig(), "linear_attention"),
        (transformers.Gemma3TextConfig(**GROUPED, use_bidirectional_attention=True), "use_bidirectional_attention"),
    ],
)
def test_models_whose_tokens_see_more_than_their_path(config: PreTrainedConfig, reason: str) -> None:
    assert reason in (tree_attention.sharing_unsupported_reason(config) or "")


def test_a_model_that_cannot_share_says_so_and_trains(tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    AutoModelForCausalLM.from_config(transformers.Gemma2Config(**GROUPED, head_dim=8)).save_pretrained(tmp_path)
    make_engine(tmp_path, model=AUTO)
    assert "share_prefixes" not in capfd.readouterr().err  # it asks for nothing
    engine = make_engine(tmp_path, model=SHARED)
    assert "model.share_prefixes has no effect, because" in capfd.readouterr().err
    assert "shared_prefix_frac" not in engine.train_batch(make_batch(FIELDS), MicroBatching(), policy_loss)


def test_a_model_that_hides_the_paths_is_refused(llama: Path) -> None:
    engine: Any = make_engine(llama, model=SHARED)
    for layer in engine.module.model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = lambda *args, f=forward, prefix_paths=None, **kwargs: f(*args, **kwargs)
    with raises_with(ModelError, "LlamaAttention", "model.share_prefixes=False"):
        engine.infer(make_batch(FIELDS), MicroBatching())


def test_a_layer_with_an_attention_of_its_own_is_refused(llama: Path) -> None:
    """It would see all tokens of the flat row before it, without an error of its own."""
    engine: Any = make_engine(llama, model=SHARED)
    engine.module.model.layers[1].self_attn.forward = lambda hidden_states, **options: (hidden_states, None)
    with raises_with(ModelError, 1, "2 layers", "model.share_prefixes=False"):
        engine.infer(make_batch(FIELDS), MicroBatching())


def without_paths(forward: Any, hidden_states: torch.Tensor, prefix_paths: Any = None, **given: Any) -> Any:
    """An attention layer's pass that loses the paths."""
    return forward(hidden_states, **given)


@pytest.mark.parametrize(
    ("hidden", "reason"),
    [
        (without_paths, "does not pass on"),
        (lambda forward, hidden_states, **given: (hidden_states, None), "1 of the 2 layers"),
        (lambda forward, hidden_states, **given: forward(hidden_states, softcap=9.0, **given), "uses softcap"),
    ],
)
def test_null_computes_rows_apart_of_a_model_that_turns_out_to_see_more(
    hidden: Any, reason: str, llama: Path, capfd: pytest.CaptureFixture
) -> None:
    """Nobody asked for sharing, so the run goes on; also where another model's micro-batches are read."""
    engines: list[Any] = [make_engine(llama, model=model) for model in (AUTO, {"share_prefixes": False}, AUTO)]
    for engine in engines[:2]:
        attention = engine.module.model.layers[1].self_attn
        attention.forward = functools.partial(hidden, attention.forward)
    found, expected = (gradients(engine, policy_loss, MicroBatching()) for engine in engines[:2])
    assert found[1] == expected[1] and all(torch.equal(found[0][name], one) for name, one in expected[0].items())
    told = capfd.readouterr().err
    assert told.count("are computed for each row") == 1 and reason in told
    engines[2].compare_with(engines[0])
    assert "shared_prefix_frac" not in gradients(engines[2], full_kl_loss, MicroBatching(), ref_kl=True)[1]
    assert "shared_prefix_frac" in gradients(engines[2], policy_loss, MicroBatching())[1]


# ------------------------------------------------------------------ in float64, on random trees


@pytest.fixture(scope="module")
def exact() -> tuple[torch.nn.Module, SelectingHead]:
    torch.manual_seed(1)
    # Unlike RMSNorm in transformers, its LayerNorm computes in float64.
    config = transformers.GPTNeoXConfig(**{**SIZES, "vocab_size": 8})
    config._attn_implementation = tree_attention.TREE
    model = AutoModelForCausalLM.from_config(config).double()
    return model, SelectingHead(model)


@st.composite
def batches(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Rows of few words: prompts at the right of their columns, responses at the left of theirs, masks with holes."""
    count = draw(st.integers(1, 6))
    words = st.lists(st.integers(0, 1), min_size=1, max_size=7)
    prompts = draw(st.lists(words, min_size=count, max_size=count))
    responses = draw(st.lists(words, min_size=count, max_size=count))
    ids, attention = torch.full((count, 14), 7), torch.zeros(count, 14, dtype=torch.int64)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        place = slice(7 - len(prompt), 7 + len(response))
        ids[row, place] = torch.tensor(prompt + response)
        attention[row, place] = 1
    holes = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=count * 7, max_size=count * 7))).view(count, 7)
    return {"input_ids": ids, "attention_mask": attention, "response_mask": attention[:, 7:] * (holes > 0)}


@settings(max_examples=40)
@given(batches(), st.sampled_from([None, 1, 2, 3]))
def test_random_trees_in_float64(
    exact: tuple[torch.nn.Module, SelectingHead], fields: dict[str, torch.Tensor], size: int | None
) -> None:
    model, head = exact
    factors = torch.linspace(-0.7, 1.3, fields["response_mask"].numel(), dtype=torch.float64)  # one per response token
    found: dict[bool, list[torch.Tensor]] = {}
    for share in (False, True):
        plan = (
            PrefixPlan(fields, MicroBatching(size=size))
            if share
            else BatchPlan(fields, MicroBatching(size=1), packed=False)
        )
        grid = torch.zeros_like(factors)
        model.zero_grad()
        for rows in plan.groups:
            layout = plan.layout(rows)
            log_p = response_logits(model, head, layout, takes_boundaries=False).log_softmax(-1)
            chosen = log_p.gather(1, layout.labels[:, None])[:, 0]
            if isinstance(layout, TreeLayout):
                chosen = layout.of_rows({"log_probs": chosen})["log_probs"]
            places = plan.token_positions(rows)
            grid[places] = chosen.detach()
            (chosen * factors[places]).sum().backward()
        found[share] = [grid, *(p.grad for p in model.parameters() if p.grad is not None)]
    assert len(found[True]) == len(found[False])
    for one, other in zip(found[True], found[False], strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


# ------------------------------------------------------------------ several ranks


def steps(
    folder: Path, rows: slice, share: bool | None, hides: bool = False, **engine_settings: Any
) -> dict[str, torch.Tensor]:
    """The weights after two steps, and the log-probabilities of the rows.

    Args:
        hides: whether a layer does not pass on the paths of a tree.
    """
    optim = {"lr_warmup_steps": 0, "override_optimizer_config": {"eps": 1e-4}}
    engine: Any = make_engine(folder, optim=optim, model={"share_prefixes": share}, **engine_settings)
    if hides:
        attention = engine.module.model.layers[1].self_attn
        attention.forward = functools.partial(without_paths, attention.forward)
    for _ in range(2):
        found = engine.train_batch(make_batch(FIELDS, rows), MicroBatching(max_tokens=60), policy_loss, TEMPERATURE)
        assert ("shared_prefix_frac" in found) == (share is not False and not hides)  # on every rank
    after = engine.infer(make_batch(FIELDS, rows), MicroBatching(), TEMPERATURE)
    return {**weights(engine), **after}


def on_two_ranks(rank: int, folder: Path) -> None:
    expected = torch.load(folder / "apart.pt", weights_only=True)
    assert_close(steps(folder, slice(None), None, ulysses_sequence_parallel_size=2), expected, 1e-5)
    rows = slice(0, 3) if rank == 0 else slice(3, 12)  # within a group; the second has more micro-batches
    expected["log_probs"] = expected["log_probs"][rows]
    assert_close(steps(folder, rows, True), expected, 1e-5)
    assert_close(steps(folder, rows, None, hides=True), expected, 1e-5)  # the trial takes part in all collectives
    # Whether it pays is decided for the rows of both ranks: the first has one row, which shares nothing.
    rows = slice(0, 1) if rank == 0 else slice(1, 12)
    expected["log_probs"] = torch.load(folder / "apart.pt", weights_only=True)["log_probs"][rows]
    assert_close(steps(folder, rows, None), expected, 1e-5)


@pytest.mark.slow
def test_two_ranks_with_rows_of_their_own_and_with_parts_of_all_rows(tmp_path: Path) -> None:
    saved("Llama", tmp_path)
    torch.save(steps(tmp_path, slice(None), False), tmp_path / "apart.pt")
    spawn(on_two_ranks, 2, tmp_path)
