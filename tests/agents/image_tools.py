"""What shows images in sessions: a tool with a format in which every turn calls it, an environment and a loop."""

import time

from vision_tools import SIZES, picture, tool_pictures

from hybridrl.agents import (
    AgentLoopBase,
    AgentLoopOutput,
    Environment,
    FunctionCall,
    Parsed,
    ToolParser,
    ToolResponse,
    function_tool,
    register,
    register_environment,
    register_tool_parser,
)


@function_tool
def snap(seed: int, wait: float) -> ToolResponse:
    """Show images.

    Args:
        seed: which.
        wait: seconds before they are there.
    """
    time.sleep(wait)
    return ToolResponse(text="no <|image_pad|> of mine" if seed % 3 else None, image=tool_pictures(seed))


@register_tool_parser("two_snaps")
class TwoSnaps(ToolParser):
    """Every turn makes two calls; the first one is answered last."""

    def parse(self, text, tools=()):
        seeds = len(text) % 7, len(text) % 5 + 1
        return Parsed("", [FunctionCall("snap", {"seed": seed, "wait": 0.05 * (seed == seeds[0])}) for seed in seeds])


@register_environment("gallery")
class Gallery(Environment):
    """Shows an image at first and one after each turn."""

    def reset(self, row):
        self.turn = 0
        return self.view(0)

    def view(self, number):
        image = {"type": "image", "image": picture(SIZES[number % 3], number)}
        return [{"role": "user", "content": [image, {"type": "text", "text": "And this?"}]}]

    def step(self, action):
        self.turn += 1
        return self.view(self.turn), 0.5, self.turn == 3


@register("looks_again")
class LooksAgain(AgentLoopBase):
    """Sends an image between two turns, and returns the images in the order that a test asks for."""

    swap = False

    async def run(self, sampling_params, **kwargs):
        prompt, images = list(kwargs["prompt_ids"]), self.row_images(kwargs)
        sampling = {**sampling_params, "max_tokens": 3, "ignore_eos": True}
        first = await self.server_manager.generate(prompt_ids=prompt, sampling_params=sampling, image_data=images)
        image = picture((16, 16), 77)
        messages = await self.prepared([{"role": "user", "content": [{"type": "image", "image": image}]}])
        more = self.turns.following(first.token_ids[-1], messages)
        whole, images = [*prompt, *first.token_ids, *more], [*images, image]
        second = await self.server_manager.generate(prompt_ids=whole, sampling_params=sampling, image_data=images)
        tokens = [*first.token_ids, *more, *second.token_ids]
        mask = [1] * 3 + [0] * len(more) + [1] * 3
        returned = images[::-1] if self.swap else images
        return AgentLoopOutput(prompt, tokens, mask, multi_modal_data={"images": returned})
