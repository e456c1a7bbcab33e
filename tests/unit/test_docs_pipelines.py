"""The blocks of docs/pipelines.md, each run as it stands there."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from doubles.scripted import Script
from doubles.trtllm_service import Behaviour, EchoEngine
from tests.helpers.scripted_services import service_in_a_thread
from tests.helpers.server_settings import DEMO, ROOT
from trtllm_bls.configure.new import command as new
from trtllm_bls.pipeline import ContentPart, connect, testing
from trtllm_bls.text.tokenizer import load_tokenizer

PAGE = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
COMMAND, *_ = re.findall(r"^```\n(.*?)^```", PAGE, re.M | re.S)
MODEL, CONNECT, CALLS, WARM_UP, PARAMETERS, CHAT, OPTIONS, PARTS, FACES, TEST = re.findall(
    r"^```python\n(.*?)^```", PAGE, re.M | re.S
)


def written(folder: Path, *more: str, imports: str = "") -> Any:
    """The page's first model, with more methods of the page in it."""
    file = folder / "model.py"
    methods = "\n".join(textwrap.indent(each, "    ") for each in more)
    file.write_text(f"{imports}\n{MODEL}\n{methods}")
    return testing.load(file)


def test_the_command_writes_what_is_shown_and_its_test_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    line, *shown = COMMAND.strip().split("\n")
    ran = CliRunner().invoke(new, line.split()[3:])
    assert (ran.exit_code, ran.output.strip().split("\n")) == (0, shown)
    (tmp_path / "models" / "my_pipeline" / "1" / "model.py").write_text(MODEL)
    exec(TEST, {})
    with pytest.raises(AssertionError):
        exec(TEST.replace('b"lo"', 'b"la"'), {})


def test_other_models_are_called(tmp_path: Path) -> None:
    """One response, and those of a decoupled model."""
    answer = "async def answer(self, request, response):\n    codes = [1, 2]\n"
    answer += textwrap.indent(CALLS.replace("...", "sound = part"), "    ")
    answer += '    await response.send({"text": str(sound["sound"].tolist())})\n'
    calls = []

    def vocoder(inputs: Any) -> Any:
        calls.append(inputs["codes"].tolist())
        return {"sound": inputs["codes"] * len(calls)}

    with testing.serving(written(tmp_path, answer), models={"vocoder": vocoder}) as model:
        assert model.ask(prompt="Hi").wait().said("text") == [[b"[2, 4]"]]
    assert calls == [[1, 2], [1, 2]]


def test_a_chat_model_has_its_parameters_and_warms_up(tmp_path: Path) -> None:
    imports = "from collections.abc import AsyncIterator\n"
    imports += 'from trtllm_bls.pipeline import ChatRequest\nPASSAGES = ["a", "b"]'
    warmed = []

    def embedder(inputs: Any) -> Any:
        warmed.extend(inputs["texts"].tolist())
        return {"vectors": np.zeros((2, 1))}

    written_model = written(tmp_path, PARAMETERS, WARM_UP, CHAT, imports=imports)
    with testing.serving(written_model, llm=["Hel", "lo"], models={"embedder": embedder}) as model:
        first, second, cited, _ = model.chat([{"role": "user", "content": "Hi"}])
    assert warmed == [b"a", b"b"]
    assert [first, second] == [{"text": "Hel"}, {"text": "lo"}]
    assert cited["annotation"]["filename"] == "fox.txt"


def test_a_field_of_its_own_reaches_a_pipeline(tmp_path: Path) -> None:
    imports = "from collections.abc import AsyncIterator\n"
    imports += "from trtllm_bls.pipeline import ChatRequest"
    with testing.serving(written(tmp_path, OPTIONS, imports=imports)) as model:
        asked = [{"role": "user", "content": "Hi"}]
        assert model.chat(asked)[0] == {"text": "3 passages"}
        assert model.chat(asked, top_docs=5)[0] == {"text": "5 passages"}


def test_a_picture_reaches_a_pipeline(tmp_path: Path) -> None:
    imports = "from collections.abc import AsyncIterator\n"
    imports += "from trtllm_bls.pipeline import ChatRequest"
    picture = ContentPart("image", data=b"abc", media_type="image/png")
    with testing.serving(written(tmp_path, PARTS, imports=imports), llm=["Hi"]) as model:
        said = model.chat([{"role": "user", "content": ["Look", picture]}])
        (asked,) = model.llm.requests
    assert said[:2] == [{"text": "Hi"}, {"text": " [3]"}]
    assert asked.messages and asked.messages[0]["content"] == "Look\n[an image of image/png]"


def test_the_model_with_three_faces_answers(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text(FACES)

    def embedder(inputs: Any) -> Any:
        return {"vectors": [[len(text), 1.0] for text in inputs["texts"].tolist()]}

    with testing.serving(testing.load(file), models={"embedder": embedder}) as model:
        vectors = model.ask(embed_request='{"input": ["a"]}', outputs=["embed_vectors"]).wait()
        sound = model.ask(speech_request='{"input": "a b"}', outputs=["speech_audio"]).wait()
        query = '{"query": "a", "documents": ["bb", "c"]}'
        scores = model.ask(rerank_request=query, outputs=["rerank_scores"]).wait()
    assert vectors.said("embed_vectors") == [[[1.0, 1.0]]]
    assert [len(piece) for piece in sound.said("speech_audio")] == [44 + 3200, 3200]
    assert scores.said("rerank_scores") == [[3.0, 2.0]]


async def test_a_program_outside_triton_connects(capsys: pytest.CaptureFixture[str]) -> None:
    target = load_tokenizer(DEMO / "target")
    engine = EchoEngine(Script(vocab_size=target.model_vocab_size), {})
    behaviour = Behaviour(eos_id=target.eos_id or 0, vocab_size=target.vocab_size)
    with service_in_a_thread(engine, behaviour) as (_, url):
        program = CONNECT.replace("127.0.0.1:50051", url)
        program = program.replace("./llama", str(DEMO / "target"))
        names: dict[str, Any] = {"connect": connect}
        exec("async def main():\n" + textwrap.indent(program, "    "), names)
        await names["main"]()
    assert capsys.readouterr().out.strip() == "Hello"
