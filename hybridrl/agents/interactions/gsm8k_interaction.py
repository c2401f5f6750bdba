"""A user who asks a question of GSM8K and says whether the answer is right."""

from typing import Any

from hybridrl.agents.interactions.interaction import BaseInteraction, register_interaction
from hybridrl.errors import RolloutError
from hybridrl.reward.score.gsm8k import compute_score


@register_interaction("gsm8k")
class Gsm8kInteraction(BaseInteraction):
    """Ends the conversation at a right answer, and asks to try again after a wrong one.

    The row's `interaction_kwargs` has `ground_truth`. The answer is the number behind `####` in a turn of the model, or
    the one that a turn without `####` begins with. The score of a turn is 1 for a right answer, else 0;
    `calculate_score` is that of the last turn.
    """

    config_names = ()

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.sessions: dict[str, dict[str, Any]] = {}

    async def start_interaction(
        self, instance_id: str | None = None, ground_truth: str | None = None, **kwargs: Any
    ) -> str:
        """Keep the row's ground truth."""
        if ground_truth is None:
            raise RolloutError("the row has no interaction_kwargs.ground_truth, which the interaction gsm8k needs")
        name = await super().start_interaction(instance_id)
        self.sessions[name] = {"truth": str(ground_truth), "score": 0.0}
        return name

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Say whether the model's last turn is right."""
        session = self.sessions[instance_id]
        last_turn = next(
            (str(message["content"]) for message in reversed(messages) if message["role"] == "assistant"), ""
        )
        answer = last_turn if "####" in last_turn else f"#### {last_turn.strip()}"
        session["score"] = float(compute_score(answer, session["truth"]))
        if session["score"] > 0:
            return True, "That is right.", session["score"], {}
        return False, "That is wrong. Think again, and give another answer.", session["score"], {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of the last turn."""
        return float(self.sessions[instance_id]["score"])

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Forget the session."""
        self.sessions.pop(instance_id, None)
