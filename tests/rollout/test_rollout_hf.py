"""The hf rollout on a real engine: what it returns is what a plain loop over the model would have sampled."""

import dataclasses

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybridrl.config import load_config
from hybridrl.engine.train_engine import MicroBatching, create_train_engine
from hybridrl.errors import UserError
from hybridrl.protocol import DataProto
from hybridrl.rollout import HFRollout
from hybridrl.rollout.hf.cache import make_cache, select_rows
from hybridrl.rollout.noise import stream_keys, uniforms

EOS, PAD = 5, 0


@pytest.fixture(scope="module")
def actor(tiny_model):
    config = load_config(
        "ppo_trainer",
        [
            f"actor_rollout_ref.model.path={tiny_model}",
            "data.train_files=x",
            "data.val_files=x",
            "data.max_response_length=24",
        ],
    ).actor_rollout_ref
    engine = create_train_engine("language_model", "fsdp2", model=config.model, engine=config.actor.fsdp_config)
    engine.initialize()
    return config, engine


@pytest.fixture(scope="module")
def reference(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def prompts_of(lengths: list[int], n: int, vocabulary: int = 90, **meta) -> DataProto:
    width = max(lengths)
    rng = np.random.default_rng(0)
    ids = np.zeros((len(lengths), width), dtype=np.int64)
    mask = np.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, width - length :] = rng.integers(6, vocabulary, length)
        mask[row, width - length :] = 1
    batch = DataProto.from_dict(
        tensors={
            "input_ids": torch.from_numpy(ids),
            "attention_mask": torch.from_numpy(mask),
            "position_ids": torch.from_numpy((mask.cumsum(1) - 1).clip(0)),
        },
        non_tensors={"uid": np.array([f"p{i}" for i in range(len(lengths))], dtype=object)},
    ).repeat(n, interleave=True)
    batch.non_tensor_batch["sample"] = np.tile(np.arange(n), len(lengths)).astype(object)
    batch.meta_info = {"global_steps": 3, **meta}
    return batch


def make(actor, eos=(EOS,), **changes):
    config, engine = actor
    rollout = type(config.rollout)(**{**vars(config.rollout), **changes})
    return HFRollout(rollout, engine=engine, eos_token_ids=eos, pad_token_id=PAD)


def plain_loop(
    model, batch: DataProto, limit: int, eos, temperature: float, seed: int
) -> list[tuple[list[int], list[float]]]:
    """Row by row, without cache or padding; inverse-CDF sampling written out."""
    keys = stream_keys(
        seed, 3, "train", batch.non_tensor_batch["uid"].tolist(), batch.non_tensor_batch["sample"].tolist()
    )
    noise = uniforms(keys, limit)
    rows = []
    for row in range(len(batch)):
        ids = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()].tolist()
        tokens, log_probs = [], []
        while len(tokens) < limit:
            with torch.no_grad():
                logits = model(torch.tensor([ids + tokens])).logits[0, -1]
            probs = torch.softmax(logits.double() / temperature, -1)
            token = int((probs.cumsum(-1) <= noise[row, len(tokens)] * probs.sum()).sum())
            tokens.append(token)
            log_probs.append(float(probs[token].log()))
            if token in eos:
                break
        rows.append((tokens, log_probs))
    return rows


@pytest.mark.parametrize(("temperature", "eos"), [(1.0, (EOS,)), (0.6, (5, 17, 40, 41, 42, 43))])
def test_samples_equal_a_plain_loop(actor, reference, temperature, eos) -> None:
    batch = prompts_of([3, 9, 6, 1], n=3)
    output = make(actor, eos, temperature=temperature).generate(batch)
    expected = plain_loop(reference, batch, 24, eos, temperature, seed=42)
    assert len({len(tokens) for tokens, _ in expected}) > 1 or len(eos) == 1  # rows end at different lengths
    for row, (tokens, log_probs) in enumerate(expected):
        length = int(output.batch["response_mask"][row].sum())
        assert output.batch["responses"][row, :length].tolist() == tokens
        assert (output.batch["responses"][row, length:] == PAD).all()
        torch.testing.assert_close(
            output.batch["rollout_log_probs"][row, :length], torch.tensor(log_probs), atol=2e-5, rtol=0
        )
        assert (output.batch["rollout_log_probs"][row, length:] == 0).all()


