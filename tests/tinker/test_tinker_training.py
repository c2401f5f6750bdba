"""Training by the public client: losses and steps against plain PyTorch and PEFT, adapters in turn, resuming."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import tinker
import torch
from peft import PeftModel
from safetensors.torch import load_file
from tinker import types
from transformers import AutoModelForCausalLM

from hybridrl.registry import DATUM_LOSSES
from hybridrl.tinker.saved_adapters import SavedAdapters

DOCS = Path(__file__).resolve().parents[2] / "docs"
ADAM = types.AdamParams(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=2.0)
#: log p, log q, advantages -> the loss of each token, as the client's documentation has it
RL_LOSSES: dict[str, tuple[dict[str, float], Callable[..., torch.Tensor]]] = {
    "importance_sampling": ({}, lambda p, q, a: -(torch.exp(p - q) * a)),
    "ppo": (
        {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
        lambda p, q, a: -torch.min(torch.exp(p - q) * a, torch.clip(torch.exp(p - q), 0.9, 1.1) * a),
    ),
    "cispo": (
        {"clip_low_threshold": 0.5, "clip_high_threshold": 1.1},
        lambda p, q, a: -(torch.clip(torch.exp(p - q), 0.5, 1.1).detach() * p * a),
    ),
    "dro": ({"beta": 0.3}, lambda p, q, a: -(p * a - 0.15 * (p - q) ** 2)),
}


def tokens(count: int, seed: int) -> list[int]:
    return torch.randint(8, 200, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def supervised(count: int = 9, seed: int = 0) -> types.Datum:
    ids = tokens(count + 1, seed)
    weights = torch.rand(count, generator=torch.Generator().manual_seed(seed))
    inputs: Any = {"target_tokens": torch.tensor(ids[1:]), "weights": weights}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def sampled(count: int, seed: int) -> types.Datum:
    """A datum of reinforcement learning, whose targets are not its next tokens."""
    generator = torch.Generator().manual_seed(seed)
    inputs: Any = {
        "target_tokens": torch.tensor(tokens(count, seed + 100)),
        "logprobs": -5.5 + 0.4 * torch.randn(count, generator=generator),
        "advantages": torch.randn(count, generator=generator),
    }
    return types.Datum(model_input=types.ModelInput.from_ints(tokens(count, seed)), loss_fn_inputs=inputs)


def trained(
    client: tinker.TrainingClient, data: list[types.Datum], loss: str, config: Mapping[str, float] | None = None
) -> types.ForwardBackwardOutput:
    passed = client.forward_backward(data, loss, config)  # type: ignore[arg-type]
    stepped = client.optim_step(ADAM)
    result = passed.result()
    stepped.result()
    return result


def saved(client: tinker.TrainingClient, server: Any, name: str) -> Path:
    path = client.save_state(name).result().path
    return SavedAdapters(server.folder).find(path)[0]


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def plain(server: Any, folder: Path) -> Any:
    """The model with a saved adapter, by PEFT alone."""
    base = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32, attn_implementation="eager")
    return PeftModel.from_pretrained(base, str(folder), is_trainable=True).eval()


def plain_log_probs(model: Any, datum: types.Datum) -> torch.Tensor:
    logits = model(torch.tensor([datum.model_input.to_ints()])).logits[0].float()
    targets = datum.loss_fn_inputs["target_tokens"].to_torch()
    return logits.log_softmax(-1).gather(-1, targets.view(len(targets), -1)).view(targets.shape)


def check_step(
    server: Any, service: tinker.ServiceClient, begun: str, data: list[types.Datum], loss: str, config: Any, own: Any
) -> None:
    """Compare a pass and a step with those of PEFT's model and torch's optimizer, from the same adapter."""
    client = service.create_training_client_from_state(begun).result()
    model = plain(server, SavedAdapters(server.folder).find(begun)[0])
    result = trained(client, data, loss, config)
    log_probs = [plain_log_probs(model, datum) for datum in data]
    losses = [own(p, datum).sum() for p, datum in zip(log_probs, data, strict=True)]
    for output, expected in zip(result.loss_fn_outputs, log_probs, strict=True):
        torch.testing.assert_close(output["logprobs"].to_torch(), expected.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(result.metrics["loss:sum"], float(sum(losses)), rtol=1e-4, atol=1e-4)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sum(losses).backward()
    torch.nn.utils.clip_grad_norm_(parameters, ADAM.grad_clip_norm)
    betas = (ADAM.beta1, ADAM.beta2)
    torch.optim.AdamW(parameters, lr=1e-2, betas=betas, eps=ADAM.eps, weight_decay=0.1).step()
    after = tensors(saved(client, server, f"{loss}-after"))
    names = {name.replace(".default.", "."): p for name, p in model.named_parameters() if p.requires_grad}
    assert after.keys() == names.keys()
    for name, parameter in names.items():
        torch.testing.assert_close(after[name], parameter.detach(), rtol=1e-3, atol=2e-4)


@pytest.mark.slow(20)
def test_losses_and_steps_are_those_of_peft_and_torch(server: Any, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(server.model, rank=4, seed=7).result()
    trained(client, [supervised(8, 3)], "cross_entropy")  # so that B is not 0
    begun = client.save_state("begun").result().path

    def weighted(log_probs: torch.Tensor, datum: types.Datum) -> torch.Tensor:
        return -log_probs * datum.loss_fn_inputs["weights"].to_torch()

    check_step(server, service, begun, [supervised(9, 1), supervised(4, 2)], "cross_entropy", None, weighted)
    for loss, (config, formula) in RL_LOSSES.items():

        def own(log_probs: torch.Tensor, datum: types.Datum, formula: Any = formula) -> torch.Tensor:
            inputs = datum.loss_fn_inputs
            return formula(log_probs, inputs["logprobs"].to_torch(), inputs["advantages"].to_torch())

        check_step(server, service, begun, [sampled(7, 1), sampled(5, 2)], loss, config, own)


def test_several_targets_of_a_position(server: Any, service: tinker.ServiceClient) -> None:
    """Targets [N, K], dense and as the client's sparse tensors."""
    client = service.create_lora_training_client(server.model, rank=2, seed=1).result()
    targets = torch.tensor([[9, 10], [11, 12], [13, 14]])
    weights = torch.tensor([[0.5, 0.25], [0.0, 1.0], [0.3, 0.0]])
    prompt = types.ModelInput.from_ints(tokens(3, 5))
    sparse: Any = {"target_tokens": targets, "weights": weights}
    dense: Any = {"target_tokens": targets.numpy(), "weights": weights.numpy()}
    results = [
        client.forward([types.Datum(model_input=prompt, loss_fn_inputs=inputs), supervised()], "cross_entropy").result()
        for inputs in (dense, sparse)
    ]
    log_probs = results[0].loss_fn_outputs[0]["logprobs"].to_torch()
    assert log_probs.shape == (3, 2)
    other = client.forward([supervised()], "cross_entropy").result().metrics["loss:sum"]
    expected = -(log_probs * weights).sum() + other
    for result in results:
        torch.testing.assert_close(result.metrics["loss:sum"], float(expected), rtol=1e-5, atol=1e-5)


