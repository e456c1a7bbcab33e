"""From a chat model's raw text to content, reasoning and tool calls, piece by piece.

``formats``  what model families write around them
``parser``   text to events, however the text is cut
``calls``    readers of one call: JSON, XML, Python
``forced``   the JSON schema with which guided decoding forces calls

Knows neither requests nor HTTP.
"""

from trtllm_bls.chat_parsing.forced import forced_calls
from trtllm_bls.chat_parsing.formats import (
    FORCED,
    REASONING_TAGS,
    TOOL_FORMATS,
    ToolFormat,
    formats_of,
)
from trtllm_bls.chat_parsing.parser import (
    Arguments,
    ChatParser,
    Content,
    Event,
    Reasoning,
    ToolCall,
)

__all__ = [
    "FORCED",
    "REASONING_TAGS",
    "TOOL_FORMATS",
    "Arguments",
    "ChatParser",
    "Content",
    "Event",
    "Reasoning",
    "ToolCall",
    "ToolFormat",
    "forced_calls",
    "formats_of",
]
