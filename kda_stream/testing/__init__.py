"""Checkpoints to test with: sound ones of any layout, and one for each way of being broken.

`write_checkpoint` writes a sound one, in which every byte is known; `write_broken_checkpoint` one
in which a single thing is wrong, named by `Broken`, with the error code that it must give;
`write_replica` one at full scale, of any family, as sparse files.

Example::

    @pytest.mark.parametrize("broken", Broken)
    def test_the_engine_refuses_it(broken, tmp_path):
        folder = write_broken_checkpoint(tmp_path, broken)
        with pytest.raises(KdaStreamError) as refusal:
            load_engine(folder)
        assert refusal.value.code is broken.code
"""

from .broken import Broken, write_broken_checkpoint
from .checkpoints import (
    DSA,
    FIELD_TENSORS,
    GEOMETRY,
    KDA,
    UNKNOWN,
    Layout,
    StoredTensor,
    bound_payload,
    payload,
    write_checkpoint,
    write_shard,
)
from .replica import EDGE_BYTES, KIMI_K3_REPLICA, Replica, write_replica

__all__ = [
    "DSA",
    "EDGE_BYTES",
    "FIELD_TENSORS",
    "GEOMETRY",
    "KDA",
    "KIMI_K3_REPLICA",
    "UNKNOWN",
    "Broken",
    "Layout",
    "Replica",
    "StoredTensor",
    "bound_payload",
    "payload",
    "write_broken_checkpoint",
    "write_checkpoint",
    "write_replica",
    "write_shard",
]
