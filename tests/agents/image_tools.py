"""A tool that returns images, a format in which every turn calls it twice, and an environment that shows images."""

import time

from vision_tools import SIZES, picture, tool_pictures

from hybridrl.agents import (
    Environment,
    FunctionCall,
    Parsed,
    ToolParser,
    ToolResponse,
    function_tool,
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
