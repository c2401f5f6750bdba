"""The settings of a run that somebody has set: value, place, and whether they act."""

from collections.abc import Iterator
from typing import Any

from hybridrl.check.findings import Findings
from hybridrl.config.checks.branches import value_at
from hybridrl.config.compose import Composed
from hybridrl.config.convert import show
from hybridrl.config.explain_setting import reasons_without_effect


def describe_settings(composed: Composed, findings: Findings) -> None:
    """Add the settings of a run that were set, in the order of their keys."""
    rows = list(_rows(composed))
    findings.facts["settings"] = rows
    for row in rows:
        effect = "" if row["acts"] else f"; without effect: {row['reason']}"
        findings.say("settings", f"{row['key']}={show(row['value'])}{row['origin']}{effect}")


def _rows(composed: Composed) -> Iterator[dict[str, Any]]:
    for key in sorted(composed.origins):
        value = value_at(composed.config, key)
        if value is ...:
            continue
        reason = next(reasons_without_effect(key, composed.config), None)
        yield {"key": key, "value": value, "origin": composed.origins[key], "acts": reason is None, "reason": reason}
