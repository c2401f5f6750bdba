"""Composing: overrides, the user's YAML, interpolations, types; all through the public functions."""

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from hybridrl.config import ConfigError, FSDPConfig, OptimConfig, as_dict, compose, load_config, to_yaml
from hybridrl.config.compose import compose_config, nodes_of
from hybridrl.config.schema.node import default_tree
from hybridrl.config.schema.root import ROOTS
from hybridrl.engine.optim.optimizer import lr_factor


def faults_of(*overrides: str, root: str = "ppo_trainer", **where) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(root, list(overrides), **where)
    return caught.value.faults


def write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize("sign", ["", "+", "++"])
def test_all_three_ways_to_set_a_declared_key_are_alike(sign):
    config = load_config("ppo_trainer", [f"{sign}trainer.total_epochs=7", f"{sign}data.seed=3"])
    assert (config.trainer.total_epochs, config.data.seed) == (7, 3)


def test_the_last_word_wins():
    assert load_config("ppo_trainer", ["data.seed=1", "data.seed=2"]).data.seed == 2


def test_a_tilde_takes_a_key_back_to_its_default(tmp_path):
    write(tmp_path, "mine.yaml", "data: {seed: 9}\nactor_rollout_ref: {ref: {log_prob_use_dynamic_bsz: false}}\n")
    config = load_config(
        "ppo_trainer",
        [
            "~data.seed",
            "~actor_rollout_ref.ref.log_prob_use_dynamic_bsz",
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
        ],
        tmp_path,
        "mine",
    )
    assert config.data.seed is None
    assert config.actor_rollout_ref.ref.log_prob_use_dynamic_bsz is True  # follows again


def test_a_tilde_removes_an_entry_of_a_free_mapping():
    config = load_config(
        "ppo_trainer", ["+ray_kwargs.ray_init.a=1", "~ray_kwargs.ray_init.a", "~placement.roles.critic"]
    )
    assert config.ray_kwargs.ray_init == {"num_cpus": None}
    assert config.placement.roles == {"actor_rollout_ref": "global", "critic": "global"}


def test_a_mapping_sets_several_keys():
    config = load_config("ppo_trainer", ["data={train_batch_size: 12, custom_cls: {path: a.py, name: A}}"])
    assert config.data.train_batch_size == 12
    assert config.data.custom_cls.name == "A"
    assert config.data.max_prompt_length == 512
    assert "data.train_batchsize" in faults_of("data={train_batchsize: 12}")[0]


def test_keys_of_free_mappings_arrive_and_merge():
    config = load_config(
        "ppo_trainer",
        [
            "+actor_rollout_ref.model.override_config.attn_implementation=eager",
            "actor_rollout_ref.model.override_config={num_hidden_layers: 2}",
            "reward.reward_kwargs.overlong_buffer_cfg.len=4",
            "actor_rollout_ref.actor.optim.override_optimizer_config.eps=1e-6",
        ],
    )
    assert config.actor_rollout_ref.model.override_config == {"attn_implementation": "eager", "num_hidden_layers": 2}
    assert config.reward.reward_kwargs == {"overlong_buffer_cfg": {"len": 4}}
    assert config.actor_rollout_ref.actor.optim.override_optimizer_config == {"eps": 1e-6}


