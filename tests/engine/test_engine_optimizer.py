"""Learning-rate schedules against their formulas, and optimizers by configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises_with
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup, get_linear_schedule_with_warmup

from hybridrl.config.schema.engine import OptimConfig
from hybridrl.engine.fsdp.offload import plain_parts
from hybridrl.engine.optim.muon import hidden_matrices
from hybridrl.engine.optim.optimizer import build_optimizer, build_schedule, lr_factor, state_bytes
from hybridrl.errors import ModelError
from hybridrl.models.model_config import load_model_config
from hybridrl.models.value import load_value_model
from hybridrl.utils import device


def settings(kind: str, **others):  # type: ignore[no-untyped-def]
    optim = OptimConfig(total_training_steps=40, lr=0.5, lr_warmup_steps=4, **others)
    optim.lr_scheduler_type = kind  # the schema admits a kind only when the whole configuration is ready for it
    return optim


def rates(optim, steps: int = 45) -> list[float]:  # type: ignore[no-untyped-def]
    optimizer = build_optimizer([torch.nn.Parameter(torch.zeros(2))], optim)
    schedule = build_schedule(optimizer, optim)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize("kind", ["linear", "cosine"])
def test_decay_to_zero_is_that_of_transformers(kind: str) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.5)
    make = get_linear_schedule_with_warmup if kind == "linear" else get_cosine_schedule_with_warmup
    schedule = make(optimizer, 4, 40)
    expected = []
    for _ in range(41):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert rates(settings(kind), 41) == pytest.approx(expected, abs=1e-12)


def test_floors_and_plateaus() -> None:
    constant, linear, cosine, wsd = (
        rates(settings(k, min_lr_ratio=0.1)) for k in ("constant", "linear", "cosine", "wsd")
    )
    assert constant[:6] == pytest.approx([0, 0.125, 0.25, 0.375, 0.5, 0.5]) and constant[44] == 0.5
    assert linear[22] == pytest.approx(0.5 * 0.55) and linear[40] == linear[44] == pytest.approx(0.05)
    assert cosine[13] == pytest.approx(0.5 * (0.55 + 0.45 * math.cos(math.pi / 4)))
    assert cosine[44] == pytest.approx(0.05)
    assert wsd[4] == wsd[36] == 0.5 and 0.05 < wsd[38] < 0.5 and wsd[40] == pytest.approx(0.05)
    assert rates(settings("cosine", num_cycles=1.0))[40] == pytest.approx(0.5)
    assert rates(settings("cosine", min_lr=0.05)) == cosine


def test_warm_up_by_ratio() -> None:
    for steps in (-1, 0):  # only a number above 0 wins over the ratio
        factor = lr_factor(OptimConfig(total_training_steps=50, lr_warmup_steps=steps, lr_warmup_steps_ratio=0.2))
        assert [factor(step) for step in (0, 5, 10)] == [0.0, 0.5, 1.0]
    factor = lr_factor(OptimConfig(total_training_steps=50, lr_warmup_steps_ratio=0.2))
    assert [factor(step) for step in (0, 5, 10, 49)] == [0, 0.5, 1, 1]
    with raises_with(ModelError, "total_training_steps=-1", "lr_warmup_steps_ratio=0.2"):
        lr_factor(OptimConfig(lr_warmup_steps_ratio=0.2))
    with raises_with(ModelError, "lr_scheduler_type='triangle'"):
        lr_factor(settings("triangle"))


def test_optimizers_by_name() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    adam = build_optimizer(parameters, OptimConfig(lr=0.1, betas=[0.8, 0.9], override_optimizer_config={"eps": 1e-3}))
    assert isinstance(adam, torch.optim.AdamW)
    assert (adam.defaults["betas"], adam.defaults["eps"], adam.defaults["fused"]) == ((0.8, 0.9), 1e-3, True)
    sgd = build_optimizer(parameters, OptimConfig(optimizer="SGD", override_optimizer_config={"momentum": 0.5}))
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.5
    slow = build_optimizer(parameters, OptimConfig(override_optimizer_config={"foreach": True}))
    assert slow.defaults["foreach"] and not slow.defaults["fused"]
    with raises_with(ModelError, "optim.optimizer='Adm'"):
        build_optimizer(parameters, OptimConfig(optimizer="Adm"))
    with raises_with(ModelError, "betta", "override_optimizer_config"):
        build_optimizer(parameters, OptimConfig(override_optimizer_config={"betta": 1}))


def test_an_optimizer_may_be_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "factors.py").write_text("FACTOR = 3.0\n")
    file = tmp_path / "own_optimizer.py"
    file.write_text(
        "import torch\n"
        "from factors import FACTOR\n"
        "class Steep(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, weight_decay):\n"
        "        super().__init__(params, lr=FACTOR * lr, weight_decay=weight_decay)\n"
    )
    weight = torch.nn.Parameter(torch.ones(3))
    optim = OptimConfig(optimizer="Steep", optimizer_impl=str(file), lr=0.1, weight_decay=0)
    optimizer = build_optimizer([weight], optim)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert torch.allclose(weight.detach(), torch.full((3,), 0.7))
    with raises_with(ModelError, "optim.optimizer='steep'", "own_optimizer.py", "use Steep"):
        build_optimizer([weight], OptimConfig(optimizer="steep", optimizer_impl=str(file)))
    file.write_text("import torch\n1 / 0\n")
    with raises_with(ModelError, "optim.optimizer_impl=", "own_optimizer.py", "ZeroDivisionError", "line 2"):
        build_optimizer([weight], optim)
    with raises_with(ModelError, "optim.optimizer_impl=torch.optimm"):
        build_optimizer([weight], OptimConfig(optimizer_impl="torch.optimm"))


MUON = {"optimizer": "Muon", "lr": 2e-2, "weight_decay": 0.1, "betas": [0.8, 0.95]}


def gradients(module: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in module.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


def test_muon_is_for_hidden_matrices_and_adamw_for_the_rest(micro_model: Path) -> None:
    module, plain = (AutoModelForCausalLM.from_pretrained(micro_model, dtype=torch.float32) for _ in range(2))
    ends = {"model.embed_tokens.weight", "lm_head.weight"}
    hidden = {n for n, p in plain.named_parameters() if p.ndim == 2 and n not in ends}
    assert len(hidden) == 7 * module.config.num_hidden_layers
    overrides = {"ns_steps": 4, "adamw_lr": 5e-3, "adamw_eps": 1e-4}
    parameters = dict(module.named_parameters())
    optimizer = build_optimizer(
        parameters.values(),
        OptimConfig(**MUON, override_optimizer_config=overrides),
        hidden_matrices(module, parameters),
    )
    schedule = build_schedule(optimizer, settings("linear"))
    muon = torch.optim.Muon(
        [p for n, p in plain.named_parameters() if n in hidden],
        lr=2e-2, weight_decay=0.1, ns_steps=4, adjust_lr_fn="match_rms_adamw",
    )  # fmt: skip
    adamw = torch.optim.AdamW(
        [p for n, p in plain.named_parameters() if n not in hidden],
        lr=5e-3, weight_decay=0.1, betas=(0.8, 0.95), eps=1e-4, fused=True,
    )  # fmt: skip
    for step in range(6):
        for made, peak in ((muon, 2e-2), (adamw, 5e-3)):
            made.param_groups[0]["lr"] = peak * lr_factor(settings("linear"))(step)
        gradients(module, step)
        gradients(plain, step)
        for one in (optimizer, schedule, muon, adamw):
            one.step()
    for name, parameter in plain.named_parameters():
        assert torch.equal(parameters[name], parameter), name
    assert "momentum_buffer" in optimizer.state[parameters["model.layers.0.mlp.up_proj.weight"]]
    assert "exp_avg" in optimizer.state[parameters["lm_head.weight"]]


def test_muon_leaves_out_the_head_of_a_value_model_and_tied_weights(micro_model: Path) -> None:
    value = load_value_model(str(micro_model), load_model_config(str(micro_model), False), torch.float32, False)
    named = dict(value.named_parameters())
    chosen = {id(p) for p in hidden_matrices(value, named)}
    apart = {name for name, p in named.items() if id(p) not in chosen and p.ndim == 2}
    assert apart == {"model.embed_tokens.weight", "score.weight"}
    with raises_with(ModelError, "optimizer=Muon"):
        build_optimizer(value.parameters(), OptimConfig(**MUON), [])
    for wrong in ("betas", "adamw_momentum"):
        with raises_with(ModelError, wrong.removeprefix("adamw_"), "override_optimizer_config"):
            build_optimizer(
                named.values(),
                OptimConfig(**MUON, override_optimizer_config={wrong: 1}),
                hidden_matrices(value, named),
            )


def test_eight_bit_adam_follows_the_full_one() -> None:
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    low = {"optimizer": "AdamW8bit", "optimizer_impl": "torchao.optim"}
    target = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
    distances = []
    for kind in ({}, low):
        weights = torch.nn.ParameterDict({"w": torch.zeros(64, 192), "b": torch.zeros(192)})
        optimizer = build_optimizer(weights.values(), OptimConfig(lr=0.03, weight_decay=0.0, **kind))
        inputs = torch.Generator().manual_seed(1)
        for _ in range(60):
            x = torch.randn(32, 64, generator=inputs)
            loss = (x @ (weights["w"] - target) + weights["b"]).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        distances.append(((weights["w"] - target).norm() / target.norm()).item())
        if kind:
            moment = optimizer.state[weights["w"]]["exp_avg"]
            assert (moment.codes.dtype, moment.block_size, len(moment.scale)) == (torch.uint8, 64, 192)
            assert optimizer.state[weights["b"]]["exp_avg"].dtype == torch.float32
    assert distances[0] < 0.4  # it learns, and in 8 bits nearly as fast
    assert distances[1] == pytest.approx(distances[0], rel=0.05)
    with raises_with(ModelError, "optim.optimizer=AdamW4bit", "AdamW8bit", "Adam8bit"):
        build_optimizer(weights.values(), OptimConfig(**{**low, "optimizer": "AdamW4bit"}))


def test_a_step_in_8_bits_is_compiled_where_the_parameters_are_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that the process has says nothing: with `offload_policy`, parameters are in main memory."""
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    stances: list[str] = []

    def compiled(function: Any, **_: Any) -> Any:
        stances.append(torch._dynamo.eval_frame._stance.stance)
        return lambda *arguments: None

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(device, "is_gpu", lambda: True)
    config = OptimConfig(optimizer="AdamW8bit", optimizer_impl="torchao.optim")
    for place in ("cpu", "meta"):  # meta stands for a GPU
        parameter = torch.nn.Parameter(torch.zeros(64, 64, device=place))
        optimizer = build_optimizer([parameter], config)
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    assert stances == ["force_eager", "default"]


