"""LiveCodeBench: a program that must pass all of a problem's test cases, run in a sandbox."""

from typing import Any

from hybridrl.reward.score import programs

#: what checks a ground truth before a run
check_ground_truth = programs.check_ground_truth
#: tries whether programs run
check_machine = programs.check_machine
_MANY = 1e9  # seconds of all test cases together: each has its own limit


def compute_score(solution_str: str, ground_truth: Any, timeout: float = 6.0, **sandbox: Any) -> dict[str, Any]:
    """Score one response as `programs.compute_score` does: 1 if it passes all test cases, else 0.

    Args:
        solution_str: the response.
        ground_truth: test cases as `programs` reads them.
        timeout: seconds for each test case.
        sandbox: see `programs.compute_score`.

    Raises:
        SandboxError: the sandbox failed, so there is no score.
        RewardError: the test cases are none.
    """
    settings = {"continuous": False, "total_timeout": _MANY, "timeout": timeout, **sandbox}
    return programs.compute_score(solution_str, ground_truth, **settings)