def test_defaults_that_follow_another_key():
    config = load_config(
        "ppo_trainer",
        [
            "actor_rollout_ref.actor.use_dynamic_bsz=true",
            "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=3",
            "actor_rollout_ref.actor.clip_ratio=0.3",
            "actor_rollout_ref.actor.loss_agg_mode=token-sum",
            "actor_rollout_ref.model.path=org/name",
            "actor_rollout_ref.rollout.n=5",
            "data.max_response_length=99",
            "trainer.nnodes=2",
            "trainer.n_gpus_per_node=4",
            "actor_rollout_ref.actor.checkpoint.save_contents=[model,hf_model]",
        ],
    )
    policy, critic = config.actor_rollout_ref, config.critic
    assert policy.ref.log_prob_use_dynamic_bsz is True
    assert policy.rollout.log_prob_use_dynamic_bsz is True
    assert critic.use_dynamic_bsz is True
    assert policy.ref.log_prob_max_token_len_per_gpu == 4096
    assert critic.ppo_max_token_len_per_gpu == critic.forward_max_token_len_per_gpu == 32768
    assert policy.rollout.log_prob_micro_batch_size_per_gpu == critic.forward_micro_batch_size_per_gpu == 3
    assert (policy.actor.clip_ratio_low, policy.actor.clip_ratio_high) == (0.3, 0.3)
    assert critic.loss_agg_mode == "token-sum"
    assert critic.model.path == "org/name"
    assert policy.actor.rollout_n == policy.ref.rollout_n == critic.rollout_n == 5
    assert policy.rollout.response_length == 99
    assert config.placement.pools == {"global": [4, 4]}
    assert policy.actor.checkpoint.load_contents == ["model", "hf_model"]


@pytest.mark.parametrize(
    ("nodes", "processes", "policy", "value"),
    [(1, 4, [2], [2]), (1, 3, [2], [1]), (2, 8, [8], [8]), (3, 8, [8, 8], [8])],
)
def test_a_split_placement_halves_the_nodes_or_the_devices_of_one(nodes, processes, policy, value):
    words = ["placement=split", f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={processes}"]
    placement = load_config("ppo_trainer", words).placement
    assert (placement.pools["policy"], placement.pools["value"]) == (policy, value)
    assert placement.roles == {"actor_rollout_ref": "policy", "critic": "value"}


@pytest.mark.parametrize(
    ("words", "actor", "critic"),
    [
        ([], 256, 256),
        (["data.train_batch_size=16"], 16, 16),
        (["data.train_batch_size='16'"], 16, 16),
        (["data.train_batch_size=16.0"], 16, 16),
        (["data.train_batch_size=512"], 256, 256),
        (["data.train_batch_size=512", "ppo_mini_batch_size=128"], 128, 128),
        (["data.train_batch_size=16", "critic.ppo_mini_batch_size=8"], 16, 8),
    ],
)
def test_a_mini_batch_is_at_most_the_batch_unless_it_is_set(words, actor, critic):
    config = load_config("ppo_trainer", words)
    assert (config.actor_rollout_ref.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size) == (actor, critic)


def test_rollouts_are_dumped_each_step_where_their_folder_is_named():
    """As in verl, where naming the folder switches dumping on."""
    frequencies = {
        (): 10,
        ("trainer.rollout_data_dir=dumps",): 1,
        ("trainer.rollout_data_dir=dumps", "trainer.dump_freq=5"): 5,
        ("trainer.dump_freq=-1",): -1,
    }
    for words, expected in frequencies.items():
        assert load_config("ppo_trainer", list(words)).trainer.dump_freq == expected


def test_interpolations_of_the_user_resolve(monkeypatch):
    monkeypatch.setenv("MY_LR", "3e-4")
    config = load_config(
        "ppo_trainer",
        ["actor_rollout_ref.actor.optim.lr=${oc.env:MY_LR}", "trainer.experiment_name=x_${data.train_batch_size}"],
    )
    assert config.actor_rollout_ref.actor.optim.lr == 3e-4
    assert config.trainer.default_local_dir == "checkpoints/hybridrl/x_1024"


def test_an_interpolation_that_leads_nowhere_is_named():
    assert "no_such" in faults_of("trainer.experiment_name=${trainer.no_such}")[0]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("data.train_batch_size=abc", "must be a whole number"),
        ("data.train_batch_size=1.5", "must be a whole number"),
        ("data.train_batch_size=true", "must be a whole number"),
        ("data.train_batch_size=null", "must be a whole number"),
        ("data.train_batch_size=0", "must be greater than 0"),
        ("data.shuffle=3", "must be true or false"),
        ("actor_rollout_ref.actor.optim.lr=fast", "must be a number"),
        ("actor_rollout_ref.actor.optim.lr=-1", "must be at least 0"),
        ("actor_rollout_ref.actor.optim.betas=[0.9,1.5]", "must be less than 1"),
        ("actor_rollout_ref.actor.clip_ratio_c=1.0", "must be greater than 1"),
        ("actor_rollout_ref.rollout.top_p=1.1", "must be at most 1"),
        ("algorithm.gamma=2", "must be at most 1"),
        ("algorithm.kl_penalty=kl4", "must be one of"),
        ("algorithm.kl_ctrl.type=fixd", "nearest: fixed"),
        ("actor_rollout_ref.actor.strategy=veomni", "does not support it yet"),
        ("actor_rollout_ref.rollout.name=trtllm", "does not support it yet"),
        ("actor_rollout_ref.actor.fsdp_config.dtype=float8", "must be one of"),
        ("actor_rollout_ref.actor.fsdp_config.model_dtype=float16", "must be one of"),
        ("trainer.logger=[console,wandbb]", "nearest: wandb"),
        ("trainer.resume_mode=always", "must be one of"),
        ("trainer.on_nonfinite=ignore", "must be one of"),
        ("actor_rollout_ref.actor.checkpoint.save_contents=[weights]", "must be one of"),
        ("actor_rollout_ref.model.override_config=3", "must be a mapping"),
        ("data.train_files=3", "must be a list"),
        ("placement.pools={a: 2}", "must be a list"),
        ("actor_rollout_ref.model.path=[a]", "must be text"),
    ],
)
def test_a_value_of_a_wrong_kind_names_key_value_and_what_is_allowed(word, expected):
    (fault,) = faults_of(word)
    assert fault.startswith(word.split("=")[0] + "=")
    assert expected in fault
    assert "command line" in fault


