"""The boundary of every method: requests that do not parse, and whatever a method raises, are typed errors.

gRPC calls a method's deserializer before the method, and an exception there ends the RPC without a type. The
interceptor here makes every deserializer return the error instead, and refuses it in front of the method.

An exception of a method would end it as UNKNOWN. A CancelledError of something that it waited for, such as a call over
a channel that was closed, would end it without a status at all, and its caller would wait until the deadline.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import grpc
import grpc.aio
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message

from baton.core.errors import BatonError, InvalidRequest, InvalidText, MalformedMessage, as_internal
from baton.proto import admin_pb2, inference_pb2, wire, worker_pb2

Handler = Any  # the stubs make the class generic; at run time it is not


class RefuseUnreadable(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]
    """Ends an RPC whose request does not parse with MalformedMessage, or InvalidText if only its UTF-8 is wrong.

    What a method raises ends it with its type, or InternalError if it is not Baton's.

    Args:
        on_call: told the caller's address of each call.
        check_size: told the name of a message and its bytes before it is parsed; raises if they are too many.
    """

    def __init__(
        self,
        on_call: Callable[[str], None] = lambda peer: None,
        check_size: Callable[[str, int], None] = lambda name, num_bytes: None,
    ) -> None:
        self._on_call = on_call
        self._check_size = check_size

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """Wrap the method's deserializer and behaviour; request streams of others, as reflection's, are left alone."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_deserializer is None:
            return handler
        parse = _returning_errors(handler.request_deserializer, self._check_size)
        if handler.request_streaming:
            return self._streaming(handler, parse) if _is_ours(handler.request_deserializer) else handler
        method: Any = handler.unary_stream if handler.response_streaming else handler.unary_unary

        async def refuse(request: BatonError, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            await wire.abort_with(context, request)

        if handler.response_streaming:
            # The methods write to the context, so that a cancel reaches them wherever they wait.
            async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
                async with _typed(context):
                    self._on_call(context.peer())
                    await (refuse if isinstance(request, BatonError) else method)(request, context)

            make = grpc.unary_stream_rpc_method_handler
            return make(stream, request_deserializer=parse, response_serializer=handler.response_serializer)

        async def unary(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            async with _typed(context):
                self._on_call(context.peer())
                return await (refuse if isinstance(request, BatonError) else method)(request, context)

        make_unary = grpc.unary_unary_rpc_method_handler
        return make_unary(unary, request_deserializer=parse, response_serializer=handler.response_serializer)

    def _streaming(self, handler: Handler, parse: Callable[[bytes], Any]) -> Handler:
        """Of a method that reads its messages itself: it raises those that are errors (`read_of`)."""

        async def streams(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
            async with _typed(context):
                self._on_call(context.peer())
                await handler.stream_stream(requests, context)

        make = grpc.stream_stream_rpc_method_handler
        return make(streams, request_deserializer=parse, response_serializer=handler.response_serializer)


async def read_of(context: grpc.aio.ServicerContext[Any, Any]) -> Any:
    """The next message of a request stream, or gRPC's EOF.

    Raises:
        BatonError: it does not parse, or is too large.
    """
    message = await context.read()
    if isinstance(message, BatonError):
        raise message
    return message


@asynccontextmanager
async def _typed(context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[None]:
    """Ends the RPC with a typed error, whatever is raised."""
    try:
        yield
    except grpc.aio.AbortError:  # it has a status already
        raise
    except asyncio.CancelledError as error:
        if wire.is_cancelled():
            raise
        await wire.abort_with(context, as_internal("the call", error))
    except Exception as error:
        if context.done():  # nothing more can be sent
            raise
        await wire.abort_with(context, as_internal("the call", error))


def explain(data: bytes, type_name: str) -> InvalidRequest:
    """What is wrong with bytes that do not parse as the message `type_name`."""
    twin = _bytes_twins().get(type_name)
    if twin is not None:
        message = twin()
        try:
            message.ParseFromString(data)
        except DecodeError:
            pass
        else:
            field = _first_bad_text(message)
            return InvalidText(f"{field or 'a string'} in {type_name} is not valid UTF-8", field=field)
    return MalformedMessage(f"{len(data)} bytes that are no {type_name}", type=type_name)


def _type_name(parse: Callable[[bytes], Any]) -> str:
    owner = getattr(parse, "__self__", None)  # FromString is bound to its message class
    return owner.DESCRIPTOR.full_name if owner is not None else "message"


def _is_ours(parse: Callable[[bytes], Any]) -> bool:
    return _type_name(parse).startswith("baton.")


def _returning_errors(parse: Callable[[bytes], Any], check_size: Callable[[str, int], None]) -> Callable[[bytes], Any]:
    type_name = _type_name(parse)

    def parse_or_explain(data: bytes) -> Any:
        try:
            check_size(type_name, len(data))
            return parse(data)
        except DecodeError:
            return explain(data, type_name)
        except BatonError as error:
            return error.with_traceback(None)  # its frames hold the message

    return parse_or_explain


@cache
def _bytes_twins() -> dict[str, type[Message]]:
    """Message classes like ours with `bytes` for `string`: they parse what is wrong only in its text."""
    pool = descriptor_pool.DescriptorPool()
    added: set[str] = set()
    for module in (inference_pb2, admin_pb2, worker_pb2):
        _add_file(pool, module.DESCRIPTOR, added)
    names = [name for module in added for name in pool.FindFileByName(module).message_types_by_name]
    found = (pool.FindMessageTypeByName(f"baton.v1.{name}") for name in names)
    return {descriptor.full_name: message_factory.GetMessageClass(descriptor) for descriptor in found}


def _add_file(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    if file.name in added:
        return
    added.add(file.name)
    for dependency in file.dependencies:
        _add_file(pool, dependency, added)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        for field in message.field:
            if field.type == field.TYPE_STRING:
                field.type = field.TYPE_BYTES
    pool.Add(proto)


def _first_bad_text(message: Message) -> str:
    for field, value in message.ListFields():
        repeated = isinstance(value, Sequence) and not isinstance(value, bytes | str)
        for item in value if repeated else (value,):
            if isinstance(item, Message):
                if found := _first_bad_text(item):
                    return f"{field.name}.{found}"
            elif isinstance(item, bytes) and not _is_utf8(item):
                return str(field.name)
    return ""


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
