"""Every key of verl's tree is known: acting, renamed, of an engine not selected, or waiting with a reason."""

import functools
import re

import pytest
from reference_tables import value_of, verl_keys

from hybridrl.config.schema import choices
from hybridrl.config.schema.node import declared, default_of
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.verl.keys import Assignment, KeyBook
from hybridrl.config.verl.tables import aliases, no_effect, pending

BOOK = KeyBook("ppo_trainer")
KEYS = verl_keys()


def outcome(key: str, value: object):
    return BOOK.rewrite([Assignment(key, value)])


def another(value: object) -> object:
    """A value of the same kind that is not `value`."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value + 3
    if isinstance(value, list):
        return [*value, 1]
    if isinstance(value, dict):
        return {"own": 1}
    return "something"


def test_the_table_has_all_820_keys():
    assert len(KEYS) == 820


def test_every_key_is_known_and_its_default_has_a_place():
    lost = []
    for key, texts in KEYS.items():
        if BOOK.kind(key) not in {"acting", "alias", "pending", "no effect"}:
            lost.append(key)
        for text in texts:
            if text in {"-", "="} or text.startswith("${"):
                continue
            result = outcome(key, value_of(text))
            # taken, said with a notice, refused with a reason, or without meaning: never dropped in silence
            spoken = result.assignments or result.faults or result.notices()
            if any("unknown key" in fault for fault in result.faults) or not (spoken or harmless(key, value_of(text))):
                lost.append(f"{key}={text}")
    assert lost == []


def harmless(key: str, value: object) -> bool:
    """Whether a value means nothing: null of an old name, or the default of a setting that waits or has no effect."""
    return value is None or BOOK.kind(key) in {"pending", "no effect"} or (BOOK.kind(key) == "alias" and value is None)


def test_defaults_of_waiting_keys_are_those_of_verl_and_pass():
    refused = []
    for key, texts in KEYS.items():
        if BOOK.kind(key) != "pending" or key in BOOK.fields:
            continue
        for text in texts:
            if text not in {"-", "="} and not text.startswith("${"):
                refused += outcome(key, value_of(text)).faults
    assert refused == []


def test_a_waiting_key_with_another_value_is_refused_by_name_with_reason_and_way_out():
    checked = 0
    for entry in pending():
        if "ppo_trainer" not in entry.roots:
            continue
        for key, default in entry.items():
            switches = entry.switches_of(key)
            words = [Assignment(key, another(default))]
            if switches and key not in switches:
                result = BOOK.rewrite(words)
                assert result.faults == []
                assert any(key in notice and switches[0] in notice for notice in result.notices())
                words.append(Assignment(switches[0], another(dict(entry.items())[switches[0]])))
            (fault,) = BOOK.rewrite(words).faults
            assert fault.startswith(words[-1].key)
            assert key in fault
            assert entry.why in fault
            assert entry.instead in fault
            checked += 1
    assert checked > 200


def test_the_last_value_of_a_waiting_key_counts():
    """A file may turn something on that the command line turns off again."""
    on, off = (BOOK.rewrite([Assignment("actor_rollout_ref.model.mtp.enable", value)]) for value in (True, False))
    on.add(off)
    assert on.faults == []
    off.add(BOOK.rewrite([Assignment("actor_rollout_ref.model.mtp.enable", True)]))
    assert len(off.faults) == 1


def test_settings_of_an_engine_not_selected_pass_with_one_notice():
    veomni = [f"{role}.veomni.{name}" for role in ("actor_rollout_ref.actor", "critic") for name in ("a", "b.c")]
    result = BOOK.rewrite([Assignment(key, 2) for key in veomni])
    assert result.faults == []
    assert result.assignments == []
    (notice,) = result.notices()
    assert all(key in notice for key in veomni)


def test_server_settings_pass_with_one_notice():
    result = BOOK.rewrite(
        [
            Assignment("actor_rollout_ref.rollout.layered_summon", True),
            Assignment("actor_rollout_ref.rollout.checkpoint_engine.backend", "nccl"),
            Assignment("actor_rollout_ref.rollout.tensor_parallel_size", 2),
        ]
    )
    assert result.faults == []
    assert [notice for notice in result.notices() if "layered_summon" in notice and "backend" in notice]


@pytest.mark.parametrize("root", ROOTS)
def test_no_key_stands_in_two_tables(root: str):
    book = KeyBook(root)
    waiting = {key: value for entry in pending() if root in entry.roots for key, value in entry.items()}
    counted = [key for entry in pending() if root in entry.roots for key, _ in entry.items()]
    branch = [key for entry in no_effect() if root in entry.roots for key, _ in entry.items()]
    assert len(counted) == len(set(counted))
    assert len(branch) == len(set(branch))
    assert set(waiting) & set(book.fields) == set()
    assert set(branch) & (set(book.fields) | set(waiting)) == set()


@pytest.mark.parametrize("alias", aliases(), ids=lambda alias: alias.old)
def test_old_names_lead_to_known_ones_and_are_not_known_themselves(alias):
    for root in alias.roots:
        book = KeyBook(root)
        assert (alias.old in book.fields) == alias.twin
        if alias.new is not None:
            assert book.kind(alias.new) in {"acting", "pending", "no effect", "group"}


@pytest.mark.parametrize(
    ("key", "value", "new", "expected"),
    [
        ("actor_rollout_ref.actor.lr", 1e-5, "actor_rollout_ref.actor.optim.lr", 1e-5),
        ("actor_rollout_ref.actor.grad_clip", 0.5, "actor_rollout_ref.actor.optim.clip_grad", 0.5),
        ("actor_rollout_ref.actor.max_grad_norm", 0.5, "actor_rollout_ref.actor.optim.clip_grad", 0.5),
        ("actor_rollout_ref.model.backend", "fsdp", "actor_rollout_ref.actor.strategy", "fsdp2"),
        (
            "actor_rollout_ref.rollout.log_prob_micro_batch_size",
            4,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
            4,
        ),
        ("critic.model.fsdp_config.param_offload", True, "critic.fsdp.param_offload", True),
        ("critic.grad_clip", 2.0, "critic.optim.clip_grad", 2.0),
        ("custom_reward_function.path", "r.py", "reward.custom_reward_function.path", "r.py"),
        ("custom_reward_function.name", "f", "reward.custom_reward_function.name", "f"),
        ("reward_model.reward_manager", "dapo", "reward.reward_manager.name", "dapo"),
        ("reward_model.num_workers", 2, "reward.num_workers", 2),
        ("sandbox_fusion.url", "http://x", "reward.sandbox_fusion.url", "http://x"),
        ("reward_model.enable", True, "reward.reward_model.enable", True),
        ("reward_model.model.path", "x", "reward.reward_model.model.path", "x"),
        ("reward.reward_model.model_path", "x", "reward.reward_model.model.path", "x"),
        ("reward_model.micro_batch_size", 4, "reward.reward_model.micro_batch_size_per_gpu", 4),
        (
            "reward_model.overlong_buffer.len",
            16,
            "reward.reward_kwargs.overlong_buffer_cfg.len",
            16,
        ),
        ("actor_rollout_ref.actor.lora.r", 8, "actor_rollout_ref.model.lora_rank", 8),
        ("actor_rollout_ref.actor.lora.enabled", True, "actor_rollout_ref.model.lora_rank", 16),
        ("actor_rollout_ref.actor.lora.enabled", False, "actor_rollout_ref.model.lora_rank", 0),
        ("critic.model.lora.adapter_path", "a", "critic.model.lora_adapter_path", "a"),
    ],
)
def test_old_names_act_under_the_new_with_a_notice(key, value, new, expected):
    result = outcome(key, value)
    assert result.faults == []
    assert [(item.key, item.value) for item in result.assignments] == [(new, expected)]
    assert any(key in notice and new in notice for notice in result.notices())


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("actor_rollout_ref.model.backend", "tpu", "actor_rollout_ref.model.backend='tpu'"),
    ],
)
def test_old_names_of_what_is_not_built_are_refused(key, value, named):
    (fault,) = outcome(key, value).faults
    assert named in fault


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("actor_rollout_ref.rollout.enable_vision", True),
        ("trainer.async_weight_update", False),
        ("actor_rollout_ref.actor.tensor_model_parallel_size", 4),
        ("actor_rollout_ref.actor.pipeline_model_parallel_size", 2),
        ("actor_rollout_ref.rollout.tensor_parallel_size", 2),
        ("trainer.use_v1", False),
    ],
)
def test_old_names_without_effect_here_say_so(key, value):
    result = outcome(key, value)
    assert result.faults == []
    assert any(key in notice for notice in result.notices())


def test_lora_rank_wins_over_lora_enabled_in_either_order():
    words = [
        Assignment("actor_rollout_ref.actor.lora.r", 4),
        Assignment("actor_rollout_ref.actor.lora.enabled", True),
    ]
    for order in (words, words[::-1]):
        result = BOOK.rewrite(order)
        assert [(item.key, item.value) for item in result.assignments] == [("actor_rollout_ref.model.lora_rank", 4)]


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("actor_rollout_ref.actor.optm.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("data.train_batchsize", "data.train_batch_size"),
        ("algorithm.kl_ctrl.kl_coeff", "algorithm.kl_ctrl.kl_coef"),
        ("trainer.n_gpus", "trainer.n_gpus_per_node"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
    ],
)
def test_an_unknown_key_names_the_nearest(wrong, right):
    (fault,) = outcome(wrong, 1).faults
    assert fault.startswith(wrong)
    assert "unknown key" in fault
    assert right in fault


def test_a_group_is_not_a_value():
    (fault,) = outcome("actor_rollout_ref.actor", 3).faults
    assert "group of settings" in fault
    (fault,) = BOOK.rewrite([Assignment("critic.optim", None, delete=True)]).faults
    assert "deleted" in fault


def test_keys_inside_free_mappings_are_free():
    for key in (
        "actor_rollout_ref.model.override_config.attn_implementation",
        "actor_rollout_ref.actor.optim.override_optimizer_config.eps",
        "data.apply_chat_template_kwargs.enable_thinking",
        "reward.custom_reward_function.reward_kwargs.anything",
        "ray_kwargs.ray_init.runtime_env.env_vars.MY_NAME",
    ):
        result = outcome(key, 1)
        assert [item.key for item in result.assignments] == [key]


def test_names_are_those_that_the_library_has():
    from hybridrl.observe.tracking import TRACKERS

    assert set(choices.LOGGERS) == set(TRACKERS)


def test_every_acting_setting_is_read_by_the_library(repository):
    """A setting that nothing reads would be ignored in silence."""
    sources = [path for path in (repository / "hybridrl").rglob("*.py") if path.parent.name != "config"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in sources)
    # by composition (which configs/ files), and by `validate`, which holds them equal to the key that acts
    here = {"model_engine", "rollout_n", "max_model_len", "max_critic_ckpt_to_keep"}
    last_parts = {key.rsplit(".", 1)[-1] for root in ROOTS for key in KeyBook(root).fields}
    read = set(re.findall(r"""(?<=[."'])\w+""", text))
    unread = last_parts - read
    assert unread - here == set()