def test_adapters_in_turn_have_the_bits_of_adapters_alone(server: Any, service: tinker.ServiceClient) -> None:
    """Two adapters of other shapes whose calls alternate, also between a pass and its step; and each of them alone."""

    def create(number: int) -> tinker.TrainingClient:
        layers = {"train_attn": number == 0, "train_unembed": number == 1}
        return service.create_lora_training_client(server.model, rank=(3, 8)[number], seed=number, **layers).result()

    data = [[supervised(9, 1), supervised(5, 2)], [supervised(7, 3)]]
    pair = [create(0), create(1)]
    for step in range(3):
        for client, own in zip(pair, data, strict=True):
            client.forward_backward(own[:1], "cross_entropy").result()
        for client, own in zip(pair, data, strict=True):
            client.forward_backward(own[step % len(own) :], "cross_entropy").result()
        for client in pair:
            client.optim_step(ADAM).result()
    for number, own in enumerate(data):
        alone = create(number)
        for step in range(3):
            alone.forward_backward(own[:1], "cross_entropy")
            alone.forward_backward(own[step % len(own) :], "cross_entropy")
            alone.optim_step(ADAM).result()
        together, single = (tensors(saved(client, server, "turns")) for client in (pair[number], alone))
        assert together.keys() == single.keys()
        assert any("q_proj" in name for name in single) == (number == 0)
        assert any("lm_head" in name for name in single) == (number == 1)
        assert all(torch.equal(together[name], single[name]) for name in single)
        assert max(tensor.abs().max() for name, tensor in single.items() if "lora_B" in name) > 0


