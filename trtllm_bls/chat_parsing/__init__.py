"""From a chat model's raw text to content, reasoning and tool calls, piece by piece.

``formats``  what model families write around them
``parser``   text to events, however the text is cut
``calls``    readers of one call: JSON, XML, Python
``forced``   the JSON schema with which guided decoding forces calls

Knows neither requests nor HTTP.
"""