def test_split_and_order_of_the_batch_do_not_matter(actor) -> None:
    batch = prompts_of([4, 7, 2, 5, 3], n=2)
    rollout = make(actor, eos=(5, 17, 40, 41))
    whole = rollout.generate(batch)
    order = np.random.default_rng(1).permutation(len(batch))
    shuffled = batch.select_idxs(order)
    pieces = [rollout.generate(shuffled[start : start + 3]) for start in range(0, len(batch), 3)]
    parts = DataProto.concat(pieces)
    assert (parts.batch["responses"] == whole.batch["responses"][order]).all()
    small = make(actor, eos=(5, 17, 40, 41), max_num_seqs=4).generate(batch)
    assert (small.batch["responses"] == whole.batch["responses"]).all()


def test_masks_and_positions_agree_with_the_tokens(actor) -> None:
    batch = prompts_of([4, 7], n=2)
    out = make(actor, eos=(5, 17, 40, 41)).generate(batch).batch
    assert out["input_ids"].shape == (4, 7 + 24) and out["responses"].shape == (4, 24)
    assert (out["input_ids"] == torch.cat([out["prompts"], out["responses"]], 1)).all()
    assert (out["attention_mask"][:, 7:] == out["response_mask"]).all()
    for row in range(4):
        real = out["attention_mask"][row].bool()
        assert out["position_ids"][row][real].tolist() == list(range(int(real.sum())))


def test_log_probs_equal_the_trainers(actor) -> None:
    _, engine = actor
    batch = prompts_of([4, 7, 2], n=4)
    out = make(actor, eos=(5, 17, 40, 41), temperature=0.8).generate(batch)
    trained = engine.infer(out, MicroBatching(size=5), temperature=0.8, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(trained, out.batch["rollout_log_probs"], atol=2e-5, rtol=0)


def test_eos_that_is_also_the_pad_token_ends_a_row_once(actor) -> None:
    config, engine = actor
    rollout = HFRollout(config.rollout, engine=engine, eos_token_ids=(PAD, 17, 40), pad_token_id=PAD)
    out = rollout.generate(prompts_of([4] * 8, n=8)).batch
    ended = out["response_mask"].sum(1) < 24
    assert ended.any()
    last = out["responses"].gather(1, (out["response_mask"].sum(1, keepdim=True) - 1))
    assert torch.isin(last[ended], torch.tensor([PAD, 17, 40])).all()
    inside = out["response_mask"].bool() & (torch.arange(24)[None] < out["response_mask"].sum(1, keepdim=True) - 1)
    assert not torch.isin(out["responses"][inside], torch.tensor([PAD, 17, 40])).any()


def test_greedy_validation_equals_transformers_generate(actor, reference) -> None:
    batch = prompts_of([3, 8, 5], n=1, validate=True)
    out = make(actor).generate(batch).batch
    reference.generation_config.eos_token_id = EOS
    expected = reference.generate(
        input_ids=batch.batch["input_ids"],
        attention_mask=batch.batch["attention_mask"],
        max_new_tokens=24,
        do_sample=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
    )[:, 8:]
    assert (out["responses"][:, : expected.shape[1]] == expected).all()


def test_ignore_eos_goes_to_the_limit(actor) -> None:
    out = make(actor, eos=(5, 17, 40, 41), ignore_eos=True).generate(prompts_of([3], n=4)).batch
    assert (out["response_mask"] == 1).all()


def test_steps_differ_and_repeat(actor) -> None:
    rollout = make(actor)
    first, again = (rollout.generate(prompts_of([3, 4], n=4)).batch["responses"] for _ in range(2))
    other = rollout.generate(prompts_of([3, 4], n=4, global_steps=4)).batch["responses"]
    assert (first == again).all() and (first != other).any()


def test_cache_grows_and_drops_rows_like_the_stock_one(reference) -> None:
    ours = make_cache(reference.config)
    stock = type(ours)(config=reference.config)
    generator = torch.Generator().manual_seed(0)
    size = reference.config.hidden_size // reference.config.num_attention_heads
    rows = 6
    for step in range(40):
        width = 7 if step == 0 else 1 + step % 9
        for layer in range(reference.config.num_hidden_layers):
            states = torch.randn(2, rows, 2, width, size, generator=generator)
            got, expected = (cache.update(states[0], states[1], layer) for cache in (ours, stock))
            assert torch.equal(got[0], expected[0]) and torch.equal(got[1], expected[1])
        if step in (3, 20):
            kept = torch.tensor([0, 2, 5, 3][: rows - 2])
            select_rows(ours, kept)
            select_rows(stock, kept)
            rows = len(kept)
    assert ours.get_seq_length() == stock.get_seq_length()


def test_no_eos_at_all_is_refused(actor) -> None:
    with pytest.raises(UserError, match="EOS"):
        make(actor, eos=()).generate(prompts_of([3], n=1))


@pytest.fixture(scope="module")
def routed(tmp_path_factory, actor):
    """A small Qwen3-MoE, its folder, and what makes an engine of it."""
    folder = tmp_path_factory.mktemp("routed")
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    experts = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    torch.manual_seed(5)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=96, head_dim=16, **sizes, **experts)).eval()
    for parameter in model.model.parameters():
        parameter.data.mul_(3)  # so that it matters which experts a token uses
    model.save_pretrained(folder)
    config = actor[0]

    def engine_of(dtype: str):
        settings = dataclasses.replace(config.actor.fsdp_config, dtype=dtype)
        chosen = dataclasses.replace(config.model, path=str(folder))
        engine = create_train_engine("language_model", "fsdp2", model=chosen, engine=settings)
        engine.initialize()
        return engine

    return config, engine_of, model


