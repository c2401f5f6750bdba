"""Settings that name files and folders are written with absolute paths; names of hubs and modules stay names."""

from __future__ import annotations

from pathlib import Path

import pytest
from raising import raises_with

from hybridrl.config import ConfigError, cli, load_config, validate
from hybridrl.config.differences import differences
from hybridrl.config.places import absolute_value, same_place, with_absolute_places
from hybridrl.config.schema.root import ROOTS
from hybridrl.observe.run_folder import settings_of, shown_settings
from hybridrl.trainer.explain_command import main as explain

ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for folder in ("org/local", "data/saved", "env"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/saved/dataset_dict.json").write_text("{}")
    for file in ("data/a.parquet", "data/b.parquet", "r.py", "lib.py", "words.txt", "tools.yaml", "f.pkl"):
        (tmp_path / file).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("key", "value", "written"),
    [
        ("actor_rollout_ref.model.path", "org/local", "{}/org/local"),
        ("actor_rollout_ref.model.path", "org/other", "org/other"),
        ("actor_rollout_ref.model.path", "Qwen/Qwen2.5-0.5B-Instruct", "Qwen/Qwen2.5-0.5B-Instruct"),
        ("actor_rollout_ref.model.path", "./moved", "{}/moved"),
        ("actor_rollout_ref.model.tokenizer_path", "org/local", "{}/org/local"),
        ("critic.model.path", "/elsewhere/model", "/elsewhere/model"),
        ("roles.prime.model.path", "org/local", "{}/org/local"),
        ("roles.prime.ref_path", "org/other", "org/other"),
        ("distillation.teacher_models.a.model_path", "org/local", "{}/org/local"),
        ("distillation.teacher_models.a.key", "org/local", "org/local"),
        ("data.train_files", ["data/a.parquet", "data/*.parquet"], ["{}/data/a.parquet", "{}/data/*.parquet"]),
        ("data.train_files", ["openai/gsm8k@main:train", "org/other"], ["openai/gsm8k@main:train", "org/other"]),
        ("data.train_files", ["data/saved", "data/saved:train"], ["{}/data/saved", "{}/data/saved:train"]),
        ("data.val_files", ["s3://bucket/rows", "made by a class"], ["s3://bucket/rows", "made by a class"]),
        ("reward.custom_reward_function.path", "r.py", "{}/r.py"),
        ("reward.custom_reward_function.path", "f.pkl", "{}/f.pkl"),
        ("reward.custom_reward_function.path", "pack.module", "pack.module"),
        ("reward.custom_reward_function.path", "pkg://pack.module", "pkg://pack.module"),
        (
            "reward.custom_reward_function.reward_kwargs",
            {"words": "words.txt", "n": 2},
            {"words": "{}/words.txt", "n": 2},
        ),
        ("reward.functions", {"a": {"path": "r.py", "name": "lib"}}, {"a": {"path": "{}/r.py", "name": "lib"}}),
        (
            "reward.reward_kwargs",
            {"url": "http://here/v1", "rule": "no.txt"},
            {"url": "http://here/v1", "rule": "no.txt"},
        ),
        ("actor_rollout_ref.model.external_lib", "json,lib.py", "json,{}/lib.py"),
        (f"{ROLLOUT}.agent.function", "lib.py:agent", "{}/lib.py:agent"),
        (f"{ROLLOUT}.agent.function", "lib:agent", "lib:agent"),
        (f"{ROLLOUT}.agent.command", "python lib.py  --words words.txt", "python {}/lib.py  --words {}/words.txt"),
        (f"{ROLLOUT}.multi_turn.tool_config_path", "tools.yaml", "{}/tools.yaml"),
        ("trainer.default_local_dir", "runs/a", "{}/runs/a"),
        ("trainer.rollout_data_dir", None, None),
        ("actor_rollout_ref.actor.optim.optimizer_impl", "torch.optim", "torch.optim"),
        ("actor_rollout_ref.actor.optim.optimizer_impl", "./env/own.py", "{}/env/own.py"),
        ("global_profiler.save_path", "outputs/profile", "outputs/profile"),  # the default, which may not act
        ("global_profiler.save_path", "profiles", "{}/profiles"),
        ("trainer.experiment_name", "env", "env"),
        ("data.system_prompt", "data/a.parquet", "data/a.parquet"),
    ],
)
def test_what_lies_on_this_machine_is_written_absolutely(place: Path, key: str, value: object, written: object) -> None:
    def filled(item: object) -> object:
        if isinstance(item, str):
            return item.replace("{}", str(place))
        if isinstance(item, list):
            return [filled(inner) for inner in item]
        return {name: filled(inner) for name, inner in item.items()} if isinstance(item, dict) else item

    root = ROOTS["ppo_trainer"]
    assert absolute_value(root, key, value) == filled(written)
    assert absolute_value(root, key, filled(written)) == filled(written)