def test_values_that_lose_nothing_are_converted():
    config = load_config(
        "ppo_trainer",
        ["data.train_batch_size=1e3", "algorithm.gamma=1", "data.train_files=a.parquet", "trainer.experiment_name=7"],
    )
    assert config.data.train_batch_size == 1000
    assert isinstance(config.data.train_batch_size, int)
    assert isinstance(config.algorithm.gamma, float)
    assert config.data.train_files == ["a.parquet"]
    assert config.trainer.experiment_name == "7"


def test_values_that_verls_scripts_give_for_never_and_not_set():
    """False is never, also where 0 is a number of its own; null leaves the warm-up to its ratio."""
    optim = "actor_rollout_ref.actor.optim"
    warmup = [f"{optim}.lr_warmup_steps=null", f"{optim}.lr_warmup_steps_ratio=0.25", f"{optim}.total_training_steps=8"]
    config = load_config("ppo_trainer", [*warmup, "trainer.test_freq=False", "trainer.save_freq=false"])
    assert (config.trainer.test_freq, config.trainer.save_freq) == (-1, -1)
    assert load_config("ppo_trainer", ["trainer.test_freq=0"]).trainer.test_freq == 0
    factor = lr_factor(config.actor_rollout_ref.actor.optim)
    assert [factor(step) for step in range(4)] == [0, 0.5, 1, 1]
    assert "trainer.test_freq=true (command line): must be a whole number" in faults_of("trainer.test_freq=True")[0]


def test_other_spellings_of_a_value():
    config = load_config(
        "ppo_trainer",
        [
            "actor_rollout_ref.actor.strategy=fsdp",
            "actor_rollout_ref.actor.fsdp_config.dtype=bf16",
            "actor_rollout_ref.rollout.dtype=half",
        ],
    )
    assert config.actor_rollout_ref.actor.strategy == config.critic.strategy == "fsdp2"
    assert config.actor_rollout_ref.actor.fsdp_config.dtype == "bfloat16"
    assert config.actor_rollout_ref.rollout.dtype == "float16"


def test_paths_in_the_home_directory():
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=~/m", "data.train_files=['~/a.parquet',b]"])
    assert config.actor_rollout_ref.model.path == str(Path("~/m").expanduser())
    assert config.data.train_files == [str(Path("~/a.parquet").expanduser()), "b"]


