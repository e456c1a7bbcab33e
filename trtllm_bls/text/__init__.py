"""Text to token ids and back, without a network and without Triton.

``prompts``, ``tokenizer`` and ``checkpoint_dir`` make ids of text; ``answer``, ``detokenizer`` and
``stopping`` make text of ids and decide where it ends; ``chat_formats`` and ``chat_parser`` find
tool calls and reasoning in it.
"""
