"""Message classes of the Protocol Buffers library, made from tables instead of generated code."""

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

Field = tuple[str, int, int | str, bool]
"""Name, number, type (a number or the name of a message), and whether the field is repeated."""


def make_messages(messages: Mapping[str, Sequence[Field]], *, package: str) -> dict[str, Any]:
    """Return the message classes by name."""
    file = descriptor_pb2.FileDescriptorProto(name="api.proto", package=package, syntax="proto3")
    for name, fields in messages.items():
        message = file.message_type.add(name=name)
        for field, number, kind, repeated in fields:
            label = (
                descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED
                if repeated
                else descriptor_pb2.FieldDescriptorProto.LABEL_OPTIONAL
            )
            made = message.field.add(name=field, number=number, label=label)
            if isinstance(kind, str):
                made.type = descriptor_pb2.FieldDescriptorProto.TYPE_MESSAGE
                made.type_name = f".{package}.{kind}"
            else:
                made.type = kind  # type: ignore[assignment]  # the enum's members are ints
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{package}.{name}"))
        for name in messages
    }