def test_all_faults_come_at_once():
    faults = faults_of(
        "data.train_batch_size=abc",
        "data.no_such_key=1",
        "actor_rollout_ref.model.mtp.enable=True",
        "algorithm.kl_penalty=kl9",
        "data.seed=1,2",
        "just_a_word",
        "model_engine=veomni",
    )
    assert len(faults) == 7
    with pytest.raises(ConfigError, match="2 faults"):
        load_config("ppo_trainer", ["data.a=1", "data.b=1"])


def test_words_that_are_no_override_say_how_to_write_one():
    assert "write key=value" in faults_of("trainer.total_epochs")[0]
    assert "group.key=value" in faults_of("=3")[0]
    assert "group.key=value" in faults_of("data..seed=3")[0]
    assert "sweep" in faults_of("trainer.logger=console,wandb")[0]
    assert "quote the value" in faults_of("trainer.experiment_name=a=b")[0]
    assert load_config("ppo_trainer", ["trainer.experiment_name='a=b'"]).trainer.experiment_name == "a=b"


# ---------------------------------------------------------------- the user's YAML

GRPO = """\
# my settings
algorithm:
  adv_estimator: grpo
actor_rollout_ref:
  actor:
    lr: 1e-4
    ppo_mini_batch_size: 32
  rollout:
    n: 8
data:
  train_files: [a.parquet, b.parquet]
  train_batch_size: 64
"""


def test_a_partial_file_goes_over_the_base(tmp_path, monkeypatch, capsys):
    write(tmp_path, "conf/grpo_math.yaml", GRPO)
    monkeypatch.chdir(tmp_path)
    config = load_config("ppo_trainer", ["data.train_batch_size=128"], "conf", "grpo_math")
    assert config.algorithm.adv_estimator == "grpo"
    assert config.actor_rollout_ref.actor.optim.lr == 1e-4
    assert config.actor_rollout_ref.rollout.n == config.critic.rollout_n == 8
    assert config.data.train_files == ["a.parquet", "b.parquet"]
    assert config.data.train_batch_size == 128  # the command line is above the file
    assert config.data.max_prompt_length == 512
    assert "grpo_math.yaml, line 6) is now actor_rollout_ref.actor.optim.lr" in capsys.readouterr().err


def test_a_file_may_have_the_name_of_the_base(tmp_path):
    write(tmp_path, "ppo_trainer.yaml", GRPO)
    assert load_config("ppo_trainer", config_dir=tmp_path).actor_rollout_ref.rollout.n == 8


def test_faults_of_a_file_name_file_and_line(tmp_path):
    path = write(tmp_path, "mine.yaml", "data:\n  seed: 1\n  train_batchsize: 4\ntrainer:\n  total_epochs: many\n")
    faults = faults_of(config_dir=tmp_path, config_name="mine")
    assert any(f"data.train_batchsize ({path}, line 3): unknown key" in fault for fault in faults)
    assert any(f"trainer.total_epochs='many' ({path}, line 5)" in fault for fault in faults)


def test_a_file_with_a_defaults_list(tmp_path):
    text = "hydra:\n  searchpath: []\ndefaults:\n  - ppo_trainer\n  - _self_\n"
    write(tmp_path, "mine.yaml", text + GRPO)
    config = load_config("ppo_trainer", [], tmp_path, "mine.yaml")
    assert config.actor_rollout_ref.rollout.n == 8


def test_a_file_on_top_of_another_and_with_groups_of_its_own(tmp_path):
    write(tmp_path, "common.yaml", "trainer: {total_epochs: 3, save_freq: 5}\ndata: {seed: 4}\n")
    write(tmp_path, "data/small.yaml", "train_batch_size: 16\n")
    write(tmp_path, "mine.yaml", "defaults:\n  - common\n  - data: small\n  - _self_\ntrainer: {total_epochs: 2}\n")
    config = load_config("ppo_trainer", [], tmp_path, "mine")
    assert (config.trainer.total_epochs, config.trainer.save_freq) == (2, 5)
    assert (config.data.seed, config.data.train_batch_size) == (4, 16)
    assert config.data.max_prompt_length == 512


