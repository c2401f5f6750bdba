"""Interpolations, resolved in a part of the tree: what OmegaConf makes of the whole tree."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hybridrl.config.compose import compose_config, register_resolvers
from hybridrl.config.interpolation import resolved
from hybridrl.config.schema.root import ROOTS

NAMES = ("a", "b", "c-d", "e", "f g", 7)
PATHS = [".".join(parts) for parts in (("a",), ("b", "a"), ("b", "e", "a"), ("e", "c-d"), ("b", "e"), ("nowhere", "a"))]
paths = st.sampled_from(PATHS)
texts = st.one_of(
    st.sampled_from(["x", "", "???", "a.b", "$", "b"]),
    st.builds("${{{}}}".format, paths),
    st.builds("${{.{}}}".format, st.sampled_from(NAMES)),
    st.builds("${{..{}}}".format, st.sampled_from(NAMES)),
    st.builds("see ${{{}}}/${{{}}}".format, paths, paths),
    st.builds("${{oc.select:{}, 7}}".format, paths),
    st.builds("${{oc.select:{},${{{}}}}}".format, paths, paths),
    st.builds("${{oc.select:${{{}}},7}}".format, paths),
    st.builds("${{b.${{{}}}}}".format, paths),
    st.builds("${{b[{}].a}}".format, st.sampled_from(NAMES)),
    st.builds("${{oc.select:{}f g,7}}".format, st.sampled_from(["", "b.", "e."])),
    st.builds("${{oc.select:'b.f g',{}}}".format, paths),
    st.builds("${{oc.select:{}.7}}".format, paths),
    st.builds("${{if_set:${{{}}},1,2}}".format, paths),
    st.builds("${{oc.decode:'${{{}}}'}}".format, paths),
    st.builds("${{global_pool:${{{}}},2}}".format, paths),
    st.builds("\\${{{}}}".format, paths),
)
plain = st.one_of(st.integers(0, 3), st.booleans(), st.none(), st.floats(0, 1), texts)
values = st.recursive(
    st.one_of(plain, st.lists(plain, max_size=2)),
    lambda inner: st.one_of(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4), st.lists(inner, max_size=2)),
    max_leaves=12,
)


def outcome(resolve: Any, tree: Any) -> Any:
    try:
        return resolve(tree)
    except (OmegaConfBaseException, ValueError, TypeError) as error:
        return type(error)
    except RecursionError:
        return RecursionError


def whole(tree: Any) -> Any:
    return OmegaConf.to_container(OmegaConf.create(tree), resolve=True)


@settings(max_examples=400)
@given(st.dictionaries(st.sampled_from(NAMES), values, min_size=2, max_size=4))
def test_a_part_gives_what_the_whole_does(tree: dict[str, Any]) -> None:
    register_resolvers()
    expected, found = outcome(whole, tree), outcome(resolved, tree)
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    "text",
    [
        "${${a}}",
        "${b.${a}}",
        "${oc.select:${h}}",
        "${oc.decode:${oc.env:HYBRIDRL_TEST_NAME}}",
        "${oc.select:b.${a}}",
        "${oc.select:b.${a},7}",
        "${b[${a}]}",
        "${oc.decode:'${b.e}'}",
        "${b[e]}",
        "${oc.select:b.nowhere,7}",
        "${oc.select:a.b,7}",
        "${oc.select:b}",
        "${ b.e }",
        "${oc.select:'x:y',7}",
        "${oc.select:x z,7}",
        "${b.7}",
    ],
)
def test_names_that_are_values_of_others(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HYBRIDRL_TEST_NAME", "${b.e.c}")
    tree = {
        "a": "e",
        "b": {"e": {"c": 3}, "d": [1, {"c": 5}], 7: 8},
        "e": 4,
        "x:y": 1,
        "x z": 2,
        "f": {"g": [text, text]},
        "h": "b.e.c",
    }
    assert repr(outcome(resolved, tree)) == repr(outcome(whole, tree))


class Number(float):
    """As NumPy's numbers are."""


@pytest.mark.parametrize(
    "strange",
    [{(1, 2): 3}, {None: 3}, {"x": object()}, {"x": Number(3)}],
    ids=["a tuple as key", "no key", "an object", "a kind of float"],
)
def test_what_is_no_setting_is_refused(strange: Any) -> None:
    tree = {"a": "${b}", "b": 1, "c": {"d": strange}}
    assert outcome(whole, tree) == outcome(resolved, tree)


@pytest.mark.parametrize("root", ROOTS)
def test_the_defaults(root: str) -> None:
    tree = compose_config(root, [] if root != "ppo_trainer" else ["trainer.nnodes=3"]).tree
    assert resolved(tree) == whole(tree)
