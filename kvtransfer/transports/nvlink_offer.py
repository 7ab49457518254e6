"""The decode worker's side of the `nvlink` data path: tells prefill workers on its host how to open its GPU pools.

It does not import torch.
"""

from baton.kvtransfer.receiver.data_path import ReceiverSide, ServedDataPath, pool_place
from baton.kvtransfer.shared_region import NONCE_BYTES
from baton.proto import kv_pb2


def receiver_data_path(side: ReceiverSide) -> ServedDataPath | None:
    """Make the offer; None where the pools cannot be shared between processes."""
    setup, region = side.setup, side.region
    device = setup.device
    if device is None or not device.pools:
        return None
    pools = [
        kv_pb2.NvlinkPool(
            place=pool_place(setup, geometry.rank, pool.ipc_offset_bytes, geometry.num_bytes),
            ipc_handle=bytes.fromhex(pool.ipc_handle),
            device_uuid=pool.device_uuid,
        )
        for pool, geometry in zip(device.pools, setup.geometries, strict=True)
    ]
    nonce = region.nonce.to_bytes(NONCE_BYTES, "little")
    nvlink = kv_pb2.NvlinkOffer(pools=pools, flags_path=str(region.path), nonce=nonce)
    return ServedDataPath(kv_pb2.DataPathOffer(data_path="nvlink", nvlink=nvlink))