def test_recorded_experts_are_those_of_a_whole_pass(routed) -> None:
    """Against the indices that the routers of transformers return for each finished sequence, alone and unpadded."""
    config, engine_of, model = routed
    engine = engine_of("float32")
    returned: list[torch.Tensor] = []
    for part in model.modules():
        if type(part).__name__.endswith("TopKRouter"):
            part.register_forward_hook(lambda module, arguments, output: returned.append(output[2]))
    batch = prompts_of([3, 9, 6, 1], n=4, routed_experts=True)
    rollout = make((config, engine), eos=tuple(range(5, 20)), max_num_seqs=6)  # two parts cut through a prompt's rows
    out = rollout.generate(batch)
    lengths = out.batch["response_mask"].sum(1)
    assert len(set(lengths.tolist())) > 4  # rows were dropped on the way
    for row, real in enumerate(out.batch["attention_mask"].bool()):
        returned.clear()
        with torch.no_grad():
            model(input_ids=out.batch["input_ids"][row][real][None])
        used, expected = out.batch["routed_experts"][row][real].long(), torch.stack(returned, dim=1)
        assert torch.equal(used[:-1].sort(-1).values, expected[:-1].sort(-1).values)
        assert torch.equal(used[-1], used[-2])  # it was never computed
        assert not out.batch["routed_experts"][row][~real].any()
    mask = out.batch["response_mask"].bool()
    sampled, micro = out.batch["rollout_log_probs"], MicroBatching(size=5)
    again = engine.infer(out, micro, outputs=("log_probs",))["log_probs"]
    torch.testing.assert_close(again, sampled, atol=1e-5, rtol=0)
    out.batch["routed_experts"] = (out.batch["routed_experts"] + 1) % 6
    disturbed = engine.infer(out, micro, outputs=("log_probs",))["log_probs"]
    assert float((disturbed - sampled)[mask].abs().max()) > 0.1
    batch.meta_info.pop("routed_experts")
    plain = rollout.generate(batch).batch
    assert "routed_experts" not in plain.keys() and torch.equal(plain["responses"], out.batch["responses"])


def test_experts_of_a_sampler_in_bfloat16_bring_the_trainer_closer_to_it(routed) -> None:
    """The k3 estimate of the KL from the sampler in bfloat16 to a trainer in float32, without and with replay."""
    config, engine_of, _ = routed
    prompts = prompts_of([3, 9, 6, 1], n=16, routed_experts=True)
    out = make((config, engine_of("bfloat16")), eos=(5,)).generate(prompts)
    trainer, mask, divergence = engine_of("float32"), out.batch["response_mask"].bool(), []
    for names in (["routed_experts"], []):
        given = out.select(batch_keys=[name for name in out.batch.keys() if name not in names])
        log_probs = trainer.infer(given, MicroBatching(size=8), outputs=("log_probs",))["log_probs"]
        log_rho = (log_probs - out.batch["rollout_log_probs"])[mask]
        divergence.append(float((log_rho.exp() - 1 - log_rho).mean()))
    assert divergence[1] < 0.8 * divergence[0]