def test_settings_that_follow_a_path_have_the_same_one(place: Path) -> None:
    config = load_config("ppo_trainer", ["actor_rollout_ref.model.path=org/local", "data.train_files=data/a.parquet"])
    tree = settings_of(config)
    assert tree["critic"]["model"]["path"] == f"{place}/org/local"
    assert tree[ROLLOUT.split(".")[0]]["rollout"]["prometheus"]["served_model_name"] == f"{place}/org/local"
    again = load_config("ppo_trainer", [f"actor_rollout_ref.model.path={place}/org/local"])
    assert with_absolute_places(settings_of(again), type(again)) == settings_of(again)
    shown = {one.key for one in differences(tree)}
    assert shown == {"actor_rollout_ref.model.path", "data.train_files"}, "a default folder is no difference"


def test_addresses_stay_without_their_credentials(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = "https://me:hunter2@host/a.parquet?sig=topsecret"
    words = [f"data.train_files=['{url}',data/a.parquet]", "trainer.remote_dir=webhdfs://me:hunter2@host/run"]
    words += ["actor_rollout_ref.model.path=org/name"]
    config = load_config("ppo_trainer", words)
    assert config.data.train_files[0] == url
    tree = settings_of(config)
    assert tree["data"]["train_files"] == ["https://***@host/a.parquet?***", f"{place}/data/a.parquet"]
    assert tree["trainer"]["remote_dir"] == "webhdfs://me:***@host/run"
    assert with_absolute_places(tree, type(config)) == tree
    for arguments in ([*words, "--cfg", "job"], [*words, "--cfg", "job", "--resolve"]):
        cli("ppo_trainer", lambda config: None, arguments)
    with pytest.raises(SystemExit):
        cli("ppo_trainer", lambda config: None, [*words, "data.val_files=sftp://me:hunter2@host/a"])
    explain(["data.train_files", "grpo", *words])
    for text in (str(tree), str(shown_settings(config)), *capsys.readouterr()):
        assert "host/a.parquet" in text or "host/a" in text
        assert "hunter2" not in text and "topsecret" not in text


@pytest.mark.parametrize("key", ["trainer.default_local_dir", "trainer.rollout_data_dir"])
def test_addresses_are_no_places_for_what_is_written_here(key: str) -> None:
    words = ["data.train_files=data/a.parquet", "actor_rollout_ref.model.path=org/local", f"{key}=s3://bucket/run"]
    with raises_with(ConfigError, f"{key}=s3://bucket/run"):
        validate(load_config("ppo_trainer", words))


def test_verls_name_of_the_address_acts() -> None:
    for root in ("ppo_trainer", "sft_trainer"):
        assert load_config(root, ["trainer.default_hdfs_dir=hdfs://host/run"]).trainer.remote_dir == "hdfs://host/run"
        assert load_config(root, ["trainer.default_hdfs_dir=null"]).trainer.remote_dir is None


def test_same_place() -> None:
    assert same_place("runs/a", "/x/runs/a") and same_place("/x/runs/a", "runs/a") and same_place(3, 3)
    assert not same_place("a", "/x/runs/ba") and not same_place("", "/x") and not same_place("a", "b")
    assert not same_place("/y/runs/a", "/x/runs/a") and not same_place(None, "/x")
