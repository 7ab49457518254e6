"""Work for a client, ended as soon as the client is gone."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from starlette.types import Receive


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Run `work`; cancel it when the connection closes. The body must have been read.

    Raises:
        Exception: whatever `work` raises, or `receive`.
    """
    try:
        gone = asyncio.create_task(_disconnected(receive))  # it ends with the connection, whatever follows
        task = asyncio.create_task(work)
    except BaseException:
        work.close()  # it has not begun
        raise
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        is_done = task.done()
        for one in (task, gone):
            one.cancel()
        await asyncio.wait({task, gone})
        if not task.cancelled() and not is_done:
            task.exception()  # of work that nobody waits for any more
    try:
        (task if is_done else gone).result()  # a `receive` that failed does not say that the client is gone
    finally:
        # An error knows this frame: with the frame knowing the task, and so the error, neither would be freed.
        del task, gone, one


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
