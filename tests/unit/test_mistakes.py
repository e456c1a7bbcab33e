"""What a newcomer gets wrong: each command ends with one line that says what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.helpers.packages import needs
from tests.helpers.ports import ANY_PORTS, unused_ports
from tests.helpers.server_settings import DEMO
from trtllm_bls.cli import main

# The command line, and words of the line that it ends with. FILE and EMPTY are a file and a
# directory; NOWHERE does not exist.
NEEDS_SERVER = needs("pytriton")
MISTAKES = {
    # directories and files
    "serve --model NOWHERE": "no such directory",
    "serve --model FILE": "no such directory",
    "serve --model EMPTY": "config.json",
    "serve --model-repository NOWHERE": "no such directory",
    "serve --model-repository FILE": "no such directory",
    "serve --model-repository EMPTY": "no model in it",
    "serve --draft-model NOWHERE": "no such directory",
    "serve --server NOWHERE": "name its directory",
    "serve --server FILE": "name its directory",
    "serve --log-file EMPTY": "Is a directory",
    "serve --log-file NOWHERE/log": "No such file or directory",
    "openai --tokenizer-dir NOWHERE": "",
    "openai --tokenizer-dir FILE": "",
    "openai --tokenizer-dir EMPTY": "",
    "openai --model-repository EMPTY": "config.pbtxt",
    "doctor --model-repository NOWHERE": "does not exist",
    "doctor --model-repository FILE": "is a file",
    "configure --engine-dir NOWHERE --tokenizer-dir DEMO --out OUT": "",
    "configure --engine-dir FILE --tokenizer-dir DEMO --out OUT": "",
    "configure --engine-dir EMPTY --tokenizer-dir DEMO --out OUT": "config.json",
    "configure --from EMPTY --out OUT": "",
    "configure --from NOWHERE --out OUT": "",
    "upgrade NOWHERE": "",
    "upgrade FILE": "",
    "upgrade EMPTY": "",
    "new FILE": "FILE",
    "recipe NOWHERE": "",
    "conformance --model NOWHERE": "",
    "demo --model NOWHERE": "no such directory",
    "prove --out FILE": "name a directory",
    "prove --out NOWHERE --url 127.0.0.1:1": "--tokenizer-dir",
    "conformance --model EMPTY --engine trtllm://127.0.0.1:1": "no tokenizer",
    "configure --engine-dir EMPTY --tokenizer-dir DEMO --out FILE": "config.json",
    # ports, addresses and keys
    "serve --http-port 70000": "70000 is not in the range",
    "serve --http-port x": "not a valid integer",
    "serve --http-port PORT --grpc-port PORT": "--http-port has it; choose another",
    "serve --openai-port PORT --health-port PORT": "choose another",
    "serve --host 0.0.0.0": "--expose",
    "serve --host nowhere.invalid --expose": "",
    "serve --api-keys-file NOWHERE": "no such file",
    "serve --api-keys-file EMPTY": "no such file",
    "serve --api-keys-file FILE": "holds no key",
    "serve --http-keys": "--api-keys-file",
    "openai --host 0.0.0.0 --tokenizer-dir DEMO": "--api-keys-file",
    "openai --api-keys-file FILE --tokenizer-dir DEMO": "holds no key",
    "openai --engine-url foo --tokenizer-dir DEMO": "",
    "serve --tls-cert FILE": "give both or neither",
    "serve --tls-cert FILE --tls-key FILE": "not usable",
    "generate Hello --url foo": "",
    "generate Hello --url 127.0.0.1:1": "",
    "generate Hello --url http://127.0.0.1:8001": "",
    "generate Hello --url ''": "names no port",
    "chat --url foo": "",
    "chat --url 127.0.0.1:1": "",
    "health --url foo": "names no port",
    "health --url 127.0.0.1:1": "Connection refused",
    "health --url 127.0.0.1:99999": "write host:port",
    # options and values
    "serve --modle DEMO": "--model",
    "serv": "did you mean 'serve'?",
    "serve --set foo": "MODEL.PARAMETER=VALUE",
    "serve --set nomodel.x=1": "no model 'nomodel'",
    "serve --set tensorrt_llm_bls.max_strems=1": "max_streams",
    "serve --set tensorrt_llm_bls.max_streams=many": "max_streams",
    "serve --engine foo": "",
    "serve --engine trtllm://": "",
    "serve --engine trtllm://h:1": "needs --model",
    "serve --lora =3": "NAME",
    "serve --max-streams 0": "not in the range",
    "serve --http-port -1": "-1 is not in the range",
    "recipe fast": "throughput",
    "upgrade EMPTY --version banana": "use a release such as",
    "conformance --model DEMO --engine foo": "trtllm://HOST:PORT",
    "openai --tokenizer-dir DEMO --engine-url 127.0.0.1:99999": "is not host:port",
    "serve --bls-instances some": "--bls-instances",
    "doctor --version latest": "",
    "drain": "--dir",
    "drain --dir EMPTY": "no process keeps a status there",
    "drain --dir FILE": "Not a directory",
    "drain --dir NOWHERE": "No such file or directory",
}


@pytest.mark.parametrize(
    "words",
    [
        pytest.param(words, marks=NEEDS_SERVER if words.startswith(("serve", "demo")) else ())
        for words in MISTAKES
    ],
)
def test_a_mistake_ends_in_one_line_with_the_mend(words: str, tmp_path: Path) -> None:
    """No traceback, an exit code that is not 0, and what was written named."""
    places = {name: tmp_path / name for name in ("FILE", "EMPTY", "NOWHERE", "OUT")}
    places["FILE"].write_text("# nothing\n")
    places["EMPTY"].mkdir()
    places["DEMO"] = DEMO / "target"
    asked = words.replace("serve ", f"serve {shlex.join(ANY_PORTS)} ")
    asked = asked.replace("openai ", "openai --port 0 ")
    asked = asked.replace("PORT", str(unused_ports(1)[0]))
    for name, path in places.items():
        asked = asked.replace(name, shlex.quote(str(path)))
    done = CliRunner().invoke(main, shlex.split(asked))
    assert isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code
    *_, last = done.output.strip().splitlines()
    assert MISTAKES[words].replace("FILE", str(places["FILE"])) in last
    lines = [line for line in done.output.splitlines() if line.lower().startswith("error")]
    assert lines == ([] if words.startswith("health --url 127.0.0.1:1") else [last])
