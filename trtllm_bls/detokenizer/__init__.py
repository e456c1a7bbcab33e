"""Token ids to text as they come: exactly the tokenizer's own text, at a cost linear in the ids.

``choice`` picks what fits a tokenizer: ``byte_table`` where tokens spell bytes, else ``window``.
``vocabulary`` is what they ask of a tokenizer. Nothing here knows a tokenizer library or an engine.

The ``tokenizers`` library's ``DecodeStream`` is not used: it cannot flush, so a text's tail is
lost; after one invalid prefix every further step raises; and a run of U+FFFD costs it more per
token the longer it gets (455 us over 4,000 tokens).
"""

from trtllm_bls.detokenizer.choice import choose_detokenizer
from trtllm_bls.detokenizer.vocabulary import Detokenizer, Vocabulary

__all__ = ["Detokenizer", "Vocabulary", "choose_detokenizer"]
