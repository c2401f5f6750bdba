"""What a user of verl would write: a simulated user."""

from verl.interactions.base import BaseInteraction


class Polite(BaseInteraction):
    """Asks again until it has had `times` turns; the score of a turn is its number of characters over 10."""

    def __init__(self, config):
        super().__init__(config)
        self.log = {}

    async def start_interaction(self, instance_id=None, **kwargs):
        name = await super().start_interaction(instance_id)
        self.log[name] = {"asked": kwargs, "seen": [], "ended": False}
        return name

    async def generate_response(self, instance_id, messages, **kwargs):
        if kwargs.get("how") == "raises":
            raise ConnectionError("the judge is gone")
        seen = self.log[instance_id]["seen"]
        seen.append(messages)
        text = messages[-1]["content"]
        ended = len(seen) == kwargs["times"]
        return ended, f"Please go on ({len(seen)}).", len(text) / 10, {"last": len(text)}

    async def calculate_score(self):  # as verl's base class writes it
        return 0.75

    async def finalize_interaction(self, instance_id, **kwargs):
        self.log[instance_id]["ended"] = True