def test_names_in_further_files_are_checked_too(tmp_path):
    write(tmp_path, "common.yaml", "trainer: {total_epoch: 3}\nactor_rollout_ref: {actor: {lr: 0.5}}\n")
    write(tmp_path, "mine.yaml", "defaults: [common]\n")
    assert "trainer.total_epoch: unknown key" in faults_of(config_dir=tmp_path, config_name="mine")[0]
    write(tmp_path, "common.yaml", "actor_rollout_ref: {actor: {lr: 0.5}}\n")
    assert load_config("ppo_trainer", [], tmp_path, "mine").actor_rollout_ref.actor.optim.lr == 0.5


def test_a_group_of_the_user_can_be_chosen_on_the_command_line(tmp_path):
    write(tmp_path, "algorithm/mygrpo.yaml", "adv_estimator: grpo\ngamma: 0.9\n")
    write(tmp_path, "mine.yaml", "data: {seed: 1}\n")
    fault = faults_of("algorithm=other", config_dir=tmp_path, config_name="mine")[0]
    assert "mygrpo" in fault
    config = load_config("ppo_trainer", ["algorithm=mygrpo"], tmp_path, "mine")
    assert (config.algorithm.adv_estimator, config.algorithm.gamma, config.algorithm.lam) == ("grpo", 0.9, 1.0)


def test_a_flat_key_with_dots_in_a_file(tmp_path):
    write(tmp_path, "mine.yaml", "data.train_batch_size: 4\n")
    assert load_config("ppo_trainer", [], tmp_path, "mine").data.train_batch_size == 4


@pytest.mark.parametrize(
    ("text", "expected"),
    [("data: [\n", "cannot be read as YAML"), ("- a\n- b\n", "must be a mapping"), ("defaults: x\n", "must be a list")],
)
def test_a_file_that_cannot_be_used(tmp_path, text, expected):
    path = write(tmp_path, "mine.yaml", text)
    (fault,) = faults_of(config_dir=tmp_path, config_name="mine")
    assert str(path) in fault
    assert expected in fault


def test_a_file_or_folder_that_is_not_there(tmp_path):
    write(tmp_path, "grpo_math.yaml", GRPO)
    assert "nearest: grpo_math" in faults_of(config_dir=tmp_path, config_name="grpo_mat")[0]
    assert "no such folder" in faults_of(config_dir=tmp_path / "none", config_name="x")[0]
    assert "ppo_trainer" in faults_of(root="ppo_traner")[0]


def test_a_defaults_list_that_leads_nowhere(tmp_path):
    path = write(tmp_path, "mine.yaml", "defaults: [missing_one]\n")
    (fault,) = faults_of(config_dir=tmp_path, config_name="mine")
    assert str(path) in fault
    assert "In 'mine': Could not load 'missing_one'" in fault


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "critic:\n", "data: {}\n"])
def test_an_empty_file_or_group_changes_nothing(tmp_path, text):
    write(tmp_path, "mine.yaml", text)
    assert load_config("ppo_trainer", [], tmp_path, "mine") == load_config("ppo_trainer")


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer"])
def test_the_saved_yaml_reads_back_to_the_same_values(root, tmp_path):
    words = ["trainer.n_gpus_per_node=2", "data.train_files=[a,b]", "trainer.resume_mode=disable"]
    config = load_config(root, words)
    write(tmp_path, "config.yaml", to_yaml(config))
    assert load_config(root, [], tmp_path, "config") == config


@pytest.mark.parametrize("root", ["ppo_trainer", "sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer"])
def test_a_configuration_travels_and_is_plain(root):
    config = load_config(root, [])
    assert pickle.loads(pickle.dumps(config)) == config
    assert pickle.loads(pickle.dumps(ConfigError(["a", "b"]))).faults == ["a", "b"]
    plain = as_dict(config)
    assert OmegaConf.to_container(OmegaConf.create(to_yaml(config))) == plain
    plain["data"]["train_files"].append("x")
    assert "x" not in config.data.train_files


