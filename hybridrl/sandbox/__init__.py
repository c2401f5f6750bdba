"""Programs that a model wrote, run with limits: on this machine or by a server, through one interface.

Imported by the processes of reward functions, so it must stay light: no torch, no numpy.
"""

from hybridrl.sandbox.languages import LANGUAGES, Language, register_language
from hybridrl.sandbox.local import EXPOSURE, LocalSandbox
from hybridrl.sandbox.program import Ended, Limits, Program, Sandbox, SandboxError
from hybridrl.sandbox.remote_sandbox import RemoteSandbox
from hybridrl.sandbox.slots import Slots

__all__ = [
    "EXPOSURE",
    "LANGUAGES",
    "Ended",
    "Language",
    "Limits",
    "LocalSandbox",
    "Program",
    "RemoteSandbox",
    "Sandbox",
    "SandboxError",
    "Slots",
    "register_language",
]
