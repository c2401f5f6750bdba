"""Writes `hybridrl/trainer/typed_calls.py` and `call_settings.py`, from the schema and the short names.

python tests/trainer/call_signatures.py      # writes both
"""

from __future__ import annotations

import functools
import textwrap
import typing
from pathlib import Path

from hybridrl.config.schema.node import is_group
from hybridrl.config.schema.root import ROOTS
from hybridrl.config.short_names import FOLLOWS, accepted, rows, table_text
from hybridrl.programs import PROGRAMS
from hybridrl.trainer.call_arguments import OTHER_NAMES

FOLDER = Path(__file__).parents[2] / "hybridrl" / "trainer"
CLASSES = {"ppo_trainer": "PolicySettings", "sft_trainer": "SFTSettings", "dpo_trainer": "DPOSettings",
           "kto_trainer": "KTOSettings", "rm_trainer": "RMSettings"}  # fmt: skip
SUPERVISED = ("sft_trainer", "dpo_trainer", "kto_trainer", "rm_trainer")
OWN = {"model", "data", "reward", "val_data", *OTHER_NAMES}  # parameters, and other names of them
ABOUT = {
    "grpo": "Train with GRPO, or another method without a critic (`adv_estimator=...`): `hybridrl grpo` from Python.",
    "ppo": "Train with PPO and a critic: `hybridrl ppo` from Python.",
    "sft": "Fine-tune on conversations: `hybridrl sft` from Python.",
    "dpo": "Train on pairs of answers, of which one is preferred: `hybridrl dpo` from Python.",
    "kto": "Train on answers with a label, desirable or not: `hybridrl kto` from Python.",
    "rm": "Train a reward model on pairs of answers: `hybridrl rm` from Python.",
}
HEADER = "Generated from the schema and the table of short names by tests/trainer/call_signatures.py."


@functools.cache
def types_of(tree: str) -> dict[str, str]:
    """The annotation of each key."""
    found: dict[str, str] = {}

    def walk(cls: type, prefix: str) -> None:
        hints = typing.get_type_hints(cls)
        for name, item in cls.__dataclass_fields__.items():  # type: ignore[attr-defined]
            if is_group(item):
                walk(item.type, f"{prefix}{name}.")
            else:
                hint = hints[name]
                text = hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)
                text = text.replace("typing.", "")
                found[f"{prefix}{name}"] = f"str | {text}" if item.metadata.get("place") == "data" else text

    walk(ROOTS[tree], "")
    return found


def annotation(tree: str, name: str, key: str) -> str:
    row = rows(tree).get(name)
    if row is not None and (row.translate is not None or row.derived):
        return "Any" if row.names[0] != "report_to" else "str | list[str]"
    return types_of(tree).get(key, "Any")


def fields(tree: str) -> dict[str, str]:
    return {name: annotation(tree, name, key) for name, key in accepted(tree).items() if name not in OWN}


def settings_text() -> str:
    every = {tree: fields(tree) for tree in CLASSES}
    first, *others = (every[tree] for tree in SUPERVISED)
    shared = {name: kind for name, kind in first.items() if all(other.get(name) == kind for other in others)}
    lines = [f'"""Settings of the calls, typed.\n\n{HEADER}\n"""', "", "from typing import Any, TypedDict", ""]

    def write(name: str, base: str, about: str, items: dict[str, str]) -> None:
        lines.extend(["", f"class {name}({base}, total=False):", f'    """{about}"""', ""])
        lines.extend(f"    {field}: {kind}" for field, kind in sorted(items.items()) if field.isidentifier())
        lines.append("")

    write("PolicySettings", "TypedDict", "Settings of `hybridrl.grpo` and `hybridrl.ppo`.", every["ppo_trainer"])
    write("SupervisedSettings", "TypedDict", "Settings that the supervised programs share.", shared)
    for tree in SUPERVISED:
        own = {name: kind for name, kind in every[tree].items() if name not in shared}
        program = tree.removesuffix("_trainer")
        write(CLASSES[tree], "SupervisedSettings", f"Settings of `hybridrl.{program}`.", own)
    return "\n".join(lines)


