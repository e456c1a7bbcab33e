"""Token ids to text as they come: exactly the tokenizer's own text, at a cost linear in the ids.

``choice`` picks what fits a tokenizer: ``byte_table`` where tokens spell bytes, else ``window``.
``vocabulary`` is the seam to the tokenizer. Nothing here knows a tokenizer library or an engine.

The ``tokenizers`` library's ``DecodeStream`` is not used: without a flush it loses what it holds
at the end, after one invalid prefix every further step raises, and a run of 4,000 U+FFFD costs it
455 us per token.
"""

from trtllm_bls.detokenizer.choice import choose_detokenizer
from trtllm_bls.detokenizer.vocabulary import Detokenizer, Vocabulary

__all__ = ["Detokenizer", "Vocabulary", "choose_detokenizer"]