def test_a_loaded_state_goes_on_bit_for_bit(server: Any, service: tinker.ServiceClient) -> None:
    client = service.create_lora_training_client(server.model, rank=4, seed=3).result()
    trained(client, [supervised()], "cross_entropy")
    path = client.save_state("middle", ttl_seconds=3600).result().path
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    anew = service.create_training_client_from_state(path).result()
    assert resumed.get_info().lora_rank == 4
    for other in (client, resumed, anew):
        trained(other, [supervised(6, 9)], "cross_entropy")
    end, again, without = (tensors(saved(other, server, "end")) for other in (client, resumed, anew))
    assert all(torch.equal(end[name], again[name]) for name in end)
    assert not all(torch.equal(end[name], without[name]) for name in end)
    info = tinker.RestClient(base_url=server.url, api_key="tml-of-a-test")
    assert info.get_weights_info_by_tinker_path(path).result().lora_rank == 4


def test_the_clients_custom_loss(server: Any, service: tinker.ServiceClient) -> None:
    """`forward_backward_custom` computes the loss at the client: a forward pass, then a backward pass with weights."""
    client, other = (service.create_lora_training_client(server.model, rank=4, seed=5).result() for _ in range(2))
    datum = supervised()
    weights = datum.loss_fn_inputs["weights"].to_torch()

    def loss(data: Any, log_probs: Any) -> Any:
        return -(log_probs[0] * weights).sum(), {"own": 1.0}

    custom = client.forward_backward_custom([datum], loss)
    client.optim_step(ADAM).result()
    result = custom.result()
    same = trained(other, [datum], "cross_entropy")
    assert result.metrics["loss:sum"] == pytest.approx(same.metrics["loss:sum"], rel=1e-5)
    own, theirs = (tensors(saved(each, server, "custom")) for each in (client, other))
    for name in own:
        torch.testing.assert_close(own[name], theirs[name], rtol=1e-3, atol=1e-4)


def test_a_policy_learns_by_the_loop_of_the_page(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The page promises 0.5 to above 0.9."""
    monkeypatch.setenv("TINKER_BASE_URL", server.url)
    monkeypatch.setenv("TINKER_API_KEY", "tml-of-a-test")
    loop, loss = re.findall(r"```python\n(.*?)```", (DOCS / "tinker.md").read_text(), re.DOTALL)
    assert "Qwen/Qwen2.5-0.5B-Instruct" in loop
    names: dict[str, Any] = {}
    exec(loop.replace("Qwen/Qwen2.5-0.5B-Instruct", server.model), names)
    curve = names["curve"]
    assert 0.4 < curve[0] < 0.6 and min(curve[-2:]) > 0.9, curve
    try:
        exec(loss, {"__name__": "page"})
        assert DATUM_LOSSES.metadata("squared").inputs == ("scores",)
    finally:
        DATUM_LOSSES.remove("squared")