def docstring(program: str) -> str:
    spec = PROGRAMS[program]
    lines = [ABOUT[program], "", "Args:"]
    entries = []
    for names, default, meaning in table_text(spec.tree, spec.defaults, common=True):
        first, *others = names.split(", ")
        also = f" (also {', '.join(others)})" if others else ""
        entries.append(
            (first, f"{meaning}{also}." + (f" Default: {default}." if default and default != FOLLOWS else ""))
        )
    entries += [
        ("reward_weights", "a number per reward function, in the same order or by name; None: 1 each."),
        ("tools", "functions that the model may call, with type hints and a docstring each."),
    ] if spec.tree == "ppo_trainer" else []  # fmt: skip
    entries += [
        ("config", "further settings by dotted key, or nested."),
        ("peft_config", "a `peft.LoraConfig`, in place of `lora_rank` and its relatives."),
        ("args", "a config of TRL, or of `hybridrl.compat.trl`, whose fields count as settings."),
        (
            "callbacks",
            "functions that are called with a `hybridrl.RunEvent` after each step, validation and checkpoint.",
        ),
        ("settings", f"these and further settings; `hybridrl {program} --help` lists them, and `--cfg job` every key."),
    ]
    for name, text in entries:
        lines += textwrap.wrap(f"{name}: {text}", 116, initial_indent="    ", subsequent_indent="        ",
                               break_long_words=False, break_on_hyphens=False)  # fmt: skip
    return "\n".join(f"    {line}" if line else "" for line in lines)


def calls_text() -> str:
    lines = [
        f'"""`hybridrl.grpo` and its relatives.\n\n{HEADER}\n"""', "",
        "from __future__ import annotations", "",
        "import inspect", "from collections.abc import Callable, Mapping, Sequence",
        "from pathlib import Path", "from typing import Any, Unpack", "",
        "from hybridrl.config.short_names import table_text",
        "from hybridrl.programs import PROGRAMS",
        "from hybridrl.trainer.api import Rewards, Rows, Trainer, TrainingResult",
        "from hybridrl.trainer.call_settings import DPOSettings, KTOSettings, PolicySettings, RMSettings, SFTSettings",
        "from hybridrl.trainer.callbacks import Callback", "",
    ]  # fmt: skip
    for program in ABOUT:
        tree = PROGRAMS[program].tree
        policy = tree == "ppo_trainer"
        rewards = ["    reward: Rewards | None = None,"] if policy else []
        weights = ["    reward_weights: Sequence[float] | Mapping[str, float] | None = None,"] if policy else []
        tools = ["    tools: Sequence[Callable[..., Any]] | None = None,"] if policy else []
        passed = ["reward=reward,", "reward_weights=reward_weights,", "tools=tools,"] if policy else []
        passed = ["model=model,", *passed, "data=data,", "val_data=val_data,", "config=config,"]
        passed += ["peft_config=peft_config,", "args=args,", "callbacks=callbacks,", "**settings,"]
        lines += ["", f"def {program}(", "    model: str | Path | None = None,", *rewards, "    data: Rows = None,",
                  "    *,", *weights, "    val_data: Rows = None,", "    config: Mapping[str, Any] | None = None,",
                  "    peft_config: Any = None,", "    args: Any = None,",
                  "    callbacks: Sequence[Callback] = (),", *tools,
                  f"    **settings: Unpack[{CLASSES[tree]}],", ") -> TrainingResult:"]  # fmt: skip
        text = docstring(program).strip()
        lines += [f'    """{text}', '    """', f'    trainer = Trainer(\n        "{program}",']
        lines += [*(f"        {item}" for item in passed), "    )", "    return trainer.train()", ""]
    lines += [
        "",
        "def _show_settings(function: Any, tree: str) -> None:",
        '    """Have editors and notebooks complete the common settings of a call."""',
        "    signature = inspect.signature(function)",
        "    *first, rest = signature.parameters.values()",
        "    listed = {parameter.name for parameter in first}",
        '    names = [name for names, _, _ in table_text(tree, {}, common=True) for name in names.split(", ")]',
        "    kind = inspect.Parameter.KEYWORD_ONLY",
        "    new = [name for name in names if name not in listed]",
        '    named = [inspect.Parameter(name, kind, default=None, annotation="Any") for name in new]',
        "    function.__signature__ = signature.replace(parameters=[*first, *named, rest])",
        "", "",
        "for _function in (grpo, ppo, sft, dpo, kto, rm):",
        "    _show_settings(_function, PROGRAMS[_function.__name__].tree)",
        "",
    ]  # fmt: skip
    return "\n".join(lines)


def texts() -> dict[str, str]:
    """The content of each file, before `ruff format`."""
    return {"call_settings.py": settings_text(), "typed_calls.py": calls_text()}


def formatted(name: str, text: str) -> str:
    import subprocess
    import sys

    command = [sys.executable, "-m", "ruff", "format", "--stdin-filename", str(FOLDER / name), "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout


def main() -> None:
    for name, text in texts().items():
        (FOLDER / name).write_text(formatted(name, text), encoding="utf-8")


if __name__ == "__main__":
    main()