@pytest.mark.parametrize("root", ROOTS)
def test_every_setting_has_a_meaning_and_a_default_of_its_type(root):
    from hybridrl.config.convert import fit_type, within_limits

    for key, field in declared(ROOTS[root]).items():
        assert field.metadata["meaning"].strip(), key
        value = default_of(field)
        if value != "":
            assert within_limits(fit_type(value, field.type), field.metadata["limits"]) == value, key


JUNK = [None, "", "x", "1", -1, 0, 2.5, float("nan"), float("inf"), True, [], ["a"], [1], {}, {"a": 1}, {"a": [1]}]


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("value", JUNK, ids=str)
@pytest.mark.parametrize("root", ROOTS)
def test_any_value_for_any_setting_is_of_its_type_or_a_fault(root, value, first):
    """For every second setting at once; no fault is that of another."""
    from hybridrl.config.convert import build, put

    kinds = {"bool": bool, "int": int, "float": float, "str": str, "list": list, "dict": dict, "None": type(None)}
    settings = declared(ROOTS[root])
    given = list(settings)[first::2]
    tree: dict = {}
    for key in given:
        put(tree, key, value)
    faults: dict[str, str] = {}
    built = build(ROOTS[root], tree, faults, {})
    assert faults.keys() <= set(given)
    for key in given:
        allowed = tuple(kinds[name] for name in kinds if name in str(settings[key].type))
        assert isinstance(functools.reduce(lambda inner, part: inner[part], key.split("."), built), allowed), key
        if key in faults:
            assert faults[key].startswith(f"{key}=")
