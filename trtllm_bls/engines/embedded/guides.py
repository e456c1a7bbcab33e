"""Guided decoding: grammars that an answer must follow, as masks over the vocabulary.

``Guides`` compiles a request's guide, after a trial in another process (``grammars``).
``GrammarMatcher`` is one sequence's position in its grammar: it bars tokens before one is chosen,
and tells when the text is complete. llguidance does the work.

The grammar decides when the end id may come: where the text is complete, and only there. Where
nothing may follow, the sequence ends by itself, whatever its end id and minimum of tokens say.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from packaging.version import Version

from trtllm_bls.engines.grammars import (
    ENGINE_STACK_BYTES,
    compiled,
    first_line,
    load_tokenizer,
    tried,
)
from trtllm_bls.engines.trtllm_fields import guide_text
from trtllm_bls.errors import InvalidRequest, Overloaded, Unsupported
from trtllm_bls.types import GUIDE_KIND_INPUT, GUIDE_TEXT_INPUT, Array, EngineRequest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# An older one knows neither the option against keys in escapes nor brief errors.
_LLGUIDANCE = Version("1.6")
_CACHED = 64  # grammars, those that were refused among them
_MAX_COMPILATIONS = 64  # grammars that wait to be compiled; more are refused


class GrammarMatcher:
    """A sequence's place in its grammar; ``ends``: tokens that may end a complete text.

    ``library_end``: the token that the library would let end it. ``allowed`` [vocab], bool: the
    tokens that may come next; the array is never changed in place.
    """

    def __init__(
        self, matcher: LLMatcher, vocab_size: int, ends: Collection[int], library_end: int
    ) -> None:
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = list(ends)
        self._barred = [*ends, library_end]
        self._bits = np.zeros((vocab_size + 31) // 32, dtype=np.int32)
        self.ended = False  # the text is complete, and nothing may follow
        self._update()

    def copy(self) -> GrammarMatcher:
        """Return a matcher for another sequence at the same position."""
        clone = copy(self)
        clone._matcher = self._matcher.deep_copy()
        clone._bits = self._bits.copy()
        return clone

    def push(self, token: int) -> None:
        """Add a token to the text. Raises ``InvalidRequest`` if no text can follow."""
        self._matcher.consume_token(token)
        self._update()

    def _update(self) -> None:
        matcher = self._matcher
        bits = self._bits
        complete = not matcher.is_error() and matcher.is_accepting()
        if matcher.is_stopped():
            bits[:] = 0
        else:
            matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if matcher.is_error():
            problem = f"cannot be enforced: {first_line(matcher.get_error())}"
            raise InvalidRequest(GUIDE_TEXT_INPUT, problem)
        unpacked = np.unpackbits(bits.view(np.uint8), count=self._vocab_size, bitorder="little")
        self.allowed: Array = unpacked.astype(np.bool_)
        self.allowed[self._barred] = False
        if not self.allowed.any():
            if not complete:
                raise InvalidRequest(
                    GUIDE_TEXT_INPUT, "no token of the vocabulary continues what it allows"
                )
            self.ended = True
        self.allowed[self._ends] = complete


class Guides:
    """Compiles the guides of requests to one checkpoint's vocabulary, one at a time.

    ``seconds``: CPU time that compiling one may take. ``of`` may be called on several event loops.
    """

    def __init__(self, model_dir: str | Path, vocab_size: int, seconds: float = 2.0) -> None:
        self._file = Path(model_dir) / "tokenizer.json"
        self._vocab_size = vocab_size
        self._seconds = seconds
        # By kind and text, the latest used last: the matcher, or the problem of the grammar.
        self._cache: OrderedDict[tuple[str, str], LLMatcher | str] = OrderedDict()
        self._waiting = 0
        # A thread has the size of stack that is set as it starts.
        default_stack_bytes = threading.stack_size(ENGINE_STACK_BYTES)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._thread.submit(bool).result()
        threading.stack_size(default_stack_bytes)

    async def of(self, request: EngineRequest) -> GrammarMatcher | None:
        """Return the compiled guide of the request, if it has one.

        Raises ``InvalidRequest`` naming the field, ``Unsupported`` where the checkpoint's
        vocabulary or this installation cannot, and ``Overloaded``.
        """
        if request.guide is None:
            return None
        grammar = request.guide.kind, guide_text(request.guide, may_be_empty=True)
        if self._waiting >= _MAX_COMPILATIONS:
            raise Overloaded.for_now(f"{_MAX_COMPILATIONS} grammars wait to be compiled", 1)
        self._waiting += 1
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._guide, request, grammar)
        finally:
            self._waiting -= 1

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(cancel_futures=True)

    def _guide(self, request: EngineRequest, grammar: tuple[str, str]) -> GrammarMatcher:
        matcher = self._cache.get(grammar)
        if matcher is None:
            tokenizer = self._tokenizer
            try:
                matcher = tried(self._file, self._vocab_size, self._seconds, *grammar)
            except TimeoutError as error:
                raise Overloaded.for_now(str(error), 1) from None
            if matcher is None:
                try:
                    matcher = compiled(tokenizer, *grammar)
                except ValueError as error:
                    matcher = str(error)
            self._cache[grammar] = matcher
        self._cache.move_to_end(grammar)
        if len(self._cache) > _CACHED:
            self._cache.popitem(last=False)
        if isinstance(matcher, str):
            raise InvalidRequest(GUIDE_TEXT_INPUT, matcher)
        ends: set[int] = set()
        for stop in request.stop_sequences:
            if len(stop) == 1 and self._tokenizer.is_special_token(stop[0]):
                ends.add(stop[0])
        if request.end_id is not None and request.end_id >= 0:
            ends.add(request.end_id)
        library_end = self._tokenizer.eos_token
        return GrammarMatcher(matcher.deep_copy(), self._vocab_size, ends, library_end)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        try:
            installed = version("llguidance")
            if Version(installed) < _LLGUIDANCE:
                problem = (
                    f"needs llguidance {_LLGUIDANCE}; {installed} is here, as TensorRT-LLM pins"
                )
                raise Unsupported(GUIDE_KIND_INPUT, problem)
            return load_tokenizer(self._file, self._vocab_size)
        except Unsupported:
            raise
        except ModuleNotFoundError:  # raised by the import, or by ``version``
            problem = "needs llguidance: run `pip install 'trtllm-bls[embedded]'`"
            raise Unsupported(GUIDE_KIND_INPUT, problem) from None
        except Exception as error:  # a missing file, or whatever the library says of it
            problem = f"cannot be kept with {self._file}: {first_line(str(error))}"
            raise Unsupported(GUIDE_KIND_INPUT, problem) from error
