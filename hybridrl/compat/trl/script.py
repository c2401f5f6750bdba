"""Reads the settings of a script that uses TRL, without running it, and reports what becomes of each."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hybridrl.compat.projects.imported_projects import imported_project
from hybridrl.compat.projects.project_settings import default_of
from hybridrl.compat.projects.run_report import MAPPED, NO_EFFECT, REFUSED, RunReport, written
from hybridrl.compat.trl import configs
from hybridrl.config.convert import show
from hybridrl.config.short_names import ShortSettings, rows
from hybridrl.errors import ConfigError
from hybridrl.programs import PROGRAMS
from hybridrl.trainer.call_arguments import settings_of_args

#: TRL's trainers: the program here, and the config
TRAINERS = {
    "GRPOTrainer": ("grpo", "GRPOConfig"),
    "RLOOTrainer": ("grpo", "RLOOConfig"),
    "SFTTrainer": ("sft", "SFTConfig"),
    "DPOTrainer": ("dpo", "DPOConfig"),
    "KTOTrainer": ("kto", "KTOConfig"),
    "RewardTrainer": ("rm", "RewardConfig"),
}
_CONFIGS = {config: program for program, config in TRAINERS.values()}
_ADAPTER = {"r": "lora_rank", "lora_alpha": "lora_alpha", "target_modules": "target_modules"}
_FIRST = {"GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset"), "DPOTrainer": (
    "model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset")}  # fmt: skip
_FIRST |= {"RLOOTrainer": _FIRST["GRPOTrainer"], "KTOTrainer": _FIRST["DPOTrainer"]}
_PASSED = {
    "callbacks",
    "model",
    "reward_funcs",
    "args",
    "train_dataset",
    "eval_dataset",
    "processing_class",
    "peft_config",
    "tokenizer",
}
_UNKNOWN = object()


@dataclass
class ScriptSettings:
    """Settings of a script.

    Attributes:
        program: the program here.
        config: the name of TRL's config.
        fields: values of the config.
        words: `key=value` of the command, from the arguments of the trainer and from a LoraConfig.
        unread: settings whose values are known only when the script runs.
        report: the states of the settings.
    """

    program: str
    config: str
    fields: dict[str, Any] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    report: RunReport = field(default_factory=lambda: RunReport(""))


@imported_project("trl", reads="Python scripts with a trainer of TRL")
def trl(words: Sequence[str]) -> list[RunReport]:
    """Report on a script.

    Args:
        words: the script alone.

    Raises:
        ConfigError: the file cannot be read, or uses no trainer of TRL.
    """
    if len(words) != 1:
        raise ConfigError(f"{' '.join(words)}: give one Python script")
    script = Path(words[0])
    try:
        tree = ast.parse(script.read_text(encoding="utf-8"))
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"{script}: cannot be read as Python ({error})") from error
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    names = Names(tree)
    trainers = [call for call in calls if _called(call) in TRAINERS]
    config_calls = [call for call in calls if _called(call) in _CONFIGS]
    if not trainers and not config_calls:
        raise ConfigError(f"{script}: no {', '.join(TRAINERS)} or config of TRL is used in it")
    first = _called((trainers or config_calls)[0])
    program, config = TRAINERS[first] if trainers else (_CONFIGS[first], first)
    settings = ScriptSettings(program, config)
    for call in config_calls:
        if _called(call) == config:
            _read_fields(call, names, settings)
    for call in trainers[:1]:
        _read_trainer(call, names, settings, script)
    for call in calls:
        if _called(call) == "LoraConfig":
            _read_adapter(call, names, settings)
    _finish(settings, script)
    return [settings.report]


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


class Names:
    """The meaning of a script's names: literals, calls and functions, where a name is assigned once.

    Args:
        tree: the script.
    """

    def __init__(self, tree: ast.Module) -> None:
        #: the script trains at its top level, outside of a function and of `if __name__ == "__main__":`
        self.trains_on_import = any(
            isinstance(node, ast.Call) and _called(node) in TRAINERS
            for statement in tree.body
            if not isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.If)
            for node in ast.walk(statement)
        )
        self.functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        self._values: dict[str, ast.expr | None] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                name = node.targets[0].id
                self._values[name] = None if name in self._values else node.value

    def value(self, node: ast.expr) -> ast.expr:
        """The expression that a name stands for, or the expression itself."""
        for _ in range(5):
            following = self._values.get(node.id) if isinstance(node, ast.Name) else None
            if following is None:
                return node
            node = following
        return node

    def literal(self, node: ast.expr) -> Any:
        """The value of an expression; `_UNKNOWN` if only running the script tells."""
        try:
            return ast.literal_eval(self.value(node))
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            return _UNKNOWN


def _read_fields(call: ast.Call, names: Names, settings: ScriptSettings) -> None:
    for keyword in call.keywords:
        if keyword.arg is None:
            settings.unread.append(f"{settings.config}(**{ast.unparse(keyword.value)})")
            continue
        value = names.literal(keyword.value)
        if value is _UNKNOWN:
            settings.unread.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
        else:
            settings.fields[keyword.arg] = value


def _read_trainer(call: ast.Call, names: Names, settings: ScriptSettings, script: Path) -> None:
    trainer = _called(call)
    positional = ("model", "args", "data_collator", "train_dataset", "eval_dataset")
    arguments = dict(zip(_FIRST.get(trainer, positional), call.args, strict=False))
    arguments |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    for name, node in arguments.items():
        if names.literal(node) in (None, []):
            continue
        if name not in _PASSED:
            settings.report.add(REFUSED, f"{name}={ast.unparse(node)}", "there is no such argument here")
            continue
        if name in ("args", "processing_class", "tokenizer", "peft_config"):
            continue
        if name == "callbacks":
            reason = "a command has none; hybridrl.compat.trl calls them"
            settings.report.add(NO_EFFECT, f"{name}={ast.unparse(node)}", reason)
            continue
        word = _word_of(name, node, names, Path("reward.py") if names.trains_on_import else script)
        if word is None:
            settings.unread.append(f"{name}={ast.unparse(node)}")
        else:
            settings.words.append(word)
            settings.report.add(MAPPED, f"{name}={ast.unparse(node)}", word)
            if name == "reward_funcs" and names.trains_on_import:
                settings.report.notes.append(
                    "copy the reward functions and what they need into reward.py: importing the script would train"
                )


def _word_of(name: str, node: ast.expr, names: Names, script: Path) -> str | None:
    """The word of the command for an argument of a trainer; None if the script alone does not tell."""
    if name == "model":
        text = names.literal(node)
        loaded = names.value(node)
        if not isinstance(text, str) and isinstance(loaded, ast.Call) and _called(loaded) == "from_pretrained":
            text = names.literal(loaded.args[0]) if loaded.args else _UNKNOWN
        return f"model={text}" if isinstance(text, str) else None
    if name == "reward_funcs":
        listed = names.value(node)
        functions = listed.elts if isinstance(listed, ast.List | ast.Tuple) else [node]
        if not all(isinstance(each, ast.Name) and each.id in names.functions for each in functions):
            return None
        places = [f"{script}:{each.id}" for each in functions if isinstance(each, ast.Name)]
        return f"reward={places[0]}" if len(places) == 1 else f"reward=[{','.join(places)}]"
    loaded = names.value(node)
    if not isinstance(loaded, ast.Call) or _called(loaded) != "load_dataset" or not loaded.args:
        return None
    parts = [names.literal(each) for each in loaded.args[:2]]
    options = {keyword.arg: names.literal(keyword.value) for keyword in loaded.keywords}
    split = options.get("split")
    if not all(isinstance(part, str) for part in parts) or not isinstance(split, str | None):
        return None
    files = options.get("data_files")
    text = "@".join(parts) + (f":{split}" if split else "") if files is None else files
    return f"{'data' if name == 'train_dataset' else 'val_data'}={text}" if isinstance(text, str) else None


def _read_adapter(call: ast.Call, names: Names, settings: ScriptSettings) -> None:
    for keyword in call.keywords:
        value = names.literal(keyword.value)
        word = f"LoraConfig({keyword.arg}={ast.unparse(keyword.value)})"
        if keyword.arg in ("task_type", "bias", "inference_mode") or (keyword.arg == "lora_dropout" and value == 0):
            continue
        if keyword.arg not in _ADAPTER:
            settings.report.add(REFUSED, word, "an adapter is plain LoRA here (docs/lora.md)")
        elif value is _UNKNOWN:
            settings.unread.append(word)
        else:
            settings.words.append(f"{_ADAPTER[keyword.arg]}={written(value)}")
            settings.report.add(MAPPED, word, settings.words[-1])


def _finish(settings: ScriptSettings, script: Path) -> None:
    """Report the fields of the config, and compose the command."""
    tree, report = PROGRAMS[settings.program].tree, settings.report
    table = rows(tree)
    report.heading, report.program = f"{script}: {settings.config} -> hybridrl {settings.program}", settings.program
    for name, value in settings.fields.items():
        meaning = ShortSettings()
        word = f"{name}={written(value)}"
        if name not in table:
            meaning.faults.append("TRL has no such field, or had it in an older version")
        else:
            meaning.read(tree, name, value)
        if meaning.faults:
            report.add(REFUSED, word, meaning.faults[0].removeprefix(f"{name}={show(value)}: "))
        elif meaning.notices:
            report.add(NO_EFFECT, word, meaning.notices[0].partition("has no effect: ")[2])
        else:
            keys = ", ".join(f"{item.key}={written(item.value)}" for item in meaning.assignments)
            report.add(MAPPED, word, keys or table[name].key_in(tree) or "as it is here anyway")
    report.words = command_words(settings)
    report.notes += [f"not read: {item} (set it in the command)" for item in settings.unread]


def command_words(settings: ScriptSettings) -> list[str]:
    """The words of the command: what the script sets, and TRL's defaults where hybridrl has others."""
    tree = PROGRAMS[settings.program].tree
    table = rows(tree)
    config: Any = getattr(configs, settings.config)
    usable = {name: value for name, value in settings.fields.items() if name in config.__dataclass_fields__}
    validates = any(word.startswith("val_data=") for word in settings.words)
    args = config(**usable)
    of_args = dict(settings_of_args(args, tree, validates=validates))
    assignments: list[str] = []
    own: dict[str, Any] = {}
    if settings.config == "RLOOConfig":
        own = configs.rloo_settings(args.beta)
        of_args.pop("beta", None)
    for name, value in of_args.items():
        meaning = ShortSettings()
        if name not in table or table[name].idle or table[name].refused:
            continue
        meaning.read(tree, name, value)
        if meaning.faults:
            continue
        differs = any(default_of(tree, item.key, settings.program) != item.value for item in meaning.assignments)
        if differs or (meaning.derived and not _is_usual(name, value)):
            assignments.append(f"{name}={written(value)}")
    return [*settings.words, *assignments, *(f"{name}={written(value)}" for name, value in own.items())]


def _is_usual(name: str, value: Any) -> bool:
    return (name, value) in (("max_steps", -1), ("adam_beta1", 0.9), ("adam_beta2", 0.999))