@pytest.mark.parametrize(
    ("optim", "per_element"),
    [
        ({}, (8.0, 8.0)),
        ({"optimizer": "SGD"}, (0.0, 0.0)),
        ({"optimizer": "SGD", "override_optimizer_config": {"momentum": 0.9}}, (4.0, 4.0)),
        ({"optimizer": "Muon"}, (4.0, 8.0)),
    ],
    ids=["AdamW", "SGD", "SGD with momentum", "Muon"],
)
def test_memory_of_the_state_is_known_before_the_first_step(optim, per_element) -> None:
    matrices = [torch.nn.Parameter(torch.randn(64, 48)), torch.nn.Parameter(torch.randn(32, 32))]
    others = [torch.nn.Parameter(torch.randn(48)), torch.nn.Parameter(torch.randn(100, 48))]
    config = settings("constant", **optim)
    found = state_bytes([*matrices, *others], config, matrices)
    assert found == sum(p.numel() * b for part, b in zip((matrices, others), per_element, strict=True) for p in part)
    optimizer = build_optimizer([*matrices, *others], config, matrices)
    for parameter in (*matrices, *others):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for p in (*matrices, *others) for value in optimizer.state.get(p, {}).values()]
    assert found == sum(value.nbytes for value in states if value is not None and value.ndim)


def test_memory_of_state_in_8_bits_is_known_before_the_first_step() -> None:
    pytest.importorskip("torchao", reason="the extra torchao is not installed")
    shapes = [(512, 1024), (64, 192), (70, 96), (32, 64), (192,)]  # the last three are not quantised
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    config = OptimConfig(optimizer="AdamW8bit", optimizer_impl="torchao.optim")
    found = state_bytes(parameters, config)
    optimizer = build_optimizer(parameters, config)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [value for p in parameters for value in optimizer.state[p].values() if value.ndim]
    assert found == sum(part.nbytes for value in states for part in plain_parts(value))


def test_another_case_is_refused_with_the_name_of_the_class() -> None:
    """Megatron-core's `sgd` has momentum, so it is no synonym of `SGD`."""
    with raises_with(ModelError, "optim.optimizer='sgd'", "SGD", "override_optimizer_config"):
        build_optimizer([torch.nn.Parameter(torch.zeros(2))], OptimConfig(optimizer="sgd"))
