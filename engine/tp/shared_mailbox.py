"""Opens memory that ranks on GPUs share by CUDA IPC, for `kernels.rank_exchange`, at start-up.

Every rank announces its memory and opens all others', then every rank reports whether it could. If one could not, all
of them do without, with the same reason, so that no rank waits for what another does not send.
"""

import json
import logging
from collections.abc import Callable

import torch

from baton.kernels.cuda_ipc import CudaFailed, IpcPlace, PeerMemory, can_reach, device_uuid, export
from baton.kernels.rank_exchange import SIZES, Mailbox, mailbox_bytes

log = logging.getLogger(__name__)

Gather = Callable[[bytes], list[bytes]]  # every rank's bytes, in rank order, on every rank


def open_mailbox(rank: int, size: int, device: torch.device, gather: Gather) -> tuple[Mailbox | None, str]:
    """This rank's end, or None and the reason; all ranks call this at the same time and get the same outcome.

    Args:
        rank: this rank.
        size: size of the group.
        device: this rank's device.
        gather: gathers bytes from the ranks.
    """
    if size not in SIZES:
        return None, f"groups of {size} do not share memory"
    memory = torch.zeros(mailbox_bytes(size), dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    try:
        place = export(memory.data_ptr(), device)
        said = {"handle": place.handle.hex(), "offset_bytes": place.offset_bytes, "uuid": device_uuid(device)}
    except CudaFailed as error:
        said = {"problem": str(error)}
    found = [json.loads(data) for data in gather(json.dumps(said).encode())]
    problems = [each["problem"] for each in found if "problem" in each]
    opened: list[PeerMemory] = []
    addresses: list[int] = []
    try:
        for other, each in enumerate([] if problems else found):
            if other == rank:
                addresses.append(memory.data_ptr())
                continue
            if not can_reach(device, each["uuid"]):
                raise CudaFailed(f"the GPU of rank {rank} does not reach that of rank {other}")
            peer = PeerMemory(IpcPlace(bytes.fromhex(each["handle"]), each["offset_bytes"]), device)
            opened.append(peer)
            if not peer.check(mailbox_bytes(size)):
                raise CudaFailed(f"the memory of rank {other} ends beyond its memory")
            addresses.append(peer.address)
    except CudaFailed as error:
        problems.append(str(error))
    heard = [data.decode() for data in gather("; ".join(problems).encode())]
    why = next((each for each in heard if each), "")
    if why:
        for peer in opened:
            peer.close()
        log.warning("ranks add by NCCL alone, not through memory that they share: %s", why)
        return None, why
    return Mailbox.of(rank, memory, torch.tensor(addresses, device=device)), ""
