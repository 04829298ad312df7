"""What the model acts in: the protocol, the built-in environments and the table from which a spec's name picks one."""

from clora_engine.environments.protocol import (
    Environment,
    EnvironmentFactory,
    Example,
    Generates,
    Message,
    Split,
    StepResult,
    Tool,
    ToolCall,
)
from clora_engine.environments.registry import BUILTIN, Builder, allowed, create

__all__ = [
    "BUILTIN",
    "Builder",
    "Environment",
    "EnvironmentFactory",
    "Example",
    "Generates",
    "Message",
    "Split",
    "StepResult",
    "Tool",
    "ToolCall",
    "allowed",
    "create",
]