def test_two_configurations_share_nothing():
    first, second = load_config("ppo_trainer"), load_config("ppo_trainer")
    first.data.train_files.append("x")
    first.placement.pools["a"] = [1]
    assert second.data.train_files == []
    assert list(second.placement.pools) == ["global"]
    assert OptimConfig().betas is not OptimConfig().betas


def test_groups_built_in_python_hold_plain_values():
    assert FSDPConfig().strategy == "fsdp2"
    optim = OptimConfig(lr=1e-3)
    assert (optim.get("lr"), optim["weight_decay"], optim.get("nothing", 5)) == (1e-3, 0.01, 5)
    assert "lr" in optim
    assert "nothing" not in optim


def test_sft_has_its_own_tree():
    config = load_config("sft_trainer", ["model.path=m", "optim.lr=2e-5", "engine.param_offload=true"])
    assert (config.model.path, config.optim.lr, config.engine.param_offload) == ("m", 2e-5, True)
    assert "nearest: optim.lr" in faults_of("optim.l=1", root="sft_trainer")[0]
    assert "unknown key" in faults_of("algorithm.gamma=1", root="sft_trainer")[0]


def test_composition_leaves_hydra_as_it_was(tmp_path, monkeypatch):
    from hydra.core.global_hydra import GlobalHydra

    monkeypatch.chdir(tmp_path)
    composed = compose_config("ppo_trainer", ["hydra.run.dir=elsewhere"])
    assert not GlobalHydra.instance().is_initialized()
    assert list(tmp_path.iterdir()) == []
    assert any("hydra.run.dir" in notice for notice in composed.notices)


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(0, 3)
    | st.floats(0, 3, allow_nan=False)
    | st.sampled_from(["", "a", "${data.seed}"])
)
ANY = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from("abc"), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=50)
@given(st.data())
def test_nodes_made_of_the_defaults_are_those_of_the_whole_tree(data):
    """True is not 1, an entry may be gone or new, and a group may be replaced by a plain value."""
    tree = default_tree(ROOTS["ppo_trainer"])
    for _ in range(data.draw(st.integers(0, 6))):
        group = tree
        while groups := [name for name, value in group.items() if isinstance(value, dict) and value]:
            name = data.draw(st.sampled_from([None, *groups]))
            if name is None:
                break
            group = group[name]
        key = data.draw(st.sampled_from([*group, "new"]))
        if data.draw(st.booleans()):
            group.pop(key, None)
        else:
            group[key] = data.draw(ANY)
    expected = OmegaConf.to_container(OmegaConf.create(tree), resolve=False)
    assert repr(sorted_by_key(OmegaConf.to_container(nodes_of("ppo_trainer", tree)))) == repr(sorted_by_key(expected))


def with_other_types(value):
    """With numbers that are equal, and of another type."""
    if isinstance(value, dict):
        return {key: with_other_types(one) for key, one in value.items()}
    if isinstance(value, list):
        return [with_other_types(one) for one in value]
    return int(value) if isinstance(value, bool) else float(value) if isinstance(value, int) else value


def test_nodes_have_the_types_of_the_tree(monkeypatch):
    tree = default_tree(ROOTS["ppo_trainer"])
    other = with_other_types(tree)
    assert other == tree and repr(other) != repr(tree)
    assert repr(OmegaConf.to_container(nodes_of("ppo_trainer", other))) == repr(other)
    monkeypatch.setattr(
        compose, "_default_nodes", lambda root: (pickle.dumps(OmegaConf.create({"a": [1]})), {"a": [1]})
    )
    assert repr(OmegaConf.to_container(nodes_of("any", {"a": [True]}))) == "{'a': [True]}"


def sorted_by_key(value):
    """With the entries of all mappings in the order of their keys."""
    if isinstance(value, dict):
        return {key: sorted_by_key(value[key]) for key in sorted(value)}
    return [sorted_by_key(one) for one in value] if isinstance(value, list) else value
