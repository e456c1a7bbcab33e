"""An engine model's responses joined to whole sequences of token ids. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trtllm_bls.client.events import Event

Key = tuple[int, int]  # sequence index, beam


class TokenAnswer:
    """The ids of one prompt's answer so far, by sequence and beam.

    What a response holds depends on what was asked for: streaming with one beam brings new ids;
    streaming with several brings each beam anew, because beams may be rewritten; not streaming
    brings everything, the prompt included unless it was ``excluded``.
    """

    def __init__(
        self, prompt: Sequence[int], *, streaming: bool, beam_width: int, excluded: bool
    ) -> None:
        self._prompt = list(prompt)
        self._brings_prompt = not streaming and not excluded
        self._appends = streaming and beam_width == 1
        self._shown_before = [] if excluded else self._prompt
        self._generated: dict[Key, list[int]] = {}

    def add(self, event: Event) -> Mapping[Key, list[int]]:
        """Take one response in; the ids it brought, by sequence and beam."""
        if "output_ids" not in event.outputs:
            return {}
        beams = event.outputs["output_ids"][0].tolist()
        lengths = event.outputs["sequence_length"].reshape(-1).tolist()
        came: dict[Key, list[int]] = {}
        for beam, (padded, length) in enumerate(zip(beams, lengths, strict=True)):
            key = (event.sequence_index, beam)
            ids = padded[:length]
            if self._brings_prompt and ids[: len(self._prompt)] == self._prompt:
                ids = ids[len(self._prompt) :]
            came[key] = ids
            before = self._generated.get(key, []) if self._appends else []
            self._generated[key] = before + ids
        return came

    @property
    def generated(self) -> Mapping[Key, list[int]]:
        """New ids of every sequence and beam, in order."""
        return dict(sorted(self._generated.items()))

    @property
    def sequences(self) -> Mapping[Key, list[int]]:
        """The same after the prompt, unless it was excluded."""
        return {key: self._shown_before + ids for key, ids in self.generated.items()}


def agrees(actual: Sequence[int], expected: Sequence[int], threshold: float) -> bool:
    """Whether ids match: at 1.0 all of them, else a share of positions above ``threshold``."""
    if threshold >= 1:
        return list(actual) == list(expected)
    same = sum(one == other for one, other in zip(actual, expected, strict=False))
    return same / max(len(actual), len(expected), 1) > threshold
