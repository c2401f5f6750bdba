"""Completions in several parts."""

from dataclasses import replace

from hybridrl.rollout.parts import add_part, rest_of
from hybridrl.rollout.request import Completion, Request
from hybridrl.rollout.sampling import SamplingParams

SAMPLING = SamplingParams(True, 1.0, 1.0, -1, max_new_tokens=8)


def part(tokens: list[int], finish: str, version: int) -> Completion:
    return Completion("a", list(tokens), [-1.0] * len(tokens), finish, versions=[(version, len(tokens))])


def test_a_part_goes_on_behind_the_tokens_before() -> None:
    request = Request("a", [1, 2], SAMPLING)
    answer = part([5, 6], "abort", 1)
    rest = rest_of(request, answer)
    assert list(rest.prompt_ids) == [1, 2, 5, 6] and rest.sampling.max_new_tokens == 6
    add_part(answer, part([7], "stop", 2), request, lambda: None)
    assert (answer.token_ids, answer.versions, answer.finish_reason) == ([5, 6, 7], [(1, 2), (2, 1)], "stop")


def test_with_a_schema_an_interrupted_answer_begins_again() -> None:
    """An engine's grammar begins with the first token that it generates, so a rest would begin like an answer."""
    request = Request("a", [1, 2], replace(SAMPLING, json_schema='{"type": "object"}'))
    answer = part([5, 6], "abort", 1)
    assert rest_of(request, answer) is request
    add_part(answer, part([5, 6, 7], "stop", 2), request, lambda: None)
    assert (answer.token_ids, len(answer.log_probs), answer.versions) == ([5, 6, 7], 3, [(2, 3)])
