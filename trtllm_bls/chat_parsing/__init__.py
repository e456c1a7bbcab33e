"""From a chat model's raw text to content, reasoning and tool calls, piece by piece.

``formats`` is what model families write around them, as data; ``parser`` reads it. Knows neither
requests nor HTTP.
"""
