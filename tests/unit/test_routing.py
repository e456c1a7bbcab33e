"""Which engine a request runs on, told as questions to ``Sources``."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.helpers.scripted_text import tokenizer, tokenizer_of_padded_model
from tests.helpers.small_tokenizers import directory
from trtllm_bls.engines.scripted import ScriptedEngine
from trtllm_bls.engines.scripted_tokens import hashed
from trtllm_bls.engines.speculative import SpeculativeEngine
from trtllm_bls.errors import EngineUnavailable, InvalidRequest
from trtllm_bls.messages import Sampling, TextRequest
from trtllm_bls.orchestrator import Source
from trtllm_bls.parameters import BlsParameters
from trtllm_bls.services.sources import Sources
from trtllm_bls.speculative import DraftSource
from trtllm_bls.tokenizer import Tokenizer


class FakeMetrics:
    """``pb_utils`` as far as counters go: remembers what was added."""

    class MetricFamily:
        COUNTER = 0
        added: ClassVar[dict[str, int]] = {}

        def __init__(self, name: str, description: str, kind: int) -> None:
            self._name = name

        def Metric(self, labels: dict[str, str]) -> FakeMetrics.Counter:
            return FakeMetrics.Counter(self._name)

    class Counter:
        def __init__(self, name: str) -> None:
            self._name = name

        def increment(self, value: int) -> None:
            added = FakeMetrics.MetricFamily.added
            added[self._name] = added.get(self._name, 0) + value


def parameters(**more: Any) -> BlsParameters:
    values: dict[str, Any] = {
        "tokenizer_dir": Path(),
        "add_special_tokens": True,
        "skip_special_tokens": True,
        "accumulate_tokens": False,
        "transport": "grpc",
        "engine_url": "nowhere:1",
        "stall_seconds": 1,
        "timeout_seconds": 0,
        "target": "tensorrt_llm",
        "draft": "",
        "draft_tokenizer_dir": None,
        "draft_source": "off",
        "num_draft_tokens": None,
        "max_draft_tokens": 10,
        "draft_deadline_seconds": 0.5,
        "overlap_drafts": False,
        "max_streams": 4,
    }
    return BlsParameters(**(values | more))


@pytest.fixture
def words() -> Tokenizer:
    return tokenizer()


class Opened:
    """Stands where ``TritonModel`` does: an engine that is there, or an error."""

    def __init__(self, outcome: ScriptedEngine | EngineUnavailable) -> None:
        self._outcome = outcome

    async def engine(self) -> ScriptedEngine:
        if isinstance(self._outcome, Exception):
            raise self._outcome
        return self._outcome

    async def close(self) -> None:
        pass


def sources(words: Tokenizer, draft: Opened | None = None, **more: Any) -> Sources:
    """Sources whose models are scripted."""
    made = Sources(parameters(draft="draft" if draft else "", **more), FakeMetrics, words)
    made._target = Opened(ScriptedEngine(hashed(50)))  # type: ignore[assignment]
    made._draft = draft if draft and made._draft else None  # type: ignore[assignment]
    return made


def chosen(made: Sources, **fields: Any) -> Source:
    request = TextRequest(request_id="1", text="a", max_tokens=5, **fields)
    return asyncio.run(made.source_for(request))


def engine_of(source: Source) -> SpeculativeEngine:
    assert isinstance(source.engine, SpeculativeEngine)
    return source.engine


def test_plain_unless_asked(words: Tokenizer) -> None:
    """A deployment that is silent about drafts decodes plainly, and so does k = 0."""
    assert not isinstance(chosen(sources(words)).engine, SpeculativeEngine)
    on = sources(words, draft_source="ngram")
    assert not isinstance(chosen(on, num_draft_tokens=0).engine, SpeculativeEngine)
    assert not isinstance(chosen(on, draft_source="off").engine, SpeculativeEngine)
    assert engine_of(chosen(on)).options.draft_source is DraftSource.NGRAM


def test_engines_are_sent_a_bias_for_each_of_the_models_logits() -> None:
    """Which may be more than the tokenizer has tokens."""
    made = Sources(parameters(), FakeMetrics, tokenizer_of_padded_model())
    assert made._target._route.vocab_size == tokenizer().vocab_size + 64


def test_a_number_of_drafts_is_kept(words: Tokenizer) -> None:
    """num_draft_tokens fixes k; without a draft model the drafts are n-grams."""
    options = engine_of(chosen(sources(words), num_draft_tokens=3)).options
    assert (options.num_draft_tokens, options.draft_source) == (3, DraftSource.NGRAM)
    draft = Opened(ScriptedEngine(hashed(50)))
    engine = engine_of(chosen(sources(words, draft), num_draft_tokens=3))
    assert engine.options.draft_source is DraftSource.MODEL
    assert engine.draft is not None


def test_an_unknown_source_is_named(words: Tokenizer) -> None:
    """The value and what may be sent instead."""
    with pytest.raises(InvalidRequest, match="draft_source: 'oracle' is unknown; send one of: off"):
        chosen(sources(words), draft_source="oracle")


def test_a_default_never_refuses(words: Tokenizer) -> None:
    """What speculation cannot keep runs plainly under a default, and is left to fail if asked."""
    on = sources(words, draft_source="ngram")
    several = {"num_return_sequences": 2}
    assert not isinstance(chosen(on, **several).engine, SpeculativeEngine)
    decaying = {"sampling": Sampling(top_p_decay=0.5)}
    assert not isinstance(chosen(on, **decaying).engine, SpeculativeEngine)
    assert engine_of(chosen(on, num_draft_tokens=2, **several))


def test_a_draft_model_that_is_not_there_fails_no_request(
    words: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """The request runs without drafts; the log says so once, the counter each time."""
    made = sources(words, Opened(EngineUnavailable("draft: gone")))
    for _ in range(2):
        assert engine_of(chosen(made, num_draft_tokens=2)).draft is None
    assert [record.message for record in caplog.records].count(
        "no draft model, decoding plainly: draft: gone"
    ) == 1
    assert made._shared.failures["missing"] == 2


def test_a_draft_with_another_vocabulary_is_never_asked(
    words: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    """Token tables are compared at load; equal sizes would not be enough."""
    draft = Opened(ScriptedEngine(hashed(50)))
    made = sources(words, draft, draft_tokenizer_dir=Path(directory("sentencepiece")))
    assert "another token table" in caplog.text
    assert engine_of(chosen(made, draft_source="model")).draft is None


def test_what_drafting_did_is_counted_once_per_request(words: Tokenizer) -> None:
    """Source.done adds the request's own figures to the counters."""
    FakeMetrics.MetricFamily.added.clear()
    source = chosen(sources(words), num_draft_tokens=3)
    engine_of(source).stats.add_round(DraftSource.NGRAM, 3, 2)
    source.done()
    added = FakeMetrics.MetricFamily.added
    assert added["trtllm_bls_speculation_drafted_total"] == 3
    assert added["trtllm_bls_speculation_accepted_total"] == 2
    told = source.speculation()
    assert told is not None and (told.rounds, told.drafted, told.accepted) == (1, 3, 2)
