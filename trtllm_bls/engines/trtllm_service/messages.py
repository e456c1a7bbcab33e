"""The messages of ``trtllm_service.proto``, built when this module is imported.

Generated code would bind the package to one range of protobuf releases, and the published stubs
(``smg-grpc-proto``) need a newer one than tritonclient allows. The reader below knows as much of
the language as our file uses: messages, enums within them, oneofs, ``repeated`` and ``optional``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

PROTO = Path(__file__).with_name("trtllm_service.proto")
_PACKAGE = "trtllm"
SERVICE = f"/{_PACKAGE}.TrtllmService/"

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in ("string", "bool", "float", "uint32", "uint64", "int32", "int64")
}
_BLOCKS = {"message": "message_type", "enum": "enum_type", "oneof": "oneof_decl"}
_LINE = re.compile(
    r"(?P<block>message|enum|oneof)\s+(?P<name>\w+)\s*\{(?P<empty>\})?"
    r"|(?P<label>repeated |optional )?(?P<type>\w+)\s+(?P<field>\w+)\s*=\s*(?P<number>\d+);"
    r"|(?P<value>\w+)\s*=\s*(?P<code>\d+);"
    r"|(?P<end>\})"
)


def _file(text: str) -> Any:
    """The file's ``FileDescriptorProto``."""
    text = re.sub(r"//[^\n]*|service\s+\w+\s*\{[^}]*\}|syntax[^;]*;|package[^;]*;", "", text)
    file = descriptor_pb2.FileDescriptorProto(
        name="trtllm_bls/trtllm_service.proto", package=_PACKAGE, syntax="proto3"
    )
    blocks: list[Any] = [file]
    for match in _LINE.finditer(text):
        if match["block"]:
            inner = getattr(blocks[-1], _BLOCKS[match["block"]])
            blocks.append(inner.add(name=match["name"]))
        if match["empty"] or match["end"]:
            blocks.pop()
        elif match["value"]:
            blocks[-1].value.add(name=match["value"], number=int(match["code"]))
        elif match["field"]:
            _add_field(match, blocks)
    for message in file.message_type:
        _add_presence(message)
    return file


def _add_field(match: re.Match[str], blocks: list[Any]) -> None:
    in_oneof = isinstance(blocks[-1], descriptor_pb2.OneofDescriptorProto)
    message = blocks[-2] if in_oneof else blocks[-1]
    label = _Field.LABEL_REPEATED if match["label"] == "repeated " else _Field.LABEL_OPTIONAL
    field = message.field.add(name=match["field"], number=int(match["number"]), label=label)
    if match["type"] in _SCALARS:
        field.type = _SCALARS[match["type"]]
    elif match["type"] in {enum.name for enum in message.enum_type}:
        field.type = _Field.TYPE_ENUM
        field.type_name = f".{_PACKAGE}.{message.name}.{match['type']}"
    else:
        field.type = _Field.TYPE_MESSAGE
        field.type_name = f".{_PACKAGE}.{match['type']}"
    if in_oneof:
        field.oneof_index = len(message.oneof_decl) - 1
    field.proto3_optional = match["label"] == "optional "


def _add_presence(message: Any) -> None:
    """A proto3 ``optional`` is a oneof of its own, behind the real ones."""
    for field in message.field:
        if field.proto3_optional:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")


def _classes() -> dict[str, Any]:
    pool = descriptor_pool.DescriptorPool()
    file = _file(PROTO.read_text(encoding="utf-8"))
    pool.AddSerializedFile(file.SerializeToString())
    found = message_factory.GetMessageClassesForFiles([file.name], pool)
    return {name.removeprefix(f"{_PACKAGE}."): made for name, made in found.items()}


MESSAGES = _classes()


def __getattr__(name: str) -> Any:
    """Each message by its name, as a class of this module."""
    try:
        return MESSAGES[name]
    except KeyError:
        raise AttributeError(name) from None
